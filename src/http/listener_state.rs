//! Holds the state of one listener, which the metrics show: its slots and limits, the number of responses, and
//! their durations.
//!
//! Begin at `ListenerState`.

use std::sync::Arc;

use axum::http::StatusCode;

use super::connection_slots::ConnectionTable;
use super::http_limits::HttpLimits;
use crate::clock::Clock;
use crate::meter::{Counter, Histogram, Moment};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The classes of responses, by the first digit of the status. This server sends no others.
const STATUS_CLASSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

/// The state of one listener: name, limits, slots and measurements.
pub struct ListenerState {
    listener: &'static str,
    clock: Clock,
    pub(super) limits: HttpLimits,
    pub(super) connections: Arc<ConnectionTable>,
    answers: [Counter; STATUS_CLASSES.len()],
    durations: Histogram,
}

impl ListenerState {
    /// Returns the state of a listener with this name and these limits.
    #[must_use]
    pub fn new(listener: &'static str, clock: Clock, limits: HttpLimits) -> Arc<Self> {
        let connections = Arc::new(ConnectionTable::new(clock, limits));
        let answers = std::array::from_fn(|_| Counter::default());
        Arc::new(Self { listener, clock, limits, connections, answers, durations: Histogram::default() })
    }

    /// Returns the time at which a request began.
    pub(super) fn current_moment(&self) -> Moment {
        Moment::now(&self.clock)
    }

    /// Records the head of a response. The body is not timed: a page is complete by then, and a stream of
    /// events has no end.
    pub(super) fn record_response(&self, status: StatusCode, began: Moment) {
        let class = usize::from(status.as_u16() / 100).checked_sub(2);
        if let Some(answers) = class.and_then(|class| self.answers.get(class)) {
            answers.increment();
        }
        self.durations.add_interval(began, self.current_moment());
    }
}

impl MetricSource for ListenerState {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        for (class, answers) in STATUS_CLASSES.iter().zip(&self.answers) {
            page.add_integer_sample(&metric::HTTP_REQUESTS, &[self.listener, class], answers.get());
        }
        page.add_duration_histogram(&metric::HTTP_DURATION, &[self.listener], &self.durations.snapshot());
        page.add_usize_sample(
            &metric::HTTP_CONNECTIONS,
            &[self.listener],
            self.connections.open_connection_count(),
        );
        page.add_usize_sample(&metric::HTTP_CONNECTIONS_LIMIT, &[self.listener], self.limits.connections);
        for (why, count) in self.connections.closed_counts() {
            page.add_integer_sample(&metric::HTTP_CONNECTIONS_CLOSED, &[self.listener, why.name()], count);
        }
    }
}

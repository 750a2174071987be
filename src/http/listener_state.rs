//! Holds the state of one listener that metrics show: slots, limits, response counts, durations.
//!
//! Begin at `ListenerState`.

use std::sync::Arc;

use axum::http::StatusCode;

use super::HttpLimits;
use super::slots::ConnectionTable;
use crate::clock::Clock;
use crate::meter::{Counter, Histogram, Moment};
use crate::telemetry::metrics::{MetricSource, Scrape, catalogue as metric};

/// The classes of answers, by the first digit of their status. Nothing else is answered here.
const STATUS_CLASSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

/// One listener: its name, its bounds, and what is measured of it.
pub struct ListenerState {
    listener: &'static str,
    clock: Clock,
    pub(super) limits: HttpLimits,
    pub(super) connections: Arc<ConnectionTable>,
    answers: [Counter; STATUS_CLASSES.len()],
    durations: Histogram,
}

impl ListenerState {
    /// A listener of this name with these bounds.
    #[must_use]
    pub fn new(listener: &'static str, clock: Clock, limits: HttpLimits) -> Arc<Self> {
        let connections = Arc::new(ConnectionTable::new(clock, limits));
        let answers = std::array::from_fn(|_| Counter::default());
        Arc::new(Self { listener, clock, limits, connections, answers, durations: Histogram::default() })
    }

    /// A request has come.
    pub(super) fn start_timer(&self) -> Moment {
        Moment::now(&self.clock)
    }

    /// The head of its answer is there. What follows is not timed: a page is whole by then, and a stream of events has no end.
    pub(super) fn record_response(&self, status: StatusCode, began: Moment) {
        let class = usize::from(status.as_u16() / 100).checked_sub(2);
        if let Some(answers) = class.and_then(|class| self.answers.get(class)) {
            answers.add();
        }
        self.durations.add(began, self.start_timer());
    }
}

impl MetricSource for ListenerState {
    fn show(&self, page: &mut Scrape) {
        for (class, answers) in STATUS_CLASSES.iter().zip(&self.answers) {
            page.count(&metric::HTTP_REQUESTS, &[self.listener, class], answers.get());
        }
        page.record_duration(&metric::HTTP_DURATION, &[self.listener], &self.durations.read());
        page.size(&metric::HTTP_CONNECTIONS, &[self.listener], self.connections.count());
        page.size(&metric::HTTP_CONNECTIONS_LIMIT, &[self.listener], self.limits.connections);
        for (why, count) in self.connections.closed() {
            page.count(&metric::HTTP_CONNECTIONS_CLOSED, &[self.listener, why.name()], count);
        }
    }
}

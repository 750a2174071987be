//! Holds the state of one listener that metrics show: slots, limits, response counts, durations.
//!
//! Begin at `Traffic`.

use std::sync::Arc;

use axum::http::StatusCode;

use super::Limits;
use super::connections::ConnectionRegistry;
use crate::clock::Clock;
use crate::meter::{Count, Moment, Times};
use crate::telemetry::metrics::{Page, Shows, catalogue as metric};

/// The classes of answers, by the first digit of their status. Nothing else is answered here.
const CLASSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

/// One listener: its name, its bounds, and what is measured of it.
pub struct Traffic {
    listener: &'static str,
    clock: Clock,
    pub(super) limits: Limits,
    pub(super) connections: Arc<ConnectionRegistry>,
    answers: [Count; CLASSES.len()],
    took: Times,
}

impl Traffic {
    /// A listener of this name with these bounds.
    #[must_use]
    pub fn new(listener: &'static str, clock: Clock, limits: Limits) -> Arc<Self> {
        let connections = Arc::new(ConnectionRegistry::new(clock, limits));
        let answers = std::array::from_fn(|_| Count::default());
        Arc::new(Self { listener, clock, limits, connections, answers, took: Times::default() })
    }

    /// A request has come.
    pub(super) fn began(&self) -> Moment {
        Moment::now(&self.clock)
    }

    /// The head of its answer is there. What follows is not timed: a page is whole by then, and a stream of events has no end.
    pub(super) fn answered(&self, status: StatusCode, began: Moment) {
        let class = usize::from(status.as_u16() / 100).checked_sub(2);
        if let Some(answers) = class.and_then(|class| self.answers.get(class)) {
            answers.add();
        }
        self.took.add(began, self.began());
    }
}

impl Shows for Traffic {
    fn show(&self, page: &mut Page) {
        for (class, answers) in CLASSES.iter().zip(&self.answers) {
            page.count(&metric::HTTP_REQUESTS, &[self.listener, class], answers.get());
        }
        page.timed(&metric::HTTP_DURATION, &[self.listener], &self.took.read());
        page.size(&metric::HTTP_CONNECTIONS, &[self.listener], self.connections.count());
        page.size(&metric::HTTP_CONNECTIONS_LIMIT, &[self.listener], self.limits.connections);
        for (why, count) in self.connections.closed() {
            page.count(&metric::HTTP_CONNECTIONS_CLOSED, &[self.listener, why.name()], count);
        }
    }
}

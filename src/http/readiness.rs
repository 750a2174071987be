//! The readiness of the server, which `/healthz/ready` and the metrics report.
//!
//! The health service of the gRPC port has its own state (`grpc/auxiliary.rs`). Begin at [`ServerReadiness`].

use std::sync::atomic::{AtomicU8, Ordering};

use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

const STARTING: u8 = 0;
const READY: u8 = 1;
const STOPPING: u8 = 2;

/// The readiness of the server: ready from the moment at which every listener is bound until the server
/// stops.
#[derive(Debug, Default)]
pub struct ServerReadiness(AtomicU8);

impl ServerReadiness {
    /// Records that every listener is bound.
    pub fn mark_ready(&self) {
        // A stop that came first prevails.
        let _ = self.0.compare_exchange(STARTING, READY, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records that the server stops.
    pub fn mark_stopping(&self) {
        self.0.store(STOPPING, Ordering::Relaxed);
    }

    /// Returns why the server is not ready; `None` if it is.
    #[must_use]
    pub fn not_ready_reason(&self) -> Option<&'static str> {
        match self.0.load(Ordering::Relaxed) {
            READY => None,
            STOPPING => Some("the server is stopping"),
            _ => Some("the server is starting: not every listener is bound yet"),
        }
    }
}

impl MetricSource for ServerReadiness {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_integer_sample(&metric::READY, &[], u64::from(self.not_ready_reason().is_none()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_stops_never_becomes_ready() {
        let readiness = ServerReadiness::default();
        assert!(readiness.not_ready_reason().is_some_and(|reason| reason.contains("starting")));
        readiness.mark_ready();
        assert_eq!(readiness.not_ready_reason(), None);
        readiness.mark_stopping();
        readiness.mark_ready();
        assert!(readiness.not_ready_reason().is_some_and(|reason| reason.contains("stopping")));
    }
}

//! Writes the metrics of the gRPC port.
//!
//! It counts nothing itself: `server.rs` and `call_counts.rs` do. Begin at `Server::show`.

use super::{ENDINGS, Server};
use crate::telemetry::metrics::{MetricSource, Scrape, catalogue as metric};

impl MetricSource for Server {
    fn show(&self, page: &mut Scrape) {
        let figures = self.counters();
        for calls in self.calls() {
            page.count(&metric::CALLS, &[calls.method, calls.generation, calls.code], calls.count);
        }
        for calls in self.call_times() {
            page.record_duration(&metric::CALL_DURATION, &[calls.method, calls.generation], &calls.timed);
        }
        page.count(&metric::CALLS_RECEIVED, &[], figures.calls);
        page.count(&metric::CALLS_REFUSED, &[], figures.calls_refused);
        page.size(&metric::CONNECTIONS, &[], figures.connections);
        page.size(&metric::CONNECTIONS_LIMIT, &[], figures.connections_max);
        page.count(&metric::CONNECTIONS_OPENED, &[], figures.connections_opened);
        for (ending, count) in ENDINGS.iter().zip(figures.endings) {
            page.count(&metric::CONNECTIONS_ENDED, &[ending], count);
        }
        page.count(&metric::CONNECTIONS_REFUSED, &[], figures.connections_refused);
        page.count(&metric::CONNECTIONS_STRANGE, &[], figures.not_http2);
        page.count(&metric::ACCEPT_ERRORS, &[], figures.accept_errors);
        page.count(&metric::RECEIVED_BYTES, &[], figures.received_bytes);
        page.count(&metric::SENT_BYTES, &[], figures.sent_bytes);
        page.size(&metric::BODIES_BYTES, &[], figures.bodies_in_flight_bytes);
        page.size(&metric::BODIES_BYTES_LIMIT, &[], figures.bodies_in_flight_bytes_max);
        page.size(&metric::STATE_BYTES, &[], figures.state_bytes);
        page.size(&metric::STATE_BYTES_LIMIT, &[], figures.state_bytes_max);
    }
}

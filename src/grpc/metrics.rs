//! Writes the metrics of the gRPC port.
//!
//! `server.rs` and `call_counts.rs` have the counters. Begin at `GrpcServer::write_samples`.

use super::{ENDINGS, GrpcServer};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

impl MetricSource for GrpcServer {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        let figures = self.counters();
        for calls in self.call_counts() {
            page.add_integer_sample(
                &metric::CALLS,
                &[calls.method, calls.generation, calls.code],
                calls.count,
            );
        }
        for calls in self.call_durations() {
            page.add_duration_histogram(
                &metric::CALL_DURATION,
                &[calls.method, calls.generation],
                &calls.timed,
            );
        }
        page.add_integer_sample(&metric::CALLS_RECEIVED, &[], figures.calls);
        page.add_integer_sample(&metric::CALLS_REFUSED, &[], figures.calls_refused);
        page.add_usize_sample(&metric::CONNECTIONS, &[], figures.connections);
        let kept = self.connection_keeping().map(|keeping| &keeping.memory);
        page.add_usize_sample(
            &metric::KEPT_CONNECTIONS,
            &[],
            kept.map_or(0, |memory| memory.connection_count()),
        );
        page.add_integer_sample(&metric::KEPT_MEMORY, &[], kept.map_or(0, |memory| memory.used_bytes()));
        page.add_usize_sample(&metric::CONNECTIONS_LIMIT, &[], figures.connections_max);
        page.add_integer_sample(&metric::CONNECTIONS_OPENED, &[], figures.connections_opened);
        for (ending, count) in ENDINGS.iter().zip(figures.endings) {
            page.add_integer_sample(&metric::CONNECTIONS_ENDED, &[ending], count);
        }
        page.add_integer_sample(&metric::CONNECTIONS_REFUSED, &[], figures.connections_refused);
        page.add_integer_sample(&metric::CONNECTIONS_STRANGE, &[], figures.not_http2);
        page.add_integer_sample(&metric::ACCEPT_ERRORS, &[], figures.accept_errors);
        page.add_integer_sample(&metric::RECEIVED_BYTES, &[], figures.received_bytes);
        page.add_integer_sample(&metric::SENT_BYTES, &[], figures.sent_bytes);
        page.add_usize_sample(&metric::BODIES_BYTES, &[], figures.bodies_in_flight_bytes);
        page.add_usize_sample(&metric::BODIES_BYTES_LIMIT, &[], figures.bodies_in_flight_bytes_max);
        page.add_usize_sample(&metric::STATE_BYTES, &[], figures.state_bytes);
        page.add_usize_sample(&metric::STATE_BYTES_LIMIT, &[], figures.state_bytes_max);
    }
}

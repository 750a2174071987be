//! Limits the number of requests of stack helpers that wait at the server.
//!
//! `stacks.rs` serves these requests. A waiting request holds an HTTP connection that is not closed to make room, so all of them
//! together take a quarter of the connections at most. Further helpers ask again after a pause. The limiter of event streams
//! counts these requests too, apart from the streams. Begin at [`StackWaits`].

use tokio::sync::watch;

use super::ClientNetwork;
use super::event_stream_limiter::{EventStreamGuard, EventStreamLimiter};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The maximum number of requests that wait.
const WAITS_MAX: usize = 256;
/// The inverse of the share of all connections that may wait.
const CONNECTION_SHARE: usize = 4;

/// The requests of helpers that wait at the server.
pub struct StackWaits(EventStreamLimiter);

impl StackWaits {
    /// Returns a limiter for a listener with this many connections.
    #[must_use]
    pub fn new(connections: usize) -> Self {
        Self(EventStreamLimiter::new(WAITS_MAX.min(connections / CONNECTION_SHARE)))
    }

    /// Reserves a place for a request of this client network, if there is one. The receiver becomes true when the request
    /// must end.
    pub(super) fn reserve(&self, source: ClientNetwork) -> Option<(EventStreamGuard, watch::Receiver<bool>)> {
        self.0.reserve_event_stream(source).ok()
    }

    /// Ends all waits. Called when the server stops.
    pub fn end_all_waits(&self) {
        self.0.end_all_streams();
    }
}

impl Default for StackWaits {
    fn default() -> Self {
        Self(EventStreamLimiter::new(WAITS_MAX))
    }
}

impl MetricSource for StackWaits {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        let (waits, most) = self.0.open_and_maximum_stream_counts();
        page.add_usize_sample(&metric::STACK_WAITS, &[], waits);
        page.add_usize_sample(&metric::STACK_WAITS_LIMIT, &[], most);
    }
}

//! Limits the number of open streams of server-sent events, in total and for each client network.
//!
//! `events.rs` and `pages/live.rs` serve the streams. Begin at [`EventStreamLimiter`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{ClientNetwork, Problem};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// Limits the number of open event streams.
pub struct EventStreamLimiter {
    most: usize,
    most_per_source: usize,
    open: Arc<Mutex<HashMap<ClientNetwork, usize>>>,
    stop: watch::Sender<bool>,
}

impl Default for EventStreamLimiter {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

impl EventStreamLimiter {
    /// The default maximum of streams.
    pub const DEFAULT: usize = 256;
    /// A client network may hold half of all streams, but never less than this number.
    const MIN_PER_NETWORK: usize = 128;

    /// Returns a limiter for this many streams.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let most_per_source = (most / 2).max(Self::MIN_PER_NETWORK);
        Self { most, most_per_source, open: Arc::default(), stop: watch::Sender::new(false) }
    }

    /// Returns how many streams are open, and how many may be.
    #[must_use]
    pub fn open_and_maximum_stream_counts(&self) -> (usize, usize) {
        (lock_counts(&self.open).values().sum(), self.most)
    }

    /// Reserves a stream for this client network. The receiver becomes true when the stream must end.
    pub(super) fn reserve_event_stream(
        &self,
        source: ClientNetwork,
    ) -> Result<(EventStreamGuard, watch::Receiver<bool>), Problem> {
        let mut open = lock_counts(&self.open);
        let all: usize = open.values().sum();
        let own = open.entry(source).or_default();
        if all >= self.most || *own >= self.most_per_source {
            let most = if all >= self.most { self.most } else { self.most_per_source };
            open.retain(|_, count| *count > 0);
            return Err(Problem::too_many_streams(most));
        }
        *own += 1;
        Ok((EventStreamGuard { open: Arc::clone(&self.open), source }, self.stop.subscribe()))
    }

    /// Ends every stream. Called when the server stops.
    pub fn end_all_streams(&self) {
        self.stop.send_replace(true);
    }
}

fn lock_counts(open: &Mutex<HashMap<ClientNetwork, usize>>) -> MutexGuard<'_, HashMap<ClientNetwork, usize>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds the reservation of one stream.
pub(super) struct EventStreamGuard {
    open: Arc<Mutex<HashMap<ClientNetwork, usize>>>,
    source: ClientNetwork,
}

impl Drop for EventStreamGuard {
    fn drop(&mut self) {
        let mut open = lock_counts(&self.open);
        if let Some(count) = open.get_mut(&self.source) {
            *count -= 1;
        }
        open.retain(|_, count| *count > 0);
    }
}

impl MetricSource for EventStreamLimiter {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        let (open, most) = self.open_and_maximum_stream_counts();
        page.add_usize_sample(&metric::STREAMS, &[], open);
        page.add_usize_sample(&metric::STREAMS_LIMIT, &[], most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_bounded_in_all_and_for_each_source() {
        let streams = EventStreamLimiter::new(2 * EventStreamLimiter::MIN_PER_NETWORK);
        let [a, b, c] = [1, 2, 3].map(|host| ClientNetwork::of_address([10, 0, 0, host].into()));
        let half = 0..EventStreamLimiter::MIN_PER_NETWORK;
        let mut held: Vec<_> =
            half.clone().map(|_| streams.reserve_event_stream(a).map_err(|_| ()).unwrap()).collect();
        assert!(streams.reserve_event_stream(a).is_err(), "half of all is for one source");
        held.extend(half.map(|_| streams.reserve_event_stream(b).map_err(|_| ()).unwrap()));
        assert!(streams.reserve_event_stream(c).is_err());
        assert_eq!(
            streams.open_and_maximum_stream_counts(),
            (2 * EventStreamLimiter::MIN_PER_NETWORK, 2 * EventStreamLimiter::MIN_PER_NETWORK)
        );
        held.clear();
        assert!(streams.reserve_event_stream(c).is_ok() && lock_counts(&streams.open).is_empty());
    }
}

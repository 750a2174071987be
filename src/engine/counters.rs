//! The counters of the engine, for metrics. Begin at [`Engine::counters`].

use std::sync::atomic::Ordering;

use super::Engine;

/// The counters of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineCounters {
    /// The number of applied inputs.
    pub inputs: u64,
    /// The number of events.
    pub events: u64,
    /// The number of retained events.
    pub events_kept: usize,
    /// The greatest number of retained events.
    pub events_kept_max: usize,
    /// The number of events that slow followers missed.
    pub events_missed: u64,
    /// The present number of followers.
    pub followers: usize,
    /// The number of times that the driver could not run for a while.
    pub lags: u64,
}

impl Engine {
    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> EngineCounters {
        let state = self.lock_for_read();
        EngineCounters {
            inputs: state.durable.inputs,
            events: state.durable.next_event - 1,
            events_kept: state.durable.history.len(),
            events_kept_max: state.durable.history.capacity(),
            events_missed: self.missed.load(Ordering::Relaxed),
            followers: self.followers.receiver_count(),
            lags: state.lags,
        }
    }
}

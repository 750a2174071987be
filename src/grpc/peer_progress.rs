//! The progress of a peer when its deadlines were set: the incomplete input, and the output that the peer had not
//! read.
//!
//! The [`GrpcConnection`](super::connection::GrpcConnection) sets the deadlines. When a deadline passes, the
//! connection compares the present state with the recorded one, to see whether the peer has made progress. Begin at
//! [`PeerProgressSnapshot`].

use std::time::Duration;

use tokio::time::Instant;

use crate::http2::IncompleteInput;

/// The number of bytes of a waiting answer that must be taken in time; of a shorter answer, all of them.
const TAKEN_MIN: u64 = 64 << 10;

/// The peer's progress when its deadlines were set.
#[derive(Default)]
pub(super) struct PeerProgressSnapshot {
    /// The incomplete input that is processed as a whole.
    pub(super) input: Option<UnfinishedInput>,
    /// The incomplete input that is passed through.
    pub(super) passing: Option<UnfinishedInput>,
    /// The output that it had not taken.
    pub(super) output: Option<OutputSnapshot>,
    /// The time since which this server does not read from the peer, which has to take its answers first.
    declines_since: Option<Instant>,
}

impl PeerProgressSnapshot {
    /// Records whether this server reads from the peer now. The time during which it does not is not counted
    /// against the peer.
    pub(super) fn set_reading_paused(&mut self, declines: bool) {
        match self.declines_since {
            None if declines => self.declines_since = Some(Instant::now()),
            Some(since) => {
                let now = Instant::now();
                self.declines_since = Some(now).filter(|_| declines);
                for input in [&mut self.input, &mut self.passing].into_iter().flatten() {
                    input.declined += now - since;
                }
            }
            None => {}
        }
    }
}

/// The peer's incomplete input when its deadline was set.
pub(super) struct UnfinishedInput {
    pub(super) what: (IncompleteInput, u64),
    /// The time for which this server has not read since the deadline was set.
    pub(super) declined: Duration,
}

/// The output of a connection at one moment: how much waits and how much was sent, of data and of bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputSnapshot {
    pub(super) data: (u64, u64),
    pub(super) bytes: (u64, u64),
}

impl OutputSnapshot {
    /// Returns whether too little of the output has been sent since, though some still waits.
    pub(super) fn has_stalled_until(&self, now: &Self) -> bool {
        let stuck =
            |was: (u64, u64), is: (u64, u64)| was.0 > 0 && is.0 > 0 && is.1 - was.1 < was.0.min(TAKEN_MIN);
        stuck(self.data, now.data) || stuck(self.bytes, now.bytes)
    }
}

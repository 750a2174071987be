//! The peer's progress at the time its deadlines were set: incomplete input, and output that it had not taken.
//!
//! The [`Connection`](super::connection::GrpcConnection) sets the deadlines and decides what follows from them. Begin
//! at [`ProgressDeadlines`].

use std::time::Duration;

use tokio::time::Instant;

use crate::http2::IncompleteInput;

/// Of an answer that waits so many bytes must be taken in time, or all of them.
const TAKEN_MIN: u64 = 64 << 10;

/// How far a peer was when the deadlines for it were set.
#[derive(Default)]
pub(super) struct ProgressDeadlines {
    /// What it had begun that must be there as a whole, and that is passed on.
    pub(super) input: Option<UnfinishedInput>,
    pub(super) passing: Option<UnfinishedInput>,
    /// What it had not taken.
    pub(super) output: Option<OutputProgress>,
    /// Since when this server has not read from the peer, who has to take its answers first.
    declines_since: Option<Instant>,
}

impl ProgressDeadlines {
    /// Notes whether this server reads from the peer now. Time during which it does not is no time that the peer has taken.
    pub(super) fn note_declining(&mut self, declines: bool) {
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

/// What a peer had begun when the deadline for it was set.
pub(super) struct UnfinishedInput {
    pub(super) what: (IncompleteInput, u64),
    /// For how long this server has not read since the deadline was set.
    pub(super) declined: Duration,
}

/// What a peer had not taken at some moment: how much waits, and how much has gone, of data and of bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputProgress {
    pub(super) data: (u64, u64),
    pub(super) bytes: (u64, u64),
}

impl OutputProgress {
    /// Whether of what waited too little has gone since, though there is still something that waits.
    pub(super) fn is_stuck(&self, now: &Self) -> bool {
        let stuck =
            |was: (u64, u64), is: (u64, u64)| was.0 > 0 && is.0 > 0 && is.1 - was.1 < was.0.min(TAKEN_MIN);
        stuck(self.data, now.data) || stuck(self.bytes, now.bytes)
    }
}

//! The peers whose preferred path, the Unix socket, has failed. For a minute after the failure, the engine tries the
//! other paths to such a peer first.
//!
//! If a Unix socket cannot be dialled, or fails in use, TCP to the same peer may still work. The engine still tries
//! the failed path, but last. So a peer stays reachable even if its path was recorded as failed by mistake. If a peer
//! ended an unused connection, its path does not count as failed. After the minute, the next connection tries the
//! preferred path first again. The engine does not end a working connection to return to the preferred path.
//!
//! [`dial`](super::dial) orders the paths. Begin at [`PathBackoff`].

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::base::membership::MemberId;
use crate::base::sync::lock;

/// How long the other paths come first.
const BACKOFF: Duration = Duration::from_secs(60);

/// The peers whose preferred path has failed, with the time of the failure.
#[derive(Debug, Default)]
pub struct PathBackoff(Mutex<HashMap<MemberId, Instant>>);

impl PathBackoff {
    /// Records that the preferred path to a peer has failed now.
    pub fn record_failure(&self, peer: MemberId, now: Instant) {
        lock(&self.0).insert(peer, now);
    }

    /// Returns whether the other paths to a peer come first.
    pub fn is_backed_off(&self, peer: MemberId, now: Instant) -> bool {
        lock(&self.0).get(&peer).is_some_and(|failed| now.saturating_duration_since(*failed) < BACKOFF)
    }

    /// Forgets the peers for which `lives` returns false.
    pub fn retain_peers(&self, lives: impl Fn(MemberId) -> bool) {
        lock(&self.0).retain(|peer, _| lives(*peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::membership::{Incarnation, TaskId};
    use muster_clock as clock;

    #[test]
    fn a_backoff_is_for_a_time_and_for_one_life() {
        let member = |task| MemberId::of_own_job(TaskId(task), Incarnation::new(7).unwrap());
        let (backoff, now) = (PathBackoff::default(), clock::monotonic());
        backoff.record_failure(member(0), now);
        assert!(backoff.is_backed_off(member(0), now) && backoff.is_backed_off(member(0), now + BACKOFF / 2));
        assert!(!backoff.is_backed_off(member(1), now) && !backoff.is_backed_off(member(0), now + BACKOFF));
        backoff.retain_peers(|peer| peer != member(0));
        assert!(!backoff.is_backed_off(member(0), now));
    }
}

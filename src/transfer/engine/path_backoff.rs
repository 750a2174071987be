//! The preferred paths that have failed: for a minute the other paths to that incarnation are tried first.
//!
//! A Unix socket that cannot be dialled, or that is lost while it is in use, says nothing of TCP to the same
//! peer. The failed path stays in the list, last, so a wrong guess disconnects no peer. If the peer ended an
//! unused connection, its path has not failed. After the minute the next connection tries the preferred path
//! first again; no working connection is ended for it.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::base::identity::Member;
use crate::base::sync::lock;

/// How long the other paths come first.
const BACKOFF: Duration = Duration::from_secs(60);

/// The peers whose preferred path has failed, with the time of the failure.
#[derive(Debug, Default)]
pub struct PathBackoff(Mutex<HashMap<Member, Instant>>);

impl PathBackoff {
    /// Records that the preferred path to a peer has failed now.
    pub fn add(&self, peer: Member, now: Instant) {
        lock(&self.0).insert(peer, now);
    }

    /// Returns whether the other paths to a peer come first.
    pub fn has(&self, peer: Member, now: Instant) -> bool {
        lock(&self.0).get(&peer).is_some_and(|failed| now.saturating_duration_since(*failed) < BACKOFF)
    }

    /// Forgets the peers for which `lives` returns false.
    pub fn retain(&self, lives: impl Fn(Member) -> bool) {
        lock(&self.0).retain(|peer, _| lives(*peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::identity::{Incarnation, TaskId};
    use muster_clock as clock;

    #[test]
    fn a_backoff_is_for_a_time_and_for_one_life() {
        let member = |task| Member { task: TaskId(task), incarnation: Incarnation::new(7).unwrap() };
        let (backoff, now) = (PathBackoff::default(), clock::monotonic());
        backoff.add(member(0), now);
        assert!(backoff.has(member(0), now) && backoff.has(member(0), now + BACKOFF / 2));
        assert!(!backoff.has(member(1), now) && !backoff.has(member(0), now + BACKOFF));
        backoff.retain(|peer| peer != member(0));
        assert!(!backoff.has(member(0), now));
    }
}

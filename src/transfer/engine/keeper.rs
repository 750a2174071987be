//! The thread that enforces limits: deadlines, stalls and silent peers.
//!
//! It sleeps until the first limit could pass. A peer for which a launch waits is pinged 32 times within the
//! shortest stall limit, so its silence is detected within a fraction of that limit; by default that costs a
//! frame a second. Begin at [`EngineShared::keep`].

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::shared::{EngineShared, LOOKS};
use crate::base::sync::lock;
use crate::launch::peer_launch::give_up;

impl EngineShared {
    /// Enforces limits until the engine ends.
    pub(super) fn keep(&self) {
        let mut planned = lock(&self.keeper.0);
        while !self.closed.load(Ordering::Acquire) {
            let now = clock::monotonic();
            match *planned {
                None => planned = self.keeper.1.wait(planned).unwrap_or_else(PoisonError::into_inner),
                Some(at) if at > now => {
                    planned = self
                        .keeper
                        .1
                        .wait_timeout(planned, at - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                Some(_) => {
                    *planned = None;
                    drop(planned);
                    let next = self.look_after(now);
                    planned = lock(&self.keeper.0);
                    *planned = match (*planned, next) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    };
                }
            }
        }
    }

    /// Checks all limits. Returns when to check again.
    fn look_after(&self, now: Instant) -> Option<Instant> {
        let connections = lock(&self.connections).clone();
        let mut next: Option<Instant> = None;
        let mut late = Vec::new();
        lock(&self.expected).retain(|(deadline, launch)| {
            let Some(launch) = launch.upgrade().filter(|launch| launch.awaits_connections()) else {
                return false;
            };
            if *deadline <= now {
                late.push(launch);
                return false;
            }
            next = Some(next.map_or(*deadline, |next| next.min(*deadline)));
            true
        });
        for launch in late {
            launch.on_deadline(self.here().task);
        }
        for connection in connections {
            connection.end_if_gone();
            let silent = connection.silent();
            let mut shortest: Option<Duration> = None;
            for launch in connection.launches() {
                match launch.check_limits(now, silent) {
                    Err(error) => give_up(&launch, error),
                    Ok(None) => {}
                    Ok(Some(at)) => {
                        next = Some(next.map_or(at, |next| next.min(at)));
                        let stall = launch.limits.stall;
                        shortest = Some(shortest.map_or(stall, |least| least.min(stall)));
                    }
                }
            }
            if let Some(shortest) = shortest {
                if silent >= shortest / LOOKS {
                    connection.ping();
                }
                let again = now + shortest / LOOKS;
                next = next.map(|next| next.min(again));
            }
        }
        next
    }
}

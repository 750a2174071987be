//! The watchdog: a thread that enforces deadlines and stall limits, and pings silent peers.
//!
//! The watchdog sleeps until the next check is due. While a launch is in flight with a peer, the watchdog pings the
//! peer whenever the peer has been silent for 1/32 of the shortest stall limit of these launches. So a live peer is
//! never silent for as long as a stall limit. With the default limit, this is about one ping a second. Begin at
//! [`EngineShared::run_watchdog`].

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::shared::{EngineShared, LOOKS};
use crate::base::sync::lock;
use crate::launch::peer_launch::fail_and_tell_peer;

impl EngineShared {
    /// Enforces limits until the engine ends.
    pub(super) fn run_watchdog(&self) {
        let mut planned = lock(&self.watchdog.0);
        while !self.closed.load(Ordering::Acquire) {
            let now = clock::monotonic();
            match *planned {
                None => planned = self.watchdog.1.wait(planned).unwrap_or_else(PoisonError::into_inner),
                Some(at) if at > now => {
                    planned = self
                        .watchdog
                        .1
                        .wait_timeout(planned, at - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                Some(_) => {
                    *planned = None;
                    drop(planned);
                    let next = self.check_limits(now);
                    planned = lock(&self.watchdog.0);
                    *planned = match (*planned, next) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    };
                }
            }
        }
    }

    /// Checks all limits. Returns when to check again.
    fn check_limits(&self, now: Instant) -> Option<Instant> {
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
        for launch in self.local_launches.in_flight() {
            // There is no peer that could be silent: what has not begun waits for its dependencies.
            match launch.check_limits(now, Duration::ZERO) {
                Err(error) => fail_and_tell_peer(&launch, error),
                Ok(at) => next = next.into_iter().chain(at).min(),
            }
        }
        for connection in connections {
            connection.end_if_gone_too_long();
            let silent = connection.peer_silence();
            let mut shortest: Option<Duration> = None;
            for launch in connection.in_flight_launches() {
                match launch.check_limits(now, silent) {
                    Err(error) => fail_and_tell_peer(&launch, error),
                    Ok(None) => {}
                    Ok(Some(at)) => {
                        next = Some(next.map_or(at, |next| next.min(at)));
                        let stall = launch.limits.stall;
                        shortest = Some(shortest.map_or(stall, |least| least.min(stall)));
                    }
                }
            }
            match connection.first_limit_of_fabric_reads() {
                Some(at) if at <= now => connection.end_for_overdue_fabric_read(),
                at => next = next.into_iter().chain(at).min(),
            }
            match connection.first_limit_of_batches() {
                Some(at) if at <= now => connection.fail_clique_for_overdue_batch(),
                at => next = next.into_iter().chain(at).min(),
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

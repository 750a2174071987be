//! Counts failed handshakes by listener and kind, logs them, and keeps a bounded number of the latest.
//!
//! `acceptor.rs` finds the reason of a failure. Begin at [`HandshakeFailures::record_failure`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{HandshakeError, HandshakeFault};
use crate::clock::{Clock, Timestamp};

/// The listeners, by the names under which their handshakes are counted.
pub const LISTENERS: [&str; 2] = ["grpc", "http"];

/// The number of kinds of failure that are kept; the one without a failure for longest is evicted first.
const KEPT: usize = 256;

/// The failed handshakes of one kind: from one host, at one listener, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailedHandshake {
    /// The listener: `grpc` or `http`.
    pub listener: String,
    /// The address of the latest client.
    #[schema(value_type = String)]
    pub peer: SocketAddr,
    /// The server name that the client dialled, if it sent one.
    pub name: Option<String>,
    /// The reason, and what to do.
    pub reason: String,
    /// The refused certificate, in one line.
    pub shown: Option<String>,
    /// The number of failures.
    pub times: u64,
    /// The time of the first, in microseconds since the Unix epoch.
    pub first: Timestamp,
    /// The time of the latest.
    pub last: Timestamp,
}

/// The kept handshake failures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = FailuresPage)]
pub struct HandshakeFailuresView {
    /// The failures, the latest first.
    pub handshakes: Vec<FailedHandshake>,
    /// The number of failed handshakes since the server started.
    pub failed: u64,
    /// The number of successful handshakes since then.
    pub succeeded: u64,
}

#[derive(Default)]
struct FailureLog {
    list: VecDeque<FailedHandshake>,
    failed: u64,
    succeeded: u64,
    /// The number of failures by listener and kind.
    faults: [[u64; HandshakeFault::ALL.len()]; LISTENERS.len()],
}

/// The results of the handshakes of all listeners.
pub struct HandshakeFailures {
    clock: Clock,
    kept: Mutex<FailureLog>,
}

impl HandshakeFailures {
    /// Returns an empty record.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { clock, kept: Mutex::default() }
    }

    fn lock_log(&self) -> std::sync::MutexGuard<'_, FailureLog> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a successful handshake.
    pub fn record_success(&self) {
        self.lock_log().succeeded += 1;
    }

    /// Records a failed handshake. Clients retry for minutes, so only the first, second, fourth, eighth …
    /// failure of a kind is logged.
    pub fn record_failure(&self, listener: &str, peer: SocketAddr, failed: HandshakeError) {
        let now = self.clock.now();
        let mut kept = self.lock_log();
        kept.failed += 1;
        for (known, faults) in LISTENERS.iter().zip(&mut kept.faults) {
            for (fault, count) in HandshakeFault::ALL.iter().zip(faults) {
                *count += u64::from(*known == listener && *fault == failed.fault);
            }
        }
        let same = |old: &FailedHandshake| {
            old.listener == listener && old.peer.ip() == peer.ip() && old.reason == failed.reason
        };
        let place = kept.list.iter().position(same);
        let former = place.and_then(|place| kept.list.remove(place));
        let (times, first) = former.map_or((1, now), |former| (former.times + 1, former.first));
        let HandshakeError { reason, name, shown, .. } = failed;
        let listener = listener.to_owned();
        let entry = FailedHandshake { listener, peer, name, reason, shown, times, first, last: now };
        if times.is_power_of_two() {
            tracing::warn!(
                listener = entry.listener,
                %peer,
                name = entry.name,
                shown = entry.shown,
                times,
                "a handshake failed: {}",
                crate::text::escape_to_one_line(&entry.reason)
            );
        }
        kept.list.push_front(entry);
        kept.list.truncate(KEPT);
    }

    /// Returns the number of failures at each listener, by kind.
    #[must_use]
    pub fn failure_counts(&self) -> Vec<(&'static str, HandshakeFault, u64)> {
        let faults = self.lock_log().faults;
        let of = |(listener, counts): (&'static str, [u64; HandshakeFault::ALL.len()])| {
            HandshakeFault::ALL.into_iter().zip(counts).map(move |(fault, count)| (listener, fault, count))
        };
        LISTENERS.into_iter().zip(faults).flat_map(of).collect()
    }

    /// Returns the kept failures.
    #[must_use]
    pub fn to_view(&self) -> HandshakeFailuresView {
        let kept = self.lock_log();
        HandshakeFailuresView {
            handshakes: kept.list.iter().cloned().collect(),
            failed: kept.failed,
            succeeded: kept.succeeded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_failures_are_counted_and_the_quietest_are_forgotten() {
        let failures = HandshakeFailures::new(Clock::start());
        let failed = |reason: String| HandshakeError {
            fault: HandshakeFault::HungUp,
            reason,
            name: None,
            shown: None,
        };
        for port in 1..=5 {
            failures.record_failure("grpc", ([10, 0, 0, 1], port).into(), failed("no".into()));
        }
        let page = failures.to_view();
        assert_eq!((page.handshakes.len(), page.failed), (1, 5));
        assert_eq!((page.handshakes[0].times, page.handshakes[0].peer.port()), (5, 5));
        for n in 0..KEPT {
            failures.record_failure("http", ([10, 0, 0, 2], 1).into(), failed(n.to_string()));
        }
        let page = failures.to_view();
        assert_eq!((page.handshakes.len(), page.failed), (KEPT, 5 + KEPT as u64));
        assert!(page.handshakes.iter().all(|kept| kept.listener == "http"));
        let counted: Vec<_> =
            failures.failure_counts().into_iter().filter(|(.., count)| *count > 0).collect();
        assert_eq!(
            counted,
            [("grpc", HandshakeFault::HungUp, 5), ("http", HandshakeFault::HungUp, KEPT as u64)]
        );
    }
}

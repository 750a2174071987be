//! Detects a host whose clock differs from the service's clock.
//!
//! Only the clocks of native workers are compared, because no message of JAX contains the client's time. If most
//! hosts differ from the service by about the same time, the finding says that the service's clock is wrong. Each
//! host counts once, however many tasks it has. Begin at `detect`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::TaskId;
use crate::service::reports::ClockReading;
use crate::text::{format_approximate_duration, micros_to_seconds};

/// The offset from which a clock counts as off, in microseconds. Synchronized hosts differ by some
/// milliseconds.
const LIMIT_US: u64 = 1_000_000;
/// The number of hosts from which a majority can show that the service's clock is off.
const HOSTS_MIN: usize = 3;

pub(super) static DETECTOR: Detector = Detector {
    id: "worker-clock-off",
    title: "A clock is off",
    severity: Severity::Warning,
    means: "The clocks of a worker's host and of the server's host differ. Their logs, traces and failures do not line up, \
            certificates and tokens look expired or not yet valid, and files look newer than they are. No decision of the \
            server depends on a worker's clock.",
    advice: "Check time synchronisation (`chronyc tracking` or `timedatectl`) on the host that the finding names, and correct \
             its clock. If the finding names the server, check the server's host. JAX programs do not report their clocks \
             and are not compared.",
    detect,
};

fn detect(DetectorInput { job, clocks, .. }: DetectorInput<'_>) -> Option<Detection> {
    let mut hosts: BTreeMap<Option<IpAddr>, Vec<i64>> = BTreeMap::new();
    for (task, clock) in clocks {
        let host = job.task(*task).and_then(|task| task.peer).map(|peer| peer.ip());
        hosts.entry(host).or_default().push(clock.ahead_us);
    }
    // The tasks of a host share a clock, so each host has one vote.
    let mut voices: Vec<i64> = hosts.into_values().map(median).collect();
    let (told, off) = (voices.len(), |ahead: i64| ahead.unsigned_abs() >= LIMIT_US);
    let mut worst: Vec<&(TaskId, ClockReading)> =
        clocks.iter().filter(|(_, clock)| clock.min_clock_distance_us() >= LIMIT_US).collect();
    worst.sort_by_key(|(_, clock)| std::cmp::Reverse(clock.min_clock_distance_us()));
    let furthest = ClockReading::furthest_from_service(worst.iter().map(|(_, clock)| *clock))?;
    let evidence = |found: Detection| {
        found
            .with_evidence(
                "furthest from the server's clock, in seconds",
                furthest.ahead_seconds(),
                micros_to_seconds(LIMIT_US),
            )
            .with_evidence(
                "uncertainty of that, in seconds",
                micros_to_seconds(furthest.within_us),
                micros_to_seconds(LIMIT_US),
            )
    };
    voices.sort_unstable();
    let most = voices[told / 2];
    // The middle half of the hosts agrees with itself and not with the service.
    let agree = voices[told / 4].abs_diff(voices[told - 1 - told / 4]) < LIMIT_US;
    if told >= HOSTS_MIN && off(most) && agree {
        let summary_without_tasks = format!(
            "the clock of this server is {} those of most of {told} hosts, which agree; check the server's host",
            clock_offset_text(most.saturating_neg())
        );
        return Some(evidence(Detection::new(summary_without_tasks, job.seen_at, Vec::new())));
    }
    let tasks: Vec<TaskId> = worst.iter().map(|(task, _)| *task).collect();
    let apart = clock_offset_text(furthest.ahead_us);
    let summary_without_tasks = match tasks.len() {
        1 => format!("the clock of 1 task is {apart} the server's"),
        many => format!("the clocks of {many} tasks are off, one of them {apart} the server's"),
    };
    Some(evidence(Detection::new(summary_without_tasks, job.seen_at, tasks)))
}

fn median(mut values: Vec<i64>) -> i64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn clock_offset_text(ahead_us: i64) -> String {
    let apart = format_approximate_duration(Duration::from_micros(ahead_us.unsigned_abs()));
    if ahead_us < 0 { format!("{apart} behind") } else { format!("{apart} ahead of") }
}

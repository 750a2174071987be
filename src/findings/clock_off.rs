//! A clock differs from the service's.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::{Detector, Found, Seen, Severity, spoken};
use crate::coordination::TaskId;
use crate::reports::ClockReading;

/// From how many microseconds on a clock is off. Hosts that keep their time are some milliseconds apart.
const LIMIT_US: u64 = 1_000_000;
/// Of so many hosts most have to agree that it is the service's clock that is off.
const HOSTS_MIN: usize = 3;

pub(super) static DETECTOR: Detector = Detector {
    id: "worker-clock-off",
    title: "A clock is off",
    severity: Severity::Warning,
    means: "The clock of a worker's host and that of the service's are apart. Logs, traces and failures of the two do not \
            line up, certificates and tokens are taken for too old or not yet valid, and files look newer than they are. \
            Nothing that the service decides depends on a worker's clock.",
    advice: "On the host that the summary names, see whether its time is kept (`chronyc tracking` or `timedatectl`), and have \
             it set right. If the summary names the service, its host is the one to look at. Workers that cannot tell of \
             their clock, as JAX programs, are not compared.",
    detect,
};

fn detect(Seen { job, clocks }: Seen<'_>) -> Option<Found> {
    let mut hosts: BTreeMap<Option<IpAddr>, Vec<i64>> = BTreeMap::new();
    for (task, clock) in clocks {
        let host = job.task(*task).and_then(|task| task.peer).map(|peer| peer.ip());
        hosts.entry(host).or_default().push(clock.ahead_us);
    }
    // The tasks of a host have one clock: each host has one voice.
    let mut voices: Vec<i64> = hosts.into_values().map(median).collect();
    let (told, off) = (voices.len(), |ahead: i64| ahead.unsigned_abs() >= LIMIT_US);
    let mut worst: Vec<&(TaskId, ClockReading)> =
        clocks.iter().filter(|(_, clock)| clock.apart_us() >= LIMIT_US).collect();
    worst.sort_by_key(|(_, clock)| std::cmp::Reverse(clock.apart_us()));
    let (_, furthest) = worst.first()?;
    let evidence = |found: Found| {
        found
            .with(
                "furthest from the service's clock, in seconds",
                furthest.ahead_seconds(),
                seconds(LIMIT_US),
            )
            .with("by how much that may be wrong, in seconds", seconds(furthest.within_us), seconds(LIMIT_US))
    };
    voices.sort_unstable();
    let most = voices[told / 2];
    // The middle half agrees with itself, and not with the service.
    let agree = voices[told / 4].abs_diff(voices[told - 1 - told / 4]) < LIMIT_US;
    if told >= HOSTS_MIN && off(most) && agree {
        let summary = format!(
            "the clock of this service is {} those of most of {told} hosts, which agree: its own host is to be looked at",
            relation(most.saturating_neg())
        );
        return Some(evidence(Found::new(summary, job.seen_at, Vec::new())));
    }
    let tasks: Vec<TaskId> = worst.iter().map(|(task, _)| *task).collect();
    let summary = match tasks.as_slice() {
        [one] => {
            format!("the clock of {} is {} the service's", job.describe(&[*one]), relation(furthest.ahead_us))
        }
        _ => format!(
            "the clocks of {} tasks are off, one of them {} the service's: {}",
            tasks.len(),
            relation(furthest.ahead_us),
            job.describe(&tasks)
        ),
    };
    Some(evidence(Found::new(summary, job.seen_at, tasks)))
}

fn median(mut values: Vec<i64>) -> i64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn relation(ahead_us: i64) -> String {
    let apart = spoken(Duration::from_micros(ahead_us.unsigned_abs()));
    if ahead_us < 0 { format!("{apart} behind") } else { format!("{apart} ahead of") }
}

fn seconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64()
}

//! Detects a task whose gaps between heartbeats come close to the heartbeat timeout.
//!
//! `coordination` detects lost tasks. Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{JobObservation, RunState, TaskId, TaskObservation, TaskPhase};
use crate::text::{format_approximate_duration, format_count_with_noun};

/// The share of the timeout from which a gap is too long. Clients send a heartbeat at half of the timeout.
const TIMEOUT_SHARE: f64 = 0.75;
/// The factor over the task's usual interval that a gap must also exceed, so that a task with a slow interval
/// by design is not reported.
const GAPS_MIN: f64 = 1.4;
/// If the heartbeats of more than one task in this many come late at the same time, the tasks have a cause in common.
const SHARED_CAUSE: usize = 2;

pub(super) static DETECTOR: Detector = Detector {
    id: "heartbeat-gaps-widening",
    title: "Heartbeats come late",
    severity: Severity::Warning,
    means: "The heartbeats of a task are so far apart that it nearly timed out. The next longer pause will fail it although \
            its process runs. Most tasks at once are told as one finding that names none: the cause is what they share.",
    advice: "Look for what keeps the process from running: a starved CPU, a long pause in native code that holds the \
             interpreter lock, a saturated network. Or give the job a longer --heartbeat-timeout; the histogram of gaps \
             (muster_heartbeat_gap_seconds) shows which. If all tasks of a host come late at once, look at that host and at the \
             network between it and this server; if most tasks do, at the host of this server and at its network.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Running {
        return None;
    }
    let timeout = seen.heartbeat_timeout;
    let limit = timeout.mul_f64(TIMEOUT_SHARE);
    let gap = |task: &TaskObservation| {
        let silent = task.last_heartbeat.map(|heard| seen.seen_at.since(heard)).unwrap_or_default();
        silent.max(Duration::from_micros(task.longest_gap_us))
    };
    let wide = |task: &&TaskObservation| {
        let usual = Duration::from_micros(task.interval_us);
        let gap = gap(task);
        task.standing == TaskPhase::Connected
            && task.interval_us > 0
            && gap >= limit
            && gap.as_secs_f64() >= GAPS_MIN * usual.as_secs_f64()
    };
    let tasks: Vec<&TaskObservation> = seen.tasks.iter().filter(wide).collect();
    let worst = tasks.iter().max_by_key(|task| gap(task))?;
    let connected = seen.tasks.iter().filter(|task| task.standing == TaskPhase::Connected).count();
    if tasks.len() > 1 && tasks.len() > connected / SHARED_CAUSE {
        return Some(detection_of_many(seen, &tasks, connected, gap(worst), limit));
    }
    let ids: Vec<TaskId> = tasks.iter().map(|task| task.task).collect();
    let summary_without_tasks = format!(
        "heartbeats of {} are up to {} apart; a task fails after {} without one",
        format_count_with_noun(ids.len(), "task", "tasks"),
        format_approximate_duration(gap(worst)),
        format_approximate_duration(timeout),
    );
    let usual = Duration::from_micros(worst.interval_us).as_secs_f64();
    Some(
        Detection::new(summary_without_tasks, seen.seen_at, ids)
            .with_evidence("longest recent gap, in seconds", gap(worst).as_secs_f64(), limit.as_secs_f64())
            .with_evidence("its usual interval, in seconds", usual, timeout.as_secs_f64() / 2.0),
    )
}

/// Returns the detection for most of the connected tasks. It names no task, because excluding one would not help.
fn detection_of_many(
    seen: &JobObservation,
    tasks: &[&TaskObservation],
    connected: usize,
    longest_gap: Duration,
    limit: Duration,
) -> Detection {
    let summary_without_tasks = format!(
        "heartbeats of {} of {connected} tasks are up to {} apart; so many at once point to the host of the service or to \
         its network, which may be overloaded, and not to the tasks",
        tasks.len(),
        format_approximate_duration(longest_gap),
    );
    let found = Detection::new(summary_without_tasks, seen.seen_at, Vec::new())
        .with_title("Heartbeats of most tasks come late".to_owned())
        .with_evidence("longest recent gap, in seconds", longest_gap.as_secs_f64(), limit.as_secs_f64());
    Detection { may_exclude: false, ..found }
}

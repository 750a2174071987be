//! Detects a barrier that takes far longer than its recent instances.
//!
//! If only a few members are missing and they are connected, `stalled_task.rs` detects these members. Both findings
//! can be open for the same barrier. Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity, longest_recent_barrier_duration};
use crate::coordination::{BarrierKind, BarrierObservation, RunState};
use crate::text::{format_count_with_noun, format_grouped};

/// The minimum wait before a barrier counts as stuck.
const MIN_WAIT: Duration = Duration::from_secs(60);
/// The factor over the longest recent instance from which a barrier counts as stuck.
const SLOWNESS_FACTOR: u32 = 5;

pub(super) static DETECTOR: Detector = Detector {
    id: "barrier-stuck",
    title: "A barrier is stuck",
    severity: Severity::Critical,
    means: "Tasks wait at a barrier for far longer than at its recent uses. The barrier passes when the other tasks reach \
            it, and fails for all when it times out.",
    advice: "Look at the tasks that have not arrived: their stacks (page Stacks of the job, if their programs load the helper or run in a native \
             worker; else py-spy dump on their hosts), their logs, their hosts. Restart a task that is gone for good, or the job.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Running {
        return None;
    }
    let old = |barrier: &&BarrierObservation| {
        let limit = MIN_WAIT.max(longest_recent_barrier_duration(seen, &barrier.id) * SLOWNESS_FACTOR);
        barrier.kind != BarrierKind::Registration && seen.seen_at.since(barrier.since) >= limit
    };
    let barrier = seen.barriers.iter().filter(old).min_by_key(|barrier| barrier.since)?;
    let waited = seen.seen_at.since(barrier.since);
    let missing = format_count_with_noun(barrier.missing, "task has not arrived", "tasks have not arrived");
    let summary_without_tasks = format!("{}; {missing}", arrival_summary(barrier));
    let limit =
        MIN_WAIT.max(longest_recent_barrier_duration(seen, &barrier.id) * SLOWNESS_FACTOR).as_secs_f64();
    Some(
        Detection::at_barrier(summary_without_tasks, barrier.since, barrier)
            .with_evidence("waited, in seconds", waited.as_secs_f64(), limit)
            .with_evidence(
                "members that have not arrived",
                f64::from(u32::try_from(barrier.missing).unwrap_or(u32::MAX)),
                0.0,
            ),
    )
}

/// Returns a sentence about the arrivals at a barrier. It truncates the barrier's id to the length of a line.
pub(super) fn arrival_summary(barrier: &BarrierObservation) -> String {
    let id = barrier.id.as_ref();
    let place = match barrier.kind {
        BarrierKind::LiveSet => format!("a {id}"),
        BarrierKind::Registration => "registration".to_owned(),
        BarrierKind::Shutdown => "shutdown".to_owned(),
        BarrierKind::Devices => "the device exchange".to_owned(),
        BarrierKind::Client => format!("barrier {}", id.get(..id.floor_char_boundary(120)).unwrap_or(id)),
    };
    let used = if barrier.counter > 0 { format!(" (use {})", barrier.counter) } else { String::new() };
    let verb = if barrier.arrived == 1 { "waits" } else { "wait" };
    let (arrived, members) = (format_grouped(barrier.arrived), format_grouped(barrier.members));
    format!("{arrived} of {members} tasks {verb} at {place}{used}")
}

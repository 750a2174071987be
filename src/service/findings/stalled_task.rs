//! Detects a few connected tasks that have not reached a barrier at which all other members wait.
//!
//! `barrier_stuck.rs` detects a barrier that takes far longer than its recent instances, whatever the cause. Both
//! findings can be open for the same barrier. Begin at `detect`.

use std::time::Duration;

use super::awaited_heartbeats::{AwaitedHeartbeat, awaited_heartbeats_text};
use super::barrier_stuck::arrival_summary;
use super::detector::{Detection, Detector, DetectorInput, Severity, longest_recent_barrier_duration};
use crate::coordination::{
    BarrierKind, BarrierObservation, JobObservation, RunState, TaskId, TaskObservation, TaskPhase,
};
use crate::text::format_count_with_noun;

/// The minimum time since all other members arrived.
const MIN_WAIT: Duration = Duration::from_secs(30);
/// The factor over the longest recent instance of the barrier that this time must also exceed.
const SLOWNESS_FACTOR: u32 = 3;
/// The inverse of the largest share of members that count as stalled. One member may always be.
const STALLED_MAX: usize = 8;

pub(super) static DETECTOR: Detector = Detector {
    id: "stalled-task",
    title: "A task has not reached the barrier",
    severity: Severity::Critical,
    means: "All other tasks wait at a barrier for a few tasks that are still connected. Their programs have not reached the \
            barrier, and while their heartbeats continue, no heartbeat timeout will clear this.",
    advice: "Look at the stack of the task before anything else: on the page Stacks of the job, if its program loads the helper or \
             runs in a native worker; else with py-spy dump on its host. Usual causes: a deadlocked data loader, a \
             collective that its peers have left, a hung device or file system. Then restart the task.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Running {
        return None;
    }
    let barrier = seen
        .barriers
        .iter()
        .filter(|barrier| {
            matches!(barrier.kind, BarrierKind::Client | BarrierKind::LiveSet) && is_stalled(seen, barrier)
        })
        .min_by_key(|barrier| barrier.last_arrival)?;
    let waited = seen.seen_at.since(barrier.last_arrival);
    let summary_without_tasks = format!("{}; {}", arrival_summary(barrier), heartbeat_text(seen, barrier));
    let heard = barrier.missing_tasks.iter().filter_map(|id| seen.task(*id)?.last_heartbeat).min();
    let silent = heard.map_or(0.0, |heard| seen.seen_at.since(heard).as_secs_f64());
    Some(
        Detection::at_barrier(summary_without_tasks, barrier.last_arrival, barrier)
            .with_title(
                format_count_with_noun(barrier.missing, "task has not reached", "tasks have not reached")
                    + " the barrier",
            )
            .with_evidence(
                "since the last arrival, in seconds",
                waited.as_secs_f64(),
                stall_threshold(seen, barrier).as_secs_f64(),
            )
            .with_evidence(
                "since its last heartbeat, in seconds",
                silent,
                seen.heartbeat_timeout.as_secs_f64(),
            ),
    )
}

/// Returns a clause about the heartbeats of the awaited tasks, which are all connected.
fn heartbeat_text(seen: &JobObservation, barrier: &BarrierObservation) -> String {
    let heartbeat = |task: &TaskObservation| AwaitedHeartbeat {
        last: task.last_heartbeat,
        interval_us: task.interval_us,
    };
    let awaited: Vec<_> =
        barrier.missing_tasks.iter().filter_map(|id| seen.task(*id).map(heartbeat)).collect();
    let (since, timeout) = (barrier.last_arrival, seen.heartbeat_timeout);
    awaited_heartbeats_text(&awaited, "awaited", since, timeout, seen.seen_at).0
}

fn stall_threshold(seen: &JobObservation, barrier: &BarrierObservation) -> Duration {
    MIN_WAIT.max(longest_recent_barrier_duration(seen, &barrier.id) * SLOWNESS_FACTOR)
}

fn is_stalled(seen: &JobObservation, barrier: &BarrierObservation) -> bool {
    let few = barrier.missing <= (barrier.members / STALLED_MAX).max(1)
        && barrier.missing == barrier.missing_tasks.len()
        && barrier.arrived + barrier.missing == barrier.members;
    let alive = |id: &TaskId| {
        seen.task(*id).is_some_and(|task| task.standing == TaskPhase::Connected && !task.is_waiting)
    };
    few && seen.seen_at.since(barrier.last_arrival) >= stall_threshold(seen, barrier)
        && barrier.missing_tasks.iter().all(alive)
}

//! A task is alive by its heartbeats, and all others wait for it.

use std::time::Duration;

use super::barrier_stuck::shown;
use super::{Detector, Found, Seen, Severity, spoken, usual};
use crate::coordination::{BarrierKind, BarrierObservation, JobObservation, RunState, TaskId, TaskStanding};

/// How long the others must have been complete.
const PATIENCE: Duration = Duration::from_secs(30);
/// And how many times as long as the longest recent use of the barrier took as a whole.
const TIMES: u32 = 3;
/// It is about single tasks: at most one part in so many of the members, and one in any case.
const FEW: usize = 8;

pub(super) static DETECTOR: Detector = Detector {
    id: "stalled-task",
    title: "A task is alive but does not come",
    severity: Severity::Critical,
    means: "Everybody else waits at a barrier for a task whose heartbeats are in order: its process lives, and its program \
            does not get there. Heartbeats alone will never end this.",
    advice: "Take a stack of the task's process (py-spy dump) before anything else. Usual causes: a deadlocked data loader, a \
             collective that its peers have left, a hung device or file system. Then restart the task.",
    detect,
};

fn detect(Seen { job: seen, .. }: Seen<'_>) -> Option<Found> {
    if seen.state != RunState::Running {
        return None;
    }
    let barrier = seen
        .barriers
        .iter()
        .filter(|barrier| {
            matches!(barrier.kind, BarrierKind::Client | BarrierKind::LiveSet) && stalls(seen, barrier)
        })
        .min_by_key(|barrier| barrier.last_arrival)?;
    let waited = seen.seen_at.since(barrier.last_arrival);
    let summary = format!(
        "{} of {} members wait at {}; the last of them came {} ago. Alive, and not there: {}",
        barrier.arrived,
        barrier.members,
        shown(barrier),
        spoken(waited),
        seen.describe(&barrier.missing_tasks),
    );
    let heard = barrier.missing_tasks.iter().filter_map(|id| seen.task(*id)?.last_heartbeat).min();
    let silent = heard.map_or(0.0, |heard| seen.seen_at.since(heard).as_secs_f64());
    Some(
        Found::new(summary, barrier.last_arrival, barrier.missing_tasks.clone())
            .with(
                "since the last arrival, in seconds",
                waited.as_secs_f64(),
                patience(seen, barrier).as_secs_f64(),
            )
            .with("since its last heartbeat, in seconds", silent, seen.heartbeat_timeout.as_secs_f64()),
    )
}

fn patience(seen: &JobObservation, barrier: &BarrierObservation) -> Duration {
    PATIENCE.max(usual(seen, &barrier.id) * TIMES)
}

fn stalls(seen: &JobObservation, barrier: &BarrierObservation) -> bool {
    let few = barrier.missing <= (barrier.members / FEW).max(1)
        && barrier.missing == barrier.missing_tasks.len()
        && barrier.arrived + barrier.missing == barrier.members;
    let alive = |id: &TaskId| {
        seen.task(*id).is_some_and(|task| task.standing == TaskStanding::Connected && !task.meets)
    };
    few && seen.seen_at.since(barrier.last_arrival) >= patience(seen, barrier)
        && barrier.missing_tasks.iter().all(alive)
}

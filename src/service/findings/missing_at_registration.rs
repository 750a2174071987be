//! Detects a run that cannot start because tasks have not registered.
//!
//! Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{BarrierKind, RunState};
use crate::text::format_grouped;

/// The minimum wait. The tasks of one job usually start within a minute of one another.
const MIN_WAIT: Duration = Duration::from_secs(60);

pub(super) static DETECTOR: Detector = Detector {
    id: "missing-at-registration",
    title: "Tasks are missing at registration",
    severity: Severity::Warning,
    means: "Some tasks have registered and wait for the rest. The run starts when all tasks have registered, and fails when \
            the registration times out.",
    advice: "Look at the scheduler's log of the missing tasks: not scheduled, still pulling an image, or crashed before \
             they could register. Check that the job was declared with as many tasks as the program has processes.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Forming {
        return None;
    }
    let barrier = seen.barriers.iter().find(|barrier| barrier.kind == BarrierKind::Registration)?;
    let waited = seen.seen_at.since(barrier.since);
    if waited < MIN_WAIT {
        return None;
    }
    let verb = if barrier.missing == 1 { "has" } else { "have" };
    let (missing, members) = (format_grouped(barrier.missing), format_grouped(barrier.members));
    let summary_without_tasks = format!("{missing} of {members} tasks {verb} not registered");
    let left = barrier.deadline.since(seen.seen_at).as_secs_f64();
    Some(
        Detection::at_barrier(summary_without_tasks, barrier.since, barrier)
            .with_evidence("waited, in seconds", waited.as_secs_f64(), MIN_WAIT.as_secs_f64())
            .with_evidence("left until the registration fails, in seconds", left, 0.0),
    )
}

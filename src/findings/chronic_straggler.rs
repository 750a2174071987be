//! A task comes late to barriers every time.

use super::{Detector, Found, Seen, Severity};
use crate::coordination::{RunState, StragglingView, TaskId, TaskObservation};

/// The score from which on a task is late as a habit; see the state machine's `straggling.rs` for what it is.
const SCORE: f64 = 0.75;
/// How many barriers it takes to tell a habit from chance.
const INSTANCES: u64 = 16;

pub(super) static DETECTOR: Detector = Detector {
    id: "chronic-straggler",
    title: "A task is late every time",
    severity: Severity::Notice,
    means: "At nearly every recent barrier the same task came far behind the median of the others. It sets the pace of the \
            whole job. One late arrival does not open this finding.",
    advice: "Compare its host with the others: clock speed and thermal throttling, a neighbour on the same machine, a slow \
             disk or network path. A task that was always late has a larger share of the data or the work; one that has \
             become slow has a sick host. Several tasks on one host point at the host.",
    detect,
};

fn detect(Seen { job: seen, .. }: Seen<'_>) -> Option<Found> {
    if seen.state != RunState::Running {
        return None;
    }
    let habit =
        |task: &TaskObservation| task.straggling.as_ref().is_some_and(|it| is_habit(it, seen.tasks.len()));
    let mut late: Vec<(&StragglingView, TaskId)> = seen
        .tasks
        .iter()
        .filter(|task| habit(task))
        .filter_map(|task| Some((task.straggling.as_ref()?, task.task)))
        .collect();
    late.sort_by_key(|(it, task)| (std::cmp::Reverse(it.lateness_us), *task));
    let (worst, _) = late.first()?;
    let (score, lateness_us) = (worst.score, worst.lateness_us);
    let habit = match worst.lateness_best_us {
        Some(best) if worst.has_slowed() => {
            format!("it has become slow, at its best it was late by {} ms", best / 1000)
        }
        Some(_) => "it always was: it may have more to do than the others".to_owned(),
        None => "since it is here".to_owned(),
    };
    let ids: Vec<TaskId> = late.iter().map(|(_, task)| *task).collect();
    let summary = format!(
        "late at nearly every barrier, by {} ms at most ({habit}): {}",
        lateness_us / 1000,
        seen.describe(&ids)
    );
    let since = seen.started_at.unwrap_or(seen.opened_at);
    Some(
        Found::new(summary, since, ids)
            .with("score of the latest", score, SCORE)
            .with("its usual lateness, in seconds", seconds(lateness_us), seconds(StragglingView::MATTERS_US))
            .with(
                "more than at its best, in seconds",
                seconds(worst.behind_best_us()),
                seconds(StragglingView::MATTERS_US),
            )
            .with("recent barriers to which it came last, as a part", worst.recent_share_last(), 0.0),
    )
}

fn is_habit(it: &StragglingView, tasks: usize) -> bool {
    // Of two, one is always the later: there only being last nearly every time is a habit.
    let enough = if tasks > 2 { 0.0 } else { 0.9 };
    it.taken_part >= INSTANCES
        && it.score >= SCORE
        && it.lateness_us >= StragglingView::MATTERS_US
        && it.recent_share_last() >= enough
}

/// Microseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

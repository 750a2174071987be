//! Detects a task that arrives late at nearly every barrier.
//!
//! `stalled_task.rs` detects a task that does not arrive at all. Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{JobObservation, RunState, StragglerView, TaskId, TaskObservation};
use crate::text::{format_count_with_noun, micros_to_seconds};

pub(super) static DETECTOR: Detector = Detector {
    id: "chronic-straggler",
    title: "A task is late at every barrier",
    severity: Severity::Notice,
    means: "At nearly every recent barrier the same task arrived far behind the median of the others. It sets the pace of the \
            whole job. One late arrival does not open this finding.",
    advice: "Compare its host with the others: clock speed and thermal throttling, a neighbour on the same machine, a slow \
             disk or network path. A task that was always late has a larger share of the data or the work; one that has \
             become slow has a sick host. Several tasks on one host point at the host.",
    detect,
};

/// A gap between two heartbeats that is longer than usual by this ratio is no chance.
const IRREGULAR_GAP: (u64, u64) = (3, 2);

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Running {
        return None;
    }
    let habit =
        |task: &TaskObservation| task.straggling.as_ref().is_some_and(|it| it.is_chronic(seen.tasks.len()));
    let mut late: Vec<(&StragglerView, TaskId)> = seen
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
            format!("it has become slower: {} ms at its best", best / 1000)
        }
        Some(_) => "as late as ever: it may have more work than the others".to_owned(),
        None => "since it joined the run".to_owned(),
    };
    let ids: Vec<TaskId> = late.iter().map(|(_, task)| *task).collect();
    let late_by = lateness_us / 1000;
    let summary_without_tasks = match ids.len() {
        1 => format!("1 task usually reaches barriers {late_by} ms after the first ({habit})"),
        many => format!(
            "{many} tasks reach nearly every barrier late, the latest usually {late_by} ms after the first ({habit})"
        ),
    };
    let summary_without_tasks = match heartbeats_of_late_tasks(seen, &ids) {
        Some(hint) => format!("{summary_without_tasks}; {hint}"),
        None => summary_without_tasks,
    };
    let title = format_count_with_noun(ids.len(), "task is late", "tasks are late") + " at every barrier";
    Some(
        Detection::new(summary_without_tasks, seen.seen_at, ids)
            .with_title(title)
            .with_evidence("score of the latest", score, StragglerView::CHRONIC_SCORE)
            .with_evidence(
                "its usual lateness, in seconds",
                micros_to_seconds(lateness_us),
                micros_to_seconds(StragglerView::SIGNIFICANT_LATENESS_US),
            )
            .with_evidence(
                "more than at its best, in seconds",
                micros_to_seconds(worst.lateness_above_best_us()),
                micros_to_seconds(StragglerView::SIGNIFICANT_LATENESS_US),
            )
            .with_evidence(
                "recent barriers at which it was last, as a part",
                worst.recent_last_arrival_fraction(),
                0.0,
            ),
    )
}

/// Returns what the heartbeats of the late tasks say about the cause, in a clause; `None` if too few have come.
fn heartbeats_of_late_tasks(seen: &JobObservation, late: &[TaskId]) -> Option<&'static str> {
    let mut known =
        late.iter().filter_map(|task| seen.task(*task)).filter(|task| task.interval_us > 0).peekable();
    known.peek()?;
    let is_irregular = |task: &TaskObservation| {
        task.longest_gap_us > task.interval_us.saturating_mul(IRREGULAR_GAP.0) / IRREGULAR_GAP.1
    };
    Some(if known.any(is_irregular) {
        "their heartbeats come late too, so look at the host and its network first"
    } else {
        "their heartbeats come on time, so look at the work, the input and the speed of the host first, and not at the network"
    })
}

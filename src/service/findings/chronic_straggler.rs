//! Detects a task that arrives late at nearly every barrier.
//!
//! `stalled_task.rs` detects a task that does not arrive at all. Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{RunState, StragglerView, TaskId, TaskObservation};
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
    let since = seen.started_at.unwrap_or(seen.opened_at);
    let title = format_count_with_noun(ids.len(), "task is late", "tasks are late") + " at every barrier";
    Some(
        Detection::new(summary_without_tasks, since, ids)
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

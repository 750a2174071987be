//! Detects repeated restarts within one run.
//!
//! `repeated_run_failures.rs` detects failed runs. Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{TaskId, TaskObservation};
use crate::text::format_count_with_noun;

/// The window in which returns of tasks are counted.
const WINDOW: Duration = Duration::from_secs(10 * 60);
/// The number of earlier lives of one task from which there are too many.
const LIVES_MIN: usize = 3;
/// The number of tasks that returned within the window from which there are too many; a tenth of the job if
/// that is more.
const TASKS_MIN: usize = 3;

pub(super) static DETECTOR: Detector = Detector {
    id: "restart-storm",
    title: "Tasks restart repeatedly",
    severity: Severity::Warning,
    means: "Tasks of a recoverable run fail and register again. Each restart costs the other tasks a round.",
    advice: "Read the end of the restarted tasks' logs for what ends them: out of memory, a bad device, a failing mount. If it \
             is always the same host, exclude that host.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    let started = seen.started_at?;
    let lately = |task: &&TaskObservation| {
        task.past_lives > 0
            && !task.excluded
            && task.registered_at > started
            && seen.seen_at.since(task.registered_at) <= WINDOW
    };
    let mut back: Vec<&TaskObservation> = seen.tasks.iter().filter(lately).collect();
    // The task with the most restarts comes first.
    back.sort_by_key(|task| (std::cmp::Reverse(task.past_lives), task.task));
    let most = back.iter().map(|task| task.past_lives).max()?;
    let many = TASKS_MIN.max(seen.tasks.len() / 10);
    if most < LIVES_MIN && back.len() < many {
        return None;
    }
    let since = back.iter().map(|task| task.registered_at).min()?;
    let ids: Vec<TaskId> = back.iter().map(|task| task.task).collect();
    // The task with the most restarts is named first.
    let worst = ids.first().copied().unwrap_or_default();
    let times = format_count_with_noun(most, "restart", "restarts");
    let summary_without_tasks = match back.len() {
        1 => format!("task {worst} restarted in the last ten minutes: {times} in this run"),
        many => format!(
            "{many} tasks restarted in the last ten minutes; most often task {worst}: {times} in this run"
        ),
    };
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    let detection = Detection::new(summary_without_tasks, since, ids);
    // None of them has restarted again.
    let detection = match most {
        1 => detection.with_title(format_count_with_noun(
            back.len(),
            "task has restarted",
            "tasks have restarted",
        )),
        _ => detection,
    };
    Some(
        detection
            .with_evidence("tasks that restarted within ten minutes", number(back.len()), number(many))
            .with_evidence("restarts of one of them", number(most), number(LIVES_MIN)),
    )
}

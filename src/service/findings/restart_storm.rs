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

/// What it means, and what to do, if most of the tasks restarted after a heartbeat timeout.
const MEANING_AFTER_SILENCE: &str = "No heartbeat of these tasks came for the length of the heartbeat timeout, so they failed; then they \
     registered again. Their hosts were down or hung, or the network between them and this server was cut.";
const ADVICE_AFTER_SILENCE: &str = "Look at what the hosts of these tasks share: the network between them and this server (cable, switch, \
     firewall, address changes). Then at the hosts: load, memory, kernel log. If it is always the same host, exclude that host.";

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
    let (worst, times) = back.first().map(|task| (task.task, restart_count_text(task)))?;
    let silent = back.iter().filter(|task| task.returned_after_silence).count();
    let after = match (silent, back.len()) {
        (0, _) => String::new(),
        (1, 1) => ", after a heartbeat timeout".to_owned(),
        (all, of) if all == of => ", all of them after a heartbeat timeout".to_owned(),
        (some, _) => format!(", {some} of them after a heartbeat timeout"),
    };
    let summary_without_tasks = match back.len() {
        1 => format!("task {worst} restarted in the last ten minutes{after}: {times} in this run"),
        many => format!(
            "{many} tasks restarted in the last ten minutes{after}; most often task {worst}: {times} in this run"
        ),
    };
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    let mut detection = Detection::new(summary_without_tasks, since, ids);
    detection.meaning_and_advice =
        (silent > back.len() / 2).then_some((MEANING_AFTER_SILENCE, ADVICE_AFTER_SILENCE));
    // The same tasks again and again: the run makes little progress until somebody acts.
    detection.severity = (most >= LIVES_MIN).then_some(Severity::Critical);
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

/// Returns how often a task has restarted in this run.
fn restart_count_text(task: &TaskObservation) -> String {
    match task.has_forgotten_lives {
        true => format!("{} or more restarts", task.past_lives),
        false => format_count_with_noun(task.past_lives, "restart", "restarts"),
    }
}

//! Detects repeated restarts within one run.
//!
//! `repeated_run_failures.rs` detects failed runs. Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{TaskId, TaskObservation};
use crate::text::format_count_with_noun;

/// The window in which returns of tasks are counted.
pub const RESTART_WINDOW: Duration = Duration::from_secs(10 * 60);
/// The number of restarts of one task from which there are too many; within the window they are critical.
const RESTARTS_MIN: usize = 3;
/// The number of tasks that returned within the window from which there are too many; a tenth of the job if
/// that is more.
const TASKS_MIN: usize = 3;

/// The meaning and the advice if most of the tasks failed by timeouts.
const MEANING_IF_UNREACHABLE: &str = "Most of these tasks failed by a heartbeat or connection timeout, then registered again with a new \
     incarnation: a new process, or a client that its process created anew. Their host was down or hung, or the network between it and this server was cut.";
const ADVICE_IF_UNREACHABLE: &str = "Look at what the hosts of these tasks share: the network between them and this server (cable, switch, \
     firewall, address changes). Then at the hosts: load, memory, kernel log. If it is always the same host, exclude that host.";

/// The meaning and the advice if none of them did.
const MEANING_IF_PROCESSES_ENDED: &str = "None of these tasks failed by a timeout: their connections ended, or they reported an error. So the network worked, and their \
     processes ended or created their clients anew. Each restart is a new incarnation, and costs the other tasks a round.";
const ADVICE_IF_PROCESSES_ENDED: &str = "Read the end of the restarted tasks' logs for the cause, such as out of memory, a bad device or a failing mount, and the \
     kernel's log of their host. If it is always the same host, exclude that host.";

pub(super) static DETECTOR: Detector = Detector {
    id: "restart-storm",
    title: "Tasks restart repeatedly",
    severity: Severity::Warning,
    means: "Tasks of a recoverable run fail and register again. Each restart costs the other tasks a round. It is critical if a task has \
            registered again three times within ten minutes. Each restart is a new incarnation: a new process, or a client that its \
            process created anew.",
    advice: "If the tasks failed by timeouts, look at the network between their hosts and this server. If their connections \
             were closed or reset, the network worked and their processes ended: read the end of the restarted tasks' logs \
             for the cause, such as out of memory, a bad device or a failing mount. If it is always the same host, exclude \
             that host.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    let started = seen.started_at?;
    let lately = |task: &&TaskObservation| {
        !task.past_registrations.is_empty()
            && !task.excluded
            && task.registered_at > started
            && seen.seen_at.since(task.registered_at) <= RESTART_WINDOW
    };
    let mut back: Vec<&TaskObservation> = seen.tasks.iter().filter(lately).collect();
    back.sort_by_key(|task| (std::cmp::Reverse(task.past_registrations.len()), task.task));
    // The task with the most restarts comes first, and is named first.
    let worst = *back.first()?;
    let most = worst.past_registrations.len();
    let many = TASKS_MIN.max(seen.tasks.len() / 10);
    if most < RESTARTS_MIN && back.len() < many {
        return None;
    }
    let since = back.iter().map(|task| task.registered_at).min()?;
    let ids: Vec<TaskId> = back.iter().map(|task| task.task).collect();
    let times = restart_count_text(most, worst.may_have_more_incarnations);
    // The list begins with them.
    let with_most = back.iter().filter(|task| task.past_registrations.len() == most).count();
    let unreachable = back.iter().filter(|task| task.was_unreachable).count();
    let after = match (unreachable, back.len()) {
        (0, 1) => ", not after a timeout".to_owned(),
        (0, _) => ", none of them after a timeout".to_owned(),
        (1, 1) => ", after a heartbeat or connection timeout".to_owned(),
        (all, of) if all == of => ", all of them after a heartbeat or connection timeout".to_owned(),
        (some, _) => format!(", {some} of them after a heartbeat or connection timeout"),
    };
    let worst = worst.task;
    let summary_without_tasks = match (back.len(), with_most) {
        (1, _) => format!("task {worst} restarted in the last ten minutes{after}: {times} in this run"),
        (many, 1) => format!(
            "{many} tasks restarted in the last ten minutes{after}; most often task {worst}: {times} in this run"
        ),
        (many, alike) if alike == many => {
            format!("{many} tasks restarted in the last ten minutes{after}; each has {times} in this run")
        }
        (many, alike) => format!(
            "{many} tasks restarted in the last ten minutes{after}; most often {alike} of them: {times} each in this run"
        ),
    };
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    let mut detection = Detection::new(summary_without_tasks, since, ids);
    detection.meaning_and_advice = match unreachable {
        0 => Some((MEANING_IF_PROCESSES_ENDED, ADVICE_IF_PROCESSES_ENDED)),
        many if many > back.len() / 2 => Some((MEANING_IF_UNREACHABLE, ADVICE_IF_UNREACHABLE)),
        _ => None,
    };
    let restarts_in_window = |task: &&TaskObservation| {
        // The first incarnation of the run did not restart.
        let registrations = std::iter::once(&task.registered_at).chain(&task.past_registrations);
        registrations.filter(|at| **at > started && seen.seen_at.since(**at) <= RESTART_WINDOW).count()
    };
    let is_critical = back.iter().map(restarts_in_window).max() >= Some(RESTARTS_MIN);
    detection.severity = is_critical.then_some(Severity::Critical);
    // None of them has restarted again.
    let detection = match most {
        1 => detection.with_title(format_count_with_noun(
            back.len(),
            "task has restarted",
            "tasks have restarted",
        )),
        _ => detection,
    };
    // Only what has reached its limit is evidence.
    let evidence = [
        ("tasks that restarted within ten minutes", back.len(), many),
        ("restarts of one of them", most, RESTARTS_MIN),
    ];
    let reached = evidence.into_iter().filter(|(_, is, limit)| is >= limit);
    Some(reached.fold(detection, |all, (what, is, limit)| all.with_evidence(what, number(is), number(limit))))
}

/// Returns a number of restarts of a task; if there may have been more, it says so.
#[must_use]
pub fn restart_count_text(restarts: usize, may_have_more: bool) -> String {
    match may_have_more {
        true => format!("{restarts} or more restarts"),
        false => format_count_with_noun(restarts, "restart", "restarts"),
    }
}

//! The words for the actions of a story: what happens to whom, and what the service should do.
//!
//! Begin at [`describe_action`], then [`describe_expectation`].

use std::time::Duration;

use super::layout::host_name;
use super::schedule::{ScheduledAction, TaskAction};
use super::story::{Story, StoryAction};
use crate::service::collectives::STUCK_AFTER;
use crate::text::{format_exact_duration, format_ranges};

/// The most ranges of tasks and the most hosts that a line names.
const NAMED_MAX: usize = 8;

/// Returns tasks as ranges: `24-31, 40`.
fn task_ranges(tasks: &[u32]) -> String {
    let numbers = tasks.iter().map(|task| i32::try_from(*task).unwrap_or(i32::MAX));
    format_ranges(numbers, NAMED_MAX, "-", "…")
}

/// Returns an action as a sentence: `host host-0003 (tasks 24-31) goes silent`.
#[must_use]
pub fn describe_action(action: &ScheduledAction) -> String {
    let tasks = task_ranges(&action.tasks);
    let is_one = match action.hosts.len() {
        0 => action.tasks.len() == 1,
        hosts => hosts == 1,
    };
    let noun = if action.tasks.len() == 1 { "task" } else { "tasks" };
    let whom = match &*action.hosts {
        [] => format!("{noun} {tasks}"),
        [host] => format!("host {} ({noun} {tasks})", host_name(*host)),
        hosts => {
            let mut names: Vec<String> = hosts.iter().take(NAMED_MAX).map(|host| host_name(*host)).collect();
            if hosts.len() > NAMED_MAX {
                names.push("…".to_owned());
            }
            format!("{} hosts {} ({noun} {tasks})", hosts.len(), names.join(", "))
        }
    };
    let verb = |one: &'static str, many: &'static str| if is_one { one } else { many };
    let lasts = |lasts: &Option<Duration>| {
        lasts.map_or_else(String::new, |lasts| format!(" for {}", format_exact_duration(lasts)))
    };
    let does = match &action.action {
        TaskAction::Late { by, lasts: time } => format!(
            "{} late at every step, by {}{}",
            verb("becomes", "become"),
            format_exact_duration(*by),
            lasts(time)
        ),
        TaskAction::Hang { lasts: time } => {
            format!(
                "{} heartbeats and {} no barrier{}",
                verb("sends", "send"),
                verb("reaches", "reach"),
                lasts(time)
            )
        }
        TaskAction::HoldGpu { lasts: time } => format!(
            "{} heartbeats, and {} no further collective{}",
            verb("sends", "send"),
            verb("its GPU begins", "their GPUs begin"),
            lasts(time)
        ),
        TaskAction::Silence { lasts: time } if action.what == StoryAction::Partition => {
            format!("{} cut off from the network{}", verb("is", "are"), lasts(time))
        }
        TaskAction::Silence { lasts: time } => format!("{} silent{}", verb("goes", "go"), lasts(time)),
        TaskAction::Kill => format!("{} without a shutdown", verb("dies", "die")),
        TaskAction::Restart { after } => format!(
            "{} and {} again after {}",
            verb("dies", "die"),
            verb("starts", "start"),
            format_exact_duration(*after)
        ),
        TaskAction::Stop => format!("{} down in good order", verb("shuts", "shut")),
        TaskAction::ReportError { message } => {
            format!("{} an error and {}: {message}", verb("reports", "report"), verb("ends", "end"))
        }
    };
    format!("{whom} {does}")
}

/// Returns what the service should do about an action, as a sentence.
#[must_use]
pub fn describe_expectation(story: &Story, action: &ScheduledAction) -> String {
    let timeout = format_exact_duration(story.job.heartbeat_timeout.0);
    let run_ends = !story.job.recoverable;
    let failure = if run_ends {
        "the run fails, with the first of these tasks as its first cause"
    } else {
        "the run goes on"
    };
    match &action.action {
        TaskAction::Late { .. } => {
            "a finding should name these tasks after about 8 steps".to_owned()
        }
        TaskAction::Hang { .. } => {
            "the next barrier should wait for these tasks; after 30 s the service should report them as stalled".to_owned()
        }
        TaskAction::HoldGpu { lasts } => {
            let finding = match lasts {
                Some(lasts) if *lasts <= STUCK_AFTER => String::new(),
                _ => {
                    format!("; after {} a finding should name them", format_exact_duration(STUCK_AFTER))
                }
            };
            format!("the collectives of all tasks should wait for these{finding}")
        }
        TaskAction::Silence { lasts: Some(lasts) } if *lasts < story.job.heartbeat_timeout.0 => {
            format!("it ends before the heartbeat timeout ({timeout}), so no task should fail")
        }
        TaskAction::Silence { lasts } => {
            let returns = match (lasts, run_ends, story.workers.restart_delay) {
                (Some(_), false, Some(_)) => "; afterwards they register again in the same run",
                _ => "",
            };
            format!("the service should report it within {timeout}; {failure}{returns}")
        }
        TaskAction::Kill => format!("the service should report it within a second; {failure}"),
        TaskAction::Restart { .. } if run_ends => format!("the service should report it within a second; {failure}"),
        TaskAction::Restart { .. } => {
            "the tasks should be back in the same run, and the step should go on".to_owned()
        }
        TaskAction::Stop if run_ends => {
            "they should wait for all other tasks to shut down".to_owned()
        }
        TaskAction::Stop => "they should be shown as disconnected, without an error".to_owned(),
        TaskAction::ReportError { .. } => format!("the service should show the error at once; {failure}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::Schedule;
    use super::*;

    fn told(event: &str) -> (String, String) {
        let text = format!("description = \"d\"\ntasks = 40\nhosts = 5\n[[events]]\nat = \"1s\"\n{event}");
        let story = Story::parse(&text).unwrap();
        story.check().unwrap();
        let action = Schedule::new(&story).next().unwrap();
        (describe_action(&action), describe_expectation(&story, &action))
    }

    #[test]
    fn an_action_is_told_with_what_to_expect() {
        let (action, expected) = told("what = \"silence\"\nhosts = \"3\"");
        assert_eq!(action, "host host-0003 (tasks 24-31) goes silent");
        assert_eq!(expected, "the service should report it within 10s; the run goes on");
        let (action, expected) = told("what = \"partition\"\nhosts = \"3-4\"\nfor = \"5s\"");
        assert_eq!(action, "2 hosts host-0003, host-0004 (tasks 24-39) are cut off from the network for 5s");
        assert!(expected.contains("no task should fail"), "{expected}");
        let (action, expected) = told("what = \"hold-gpu\"\ntasks = \"7\"\n[collectives]");
        assert_eq!(action, "task 7 sends heartbeats, and its GPU begins no further collective");
        assert!(expected.contains("a finding should name them"), "{expected}");
        assert_eq!(told("what = \"kill\"\ntasks = \"7\"").0, "task 7 dies without a shutdown");
        let (action, _) = told("what = \"late\"\nby = \"1s\"\ntasks = \"7-9\"");
        assert_eq!(action, "tasks 7-9 become late at every step, by 1s");
    }
}

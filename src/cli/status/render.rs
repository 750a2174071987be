//! The state of jobs as text: what is wrong comes first.

use std::fmt::Write as _;

use super::style::{Colour, Style, shorten, span};
use crate::coordination::{
    BarrierView, JobView, RunOutcome, RunState, RunView, TaskId, TaskStanding, TaskView, Timestamp,
};
use crate::findings::{Finding, Severity};
use crate::http::About;
use crate::text::one_line;

/// Jobs of up to this many tasks have every task listed.
const TASKS_LISTED: usize = 32;
/// How many tasks that are not fine are listed, and how many that a barrier waits for.
const TROUBLED_LISTED: usize = 20;
const MISSING_LISTED: usize = 10;
/// How many barriers and earlier runs are listed.
const BARRIERS_LISTED: usize = 20;
const RUNS_LISTED: usize = 5;
/// How many exclusions are listed.
const EXCLUSIONS_LISTED: usize = 10;
/// How much of an error is shown.
const CAUSE_CHARS: usize = 2000;
const ERROR_CHARS: usize = 300;
/// How many ranges of task numbers are shown.
const RANGES_LISTED: usize = 12;

/// Everything as text.
pub fn render(url: &str, about: &About, jobs: &[JobView], findings: &[Finding], style: Style) -> String {
    let version = one_line(&about.version.version);
    let grpc: Vec<String> = about.grpc.iter().map(|listener| listener.address.to_string()).collect();
    let mut text = style.entry(
        0,
        "",
        Colour::Faint,
        &format!("Muster {version} at {url}, gRPC at {}, {} job(s)", grpc.join(" and "), jobs.len()),
    );
    for job in jobs {
        text.push('\n');
        let findings: Vec<&Finding> = findings.iter().filter(|finding| finding.job == job.name).collect();
        text.push_str(&Job { view: job, run: &job.run, findings, now: job.seen_at, style }.render());
    }
    text
}

struct Job<'a> {
    view: &'a JobView,
    run: &'a RunView,
    findings: Vec<&'a Finding>,
    now: Timestamp,
    style: Style,
}

impl Job<'_> {
    fn render(&self) -> String {
        let mut text = self.headline();
        text.push_str(&self.cause());
        text.push_str(&self.found());
        text.push_str(&self.exclusions());
        text.push_str(&self.troubled());
        text.push_str(&self.barriers());
        text.push_str(&self.live_sets());
        text.push_str(&self.preemption());
        text.push_str(&self.tasks());
        text.push_str(&self.history());
        text
    }

    fn ago(&self, at: Timestamp) -> String {
        span(self.now.since(at))
    }

    fn headline(&self) -> String {
        let run = self.run;
        let tasks = run.tasks.len();
        let (word, colour) = match run.state {
            RunState::Forming => ("FORMING", Colour::Caution),
            RunState::Running => ("RUNNING", Colour::Good),
            RunState::Completed => ("COMPLETED", Colour::Good),
            RunState::Failed => ("FAILED", Colour::Bad),
            RunState::Abandoned => ("ABANDONED", Colour::Bad),
        };
        let began = run.started_at.unwrap_or(run.opened_at);
        let when = match (run.state, run.ended_at) {
            (RunState::Forming, _) if self.nobody_came() => {
                format!("waits for the first of its {tasks} task(s) to register")
            }
            (RunState::Forming, _) => format!("registration is open for {}", self.ago(run.opened_at)),
            (_, Some(ended)) => format!("{} ago, after {}", self.ago(ended), span(ended.since(began))),
            (_, None) => format!("for {}", self.ago(began)),
        };
        let recoverable = if self.view.settings.recoverable { ", recoverable" } else { "" };
        let text = format!(
            "run {}  {}  {when}; {} of {tasks} task(s) connected{recoverable}",
            run.number,
            self.style.paint(word, colour),
            run.live,
        );
        self.style.entry(0, &format!("JOB {}", self.view.name), Colour::Bold, &text)
    }

    fn nobody_came(&self) -> bool {
        self.run.barriers.is_empty() && self.run.tasks.iter().all(|task| task.lives.is_empty())
    }

    /// What the server has found, what matters most first, and what to do about it.
    fn found(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let colour = match finding.severity {
                Severity::Critical => Colour::Bad,
                Severity::Warning | Severity::Notice => Colour::Caution,
            };
            let summary = shorten(&one_line(&finding.summary), CAUSE_CHARS);
            let about = format!("{} for {}: {summary}", finding.title, self.ago(finding.since));
            text.push_str(&self.style.entry(2, "NEEDS YOU", colour, &about));
            text.push_str(&self.style.entry(4, "to do", Colour::Faint, &one_line(&finding.advice)));
        }
        text
    }

    fn cause(&self) -> String {
        let Some(cause) = &self.run.first_cause else { return String::new() };
        let whose = match cause.task {
            Some(task) => format!("{}{}: ", self.who(task), self.ago_of(cause.at)),
            None => format!("{} ago: ", self.ago(cause.at)),
        };
        let why = shorten(&one_line(&cause.why), CAUSE_CHARS);
        self.style.entry(2, "FIRST CAUSE", Colour::Bad, &format!("{whose}{why}"))
    }

    /// Who takes no part, by whose decision.
    fn exclusions(&self) -> String {
        let all = &self.view.exclusions;
        let mut text = String::new();
        for exclusion in all.iter().take(EXCLUSIONS_LISTED) {
            let until = match exclusion.expires_at {
                Some(at) => format!("for {} more", span(at.since(self.now))),
                None => "until it is lifted".to_owned(),
            };
            let turned = match exclusion.refused {
                0 => String::new(),
                times => format!("; {times} registration(s) refused"),
            };
            let line = format!(
                "{} since {} ago, {until}, by {}: {} (number {}){turned}",
                exclusion.target,
                self.ago(exclusion.since),
                one_line(&exclusion.actor.to_string()),
                one_line(exclusion.reason.as_str()),
                exclusion.id,
            );
            text.push_str(&self.style.entry(2, "EXCLUDED", Colour::Caution, &line));
        }
        if all.len() > EXCLUSIONS_LISTED {
            let more = format!("… {} in all; see them with: muster exclude", all.len());
            text.push_str(&self.style.entry(2, "EXCLUDED", Colour::Caution, &more));
        }
        text
    }

    fn ago_of(&self, at: Timestamp) -> String {
        format!(", {} ago", self.ago(at))
    }

    fn task(&self, task: TaskId) -> Option<&TaskView> {
        self.run.tasks.get(usize::try_from(task.0).ok()?)
    }

    /// A task and where it is.
    fn who(&self, task: TaskId) -> String {
        let peer = self.task(task).and_then(address);
        peer.map_or_else(|| format!("task {task}"), |peer| format!("task {task} at {peer}"))
    }

    /// Tasks that failed or are suspected, the failed first.
    fn troubled(&self) -> String {
        let mut text = String::new();
        let of = |standing| self.run.tasks.iter().filter(move |task| task.standing == standing);
        let mut left = TROUBLED_LISTED;
        for (standing, label, colour) in [
            (TaskStanding::Failed, "FAILED", Colour::Bad),
            (TaskStanding::Suspect, "SUSPECT", Colour::Caution),
        ] {
            for task in of(standing).take(left) {
                let about = format!("{}{}", self.who(task.task), self.ago_of(task.since));
                let follows = if self.run.follows(task) { ", following the first cause" } else { "" };
                let why = match (&task.why, standing) {
                    (Some(why), _) => format!(": {}", shorten(&one_line(why), ERROR_CHARS)),
                    (None, TaskStanding::Suspect) => format!(": its connection broke; {}", self.heard(task)),
                    (None, _) => String::new(),
                };
                text.push_str(&self.style.entry(2, label, colour, &format!("{about}{follows}{why}")));
            }
            let all: Vec<TaskId> = of(standing).map(|task| task.task).collect();
            if all.len() > left {
                let more = format!("… {} in all: {}", all.len(), ranges(&all));
                text.push_str(&self.style.entry(2, label, colour, &more));
            }
            left = left.saturating_sub(all.len());
        }
        text
    }

    fn heard(&self, task: &TaskView) -> String {
        match task.last_heartbeat {
            Some(at) => format!("last heard {} ago", self.ago(at)),
            None => "never heard".into(),
        }
    }

    fn barriers(&self) -> String {
        let mut barriers: Vec<&BarrierView> = self.run.barriers.iter().collect();
        barriers.sort_by_key(|barrier| barrier.since);
        let mut text = String::new();
        for barrier in barriers.iter().take(BARRIERS_LISTED) {
            let left = match barrier.deadline.since(self.now) {
                left if left.as_secs() > 366 * 24 * 60 * 60 => "no deadline".into(),
                left => format!("gives up in {}", span(left)),
            };
            let about = format!(
                "{}: {} of {} there, waiting for {} (first came task {}); {left}",
                barrier_name(barrier),
                barrier.arrived,
                barrier.members,
                self.ago(barrier.since),
                barrier.first,
            );
            text.push_str(&self.style.entry(2, "BARRIER", Colour::Caution, &about));
            text.push_str(&self.missing(&barrier.missing));
        }
        if barriers.len() > BARRIERS_LISTED {
            let more = format!("… {} in all", barriers.len());
            text.push_str(&self.style.entry(2, "BARRIER", Colour::Caution, &more));
        }
        text
    }

    fn missing(&self, missing: &[TaskId]) -> String {
        let mut text = String::new();
        for task in missing.iter().take(MISSING_LISTED) {
            let what = self.task(*task).map_or_else(String::new, |task| format!(": {}", self.doing(task)));
            text.push_str(&self.style.entry(
                4,
                "MISSING",
                Colour::Caution,
                &format!("{}{what}", self.who(*task)),
            ));
        }
        if missing.len() > MISSING_LISTED {
            let more = format!("… {} in all: {}", missing.len(), ranges(missing));
            text.push_str(&self.style.entry(4, "MISSING", Colour::Caution, &more));
        }
        text
    }

    /// What a task does that others wait for.
    fn doing(&self, task: &TaskView) -> String {
        let since = self.ago(task.since);
        match task.standing {
            TaskStanding::Missing if task.lives.is_empty() => "has not registered".into(),
            TaskStanding::Missing => format!("has not registered again since {since}"),
            TaskStanding::Registering => format!("registers since {since}"),
            TaskStanding::Disconnected => format!("left {since} ago"),
            TaskStanding::Failed => format!("failed {since} ago"),
            TaskStanding::Suspect => format!("its connection broke {since} ago"),
            TaskStanding::Connected => {
                let restarted = if task.unsynced { "restarted and not in step yet, " } else { "" };
                let waits = match waits(task) {
                    waits if waits.is_empty() => "waits nowhere: it is busy or stuck".into(),
                    waits => format!("waits at {waits}"),
                };
                format!("{restarted}{}, {waits}", self.heard(task))
            }
        }
    }

    fn live_sets(&self) -> String {
        let mut text = String::new();
        for question in self.run.live_sets.iter().take(BARRIERS_LISTED) {
            let about = format!(
                "{} of {} asked, waiting for {}",
                question.arrived,
                question.members,
                self.ago(question.since)
            );
            text.push_str(&self.style.entry(2, "LIVE SET", Colour::Caution, &about));
            text.push_str(&self.missing(&question.missing));
        }
        text
    }

    fn preemption(&self) -> String {
        let Some(preemption) = &self.run.preemption else { return String::new() };
        let step = match preemption.agreed_step {
            Some(step) => format!("all save at step {step}"),
            None => format!(
                "{} of {} task(s) have acknowledged",
                preemption.acknowledged.len(),
                self.run.tasks.len()
            ),
        };
        let about = format!("asked for {} ago: {step}", self.ago(preemption.since));
        self.style.entry(2, "SAVE", Colour::Caution, &about)
    }

    /// All tasks of a small job, or how many of a large one are in which standing.
    fn tasks(&self) -> String {
        if self.nobody_came() {
            return String::new();
        }
        let tasks = &self.run.tasks;
        if tasks.len() > TASKS_LISTED {
            let mut counts = Vec::new();
            for standing in STANDINGS {
                let count = tasks.iter().filter(|task| task.standing == standing).count();
                if count > 0 {
                    counts.push(format!("{count} {}", word(standing)));
                }
            }
            let unsynced = tasks.iter().filter(|task| task.unsynced).count();
            if unsynced > 0 {
                counts.push(format!("{unsynced} of them restarted and not in step yet"));
            }
            return self.style.entry(2, "TASKS", Colour::Bold, &counts.join(", "));
        }
        let peers: Vec<String> = tasks
            .iter()
            .map(|task| address(task).map_or_else(|| "-".into(), |peer| peer.to_string()))
            .collect();
        let wide = peers.iter().map(String::len).max().unwrap_or(0).max("ADDRESS".len());
        let mut text = self.style.paint(
            &format!(
                "  {:<6}{:<15}{:<9}{:<9}{:<wide$}  WAITS AT",
                "TASK", "STANDING", "SINCE", "HEARD", "ADDRESS"
            ),
            Colour::Bold,
        );
        text.push('\n');
        for (task, peer) in tasks.iter().zip(&peers) {
            let heard = task.last_heartbeat.map_or_else(|| "-".into(), |at| self.ago(at));
            let standing = format!("{:<15}", word(task.standing));
            let standing = match task.standing {
                TaskStanding::Failed => self.style.paint(&standing, Colour::Bad),
                TaskStanding::Suspect | TaskStanding::Missing => self.style.paint(&standing, Colour::Caution),
                _ => standing,
            };
            let waits = waits(task);
            let line = format!(
                "  {:<6}{standing}{:<9}{heard:<9}{peer:<wide$}  {waits}",
                task.task,
                self.ago(task.since)
            );
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }

    fn history(&self) -> String {
        let mut text = String::new();
        let history = &self.view.history;
        for run in history.iter().take(RUNS_LISTED) {
            let (word, colour) = match run.outcome {
                RunOutcome::Completed => ("completed", Colour::Faint),
                RunOutcome::Failed => ("failed", Colour::Caution),
                RunOutcome::Abandoned => ("was abandoned", Colour::Caution),
            };
            let lasted = span(run.ended_at.since(run.started_at.unwrap_or(run.opened_at)));
            let cause = run.first_cause.as_ref().map_or_else(String::new, |cause| {
                let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
                format!("; first cause: {whose}{}", shorten(&one_line(&cause.why), ERROR_CHARS))
            });
            let about =
                format!("run {} {word} {} ago after {lasted}{cause}", run.number, self.ago(run.ended_at));
            text.push_str(&self.style.entry(2, "EARLIER", colour, &about));
        }
        if history.len() > RUNS_LISTED {
            let more = format!("… {} earlier runs in all", history.len());
            text.push_str(&self.style.entry(2, "EARLIER", Colour::Faint, &more));
        }
        text
    }
}

const STANDINGS: [TaskStanding; 6] = [
    TaskStanding::Failed,
    TaskStanding::Suspect,
    TaskStanding::Missing,
    TaskStanding::Registering,
    TaskStanding::Disconnected,
    TaskStanding::Connected,
];

fn word(standing: TaskStanding) -> &'static str {
    match standing {
        TaskStanding::Missing => "missing",
        TaskStanding::Registering => "registering",
        TaskStanding::Connected => "connected",
        TaskStanding::Suspect => "suspect",
        TaskStanding::Disconnected => "left",
        TaskStanding::Failed => "failed",
    }
}

/// Where a task is, or was last.
fn address(task: &TaskView) -> Option<std::net::SocketAddr> {
    task.lives.iter().find_map(|life| life.peer)
}

fn waits(task: &TaskView) -> String {
    let barriers = task.waits_at.iter().map(|id| own_name(id));
    let names: Vec<String> =
        barriers.chain(task.waits_for.iter().map(|wait| format!("key {}", wait.key))).collect();
    shorten(&names.join(", "), ERROR_CHARS)
}

/// A barrier's name: the service's own ones by what they are for.
fn own_name(id: &str) -> String {
    if id == "[Init]Wait_for_all_tasks_to_register" {
        return "registration".into();
    }
    match id.split_once("::") {
        Some(("Shutdown", _)) => "shutdown".into(),
        Some(("WaitForAllTasks", _)) => "device exchange".into(),
        _ => one_line(id).into_owned(),
    }
}

fn barrier_name(barrier: &BarrierView) -> String {
    let name = own_name(&barrier.id);
    let name = shorten(&name, ERROR_CHARS);
    if barrier.counter > 0 { format!("{name} (use {})", barrier.counter) } else { name }
}

/// Task numbers in few words: `0-3, 7, 9-11`.
fn ranges(tasks: &[TaskId]) -> String {
    let mut ranges: Vec<(i32, i32)> = Vec::new();
    for TaskId(task) in tasks {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*task) => *last = *task,
            _ => ranges.push((*task, *task)),
        }
    }
    let more = ranges.len() > RANGES_LISTED;
    let shown: Vec<String> = ranges
        .iter()
        .take(RANGES_LISTED)
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    format!("{}{}", shown.join(", "), if more { ", … (--json has all)" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_numbers_are_said_in_few_words() {
        let ids = |numbers: &[i32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        assert_eq!(ranges(&ids(&[0, 1, 2, 3, 7, 9, 10])), "0-3, 7, 9-10");
        let even: Vec<i32> = (0..100).map(|n| n * 2).collect();
        assert!(ranges(&ids(&even)).ends_with("22, … (--json has all)"));
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn barriers_are_called_by_what_they_are_for() {
        assert_eq!(own_name("[Init]Wait_for_all_tasks_to_register"), "registration");
        assert_eq!(own_name("Shutdown::0123"), "shutdown");
        assert_eq!(own_name("save\u{1b}[2J"), "save\\u{1b}[2J");
    }
}

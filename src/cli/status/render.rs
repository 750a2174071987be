//! Formats the state of jobs as text, problems first.
//!
//! It sends no request. Begin at `render`.

use super::super::output::{TerminalColour, TerminalLine, TerminalStyle, TerminalText};
use crate::coordination::{
    BarrierView, JobView, RunOutcome, RunState, RunView, TaskId, TaskPhase, TaskState, TaskView, Timestamp,
    barrier_label,
};
use crate::findings::{Finding, Severity};
use crate::http::ServerInfo;
use crate::text::{one_line, span};

/// The maximum number of tasks of a job for which every task is listed.
const TASKS_LISTED: usize = 32;
/// The maximum number of listed tasks in trouble, and of those that a barrier waits for.
const TROUBLED_LISTED: usize = 20;
const MISSING_LISTED: usize = 10;
/// The maximum number of listed barriers and of earlier runs.
const BARRIERS_LISTED: usize = 20;
const RUNS_LISTED: usize = 5;
/// The maximum number of listed exclusions.
const EXCLUSIONS_LISTED: usize = 10;
/// The maximum length of an error, in characters.
const CAUSE_CHARS: usize = 2000;
const ERROR_CHARS: usize = 300;
/// The maximum number of ranges of task numbers.
const RANGES_LISTED: usize = 12;

/// Renders the whole status as text.
pub fn render(
    url: &str,
    about: &ServerInfo,
    jobs: &[JobView],
    findings: &[Finding],
    style: TerminalStyle,
) -> TerminalText {
    let grpc: Vec<String> = about.grpc.iter().map(|listener| listener.address.to_string()).collect();
    let mut out = TerminalText::default();
    let head = format!(
        "Muster {} at {url}, gRPC at {}, {} job(s)",
        about.version.version,
        grpc.join(" and "),
        jobs.len()
    );
    out.entry(style, 0, "", TerminalColour::Faint, head);
    for job in jobs {
        out.line("");
        let findings: Vec<&Finding> = findings.iter().filter(|finding| finding.job == job.name).collect();
        JobRenderer { view: job, run: &job.run, findings, now: job.seen_at, style, out: &mut out }.render();
    }
    out
}

struct JobRenderer<'a> {
    view: &'a JobView,
    run: &'a RunView,
    findings: Vec<&'a Finding>,
    now: Timestamp,
    style: TerminalStyle,
    out: &'a mut TerminalText,
}

impl JobRenderer<'_> {
    fn render(&mut self) {
        self.headline();
        self.cause();
        self.findings_text();
        self.exclusions();
        self.troubled();
        self.barriers();
        self.live_sets();
        self.preemption();
        self.tasks();
        self.history();
    }

    fn entry(&mut self, indent: usize, label: &str, colour: TerminalColour, text: impl Into<TerminalLine>) {
        self.out.entry(self.style, indent, label, colour, text);
    }

    fn ago(&self, at: Timestamp) -> String {
        span(self.now.since(at))
    }

    fn headline(&mut self) {
        let run = self.run;
        let tasks = run.tasks.len();
        let (word, colour) = match run.state {
            RunState::Forming => ("FORMING", TerminalColour::Caution),
            RunState::Running => ("RUNNING", TerminalColour::Good),
            RunState::Completed => ("COMPLETED", TerminalColour::Good),
            RunState::Failed => ("FAILED", TerminalColour::Bad),
            RunState::Abandoned => ("ABANDONED", TerminalColour::Bad),
        };
        let length = span(run.span().length(self.now));
        let when = match (run.state, run.ended_at) {
            (RunState::Forming, _) if self.nobody_came() => {
                format!("no task has registered yet, {tasks} expected")
            }
            (RunState::Forming, _) => format!("registration is open for {length}"),
            (_, Some(ended)) => format!("{} ago, after {length}", self.ago(ended)),
            (_, None) => format!("for {length}"),
        };
        let recoverable = if self.view.settings.recoverable { ", recoverable" } else { "" };
        let text = TerminalLine::from(format!("run {}  ", run.number))
            .styled(self.style, word, colour)
            .push(format!("  {when}; {} of {tasks} task(s) connected{recoverable}", run.live));
        self.entry(0, &format!("JOB {}", self.view.name), TerminalColour::Bold, text);
    }

    fn nobody_came(&self) -> bool {
        self.run.barriers.is_empty() && self.run.tasks.iter().all(|task| task.lives.is_empty())
    }

    /// Writes the open findings, the most urgent first, with their advice.
    fn findings_text(&mut self) {
        for finding in std::mem::take(&mut self.findings) {
            let colour = match finding.severity {
                Severity::Critical => TerminalColour::Bad,
                Severity::Warning | Severity::Notice => TerminalColour::Caution,
            };
            let summary = shorten(&finding.summary, CAUSE_CHARS);
            let about = format!("{} for {}: {summary}", finding.title, self.ago(finding.since));
            self.entry(2, "ISSUE", colour, about);
            self.entry(4, "to do", TerminalColour::Faint, &*finding.advice);
        }
    }

    fn cause(&mut self) {
        let Some(cause) = &self.run.first_cause else { return };
        let whose = match cause.task {
            Some(task) => format!("{}{}: ", self.who(task), self.ago_of(cause.at)),
            None => format!("{} ago: ", self.ago(cause.at)),
        };
        let why = shorten(&cause.why, CAUSE_CHARS);
        self.entry(2, "FIRST CAUSE", TerminalColour::Bad, format!("{whose}{why}"));
    }

    /// Writes the exclusions with their actors.
    fn exclusions(&mut self) {
        let all = &self.view.exclusions;
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
                exclusion.actor,
                exclusion.reason,
                exclusion.id,
            );
            self.entry(2, "EXCLUDED", TerminalColour::Caution, line);
        }
        if all.len() > EXCLUSIONS_LISTED {
            let more = format!("… {} in all; see them with: muster exclude", all.len());
            self.entry(2, "EXCLUDED", TerminalColour::Caution, more);
        }
    }

    fn ago_of(&self, at: Timestamp) -> String {
        format!(", {} ago", self.ago(at))
    }

    fn task(&self, task: TaskId) -> Option<&TaskView> {
        self.run.tasks.get(usize::try_from(task.0).ok()?)
    }

    /// Returns a task with its address.
    fn who(&self, task: TaskId) -> String {
        let peer = self.task(task).and_then(address);
        peer.map_or_else(|| format!("task {task}"), |peer| format!("task {task} at {peer}"))
    }

    /// Writes the failed and suspected tasks, failed ones first. Excluded tasks have an entry of their own.
    fn troubled(&mut self) {
        let run = self.run;
        let of = |state| run.tasks.iter().filter(move |task| task.state() == state);
        let mut left = TROUBLED_LISTED;
        for (standing, label, colour) in [
            (TaskPhase::Failed, "FAILED", TerminalColour::Bad),
            (TaskPhase::Suspect, "SUSPECT", TerminalColour::Caution),
        ] {
            let state = TaskState::Phase(standing);
            for task in of(state).take(left) {
                let about = format!("{}{}", self.who(task.task), self.ago_of(task.since));
                let follows = if run.is_consequence(task) { ", following the first cause" } else { "" };
                let why = match (&task.why, standing) {
                    (Some(why), _) => format!(": {}", shorten(why, ERROR_CHARS)),
                    (None, TaskPhase::Suspect) => {
                        format!(": its connection broke; {}", self.heartbeat_text(task))
                    }
                    (None, _) => String::new(),
                };
                self.entry(2, label, colour, format!("{about}{follows}{why}"));
            }
            let count = run.counts.get(state);
            if count > left {
                let all: Vec<TaskId> = of(state).map(|task| task.task).collect();
                self.entry(2, label, colour, format!("… {count} in all: {}", ranges(&all)));
            }
            left = left.saturating_sub(count);
        }
    }

    fn heartbeat_text(&self, task: &TaskView) -> String {
        match task.last_heartbeat {
            Some(at) => format!("last heartbeat {} ago", self.ago(at)),
            None => "no heartbeat yet".into(),
        }
    }

    fn barriers(&mut self) {
        let mut barriers: Vec<&BarrierView> = self.run.barriers.iter().collect();
        barriers.sort_by_key(|barrier| barrier.since);
        for barrier in barriers.iter().take(BARRIERS_LISTED) {
            let left = match barrier.deadline.since(self.now) {
                left if left.as_secs() > 366 * 24 * 60 * 60 => "no timeout".into(),
                left => format!("times out in {}", span(left)),
            };
            let latest = barrier.arrivals.last().filter(|latest| latest.task != barrier.first);
            let latest = latest.map_or_else(String::new, |latest| {
                format!("; latest: task {}{}", latest.task, self.ago_of(latest.at))
            });
            let about = format!(
                "{}: {} of {} arrived, waiting for {}; first arrival: task {}{latest}; {left}",
                barrier_name(barrier),
                barrier.arrived,
                barrier.members,
                self.ago(barrier.since),
                barrier.first,
            );
            self.entry(2, "BARRIER", TerminalColour::Caution, about);
            self.missing_text(&barrier.missing);
        }
        if barriers.len() > BARRIERS_LISTED {
            self.entry(2, "BARRIER", TerminalColour::Caution, format!("… {} in all", barriers.len()));
        }
    }

    fn missing_text(&mut self, missing: &[TaskId]) {
        for task in missing.iter().take(MISSING_LISTED) {
            let what = self.task(*task).map_or_else(String::new, |task| format!(": {}", self.activity(task)));
            self.entry(4, "MISSING", TerminalColour::Caution, format!("{}{what}", self.who(*task)));
        }
        if missing.len() > MISSING_LISTED {
            let more = format!("… {} in all: {}", missing.len(), ranges(missing));
            self.entry(4, "MISSING", TerminalColour::Caution, more);
        }
    }

    /// Returns the activity of a task that others wait for.
    fn activity(&self, task: &TaskView) -> String {
        let since = self.ago(task.since);
        match task.standing {
            TaskPhase::Missing if task.lives.is_empty() => "has not registered".into(),
            TaskPhase::Missing => format!("has not registered again, for {since}"),
            TaskPhase::Registering => format!("registering for {since}"),
            TaskPhase::Disconnected => format!("left {since} ago"),
            TaskPhase::Failed => format!("failed {since} ago"),
            TaskPhase::Suspect => format!("its connection broke {since} ago"),
            TaskPhase::Connected => {
                let restarted = if task.unsynced { "restarted and not in step yet, " } else { "" };
                let waits = match waiting_text(task) {
                    waits if waits.is_empty() => "connected, not at any barrier".into(),
                    waits => format!("waits at {waits}"),
                };
                format!("{restarted}{waits}; {}", self.heartbeat_text(task))
            }
        }
    }

    fn live_sets(&mut self) {
        let run = self.run;
        for question in run.live_sets.iter().take(BARRIERS_LISTED) {
            let about = format!(
                "{} of {} asked, waiting for {}",
                question.arrived,
                question.members,
                self.ago(question.since)
            );
            self.entry(2, "LIVE SET", TerminalColour::Caution, about);
            self.missing_text(&question.missing);
        }
    }

    fn preemption(&mut self) {
        let Some(preemption) = &self.run.preemption else { return };
        let step = match preemption.agreed_step {
            Some(step) => format!("all save at step {step}"),
            None if preemption.failed => "the tasks did not agree on a step".to_owned(),
            None => format!(
                "{} of {} task(s) have acknowledged",
                preemption.acknowledged.len(),
                self.run.tasks.len()
            ),
        };
        let about = format!("asked for {} ago: {step}", self.ago(preemption.since));
        self.entry(2, "SAVE", TerminalColour::Caution, about);
    }

    /// Writes all tasks of a small job, or the number of tasks in each state for a large one.
    fn tasks(&mut self) {
        if self.nobody_came() {
            return;
        }
        let tasks = &self.run.tasks;
        if tasks.len() > TASKS_LISTED {
            let count = |state: TaskState| (self.run.counts.get(state), state.word());
            let present = TaskState::ALL.into_iter().map(count).filter(|(count, _)| *count > 0);
            let mut counts: Vec<String> = present.map(|(count, word)| format!("{count} {word}")).collect();
            let unsynced = tasks.iter().filter(|task| task.unsynced).count();
            if unsynced > 0 {
                counts.push(format!("{unsynced} of them restarted and not in step yet"));
            }
            return self.entry(2, "TASKS", TerminalColour::Bold, counts.join(", "));
        }
        let peers: Vec<String> = tasks
            .iter()
            .map(|task| address(task).map_or_else(|| "-".into(), |peer| peer.to_string()))
            .collect();
        let wide = peers.iter().map(String::len).max().unwrap_or(0).max("ADDRESS".len());
        let heading = format!(
            "  {:<6}{:<14}{:<14}{:<14}{:<wide$}  WAITS AT",
            "TASK", "STATE", "FOR", "HEARTBEAT", "ADDRESS"
        );
        self.out.line(TerminalLine::default().styled(self.style, heading, TerminalColour::Bold));
        for (task, peer) in tasks.iter().zip(&peers) {
            let heard = task.last_heartbeat.map_or_else(|| "-".into(), |at| self.ago(at));
            let state = task.state();
            let word = format!("{:<14}", state.word());
            let line = TerminalLine::from(format!("  {:<6}", task.task));
            let line = match state {
                TaskState::Phase(TaskPhase::Failed) => line.styled(self.style, word, TerminalColour::Bad),
                TaskState::Phase(TaskPhase::Suspect | TaskPhase::Missing) => {
                    line.styled(self.style, word, TerminalColour::Caution)
                }
                _ => line.push(word),
            };
            let since = self.ago(task.since);
            self.out.line(line.push(format!("{since:<14}{heard:<14}{peer:<wide$}  {}", waiting_text(task))));
        }
    }

    fn history(&mut self) {
        let history = &self.view.history;
        for run in history.iter().take(RUNS_LISTED) {
            let (word, colour) = match run.outcome {
                RunOutcome::Completed => ("completed", TerminalColour::Faint),
                RunOutcome::Failed => ("failed", TerminalColour::Caution),
                RunOutcome::Abandoned => ("was abandoned", TerminalColour::Caution),
            };
            let lasted = span(run.span().length(self.now));
            let cause = run.first_cause.as_ref().map_or_else(String::new, |cause| {
                let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
                format!("; first cause: {whose}{}", shorten(&cause.why, ERROR_CHARS))
            });
            let about =
                format!("run {} {word} {} ago after {lasted}{cause}", run.number, self.ago(run.ended_at));
            self.entry(2, "EARLIER", colour, about);
        }
        if history.len() > RUNS_LISTED {
            let more = format!("… {} earlier runs in all", history.len());
            self.entry(2, "EARLIER", TerminalColour::Faint, more);
        }
    }
}

/// Returns at most `most` characters of a text on one line, and marks a truncated one.
fn shorten(text: &str, most: usize) -> String {
    let text = one_line(text);
    match text.char_indices().nth(most) {
        Some((cut, _)) => format!("{}… (cut; --json has it whole)", &text[..cut]),
        None => text.into_owned(),
    }
}

/// Returns the present or last address of a task.
fn address(task: &TaskView) -> Option<std::net::SocketAddr> {
    task.lives.iter().find_map(|life| life.peer)
}

fn waiting_text(task: &TaskView) -> String {
    let barriers = task.waits_at.iter().map(|id| one_line(barrier_label(id)).into_owned());
    let keys = task.waits_for.iter().map(|wait| format!("key {}", one_line(&wait.key)));
    let names: Vec<String> = barriers.chain(keys).collect();
    shorten(&names.join(", "), ERROR_CHARS)
}

fn barrier_name(barrier: &BarrierView) -> String {
    let name = shorten(barrier_label(&barrier.id), ERROR_CHARS);
    if barrier.counter > 0 { format!("{name} (use {})", barrier.counter) } else { name }
}

/// Returns task numbers as ranges: `0-3, 7, 9-11`.
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
    fn many_task_numbers_become_ranges() {
        let ids = |numbers: &[i32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        assert_eq!(ranges(&ids(&[0, 1, 2, 3, 7, 9, 10])), "0-3, 7, 9-10");
        let even: Vec<i32> = (0..100).map(|n| n * 2).collect();
        assert!(ranges(&ids(&even)).ends_with("22, … (--json has all)"));
        assert_eq!(ranges(&[]), "");
    }
}

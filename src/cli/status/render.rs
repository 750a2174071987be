//! Formats the state of jobs as text, with problems first.
//!
//! `status.rs` fetches the state. Begin at `render_status`.

use std::collections::BTreeMap;

use super::super::output::{TerminalCapabilities, TerminalLine, TerminalText, TextColour};
use crate::coordination::{
    BarrierView, HostId, JobView, RunOutcome, RunState, RunView, TaskId, TaskPhase, TaskState, TaskView,
    Timestamp, barrier_label,
};
use crate::http::api::ServerInfo;
use crate::service::findings::{Finding, Severity};
use crate::text::{escape_to_one_line, format_approximate_duration};

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
pub fn render_status(
    url: &str,
    about: &ServerInfo,
    jobs: &[JobView],
    findings: &[Finding],
    style: TerminalCapabilities,
) -> TerminalText {
    let grpc: Vec<String> = about.grpc.iter().map(|listener| listener.address.to_string()).collect();
    let mut out = TerminalText::default();
    let head = format!(
        "Muster {} at {url}, gRPC at {}, {} job(s)",
        about.version.version,
        grpc.join(" and "),
        jobs.len()
    );
    out.add_entry(style, 0, "", TextColour::Faint, head);
    for job in jobs {
        out.add_line("");
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
    style: TerminalCapabilities,
    out: &'a mut TerminalText,
}

impl JobRenderer<'_> {
    fn render(&mut self) {
        self.add_headline();
        self.add_first_cause();
        self.add_findings();
        self.add_exclusions();
        self.add_troubled_tasks();
        self.add_barriers();
        self.add_live_set_requests();
        self.add_preemption();
        self.add_tasks();
        self.add_earlier_runs();
    }

    fn add_entry(&mut self, indent: usize, label: &str, colour: TextColour, text: impl Into<TerminalLine>) {
        self.out.add_entry(self.style, indent, label, colour, text);
    }

    fn elapsed_since_text(&self, at: Timestamp) -> String {
        format_approximate_duration(self.now.since(at))
    }

    fn add_headline(&mut self) {
        let run = self.run;
        let tasks = run.tasks.len();
        let (word, colour) = match run.state {
            RunState::Forming => ("FORMING", TextColour::Caution),
            RunState::Running => ("RUNNING", TextColour::Good),
            RunState::Completed => ("COMPLETED", TextColour::Good),
            RunState::Failed => ("FAILED", TextColour::Bad),
            RunState::Abandoned => ("ABANDONED", TextColour::Bad),
        };
        let length = format_approximate_duration(run.measured_interval().duration(self.now));
        let when = match (run.state, run.ended_at) {
            (RunState::Forming, _) if self.has_no_tasks_yet() => {
                format!("no task has registered yet, {tasks} expected")
            }
            (RunState::Forming, _) => format!("registration is open for {length}"),
            (_, Some(ended)) => format!("{} ago, after {length}", self.elapsed_since_text(ended)),
            (_, None) => format!("for {length}"),
        };
        let recoverable = if self.view.settings.recoverable { ", recoverable" } else { "" };
        let text = TerminalLine::from(format!("run {}  ", run.number))
            .push_styled(self.style, word, colour)
            .push(format!("  {when}; {} of {tasks} task(s) connected{recoverable}", run.live));
        self.add_entry(0, &format!("JOB {}", self.view.name), TextColour::Bold, text);
    }

    fn has_no_tasks_yet(&self) -> bool {
        self.run.barriers.is_empty() && self.run.tasks.iter().all(|task| task.lives.is_empty())
    }

    /// Writes the open findings, the most urgent first, with their advice.
    fn add_findings(&mut self) {
        for finding in std::mem::take(&mut self.findings) {
            let colour = match finding.severity {
                Severity::Critical => TextColour::Bad,
                Severity::Warning | Severity::Notice => TextColour::Caution,
            };
            let summary = shorten_text(&finding.summary, CAUSE_CHARS);
            let about =
                format!("{} for {}: {summary}", finding.title, self.elapsed_since_text(finding.since));
            self.add_entry(2, "ISSUE", colour, about);
            self.add_entry(4, "to do", TextColour::Faint, &*finding.advice);
        }
    }

    fn add_first_cause(&mut self) {
        let Some(cause) = &self.run.first_cause else { return };
        let whose = match cause.task {
            Some(task) => format!("{}{}: ", self.task_address_text(task), self.ago_suffix(cause.at)),
            None => format!("{} ago: ", self.elapsed_since_text(cause.at)),
        };
        let why = shorten_text(&cause.why, CAUSE_CHARS);
        self.add_entry(2, "FIRST CAUSE", TextColour::Bad, format!("{whose}{why}"));
    }

    /// Writes the exclusions with their actors.
    fn add_exclusions(&mut self) {
        let all = &self.view.exclusions;
        for exclusion in all.iter().take(EXCLUSIONS_LISTED) {
            let until = match exclusion.expires_at {
                Some(at) => format!("for {} more", format_approximate_duration(at.since(self.now))),
                None => "until it is lifted".to_owned(),
            };
            let turned = match exclusion.refused {
                0 => String::new(),
                times => format!("; {times} registration(s) refused"),
            };
            let line = format!(
                "{} since {} ago, {until}, by {}: {} (number {}){turned}",
                exclusion.target,
                self.elapsed_since_text(exclusion.since),
                exclusion.actor,
                exclusion.reason,
                exclusion.id,
            );
            self.add_entry(2, "EXCLUDED", TextColour::Caution, line);
        }
        if all.len() > EXCLUSIONS_LISTED {
            let more = format!("… {} in all; see them with: muster exclude", all.len());
            self.add_entry(2, "EXCLUDED", TextColour::Caution, more);
        }
    }

    fn ago_suffix(&self, at: Timestamp) -> String {
        format!(", {} ago", self.elapsed_since_text(at))
    }

    fn find_task(&self, task: TaskId) -> Option<&TaskView> {
        self.run.tasks.get(usize::try_from(task.0).ok()?)
    }

    /// Returns a task with its address.
    fn task_address_text(&self, task: TaskId) -> String {
        let peer = self.find_task(task).and_then(task_address);
        peer.map_or_else(|| format!("task {task}"), |peer| format!("task {task} at {peer}"))
    }

    /// Groups the tasks by host, if all of a host's tasks are among them, there are several, and one sentence can tell about all:
    /// they have the same state and wait for the same; the others stay alone. The groups are in the order of their first task.
    fn group_by_whole_hosts(&self, tasks: &[TaskId]) -> Vec<Vec<TaskId>> {
        let mut on_host: BTreeMap<&HostId, usize> = BTreeMap::new();
        for host in self.run.tasks.iter().filter_map(|task| task.host.as_ref()) {
            *on_host.entry(host).or_default() += 1;
        }
        let host_of = |task: TaskId| self.find_task(task).and_then(|task| task.host.as_ref());
        let mut among: BTreeMap<&HostId, Vec<TaskId>> = BTreeMap::new();
        for task in tasks {
            if let Some(host) = host_of(*task) {
                among.entry(host).or_default().push(*task);
            }
        }
        let follows = |task: &TaskId| {
            self.find_task(*task).is_some_and(|task| self.run.is_consequence_of_first_cause(task))
        };
        let trouble = |task: &TaskId| {
            let task = self.find_task(*task);
            task.map(|task| (task.state(), task.why.is_some(), &task.waits_at, &task.waits_for))
        };
        among.retain(|host, tasks| {
            let is_whole = tasks.len() > 1 && on_host.get(host) == Some(&tasks.len());
            let first = (follows(&tasks[0]), trouble(&tasks[0]));
            is_whole && tasks.iter().all(|task| (follows(task), trouble(task)) == first)
        });
        let mut groups = Vec::new();
        for task in tasks {
            match host_of(*task).and_then(|host| among.get(host)) {
                None => groups.push(vec![*task]),
                Some(all) if all[0] == *task => groups.push(all.clone()),
                Some(_) => {}
            }
        }
        groups
    }

    /// Returns a task with its address, or all tasks of a host.
    fn group_text(&self, group: &[TaskId]) -> String {
        match (group, self.find_task(group[0]).and_then(|task| task.host.as_ref())) {
            ([_, _, ..], Some(host)) => {
                format!("all {} tasks of host {host} ({})", group.len(), task_ranges_text(group))
            }
            _ => self.task_address_text(group[0]),
        }
    }

    /// Writes the failed and suspected tasks, failed ones first. Excluded tasks have an entry of their own.
    fn add_troubled_tasks(&mut self) {
        let run = self.run;
        let of = |state| run.tasks.iter().filter(move |task| task.state() == state);
        let mut left = TROUBLED_LISTED;
        for (standing, label, colour) in [
            (TaskPhase::Failed, "FAILED", TextColour::Bad),
            (TaskPhase::Suspect, "SUSPECT", TextColour::Caution),
        ] {
            let state = TaskState::Phase(standing);
            let all: Vec<TaskId> = of(state).map(|task| task.task).collect();
            let groups = self.group_by_whole_hosts(&all);
            for group in groups.iter().take(left) {
                let Some(task) = self.find_task(group[0]) else { continue };
                let about = format!("{}{}", self.group_text(group), self.ago_suffix(task.since));
                let follows =
                    if run.is_consequence_of_first_cause(task) { ", following the first cause" } else { "" };
                let mut whys =
                    group.iter().map(|task| self.find_task(*task).and_then(|task| task.why.as_ref()));
                let is_same = whys.all(|why| why == task.why.as_ref());
                let whose = if is_same { String::new() } else { format!("task {}: ", task.task) };
                let why = match (&task.why, standing) {
                    (Some(why), _) => format!(": {whose}{}", shorten_text(why, ERROR_CHARS)),
                    (None, TaskPhase::Suspect) => {
                        format!(": its connection broke; {}", self.heartbeat_text(task))
                    }
                    (None, _) => String::new(),
                };
                self.add_entry(2, label, colour, format!("{about}{follows}{why}"));
            }
            if groups.len() > left {
                let more = format!("… {} in all: {}", all.len(), task_ranges_text(&all));
                self.add_entry(2, label, colour, more);
            }
            left = left.saturating_sub(groups.len());
        }
    }

    fn heartbeat_text(&self, task: &TaskView) -> String {
        match task.last_heartbeat {
            Some(at) => format!("last heartbeat {} ago", self.elapsed_since_text(at)),
            None => "no heartbeat yet".into(),
        }
    }

    fn add_barriers(&mut self) {
        let mut barriers: Vec<&BarrierView> = self.run.barriers.iter().collect();
        barriers.sort_by_key(|barrier| barrier.since);
        for barrier in barriers.iter().take(BARRIERS_LISTED) {
            let left = match barrier.deadline.since(self.now) {
                left if left.as_secs() > 366 * 24 * 60 * 60 => "no timeout".into(),
                left => format!("times out in {}", format_approximate_duration(left)),
            };
            let latest = barrier.arrivals.last().filter(|latest| latest.task != barrier.first);
            let latest = latest.map_or_else(String::new, |latest| {
                format!("; latest: task {}{}", latest.task, self.ago_suffix(latest.at))
            });
            let about = format!(
                "{}: {} of {} arrived, waiting for {}; first arrival: task {}{latest}; {left}",
                barrier_name(barrier),
                barrier.arrived,
                barrier.members,
                self.elapsed_since_text(barrier.since),
                barrier.first,
            );
            self.add_entry(2, "BARRIER", TextColour::Caution, about);
            self.add_missing_tasks(&barrier.missing);
        }
        if barriers.len() > BARRIERS_LISTED {
            self.add_entry(2, "BARRIER", TextColour::Caution, format!("… {} in all", barriers.len()));
        }
    }

    fn add_missing_tasks(&mut self, missing: &[TaskId]) {
        let groups = self.group_by_whole_hosts(missing);
        for group in groups.iter().take(MISSING_LISTED) {
            let what = self
                .find_task(group[0])
                .map_or_else(String::new, |task| format!(": {}", self.activity_text(task)));
            self.add_entry(4, "MISSING", TextColour::Caution, format!("{}{what}", self.group_text(group)));
        }
        if groups.len() > MISSING_LISTED {
            let more = format!("… {} in all: {}", missing.len(), task_ranges_text(missing));
            self.add_entry(4, "MISSING", TextColour::Caution, more);
        }
    }

    /// Returns the activity of a task that others wait for.
    fn activity_text(&self, task: &TaskView) -> String {
        let since = self.elapsed_since_text(task.since);
        match task.standing {
            TaskPhase::Missing if task.lives.is_empty() => "has not registered".into(),
            TaskPhase::Missing => format!("has not registered again, for {since}"),
            TaskPhase::Registering => format!("registering for {since}"),
            TaskPhase::Disconnected => format!("disconnected {since} ago"),
            TaskPhase::Failed => format!("failed {since} ago"),
            TaskPhase::Suspect => format!("its connection broke {since} ago"),
            TaskPhase::Connected => {
                let restarted = if task.unsynced { "restarted and not in step yet, " } else { "" };
                let waits = match task_waits_text(task) {
                    waits if waits.is_empty() => "connected, not at any barrier".into(),
                    waits => format!("waits at {waits}"),
                };
                format!("{restarted}{waits}; {}", self.heartbeat_text(task))
            }
        }
    }

    fn add_live_set_requests(&mut self) {
        let run = self.run;
        for question in run.live_sets.iter().take(BARRIERS_LISTED) {
            let about = format!(
                "{} of {} asked, waiting for {}",
                question.arrived,
                question.members,
                self.elapsed_since_text(question.since)
            );
            self.add_entry(2, "LIVE SET", TextColour::Caution, about);
            self.add_missing_tasks(&question.missing);
        }
    }

    fn add_preemption(&mut self) {
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
        let about = format!("asked for {} ago: {step}", self.elapsed_since_text(preemption.since));
        self.add_entry(2, "SAVE", TextColour::Caution, about);
    }

    /// Writes all tasks of a small job, or the number of tasks in each state for a large one.
    fn add_tasks(&mut self) {
        if self.has_no_tasks_yet() {
            return;
        }
        let tasks = &self.run.tasks;
        if tasks.len() > TASKS_LISTED {
            let count = |state: TaskState| (self.run.counts.get(state), state.name());
            let present = TaskState::ALL.into_iter().map(count).filter(|(count, _)| *count > 0);
            let mut counts: Vec<String> = present.map(|(count, word)| format!("{count} {word}")).collect();
            let unsynced = tasks.iter().filter(|task| task.unsynced).count();
            if unsynced > 0 {
                counts.push(format!("{unsynced} of them restarted and not in step yet"));
            }
            return self.add_entry(2, "TASKS", TextColour::Bold, counts.join(", "));
        }
        let peers: Vec<String> = tasks
            .iter()
            .map(|task| task_address(task).map_or_else(|| "-".into(), |peer| peer.to_string()))
            .collect();
        let wide = peers.iter().map(String::len).max().unwrap_or(0).max("ADDRESS".len());
        let heading = format!(
            "  {:<6}{:<14}{:<14}{:<14}{:<wide$}  WAITS AT",
            "TASK", "STATE", "FOR", "HEARTBEAT", "ADDRESS"
        );
        self.out.add_line(TerminalLine::default().push_styled(self.style, heading, TextColour::Bold));
        for (task, peer) in tasks.iter().zip(&peers) {
            let heard = task.last_heartbeat.map_or_else(|| "-".into(), |at| self.elapsed_since_text(at));
            let state = task.state();
            let word = format!("{:<14}", state.name());
            let line = TerminalLine::from(format!("  {:<6}", task.task));
            let line = match state {
                TaskState::Phase(TaskPhase::Failed) => line.push_styled(self.style, word, TextColour::Bad),
                TaskState::Phase(TaskPhase::Suspect | TaskPhase::Missing) => {
                    line.push_styled(self.style, word, TextColour::Caution)
                }
                _ => line.push(word),
            };
            let since = self.elapsed_since_text(task.since);
            self.out.add_line(
                line.push(format!("{since:<14}{heard:<14}{peer:<wide$}  {}", task_waits_text(task))),
            );
        }
    }

    fn add_earlier_runs(&mut self) {
        let history = &self.view.history;
        for run in history.iter().take(RUNS_LISTED) {
            let (word, colour) = match run.outcome {
                RunOutcome::Completed => ("completed", TextColour::Faint),
                RunOutcome::Failed => ("failed", TextColour::Caution),
                RunOutcome::Abandoned => ("was abandoned", TextColour::Caution),
            };
            let lasted = format_approximate_duration(run.measured_interval().duration(self.now));
            let cause = run.first_cause.as_ref().map_or_else(String::new, |cause| {
                let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
                format!("; first cause: {whose}{}", shorten_text(&cause.why, ERROR_CHARS))
            });
            let about = format!(
                "run {} {word} {} ago after {lasted}{cause}",
                run.number,
                self.elapsed_since_text(run.ended_at)
            );
            self.add_entry(2, "EARLIER", colour, about);
        }
        if history.len() > RUNS_LISTED {
            let more = format!("… {} earlier runs in all", history.len());
            self.add_entry(2, "EARLIER", TextColour::Faint, more);
        }
    }
}

/// Returns at most `most` characters of a text on one line, and marks a truncated one.
fn shorten_text(text: &str, most: usize) -> String {
    crate::text::truncate_text(&escape_to_one_line(text), most, "… (cut; --json has it whole)")
}

/// Returns the present or last address of a task.
fn task_address(task: &TaskView) -> Option<std::net::SocketAddr> {
    task.lives.iter().find_map(|life| life.peer)
}

fn task_waits_text(task: &TaskView) -> String {
    let barriers = task.waits_at.iter().map(|id| escape_to_one_line(barrier_label(id)).into_owned());
    let keys = task.waits_for.iter().map(|wait| format!("key {}", escape_to_one_line(&wait.key)));
    let names: Vec<String> = barriers.chain(keys).collect();
    shorten_text(&names.join(", "), ERROR_CHARS)
}

fn barrier_name(barrier: &BarrierView) -> String {
    let name = shorten_text(barrier_label(&barrier.id), ERROR_CHARS);
    if barrier.counter > 0 { format!("{name} (use {})", barrier.counter) } else { name }
}

/// Returns task numbers as ranges: `0-3, 7, 9-11`.
fn task_ranges_text(tasks: &[TaskId]) -> String {
    crate::text::format_ranges(tasks.iter().map(|task| task.0), RANGES_LISTED, "-", "… (--json has all)")
}

//! Computes the issues of a job, such as lost tasks, from its findings and its run. The most urgent issue is first.
//!
//! `service::findings` detects findings. Begin at `Issue`.

use std::sync::Arc;
use std::time::Duration;

use askama::Template;

use super::amount;
use super::fragment::Fragment;
use super::links;
use super::named_tasks::{NamedGroup, NamedTasks};
use super::snapshot::{JobSnapshot, heartbeat_interval_us, last_arrival_time};
use super::status::{self, AWAITED_AFTER, TaskStatus, barrier_display_name};
use super::times;
use crate::coordination::{
    BarrierKind, BarrierView, FirstCause, JobName, RunOutcome, RunState, TaskId, TaskPhase, TaskView,
    Timestamp, is_unreachable_host,
};
use crate::http::Problem;
use crate::service::findings::{
    AwaitedHeartbeat, Evidence, Finding, LateArrivals, RESTART_WINDOW, awaited_heartbeats_text,
    count_late_arrivals,
};
use crate::text::{format_approximate_duration, format_count_with_noun, format_grouped};

/// The maximum number of tasks that an issue names.
const NAMED: usize = 4;
/// The number of latest barriers, and at how many of them a task must have been late before a job without issues says so.
const LATE_WINDOW: usize = 4;
const LATE_OFTEN: usize = 3;
/// The numbers of issues of which the overview shows the details, and the title.
const DETAILED_ISSUES: usize = 2;
const ISSUE_TITLES: usize = 8;

/// Advice about failed tasks: if most failed by timeouts or for other reasons; of whole hosts, or of others.
const ADVICE_FOR_UNREACHABLE_HOSTS: &str = "Nothing comes from any task on a host that is named here: the host is down, or the network between \
    it and this server is cut. Try to reach it from this machine (ping, ssh). If it answers, look at the network from there to the gRPC port of \
    this server; if not, at the host, and at what it shares with other hosts that failed. Its tasks may register again; exclude a host that does \
    not come back.";
const ADVICE_FOR_UNREACHABLE_TASKS: &str = "Nothing came from the process any more: it hangs, it gets no CPU, or its host is down or cut off. Look \
    whether the host can be reached and the process runs, then at its stack and its log. Unless others wait for it at a barrier, the run continues \
    without it until it registers again; exclude it if its host is bad.";
const ADVICE_FOR_FAILED_HOSTS: &str = "All tasks of a host that is named here have failed. Look at the host first: is it up, and does the kernel's \
    log have a reboot, an out-of-memory kill or a device error? Then at the end of the tasks' logs. A connection that was closed or reset says \
    that the network worked: the processes ended. Unless others wait for them at a barrier, the run continues without \
    them until they register again; exclude a host that is bad.";
const ADVICE_FOR_FAILED_TASKS: &str = "Read the end of the task's log, and the kernel's log of its host. A connection that was closed or reset says \
    that the network worked: the process ended. Unless others wait for it at a barrier, the run continues without it until it registers \
    again: check whether its scheduler restarts it, and exclude it if its host is bad.";
const ADVICE_FOR_THE_NEXT_RUN: &str = "The run is over. Before the next one, read the end of the tasks' logs, and the kernel's log of their hosts; \
    exclude a host that is bad.";

/// The kind of the issue of the tasks that a run has lost.
const LOST_TASKS: &str = "tasks-failed";

/// An issue: something that needs an operator.
pub(super) struct Issue {
    /// The name of its finding, or of another condition. A job has at most one issue of a kind.
    kind: Arc<str>,
    pub job: JobName,
    /// It is the failure of a run, which comes before everything that may follow from it.
    is_run_failure: bool,
    pub tone: &'static str,
    pub title: String,
    pub text: String,
    /// The error that clients received, if the text is another one.
    pub told: String,
    pub since: Timestamp,
    /// The tasks of the issue, of which a finding without a barrier lists only the first.
    tasks: Vec<TaskId>,
    /// The first hosts and tasks of the issue.
    pub named: NamedTasks,
    pub means: String,
    pub advice: String,
    pub guide: String,
    pub evidence: Vec<Evidence>,
}

impl Issue {
    fn from_finding(snapshot: &JobSnapshot, finding: &Finding) -> Self {
        let tone = status::severity_tone(finding.severity);
        // A finding lists its first tasks; its barrier has all of them.
        let barrier = finding.barrier.as_deref().zip(finding.counter);
        let barrier = barrier.and_then(|(id, counter)| snapshot.find_barrier(id, counter));
        let mut tasks = barrier.map_or_else(|| finding.tasks.clone(), |barrier| barrier.missing.clone());
        // Those that are lost have an entry of their own, so they come last; but those of a restart storm have no other one.
        let has_own_entry = finding.id.as_ref() != "restart-storm";
        let is_lost =
            |task: &TaskId| matches!(snapshot.status_of(*task), TaskStatus::Failed | TaskStatus::Suspect);
        tasks.sort_by_key(|task| is_lost(task) == has_own_entry);
        let named = NamedTasks::new(snapshot, &tasks, finding.task_count, NAMED);
        Self {
            tone,
            tasks,
            means: finding.means.clone(),
            evidence: finding.evidence.clone(),
            ..Self::new(
                snapshot,
                &finding.id,
                tone,
                finding.title.clone(),
                status::to_sentence(&finding.summary_without_tasks),
                finding.since,
            )
            .with_named_tasks(named)
            .with_advice(&finding.advice, &format!("/guide/findings#{}", finding.id))
        }
    }

    fn new(
        snapshot: &JobSnapshot,
        kind: &str,
        tone: &'static str,
        title: String,
        text: String,
        since: Timestamp,
    ) -> Self {
        Self {
            kind: kind.into(),
            job: snapshot.view.name.clone(),
            is_run_failure: false,
            tone,
            title,
            text,
            told: String::new(),
            since,
            tasks: Vec::new(),
            named: NamedTasks::default(),
            means: String::new(),
            advice: String::new(),
            guide: String::new(),
            evidence: Vec::new(),
        }
    }

    fn with_tasks(self, snapshot: &JobSnapshot, tasks: &[TaskId]) -> Self {
        let named = NamedTasks::new(snapshot, tasks, tasks.len(), NAMED);
        Self { tasks: tasks.to_vec(), ..self }.with_named_tasks(named)
    }

    /// Sets the tasks. If they are all tasks of whole hosts, the title says so.
    fn with_named_tasks(mut self, named: NamedTasks) -> Self {
        self.title.push_str(&named.whole_hosts_text());
        self.named = named;
        self
    }

    fn with_advice(mut self, advice: &str, guide: &str) -> Self {
        advice.clone_into(&mut self.advice);
        guide.clone_into(&mut self.guide);
        self
    }

    /// Adds the tasks that have failed again, and have not come back, to the issue about their restarts.
    fn with_tasks_down_again(self, snapshot: &JobSnapshot, ids: &[TaskId]) -> Self {
        let tasks: Vec<&TaskView> = ids.iter().filter_map(|task| snapshot.find_task(*task)).collect();
        let Some(first) = tasks.iter().min_by_key(|task| task.since) else { return self };
        let (why, told) = status::failure_texts(first).unwrap_or_default();
        let title = format_count_with_noun(tasks.len(), "task has failed again", "tasks have failed again");
        let title = title + &NamedTasks::new(snapshot, ids, ids.len(), NAMED).whole_hosts_text();
        let why = match tasks.len() {
            1 => format!("Task {}: {why}", first.task),
            _ => text_of_failures(snapshot, &tasks, first, &why),
        };
        let text = format!("{} {}", status::to_sentence(&why), self.text);
        Self { tone: "bad", title, text, since: first.since, ..self }.with_client_error(told)
    }

    /// Adds the full error to a text that summarizes it.
    fn with_client_error(mut self, told: String) -> Self {
        self.told = told;
        self
    }

    /// Returns whether it concerns one of these tasks, which are ascending.
    pub fn concerns_one_of(&self, tasks: &[TaskId]) -> bool {
        self.tasks.iter().any(|task| tasks.binary_search(task).is_ok())
    }

    /// Returns the key of the issue among those of all jobs, by which a live update finds it.
    pub fn key(&self) -> String {
        format!("{} {}", self.job, self.kind)
    }

    /// Returns a number of the evidence as text.
    pub fn evidence_text(&self, value: &f64) -> String {
        let text = format!("{value:.2}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

/// Returns the issues of a job: the failure of its run first, then by urgency.
pub(super) fn job_issues(snapshot: &JobSnapshot) -> Vec<Issue> {
    let found = |id: &str| snapshot.findings.iter().find(|finding| finding.id.as_ref() == id);
    // Tasks that restart repeatedly are one issue, whether they are down or back at this moment.
    let has_storm = found("restart-storm").is_some();
    let is_in_storm = |task: &TaskId| {
        has_storm && snapshot.find_task(*task).is_some_and(|task| has_restarted_lately(snapshot, task))
    };
    let failed = tasks_with_status(snapshot, TaskStatus::Failed).into_iter();
    let (down_again, lost): (Vec<TaskId>, Vec<TaskId>) = failed.partition(is_in_storm);
    let mut needs: Vec<Issue> =
        failed_run_issue(snapshot).or_else(|| lost_tasks_issue(snapshot, &lost)).into_iter().collect();
    // A stalled task is the reason why its barrier is stuck, so both are one issue.
    let place = |finding: &Finding| (finding.barrier.clone(), finding.counter);
    let stalled = found("stalled-task").map(place);
    let again =
        |finding: &&Finding| finding.id.as_ref() == "barrier-stuck" && Some(place(finding)) == stalled;
    let mut own: Vec<Issue> = Vec::new();
    own.extend(snapshot.findings.iter().filter(|it| !again(it)).map(|finding| {
        let issue = Issue::from_finding(snapshot, finding);
        match finding.id.as_ref() {
            "restart-storm" => issue.with_tasks_down_again(snapshot, &down_again),
            _ => issue,
        }
    }));
    if stalled.is_none() && found("barrier-stuck").is_none() {
        own.extend(awaited_tasks_issue(snapshot));
    }
    needs.extend(merge_late_heartbeats(snapshot, own));
    merge_wait_for_lost_tasks(snapshot, &mut needs);
    let mut suspects = tasks_with_status(snapshot, TaskStatus::Suspect);
    suspects.retain(|task| !is_in_storm(task) && !snapshot.is_consequence(*task));
    if let Some(since) = suspects.iter().filter_map(|task| Some(snapshot.find_task(*task)?.since)).min() {
        let title = format_count_with_noun(
            suspects.len(),
            "task lost its connection",
            "tasks lost their connections",
        );
        let grace = snapshot.view.settings.disconnect_grace.unwrap_or_default();
        let text = format!(
            "A task that reconnects within {} stays in the run; otherwise it fails.",
            times::microseconds_text(&u64::try_from(grace.as_micros()).unwrap_or(u64::MAX))
        );
        needs.push(
            Issue::new(snapshot, "tasks-suspect", "warn", title, text, since).with_tasks(snapshot, &suspects),
        );
    }
    needs.sort_by_key(urgency_key);
    needs
}

/// Returns whether the first cause is among the issues.
pub(super) fn is_first_cause_listed(snapshot: &JobSnapshot) -> bool {
    let run = &snapshot.view.run;
    matches!(run.state, RunState::Failed | RunState::Abandoned) && run.first_cause.is_some()
}

/// Returns the sort key of an issue. Lost tasks come before what is as urgent, because the others may follow from them.
pub(super) fn urgency_key(need: &Issue) -> (bool, usize, bool, Timestamp) {
    let tones = ["bad", "warn", "info"];
    let tone = tones.iter().position(|tone| *tone == need.tone).unwrap_or(tones.len());
    (!need.is_run_failure, tone, need.kind.as_ref() != LOST_TASKS, need.since)
}

/// Returns the number of issues in words.
pub(super) fn issue_count_text(number: usize) -> String {
    format_count_with_noun(number, "issue", "issues")
}

fn tasks_with_status(snapshot: &JobSnapshot, look: TaskStatus) -> Vec<TaskId> {
    let tasks = snapshot.view.run.tasks.iter().zip(&snapshot.statuses);
    tasks.filter(|(_, one)| **one == look).map(|(task, _)| task.task).collect()
}

/// Returns the issue of a failed run.
fn failed_run_issue(snapshot: &JobSnapshot) -> Option<Issue> {
    let run = &snapshot.view.run;
    let cause = run.first_cause.as_ref();
    if !matches!(run.state, RunState::Failed | RunState::Abandoned) {
        return None;
    }
    let (text, told) = match cause {
        Some(cause) => {
            let (why, told) = status::first_cause_texts(cause);
            (format!("First cause: {}{why}", task_prefix_of(cause)), told)
        }
        None => {
            let reason = run.end_reason.as_deref().filter(|reason| !reason.is_empty());
            (
                crate::text::escape_to_one_line(reason.unwrap_or("The cause is not known.")).into_owned(),
                String::new(),
            )
        }
    };
    let title = format!(
        "Run {} {}",
        run.number,
        if run.state == RunState::Failed { "failed" } else { "was abandoned" }
    );
    let since = run.ended_at.unwrap_or(run.opened_at);
    let advice = "Read the log of that task at that time: the errors of the other tasks follow from it. The next run starts \
                  when tasks register again; nothing has to be reset.";
    let need = Issue::new(snapshot, "run-failed", "bad", title, text, since)
        .with_client_error(told)
        .with_advice(advice, "/guide/troubleshooting#failed");
    let need = Issue { is_run_failure: true, ..need };
    Some(match cause.and_then(|cause| cause.task) {
        Some(task) => need.with_tasks(snapshot, &[task]),
        None => need,
    })
}

/// Returns the issue of the tasks that a run has lost.
fn lost_tasks_issue(snapshot: &JobSnapshot, lost: &[TaskId]) -> Option<Issue> {
    let mut tasks: Vec<&TaskView> = lost.iter().filter_map(|task| snapshot.find_task(*task)).collect();
    tasks.sort_by_key(|task| task.since);
    let first = tasks.first()?;
    let (why, told) = status::failure_texts(first).unwrap_or_default();
    let text = text_of_failures(snapshot, &tasks, first, &why);
    let text = match text_of_wait_for(snapshot, lost) {
        Some(wait) => format!("{} {wait}", status::to_sentence(&text)),
        None => text,
    };
    let title = format_count_with_noun(tasks.len(), "task has failed", "tasks have failed");
    let order: Vec<TaskId> = tasks.iter().map(|task| task.task).collect();
    let named = NamedTasks::new(snapshot, &order, order.len(), NAMED);
    let unreachable =
        tasks.iter().filter(|task| task.why.as_deref().is_some_and(is_unreachable_host)).count();
    let advice = match (unreachable > tasks.len() / 2, named.whole_hosts > 0) {
        (true, true) => ADVICE_FOR_UNREACHABLE_HOSTS,
        (true, false) => ADVICE_FOR_UNREACHABLE_TASKS,
        (false, true) => ADVICE_FOR_FAILED_HOSTS,
        (false, false) => ADVICE_FOR_FAILED_TASKS,
    };
    let (tone, title, advice) = match snapshot.view.run.state {
        RunState::Completed => {
            let them = if tasks.len() == 1 { "it" } else { "them" };
            ("info", format!("{title}, and the run has completed without {them}"), ADVICE_FOR_THE_NEXT_RUN)
        }
        _ => ("bad", title, advice),
    };
    let issue = Issue::new(snapshot, LOST_TASKS, tone, title, text, first.since).with_client_error(told);
    let issue = Issue { tasks: order, ..issue };
    Some(issue.with_named_tasks(named).with_advice(advice, "/guide/states#failed"))
}

/// Merges the issue of late heartbeats into the issue of the tasks that others wait for, if it is about these tasks: their process or host
/// is the cause of both. The text of the latter tells the heartbeats too.
fn merge_late_heartbeats(snapshot: &JobSnapshot, mut issues: Vec<Issue>) -> Vec<Issue> {
    let is_wait = |issue: &&mut Issue| ["stalled-task", "tasks-awaited"].contains(&issue.kind.as_ref());
    let finding = snapshot.findings.iter().find(|finding| finding.id.as_ref() == "heartbeat-gaps-widening");
    if let Some(finding) = finding
        && !finding.tasks.is_empty()
        && let Some(wait) = issues.iter_mut().find(is_wait)
        && finding.tasks.iter().all(|task| wait.tasks.contains(task))
        && finding.task_count == finding.tasks.len()
    {
        wait.means.clone_from(&finding.means);
        wait.advice = format!("{} {}", finding.advice, wait.advice);
        wait.guide = format!("/guide/findings#{}", finding.id);
        wait.evidence.extend(finding.evidence.iter().cloned());
        issues.retain(|issue| issue.kind != finding.id);
    }
    issues
}

/// Says which tasks wait at a barrier for lost tasks alone; `None` if none do, or only for a moment.
fn text_of_wait_for(snapshot: &JobSnapshot, lost: &[TaskId]) -> Option<String> {
    let barrier = snapshot.barriers_in_progress().into_iter().find(|barrier| {
        is_step_barrier(barrier.kind)
            && snapshot.captured_at().since(barrier.since) >= AWAITED_AFTER
            && !barrier.missing.is_empty()
            && barrier.missing.iter().all(|task| lost.contains(task))
    })?;
    let them = if barrier.missing.len() == 1 { "it" } else { "them" };
    let name = barrier_display_name(&barrier.id);
    Some(format!("{} for {them} at {name}.", waiting_members_text(barrier)))
}

/// Merges the issue of a stuck barrier into the issue of the lost tasks, if the barrier waits for these tasks alone: their failure is
/// the cause of both. The text of the latter tells of the wait.
fn merge_wait_for_lost_tasks(snapshot: &JobSnapshot, issues: &mut Vec<Issue>) {
    let is_lost = |task: &TaskId| snapshot.status_of(*task) == TaskStatus::Failed;
    let waits_for_lost = |issue: &Issue| {
        issue.kind.as_ref() == "barrier-stuck" && !issue.tasks.is_empty() && issue.tasks.iter().all(is_lost)
    };
    if let Some(lost) = issues.iter().position(|issue| issue.kind.as_ref() == LOST_TASKS)
        && let Some(wait) = issues.iter().position(waits_for_lost)
    {
        let (means, evidence) = (issues[wait].means.clone(), std::mem::take(&mut issues[wait].evidence));
        issues[lost].means = means;
        issues[lost].evidence.extend(evidence);
        issues.remove(wait);
    }
}

/// Returns why these tasks have failed; `why` is the reason of the first. Of tasks that one outage made unreachable, none is the first:
/// when each fails follows from the time of its last heartbeat.
fn text_of_failures(snapshot: &JobSnapshot, tasks: &[&TaskView], first: &TaskView, why: &str) -> String {
    let is_alike = tasks.iter().all(|task| task.why == first.why);
    let last = tasks.iter().map(|task| task.since).max().unwrap_or(first.since);
    let span = last.since(first.since);
    let is_one_outage = first.why.as_deref().is_some_and(is_unreachable_host)
        && span <= snapshot.view.settings.heartbeat_timeout;
    let all = format_grouped(tasks.len());
    match (tasks.len(), is_alike, is_one_outage) {
        (1, ..) => why.to_owned(),
        (_, true, true) if span < Duration::from_secs(1) => format!("All {all} within a second: {why}"),
        (_, true, true) => format!("All {all} within {}: {why}", format_approximate_duration(span)),
        (_, true, false) => format!("All {all} for the same reason. First: task {}: {why}", first.task),
        (_, false, _) => format!("First: task {}: {why}", first.task),
    }
}

/// Returns the issue of connected tasks that others wait for.
fn awaited_tasks_issue(snapshot: &JobSnapshot) -> Option<Issue> {
    let barriers = snapshot.barriers_in_progress();
    let waits = |task: &TaskId| snapshot.status_of(*task) == TaskStatus::Awaited;
    let holds_up =
        |barrier: &&BarrierView| is_step_barrier(barrier.kind) && barrier.missing.iter().any(waits);
    let barrier = barriers.into_iter().find(holds_up)?;
    let name = barrier_display_name(&barrier.id);
    let who = match &barrier.missing[..] {
        [one] => format!("task {one}"),
        many => format!("{} tasks", many.len()),
    };
    let title = format!("{} at {name} for {who}", waiting_members_text(barrier));
    // Lost tasks have an issue of their own, so they come last here.
    let mut missing = barrier.missing.clone();
    missing.sort_by_key(|task| !waits(task));
    let alive: Vec<TaskId> = missing.iter().copied().filter(waits).collect();
    let text = awaited_tasks_heartbeat_text(snapshot, &alive, barrier);
    let need = Issue::new(snapshot, "tasks-awaited", "warn", title, text, last_arrival_time(barrier));
    let advice = "Look at its stack before anything else: on the page Stacks of the job, or with py-spy dump on its host. \
                  Then restart it, or exclude it if the job can continue without it.";
    Some(need.with_tasks(snapshot, &missing).with_advice(advice, "/guide/states#awaited"))
}

/// Returns a sentence about the heartbeats of these connected tasks, which have not reached `barrier`, and its consequence.
fn awaited_tasks_heartbeat_text(snapshot: &JobSnapshot, tasks: &[TaskId], barrier: &BarrierView) -> String {
    let heartbeat = |task: &TaskView| AwaitedHeartbeat {
        last: task.last_heartbeat,
        interval_us: heartbeat_interval_us(task),
    };
    let heartbeats: Vec<_> =
        tasks.iter().filter_map(|task| snapshot.find_task(*task).map(heartbeat)).collect();
    let timeout = snapshot.view.settings.heartbeat_timeout;
    let kind = if tasks.len() < barrier.missing.len() { "connected" } else { "awaited" };
    let (since, now) = (last_arrival_time(barrier), snapshot.captured_at());
    let (text, they_continue) = awaited_heartbeats_text(&heartbeats, kind, since, timeout, now);
    let consequence = if they_continue {
        let endless = times::has_no_timeout(&barrier.deadline, now);
        format!(", so no {} will clear this", if endless { "timeout" } else { "heartbeat timeout" })
    } else {
        format!("; a task fails after {} without one", times::duration_text(&timeout))
    };
    status::to_sentence(&format!("{text}{consequence}"))
}

/// Returns the text about a job without issues.
pub(super) fn no_issue_text(snapshot: &JobSnapshot) -> String {
    let run = &snapshot.view.run;
    match run.state {
        RunState::Running => {
            if let Some(trouble) = recently_late_text(snapshot).or_else(|| recent_trouble_text(snapshot)) {
                return format!("No action needed yet: {trouble}");
            }
            // A barrier that has just begun is not named: between two updates it is there or not, by chance.
            let is_lasting = |it: &&BarrierView| snapshot.captured_at().since(it.since) >= AWAITED_AFTER;
            match snapshot.barriers_in_progress().into_iter().find(is_lasting) {
                None => "No action needed".into(),
                Some(barrier) => {
                    let name = barrier_display_name(&barrier.id);
                    format!("No action needed yet: {} at {name}", waiting_members_text(barrier))
                }
            }
        }
        RunState::Completed => "The run completed.".into(),
        RunState::Forming | RunState::Failed | RunState::Abandoned => String::new(),
    }
}

/// Returns which host or tasks came late at most of the last barriers, which may become a finding.
fn recently_late_text(snapshot: &JobSnapshot) -> Option<String> {
    let recent = count_late_arrivals(snapshot.view.run.recent_barriers.iter(), LATE_WINDOW);
    let often = |(task, late): (&TaskId, &LateArrivals)| {
        (late.count >= LATE_OFTEN && snapshot.find_task(*task).is_some_and(is_connected)).then_some(*task)
    };
    let tasks: Vec<TaskId> = recent.tasks.iter().filter_map(often).collect();
    let most = tasks.iter().filter_map(|task| Some(recent.tasks.get(task)?.count)).max()?;
    let named = NamedTasks::new(snapshot, &tasks, tasks.len(), 1);
    let who = match &named.groups[..] {
        [NamedGroup::Host(host)] if named.others == 0 => {
            format!("host {} was", links::short_host_name(&host.host))
        }
        _ if tasks.len() <= 4 => {
            let noun = if tasks.len() == 1 { "task" } else { "tasks" };
            format!(
                "{noun} {} {}",
                links::task_ranges_text(&tasks),
                if tasks.len() == 1 { "was" } else { "were" }
            )
        }
        _ => format!("{} tasks were", tasks.len()),
    };
    Some(format!("{who} late at {most} of the last {} barriers", recent.barriers))
}

/// Returns which tasks restarted a while ago, or that the run before failed; `None` if neither is so.
fn recent_trouble_text(snapshot: &JobSnapshot) -> Option<String> {
    let restarted = snapshot.view.run.tasks.iter().filter(|task| has_restarted_lately(snapshot, task));
    let restarted: Vec<TaskId> = restarted.map(|task| task.task).collect();
    match &restarted[..] {
        [] => {}
        [one] => return Some(format!("task {one} restarted in the last ten minutes")),
        many => {
            let (count, named) = (format_grouped(many.len()), NamedTasks::new(snapshot, many, many.len(), 1));
            let hosts = named.whole_hosts_text();
            return Some(format!("{count} tasks restarted in the last ten minutes{hosts}"));
        }
    }
    let before = snapshot.view.history.first().filter(|past| {
        past.outcome != RunOutcome::Completed && snapshot.captured_at().since(past.ended_at) <= RESTART_WINDOW
    })?;
    let cause = before.first_cause.as_ref()?;
    let why = status::first_cause_texts(cause).0;
    Some(format!("run {} failed: {}{why}", before.number, task_prefix_of(cause)))
}

/// Returns whether a task has registered again a while ago.
fn has_restarted_lately(snapshot: &JobSnapshot, task: &TaskView) -> bool {
    let is_recent = |at: Timestamp| snapshot.captured_at().since(at) <= RESTART_WINDOW;
    matches!(&task.lives[..], [present, _, ..] if is_recent(present.registered_at))
}

/// Returns a label for the task of a first cause, if one is known.
fn task_prefix_of(cause: &FirstCause) -> String {
    cause.task.map_or_else(String::new, |task| format!("task {task}: "))
}

/// Returns how many of a barrier's members wait.
fn waiting_members_text(barrier: &BarrierView) -> String {
    let (arrived, members) = (format_grouped(barrier.arrived), format_grouped(barrier.members));
    let verb = if barrier.arrived == 1 { "waits" } else { "wait" };
    format!("{arrived} of {members} tasks {verb}")
}

fn is_connected(task: &TaskView) -> bool {
    task.standing == TaskPhase::Connected && task.excluded.is_none()
}

/// Returns whether tasks meet at such a barrier between the steps of their program.
fn is_step_barrier(kind: BarrierKind) -> bool {
    matches!(kind, BarrierKind::Client | BarrierKind::LiveSet)
}

#[derive(Template)]
#[template(path = "parts/needs.html")]
struct IssueListFragment<'a> {
    /// The issues that are shown with their details.
    issues: Vec<&'a Issue>,
    /// The issues of which the title is shown, and how many further ones there are.
    titles: Vec<&'a Issue>,
    more: usize,
    /// The list covers several jobs, so each issue names its job.
    whose: bool,
    /// The text if there are no issues.
    calm: String,
}

impl IssueListFragment<'_> {
    /// Returns the number of all issues in words.
    fn count_text(&self) -> String {
        issue_count_text(self.issues.len() + self.titles.len() + self.more)
    }

    /// Returns the part of the text that screen readers announce: without the progress of a barrier.
    fn spoken_summary(&self) -> &str {
        self.calm.split(':').next().unwrap_or_default()
    }
}

/// Returns the issues as a fragment of a page. Of the issues of several jobs, only the first ones have their details, and only the most
/// urgent one of a job, so that the table of jobs stays on the first screen.
pub(super) fn render_issue_list_fragment(
    issues: &[Issue],
    whose: bool,
    calm: String,
) -> Result<Fragment, Problem> {
    let (mut detailed, mut titles): (Vec<&Issue>, Vec<&Issue>) = (Vec::new(), Vec::new());
    for issue in issues {
        let is_of_new_job = detailed.iter().all(|other| other.job != issue.job);
        // No issue is shown in full that is less urgent than one of which only the title is shown.
        let is_urgent = detailed.is_empty() || issue.tone == "bad";
        if !whose || (detailed.len() < DETAILED_ISSUES && is_of_new_job && is_urgent) {
            detailed.push(issue);
        } else {
            titles.push(issue);
        }
    }
    let more = titles.len().saturating_sub(ISSUE_TITLES);
    titles.truncate(ISSUE_TITLES);
    Fragment::new("needs", &IssueListFragment { issues: detailed, titles, more, whose, calm })
}

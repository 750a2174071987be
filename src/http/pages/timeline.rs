//! Records the timeline of each job, as an [`Observer`] of events, and renders timelines with the first cause at the
//! top.
//!
//! `engine` stores the events. Begin at `Timelines`, then `show_timeline_page`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::status::barrier_name;
use super::{issues, links, status, times};
use crate::coordination::{
    BarrierRecordWithArrivals, EventKind, FailureClass, JobEvent, JobId, JobName, RunNumber, RunOutcome,
    TaskId, Timestamp,
};
use crate::engine::Observer;
use crate::http::extract::{JobPath, QueryParams};
use crate::http::{AppState, Problem};
use crate::text::format_grouped;

/// The maximum number of entries of a job.
const MOMENTS_KEPT: usize = 400;
/// The maximum number of entries on the page of the job.
const MOMENTS_SHORT: usize = 10;
/// The maximum number of task ranges in one entry.
const RANGES_SHOWN: usize = 6;
/// Consecutive changes of many tasks are one entry if they are no further apart than this, in microseconds:
/// the first is for normal changes, the second for trouble.
const MERGE_WITHIN_US: u64 = 60_000_000;
const MERGE_TROUBLE_WITHIN_US: u64 = 1_000_000;

/// The relation of an entry to the failure of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CausalRole {
    /// The first cause.
    Cause,
    /// A consequence of the first cause.
    Consequence,
    /// Neither.
    Plain,
}

/// A change of one task, or of many tasks at once.
#[derive(Debug, Clone)]
pub(super) struct TimelineEntry {
    pub at: Timestamp,
    last_at: Timestamp,
    pub run: RunNumber,
    pub kind: &'static str,
    pub role: CausalRole,
    pub tone: &'static str,
    /// It counts as a consequence if a failure came before it.
    is_trouble: bool,
    pub tasks: Vec<TaskId>,
    pub text: String,
    /// The task of the text, if the text is not about all tasks.
    latest: Option<TaskId>,
    /// The key that entries must share to be merged; `None` for entries that are never merged.
    merge_key: Option<String>,
}

impl TimelineEntry {
    fn from_event(event: &JobEvent) -> Option<Self> {
        let tone = event_tone(&event.what)?;
        Some(Self {
            at: event.at,
            last_at: event.at,
            run: event.run,
            kind: event.what.kind(),
            role: if matches!(event.what, EventKind::FirstCause { .. }) {
                CausalRole::Cause
            } else {
                CausalRole::Plain
            },
            tone,
            is_trouble: tone == "bad" || matches!(event.what, EventKind::TaskSuspected { .. }),
            tasks: event_tasks(&event.what),
            text: event_text(event),
            latest: None,
            merge_key: merge_key(event),
        })
    }

    /// Returns the kind of the change in words.
    pub fn kind_text(&self) -> String {
        self.kind.replace('-', " ")
    }

    /// Returns the tasks as ranges.
    pub fn tasks_text(&self) -> String {
        match &self.tasks[..] {
            [] => String::new(),
            [one] => format!("task {one}"),
            many => {
                let mut sorted = many.to_vec();
                sorted.sort_unstable();
                format!(
                    "{} tasks: {}",
                    format_grouped(many.len()),
                    links::first_task_ranges_text(&sorted, RANGES_SHOWN)
                )
            }
        }
    }

    /// Returns a label for the task of the text, if the entry has several tasks.
    pub fn latest_task_text(&self) -> String {
        self.latest.map_or_else(String::new, |task| format!("latest, task {task}: "))
    }

    /// Returns the task, if the entry has exactly one.
    pub fn single_task(&self) -> Option<&TaskId> {
        if let [one] = &self.tasks[..] { Some(one) } else { None }
    }
}

/// Returns the tone of a change; `None` if it has no entry.
fn event_tone(what: &EventKind) -> Option<&'static str> {
    Some(match what {
        // The exclusion has an entry of its own.
        EventKind::BarrierStarted { .. } | EventKind::TaskFailed { class: FailureClass::Excluded, .. } => {
            return None;
        }
        EventKind::BarrierPassed { without, .. } if without.is_empty() => return None,
        EventKind::FirstCause { .. } | EventKind::TaskFailed { .. } | EventKind::BarrierFailed { .. } => {
            "bad"
        }
        EventKind::RunEnded { outcome } if *outcome != RunOutcome::Completed => "bad",
        EventKind::TaskSuspected { .. }
        | EventKind::TaskSuperseded { .. }
        | EventKind::Fenced { .. }
        | EventKind::Excluded { .. }
        | EventKind::RegistrationRefused { .. }
        | EventKind::FindingOpened { .. }
        | EventKind::TransferFailed { .. }
        | EventKind::JobDeleted { .. } => "warn",
        EventKind::DrainRequested { .. } | EventKind::PreemptionNoticed | EventKind::BarrierPassed { .. } => {
            "info"
        }
        _ => "calm",
    })
}

/// Returns the key that changes must share to be merged into one entry: an empty one for normal changes, the
/// cause for failures. Other changes are never merged.
fn merge_key(event: &JobEvent) -> Option<String> {
    match &event.what {
        EventKind::TaskRegistering { .. }
        | EventKind::TaskConnected { .. }
        | EventKind::TaskDisconnected { .. }
        | EventKind::TaskReturned { .. } => Some(String::new()),
        EventKind::TaskFailed { class, .. } => Some(class.name().to_owned()),
        EventKind::TaskSuspected { .. } => Some("suspected".to_owned()),
        _ => None,
    }
}

/// Returns the reason of a change, with the barrier it is about.
fn event_text(event: &JobEvent) -> String {
    let reason = crate::text::escape_to_one_line(&event.reason);
    match &event.what {
        EventKind::BarrierFailed { barrier, counter } | EventKind::BarrierPassed { barrier, counter, .. } => {
            let used = if *counter > 0 { format!(" (use {counter})") } else { String::new() };
            format!("{}{used}: {reason}", barrier_name(barrier))
        }
        _ => reason.into_owned(),
    }
}

fn event_tasks(what: &EventKind) -> Vec<TaskId> {
    match what {
        EventKind::TaskRegistering { task, .. }
        | EventKind::TaskConnected { task, .. }
        | EventKind::TaskSuperseded { task, .. }
        | EventKind::TaskSuspected { task }
        | EventKind::TaskReturned { task }
        | EventKind::TaskDisconnected { task }
        | EventKind::TaskFailed { task, .. }
        | EventKind::TransferFailed { task, .. }
        | EventKind::RegistrationRefused { task, .. } => vec![*task],
        EventKind::FirstCause { task } | EventKind::Fenced { task } => task.iter().copied().collect(),
        EventKind::Excluded { tasks, .. } | EventKind::FindingOpened { tasks, .. } => tasks.clone(),
        EventKind::HostsAssigned { tasks } | EventKind::HostsForgotten { tasks, .. } => tasks.clone(),
        EventKind::BarrierPassed { without, .. } => without.clone(),
        _ => Vec::new(),
    }
}

/// The timeline of one job.
#[derive(Debug, Default, Clone)]
pub(super) struct JobTimeline {
    /// The entries, the latest last.
    entries: VecDeque<Arc<TimelineEntry>>,
    /// The run whose first cause is in the timeline.
    run_with_cause: Option<RunNumber>,
    /// Older entries were dropped.
    is_truncated: bool,
}

impl JobTimeline {
    fn add_or_merge(&mut self, mut moment: TimelineEntry) {
        if moment.role == CausalRole::Cause {
            self.run_with_cause = Some(moment.run);
            self.mark_consequences_of(&moment);
        } else if self.run_with_cause == Some(moment.run) && moment.is_trouble {
            moment.role = CausalRole::Consequence;
        }
        if let Some(last) = self.entries.back_mut()
            && let Some(shared) = &moment.merge_key
            && last.merge_key.as_ref() == Some(shared)
            && (last.kind, last.run, last.role) == (moment.kind, moment.run, moment.role)
            && moment.at.0.saturating_sub(last.last_at.0)
                < if shared.is_empty() { MERGE_WITHIN_US } else { MERGE_TROUBLE_WITHIN_US }
        {
            let last = Arc::make_mut(last);
            last.last_at = moment.at;
            // The merged text must hold for all tasks; otherwise it names the latest one.
            if last.text != moment.text {
                last.latest = moment.tasks.first().copied();
                last.text = moment.text;
            }
            last.tasks.extend(moment.tasks);
            return;
        }
        self.entries.push_back(Arc::new(moment));
        if self.entries.len() > MOMENTS_KEPT {
            self.entries.pop_front();
            self.is_truncated = true;
        }
    }

    /// Marks failures at the very time of a first cause as its consequences, although their events came
    /// before it.
    fn mark_consequences_of(&mut self, cause: &TimelineEntry) {
        let with = self.entries.iter_mut().rev();
        for moment in with.take_while(|moment| moment.at == cause.at && moment.run == cause.run) {
            if moment.is_trouble && moment.tasks != cause.tasks {
                Arc::make_mut(moment).role = CausalRole::Consequence;
            }
        }
    }

    /// Returns the entries, the latest first.
    pub fn latest_first(&self) -> impl Iterator<Item = &TimelineEntry> + Clone {
        self.entries.iter().rev().map(Arc::as_ref)
    }
}

/// The timelines of all jobs. They are collected from events as they happen, so frequent barriers cannot push
/// entries out.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<HashMap<JobId, JobTimeline>>);

impl Timelines {
    fn lock_timelines(&self) -> MutexGuard<'_, HashMap<JobId, JobTimeline>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the timeline of a job.
    pub(super) fn timeline_of(&self, job: JobId) -> JobTimeline {
        self.lock_timelines().get(&job).cloned().unwrap_or_default()
    }
}

impl Observer for Timelines {
    fn on_event(&self, event: &JobEvent) {
        if matches!(event.what, EventKind::JobDeleted { .. }) {
            self.lock_timelines().remove(&event.job);
        } else if let Some(moment) = TimelineEntry::from_event(event) {
            self.lock_timelines().entry(event.job).or_default().add_or_merge(moment);
        }
    }

    fn on_barrier_ended(&self, _ending: &BarrierRecordWithArrivals) {}
}

#[derive(Template)]
#[template(path = "parts/timeline.html")]
struct TimelineFragment<'a> {
    job: &'a JobName,
    /// The first cause of the present run.
    cause: Option<FirstCauseRow>,
    /// The page shows the first cause above.
    cause_shown_above: bool,
    entries: Vec<&'a TimelineEntry>,
    more: bool,
    /// Earlier entries were dropped.
    is_truncated: bool,
}

struct FirstCauseRow {
    at: Timestamp,
    task: Option<TaskId>,
    host: String,
    why: String,
    /// The text that clients received, if it is another one.
    told: String,
    following: usize,
}

/// The timeline: a short one for the page of the job, or all that is known.
pub(super) fn render_fragment(
    snapshot: &JobSnapshot,
    whole: bool,
    only: Option<TaskId>,
) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let most = if whole { MOMENTS_KEPT } else { MOMENTS_SHORT };
    let about = |moment: &&TimelineEntry| only.is_none_or(|task| moment.tasks.contains(&task));
    let following =
        |moment: &&TimelineEntry| moment.role == CausalRole::Consequence && moment.run == run.number;
    let cause = run.first_cause.as_ref().map(|cause| {
        let (why, told) = status::error_texts(&cause.error, &cause.why);
        FirstCauseRow {
            at: cause.at,
            task: cause.task,
            host: cause.task.map(|task| snapshot.task_label(task).host).unwrap_or_default(),
            why,
            told,
            following: snapshot
                .timeline
                .latest_first()
                .filter(following)
                .filter(about)
                .map(|moment| moment.tasks.len().max(1))
                .sum(),
        }
    });
    // The page of the job shows the first cause as its first issue, the page of its task as the last error.
    let told_above = match only {
        None => !whole && issues::is_first_cause_listed(snapshot),
        Some(task) => !whole && run.first_cause.as_ref().is_some_and(|cause| cause.task == Some(task)),
    };
    let shown = snapshot.timeline.latest_first().filter(about);
    let more = !whole && shown.clone().nth(most).is_some();
    let moments: Vec<&TimelineEntry> = shown.take(most).collect();
    let cut = !more && snapshot.timeline.is_truncated;
    Fragment::new(
        "timeline",
        &TimelineFragment {
            job: &snapshot.view.name,
            cause,
            cause_shown_above: told_above,
            entries: moments,
            more,
            is_truncated: cut,
        },
    )
}

#[derive(Template)]
#[template(path = "timeline.html")]
struct TimelinePage {
    page: PageFrame,
    job: JobName,
    task: Option<i32>,
    tasks: usize,
}

/// The query parameters of the page.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct TimelinePageQuery {
    /// The task to which the timeline is limited.
    pub task: String,
}

impl TimelinePageQuery {
    fn task(&self) -> Option<TaskId> {
        self.task.trim().parse().ok().map(TaskId)
    }
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    which: &TimelinePageQuery,
) -> Result<Vec<Fragment>, Problem> {
    Ok(vec![super::job::render_head_fragment(snapshot)?, render_fragment(snapshot, true, which.task())?])
}

/// Serves `GET /jobs/{job}/timeline`.
pub(super) async fn show_timeline_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<TimelinePageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_by_path(&site, &job)?;
    let (now, tasks) = (snapshot.captured_at(), snapshot.task_count());
    let (parts, task) = (render_fragments(&snapshot, &which)?, which.task().map(|task| task.0));
    let title = format!("Timeline of {}", job.name);
    let live = LivePage::Timeline(which);
    let page = PageFrame::for_job_snapshot(user, NavEntry::Timeline, title, &snapshot, &live, parts);
    render_page(&TimelinePage { page, job: job.name, task, tasks }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(kind: &'static str, task: i32, tone: &'static str, role: CausalRole) -> TimelineEntry {
        let (at, run) = (Timestamp(task.unsigned_abs().into()), RunNumber(1));
        let (tasks, text, shared) = (vec![TaskId(task)], kind.into(), Some(kind.into()));
        let (is_trouble, latest) = (tone == "bad", None);
        TimelineEntry {
            at,
            last_at: at,
            run,
            kind,
            role,
            tone,
            is_trouble,
            tasks,
            text,
            latest,
            merge_key: shared,
        }
    }

    fn failed(timelines: &Timelines, at: u64, task: i32, class: FailureClass, reason: &str) {
        let what = EventKind::TaskFailed { task: TaskId(task), class };
        let (run, reason) = (RunNumber(1), reason.to_owned());
        timelines.on_event(&JobEvent { at: Timestamp(at), job: JobId(0), run, what, reason });
    }

    #[test]
    fn failures_are_one_line_only_where_they_have_one_cause() {
        let timelines = Timelines::default();
        failed(&timelines, 0, 1, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 900_000, 2, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 1_000_000, 3, FailureClass::HeartbeatTimeout, "no heartbeat for 100 s");
        failed(&timelines, 2_500_000, 4, FailureClass::HeartbeatTimeout, "no heartbeat for 101 s");
        failed(&timelines, 2_600_000, 5, FailureClass::Excluded, "its exclusion is told instead");
        let told: Vec<_> = timelines
            .timeline_of(JobId(0))
            .latest_first()
            .map(|m| (m.tasks_text(), m.text.clone()))
            .collect();
        let wanted = [
            ("task 4", "no heartbeat for 101 s"),
            ("task 3", "no heartbeat for 100 s"),
            ("2 tasks: 1–2", "the host is gone"),
        ];
        assert_eq!(told, wanted.map(|(whose, text)| (whose.to_owned(), text.to_owned())));
    }

    #[test]
    fn simultaneous_events_are_one_line_and_consequences_name_their_cause() {
        let mut happened = JobTimeline::default();
        for task in 0..3 {
            happened.add_or_merge(moment("task-connected", task, "calm", CausalRole::Plain));
        }
        happened.add_or_merge(moment("first-cause", 1, "bad", CausalRole::Cause));
        for task in 0..3 {
            happened.add_or_merge(moment("task-failed", task, "bad", CausalRole::Plain));
        }
        let told: Vec<_> = happened.latest_first().map(|m| (m.kind, m.role, m.tasks_text())).collect();
        assert_eq!(
            told,
            [
                ("task-failed", CausalRole::Consequence, "3 tasks: 0–2".to_owned()),
                ("first-cause", CausalRole::Cause, "task 1".to_owned()),
                ("task-connected", CausalRole::Plain, "3 tasks: 0–2".to_owned()),
            ]
        );
    }
}

//! Holds the timelines of jobs as an observer of the engine, and renders them with the first cause first.
//!
//! It does not store events (`engine` does). Begin at `Timelines`, then `show`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::snapshot::JobSnapshot;
use super::status::{barrier_name, grouped};
use super::{issues, links, status, times};
use crate::coordination::{
    BarrierCompletion, EventKind, FailureClass, JobEvent, JobId, JobName, RunNumber, RunOutcome, TaskId,
    Timestamp,
};
use crate::engine::Observer;
use crate::http::extract::{JobPath, QueryParams};
use crate::http::{AppState, Problem};

/// How many moments of a job are shown at most.
const MOMENTS_KEPT: usize = 400;
/// How many the page of the job shows.
const MOMENTS_SHORT: usize = 10;
/// How many ranges of tasks one moment names.
const RANGES_SHOWN: usize = 6;
/// What many tasks do one after the other is one moment if no two are further apart than this, in microseconds: where it is
/// no trouble, and where it is.
const MERGE_WITHIN_US: u64 = 60_000_000;
const MERGE_TROUBLE_WITHIN_US: u64 = 1_000_000;

/// What a moment is to the failure of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CausalRole {
    /// The error that the others came of.
    Cause,
    /// It came of the first cause.
    Consequence,
    /// Neither.
    Plain,
}

/// Something that happened, or that happened to many tasks at once.
#[derive(Debug, Clone)]
pub(super) struct TimelineEntry {
    pub at: Timestamp,
    last_at: Timestamp,
    pub run: RunNumber,
    pub kind: &'static str,
    pub role: CausalRole,
    pub tone: &'static str,
    /// What comes of a failure, if there was one before it.
    is_trouble: bool,
    pub tasks: Vec<TaskId>,
    pub text: String,
    /// The task that the text is about, where it is not about all of them.
    latest: Option<TaskId>,
    /// What it must share with a moment that it is told of together with; nothing if it stands alone.
    merge_key: Option<String>,
}

impl TimelineEntry {
    fn of(event: &JobEvent) -> Option<Self> {
        let tone = tone(&event.what)?;
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
            tasks: tasks(&event.what),
            text: text(event),
            latest: None,
            merge_key: shared(event),
        })
    }

    /// What kind of thing happened, in words.
    pub fn word(&self) -> String {
        self.kind.replace('-', " ")
    }

    /// The tasks that it is about, in few words.
    pub fn task_text(&self) -> String {
        match &self.tasks[..] {
            [] => String::new(),
            [one] => format!("task {one}"),
            many => {
                let mut sorted = many.to_vec();
                sorted.sort_unstable();
                format!("{} tasks: {}", grouped(many.len()), links::first_ranges(&sorted, RANGES_SHOWN))
            }
        }
    }

    /// Whom of several tasks the text is about.
    pub fn latest_text(&self) -> String {
        self.latest.map_or_else(String::new, |task| format!("latest, task {task}: "))
    }

    /// The task that it is about, if it is one.
    pub fn single_task(&self) -> Option<&TaskId> {
        if let [one] = &self.tasks[..] { Some(one) } else { None }
    }
}

/// Whether a change is worth a line, and its tone.
fn tone(what: &EventKind) -> Option<&'static str> {
    Some(match what {
        // The exclusion itself is told.
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

/// What many changes at one time have to share to be one moment: nothing more than their kind if they are no trouble, the
/// cause if they are. Others stand alone.
fn shared(event: &JobEvent) -> Option<String> {
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

/// Why it happened, and to what, where that is no task.
fn text(event: &JobEvent) -> String {
    let reason = crate::text::one_line(&event.reason);
    match &event.what {
        EventKind::BarrierFailed { barrier, counter } | EventKind::BarrierPassed { barrier, counter, .. } => {
            let used = if *counter > 0 { format!(" (use {counter})") } else { String::new() };
            format!("{}{used}: {reason}", barrier_name(barrier))
        }
        _ => reason.into_owned(),
    }
}

fn tasks(what: &EventKind) -> Vec<TaskId> {
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
        EventKind::BarrierPassed { without, .. } => without.clone(),
        _ => Vec::new(),
    }
}

/// What is known of the past of a job.
#[derive(Debug, Default, Clone)]
pub(super) struct JobTimeline {
    /// The latest last.
    entries: VecDeque<Arc<TimelineEntry>>,
    /// The run whose first cause has been seen.
    run_with_cause: Option<RunNumber>,
    /// Moments before the first were dropped.
    is_truncated: bool,
}

impl JobTimeline {
    fn push(&mut self, mut moment: TimelineEntry) {
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
            // What is said of several is true of all of them, or of the latest, which is named.
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

    /// What failed at the very moment of a first cause came of it, though it is told before it.
    fn mark_consequences_of(&mut self, cause: &TimelineEntry) {
        let with = self.entries.iter_mut().rev();
        for moment in with.take_while(|moment| moment.at == cause.at && moment.run == cause.run) {
            if moment.is_trouble && moment.tasks != cause.tasks {
                Arc::make_mut(moment).role = CausalRole::Consequence;
            }
        }
    }

    /// The latest moments first.
    pub fn latest(&self) -> impl Iterator<Item = &TimelineEntry> + Clone {
        self.entries.iter().rev().map(Arc::as_ref)
    }
}

/// What has happened in every job, told as it happens: however many barriers pass, it is not pushed out.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<HashMap<JobId, JobTimeline>>);

impl Timelines {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, JobTimeline>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has happened in a job.
    pub(super) fn of(&self, job: JobId) -> JobTimeline {
        self.lock().get(&job).cloned().unwrap_or_default()
    }
}

impl Observer for Timelines {
    fn event(&self, event: &JobEvent) {
        if matches!(event.what, EventKind::JobDeleted { .. }) {
            self.lock().remove(&event.job);
        } else if let Some(moment) = TimelineEntry::of(event) {
            self.lock().entry(event.job).or_default().push(moment);
        }
    }

    fn barrier_ended(&self, _ending: &BarrierCompletion) {}
}

#[derive(Template)]
#[template(path = "parts/timeline.html")]
struct TimelineFragment<'a> {
    job: &'a JobName,
    /// The first cause of the present run.
    cause: Option<FirstCauseRow>,
    /// The page has told it already.
    cause_shown_above: bool,
    entries: Vec<&'a TimelineEntry>,
    more: bool,
    /// What happened before is not kept.
    is_truncated: bool,
}

struct FirstCauseRow {
    at: Timestamp,
    task: Option<TaskId>,
    host: String,
    why: String,
    /// What clients were told, where those are other words.
    told: String,
    following: usize,
}

/// The timeline: a short one for the page of the job, or all that is known.
pub(super) fn fragment(
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
                .latest()
                .filter(following)
                .filter(about)
                .map(|moment| moment.tasks.len().max(1))
                .sum(),
        }
    });
    // On the page of the job it is the first of what needs a person, on that of its task the last error.
    let told_above = match only {
        None => !whole && issues::shows_first_cause(snapshot),
        Some(task) => !whole && run.first_cause.as_ref().is_some_and(|cause| cause.task == Some(task)),
    };
    let shown = snapshot.timeline.latest().filter(about);
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

/// Which moments are wanted.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TimelinePageQuery {
    /// Only those of this task.
    task: String,
}

/// `GET /jobs/{job}/timeline`
pub(super) async fn show(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<TimelinePageQuery>,
) -> Result<Response, Problem> {
    let task = which.task.trim().parse::<i32>().ok();
    let snapshot = JobSnapshot::of(&site, &job)?;
    let (now, tasks) = (snapshot.now(), snapshot.tasks());
    let query = task.map_or_else(String::new, |task| format!("&task={task}"));
    let parts = vec![super::job::head(&snapshot)?, fragment(&snapshot, true, task.map(TaskId))?];
    let title = format!("Timeline of {}", job.name);
    let query = format!("timeline{query}");
    let page = PageFrame::of_job_snapshot(user, NavEntry::Timeline, title, &snapshot, &query, parts);
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
        timelines.event(&JobEvent { at: Timestamp(at), job: JobId(0), run, what, reason });
    }

    #[test]
    fn failures_are_one_line_only_where_they_have_one_cause() {
        let timelines = Timelines::default();
        failed(&timelines, 0, 1, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 900_000, 2, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 1_000_000, 3, FailureClass::HeartbeatTimeout, "no heartbeat for 100 s");
        failed(&timelines, 2_500_000, 4, FailureClass::HeartbeatTimeout, "no heartbeat for 101 s");
        failed(&timelines, 2_600_000, 5, FailureClass::Excluded, "its exclusion is told instead");
        let told: Vec<_> = timelines.of(JobId(0)).latest().map(|m| (m.task_text(), m.text.clone())).collect();
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
            happened.push(moment("task-connected", task, "calm", CausalRole::Plain));
        }
        happened.push(moment("first-cause", 1, "bad", CausalRole::Cause));
        for task in 0..3 {
            happened.push(moment("task-failed", task, "bad", CausalRole::Plain));
        }
        let told: Vec<_> = happened.latest().map(|m| (m.kind, m.role, m.task_text())).collect();
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

//! Holds the timelines of jobs as an observer of the engine, and renders them with the first cause first.
//!
//! It does not store events (`engine` does). Begin at `Timelines`, then `show`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::look::{barrier_name, grouped};
use super::part::Part;
use super::scene::Scene;
use super::shell::{Guest, Page, Place, answer};
use super::{links, look, needs, times};
use crate::coordination::{
    BarrierEnding, Change, Event, FailureClass, JobId, JobName, RunNumber, RunOutcome, TaskId, Timestamp,
};
use crate::engine::Observer;
use crate::http::extract::{Job, Params};
use crate::http::{Problem, Site};

/// How many moments of a job are shown at most.
const MOMENTS_KEPT: usize = 400;
/// How many the page of the job shows.
const MOMENTS_SHORT: usize = 10;
/// How many ranges of tasks one moment names.
const RANGES_SHOWN: usize = 6;
/// What many tasks do one after the other is one moment if no two are further apart than this, in microseconds: where it is
/// no trouble, and where it is.
const CALM_US: u64 = 60_000_000;
const TROUBLE_US: u64 = 1_000_000;

/// What a moment is to the failure of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The error that the others came of.
    Cause,
    /// It came of the first cause.
    Following,
    /// Neither.
    Plain,
}

/// Something that happened, or that happened to many tasks at once.
#[derive(Debug, Clone)]
pub(super) struct Moment {
    pub at: Timestamp,
    last_at: Timestamp,
    pub run: RunNumber,
    pub kind: &'static str,
    pub role: Role,
    pub tone: &'static str,
    /// What comes of a failure, if there was one before it.
    is_trouble: bool,
    pub tasks: Vec<TaskId>,
    pub text: String,
    /// The task that the text is about, where it is not about all of them.
    latest: Option<TaskId>,
    /// What it must share with a moment that it is told of together with; nothing if it stands alone.
    shared: Option<String>,
}

impl Moment {
    fn of(event: &Event) -> Option<Self> {
        let tone = tone(&event.what)?;
        Some(Self {
            at: event.at,
            last_at: event.at,
            run: event.run,
            kind: event.what.kind(),
            role: if matches!(event.what, Change::FirstCause { .. }) { Role::Cause } else { Role::Plain },
            tone,
            is_trouble: tone == "bad" || matches!(event.what, Change::TaskSuspected { .. }),
            tasks: tasks(&event.what),
            text: text(event),
            latest: None,
            shared: shared(event),
        })
    }

    /// What kind of thing happened, in words.
    pub fn word(&self) -> String {
        self.kind.replace('-', " ")
    }

    /// The tasks that it is about, in few words.
    pub fn whose(&self) -> String {
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
    pub fn whom(&self) -> String {
        self.latest.map_or_else(String::new, |task| format!("latest, task {task}: "))
    }

    /// The task that it is about, if it is one.
    pub fn only(&self) -> Option<&TaskId> {
        if let [one] = &self.tasks[..] { Some(one) } else { None }
    }
}

/// Whether a change is worth a line, and its tone.
fn tone(what: &Change) -> Option<&'static str> {
    Some(match what {
        // The exclusion itself is told.
        Change::BarrierStarted { .. } | Change::TaskFailed { class: FailureClass::Excluded, .. } => {
            return None;
        }
        Change::BarrierPassed { without, .. } if without.is_empty() => return None,
        Change::FirstCause { .. } | Change::TaskFailed { .. } | Change::BarrierFailed { .. } => "bad",
        Change::RunEnded { outcome } if *outcome != RunOutcome::Completed => "bad",
        Change::TaskSuspected { .. }
        | Change::TaskSuperseded { .. }
        | Change::Fenced { .. }
        | Change::Excluded { .. }
        | Change::RegistrationRefused { .. }
        | Change::FindingOpened { .. }
        | Change::TransferFailed { .. }
        | Change::JobDeleted { .. } => "warn",
        Change::DrainRequested { .. } | Change::PreemptionNoticed | Change::BarrierPassed { .. } => "info",
        _ => "calm",
    })
}

/// What many changes at one time have to share to be one moment: nothing more than their kind if they are no trouble, the
/// cause if they are. Others stand alone.
fn shared(event: &Event) -> Option<String> {
    match &event.what {
        Change::TaskRegistering { .. }
        | Change::TaskConnected { .. }
        | Change::TaskDisconnected { .. }
        | Change::TaskReturned { .. } => Some(String::new()),
        Change::TaskFailed { class, .. } => Some(class.name().to_owned()),
        Change::TaskSuspected { .. } => Some("suspected".to_owned()),
        _ => None,
    }
}

/// Why it happened, and to what, where that is no task.
fn text(event: &Event) -> String {
    let reason = crate::text::one_line(&event.reason);
    match &event.what {
        Change::BarrierFailed { barrier, counter } | Change::BarrierPassed { barrier, counter, .. } => {
            let used = if *counter > 0 { format!(" (use {counter})") } else { String::new() };
            format!("{}{used}: {reason}", barrier_name(barrier))
        }
        _ => reason.into_owned(),
    }
}

fn tasks(what: &Change) -> Vec<TaskId> {
    match what {
        Change::TaskRegistering { task, .. }
        | Change::TaskConnected { task, .. }
        | Change::TaskSuperseded { task, .. }
        | Change::TaskSuspected { task }
        | Change::TaskReturned { task }
        | Change::TaskDisconnected { task }
        | Change::TaskFailed { task, .. }
        | Change::TransferFailed { task, .. }
        | Change::RegistrationRefused { task, .. } => vec![*task],
        Change::FirstCause { task } | Change::Fenced { task } => task.iter().copied().collect(),
        Change::Excluded { tasks, .. } | Change::FindingOpened { tasks, .. } => tasks.clone(),
        Change::BarrierPassed { without, .. } => without.clone(),
        _ => Vec::new(),
    }
}

/// What is known of the past of a job.
#[derive(Debug, Default, Clone)]
pub(super) struct Happened {
    /// The latest last.
    moments: VecDeque<Arc<Moment>>,
    /// The run whose first cause has been seen.
    caused: Option<RunNumber>,
    /// Moments before the first were dropped.
    cut: bool,
}

impl Happened {
    fn push(&mut self, mut moment: Moment) {
        if moment.role == Role::Cause {
            self.caused = Some(moment.run);
            self.mark_what_failed_with(&moment);
        } else if self.caused == Some(moment.run) && moment.is_trouble {
            moment.role = Role::Following;
        }
        if let Some(last) = self.moments.back_mut()
            && let Some(shared) = &moment.shared
            && last.shared.as_ref() == Some(shared)
            && (last.kind, last.run, last.role) == (moment.kind, moment.run, moment.role)
            && moment.at.0.saturating_sub(last.last_at.0)
                < if shared.is_empty() { CALM_US } else { TROUBLE_US }
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
        self.moments.push_back(Arc::new(moment));
        if self.moments.len() > MOMENTS_KEPT {
            self.moments.pop_front();
            self.cut = true;
        }
    }

    /// What failed at the very moment of a first cause came of it, though it is told before it.
    fn mark_what_failed_with(&mut self, cause: &Moment) {
        let with = self.moments.iter_mut().rev();
        for moment in with.take_while(|moment| moment.at == cause.at && moment.run == cause.run) {
            if moment.is_trouble && moment.tasks != cause.tasks {
                Arc::make_mut(moment).role = Role::Following;
            }
        }
    }

    /// The latest moments first.
    pub fn latest(&self) -> impl Iterator<Item = &Moment> + Clone {
        self.moments.iter().rev().map(Arc::as_ref)
    }
}

/// What has happened in every job, told as it happens: however many barriers pass, it is not pushed out.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<HashMap<JobId, Happened>>);

impl Timelines {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Happened>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has happened in a job.
    pub(super) fn of(&self, job: JobId) -> Happened {
        self.lock().get(&job).cloned().unwrap_or_default()
    }
}

impl Observer for Timelines {
    fn event(&self, event: &Event) {
        if matches!(event.what, Change::JobDeleted { .. }) {
            self.lock().remove(&event.job);
        } else if let Some(moment) = Moment::of(event) {
            self.lock().entry(event.job).or_default().push(moment);
        }
    }

    fn barrier_ended(&self, _ending: &BarrierEnding) {}
}

#[derive(Template)]
#[template(path = "parts/timeline.html")]
struct Timeline<'a> {
    job: &'a JobName,
    /// The first cause of the present run.
    cause: Option<Cause>,
    /// The page has told it already.
    told_above: bool,
    moments: Vec<&'a Moment>,
    more: bool,
    /// What happened before is not kept.
    cut: bool,
}

struct Cause {
    at: Timestamp,
    task: Option<TaskId>,
    host: String,
    why: String,
    /// What clients were told, where those are other words.
    told: String,
    following: usize,
}

/// The timeline: a short one for the page of the job, or all that is known.
pub(super) fn part(scene: &Scene, whole: bool, only: Option<TaskId>) -> Result<Part, Problem> {
    let run = &scene.view.run;
    let most = if whole { MOMENTS_KEPT } else { MOMENTS_SHORT };
    let about = |moment: &&Moment| only.is_none_or(|task| moment.tasks.contains(&task));
    let following = |moment: &&Moment| moment.role == Role::Following && moment.run == run.number;
    let cause = run.first_cause.as_ref().map(|cause| {
        let (why, told) = look::told(&cause.error, &cause.why);
        Cause {
            at: cause.at,
            task: cause.task,
            host: cause.task.map(|task| scene.named(task).host).unwrap_or_default(),
            why,
            told,
            following: scene
                .happened
                .latest()
                .filter(following)
                .filter(about)
                .map(|moment| moment.tasks.len().max(1))
                .sum(),
        }
    });
    // On the page of the job it is the first of what needs a person, on that of its task the last error.
    let told_above = match only {
        None => !whole && needs::tell_cause(scene),
        Some(task) => !whole && run.first_cause.as_ref().is_some_and(|cause| cause.task == Some(task)),
    };
    let shown = scene.happened.latest().filter(about);
    let more = !whole && shown.clone().nth(most).is_some();
    let moments: Vec<&Moment> = shown.take(most).collect();
    let cut = !more && scene.happened.cut;
    Part::new("timeline", &Timeline { job: &scene.view.name, cause, told_above, moments, more, cut })
}

#[derive(Template)]
#[template(path = "timeline.html")]
struct TimelinePage {
    page: Page,
    job: JobName,
    task: Option<i32>,
    tasks: usize,
}

/// Which moments are wanted.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    /// Only those of this task.
    task: String,
}

/// `GET /jobs/{job}/timeline`
pub(super) async fn show(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let task = which.task.trim().parse::<i32>().ok();
    let scene = Scene::of(&site, &job)?;
    let (now, tasks) = (scene.now(), scene.tasks());
    let query = task.map_or_else(String::new, |task| format!("&task={task}"));
    let parts = vec![super::job::head(&scene)?, part(&scene, true, task.map(TaskId))?];
    let title = format!("Timeline of {}", job.name);
    let query = format!("timeline{query}");
    let page = Page::of_scene(guest, Place::Timeline, title, &scene, &query, parts);
    answer(&TimelinePage { page, job: job.name, task, tasks }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(kind: &'static str, task: i32, tone: &'static str, role: Role) -> Moment {
        let (at, run) = (Timestamp(task.unsigned_abs().into()), RunNumber(1));
        let (tasks, text, shared) = (vec![TaskId(task)], kind.into(), Some(kind.into()));
        let (is_trouble, latest) = (tone == "bad", None);
        Moment { at, last_at: at, run, kind, role, tone, is_trouble, tasks, text, latest, shared }
    }

    fn failed(timelines: &Timelines, at: u64, task: i32, class: FailureClass, reason: &str) {
        let what = Change::TaskFailed { task: TaskId(task), class };
        let (run, reason) = (RunNumber(1), reason.to_owned());
        timelines.event(&Event { at: Timestamp(at), job: JobId(0), run, what, reason });
    }

    #[test]
    fn failures_are_one_line_only_where_they_have_one_cause() {
        let timelines = Timelines::default();
        failed(&timelines, 0, 1, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 900_000, 2, FailureClass::ConnectionLost, "the host is gone");
        failed(&timelines, 1_000_000, 3, FailureClass::HeartbeatTimeout, "no heartbeat for 100 s");
        failed(&timelines, 2_500_000, 4, FailureClass::HeartbeatTimeout, "no heartbeat for 101 s");
        failed(&timelines, 2_600_000, 5, FailureClass::Excluded, "its exclusion is told instead");
        let told: Vec<_> = timelines.of(JobId(0)).latest().map(|m| (m.whose(), m.text.clone())).collect();
        let wanted = [
            ("task 4", "no heartbeat for 101 s"),
            ("task 3", "no heartbeat for 100 s"),
            ("2 tasks: 1–2", "the host is gone"),
        ];
        assert_eq!(told, wanted.map(|(whose, text)| (whose.to_owned(), text.to_owned())));
    }

    #[test]
    fn what_many_do_at_once_is_one_line_and_what_follows_a_cause_says_so() {
        let mut happened = Happened::default();
        for task in 0..3 {
            happened.push(moment("task-connected", task, "calm", Role::Plain));
        }
        happened.push(moment("first-cause", 1, "bad", Role::Cause));
        for task in 0..3 {
            happened.push(moment("task-failed", task, "bad", Role::Plain));
        }
        let told: Vec<_> = happened.latest().map(|m| (m.kind, m.role, m.whose())).collect();
        assert_eq!(
            told,
            [
                ("task-failed", Role::Following, "3 tasks: 0–2".to_owned()),
                ("first-cause", Role::Cause, "task 1".to_owned()),
                ("task-connected", Role::Plain, "3 tasks: 0–2".to_owned()),
            ]
        );
    }
}

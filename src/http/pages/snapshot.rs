//! The snapshot of one job that all viewers of its pages share.
//!
//! It renders nothing. Begin at [`JobSnapshot::capture`], which copies the state once and checks the open findings against
//! that very copy.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::fragment::Fragment;
use super::issues::last_arrival;
use super::links::TaskLabel;
use super::status::{TaskStatus, barrier_name, key_name};
use super::timeline::JobTimeline;
use crate::coordination::{
    BarrierKind, BarrierView, JobId, JobView, LiveSetRequestView, TaskId, TaskIncarnations, TaskPhase,
    TaskView, Timestamp, heartbeat_overdue_by,
};
use crate::findings::{self, Finding};
use crate::http::extract::JobPath;
use crate::http::{AppState, Problem};
use crate::reports::ReportStore;

/// A job, as it was at one moment.
pub(super) struct JobSnapshot {
    pub id: JobId,
    /// Which lives of the tasks count.
    pub roster: TaskIncarnations,
    /// What the tasks report of their transfers: looked at by the pages that show it.
    pub reports: Arc<ReportStore>,
    pub view: JobView,
    pub findings: Vec<Finding>,
    pub timeline: JobTimeline,
    /// How each task looks, by its number.
    pub statuses: Vec<TaskStatus>,
    /// Since when the other tasks have waited for a task.
    awaited: HashMap<TaskId, Timestamp>,
    /// How many devices each task has published.
    devices: HashMap<TaskId, usize>,
    /// What has been made of it already: by page and query, for all who ask the same.
    made: Mutex<BTreeMap<String, Arc<Vec<Fragment>>>>,
}

impl JobSnapshot {
    /// Looks at a job.
    pub fn capture(site: &AppState, id: JobId) -> Option<Self> {
        // Findings are checked against the very state that the page shows.
        let found = site.findings.has_open(id);
        let (view, roster, seen) = site.engine.read(|core, now| {
            let seen = if found { core.observe(id, now) } else { None };
            Some((core.job_view(id, now)?, core.job(id)?.task_incarnations(), seen))
        })?;
        let hold = |seen| findings::hold(&site.engine, &site.transfers, &site.findings, &seen);
        let open = seen.map_or_else(Vec::new, hold);
        Some(Self::new(id, (view, roster), open, site.timelines.of(id), Arc::clone(&site.transfers)))
    }

    /// Looks at the job of a request.
    pub fn of(site: &AppState, job: &JobPath) -> Result<Self, Problem> {
        let seen = Self::capture(site, job.id);
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }

    pub fn new(
        id: JobId,
        (mut view, roster): (JobView, TaskIncarnations),
        open: Vec<Finding>,
        happened: JobTimeline,
        board: Arc<ReportStore>,
    ) -> Self {
        let questions = std::mem::take(&mut view.run.live_sets);
        view.run.barriers.extend(questions.into_iter().map(live_set_as_barrier));
        let awaited = awaited(&view);
        let look = |task: &TaskView| TaskStatus::of(task, awaited.get(&task.task).copied(), view.seen_at);
        let looks = view.run.tasks.iter().map(look).collect();
        let mut devices = HashMap::new();
        for device in &view.run.devices {
            *devices.entry(device.task).or_default() += 1;
        }
        Self {
            id,
            roster,
            reports: board,
            view,
            findings: open,
            timeline: happened,
            statuses: looks,
            awaited,
            devices,
            made: Mutex::default(),
        }
    }

    /// What was made of this scene under that name, or is made now.
    pub fn cached_parts(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<Vec<Fragment>, Problem>,
    ) -> Result<Arc<Vec<Fragment>>, Problem> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(parts) = made.get(name) {
            return Ok(Arc::clone(parts));
        }
        let parts = Arc::new(make()?);
        made.insert(name.to_owned(), Arc::clone(&parts));
        Ok(parts)
    }

    pub fn now(&self) -> Timestamp {
        self.view.seen_at
    }

    pub fn task(&self, id: TaskId) -> Option<&TaskView> {
        self.view.run.tasks.get(usize::try_from(id.0).ok()?)
    }

    pub fn status_of(&self, id: TaskId) -> TaskStatus {
        let look = usize::try_from(id.0).ok().and_then(|at| self.statuses.get(at));
        look.copied().unwrap_or(TaskStatus::Missing)
    }

    /// Since when a task has looked as it does: one that is awaited, since the others have been complete.
    pub fn since(&self, task: &TaskView) -> Timestamp {
        let awaited =
            self.awaited.get(&task.task).filter(|_| self.status_of(task.task) == TaskStatus::Awaited);
        awaited.copied().unwrap_or(task.since)
    }

    /// For how long a connected task has been silent, if its heartbeats are overdue.
    pub fn overdue(&self, task: &TaskView) -> Option<Duration> {
        let interval_us = task.pulse.as_ref().map_or(0, |pulse| pulse.interval_us);
        let timeout = self.view.settings.heartbeat_timeout;
        let connected = task.standing == TaskPhase::Connected;
        heartbeat_overdue_by(task.last_heartbeat.filter(|_| connected), interval_us, timeout, self.now())
    }

    /// The barrier in progress of this id and counter.
    pub fn barrier(&self, id: &str, counter: i64) -> Option<&BarrierView> {
        self.view.run.barriers.iter().find(|barrier| barrier.id == id && barrier.counter == counter)
    }

    /// How many tasks look so.
    pub fn count(&self, look: TaskStatus) -> usize {
        self.statuses.iter().filter(|one| **one == look).count()
    }

    /// Every look that a task has, with how many have it; what needs a person first comes first.
    pub fn counts(&self) -> Vec<(TaskStatus, usize)> {
        TaskStatus::ALL
            .into_iter()
            .map(|look| (look, self.count(look)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    pub fn devices_of(&self, task: TaskId) -> usize {
        self.devices.get(&task).copied().unwrap_or_default()
    }

    /// Whether a task is in trouble because its run had failed: it came of the first cause, and is none.
    pub fn is_consequence(&self, id: TaskId) -> bool {
        let trouble = matches!(self.status_of(id), TaskStatus::Failed | TaskStatus::Suspect);
        trouble && self.task(id).is_some_and(|task| self.view.run.is_consequence(task))
    }

    /// A task with where it is and what it does.
    pub fn task_label(&self, id: TaskId) -> TaskLabel {
        let task = self.task(id);
        let mut doing = task.map(|task| self.activity(task)).unwrap_or_default();
        if self.is_consequence(id) {
            doing.push_str(", following the first cause");
        }
        TaskLabel {
            task: id,
            host: task.map(host).unwrap_or_default(),
            status: self.status_of(id),
            activity: doing,
            heard: task.and_then(|task| task.last_heartbeat),
        }
    }

    /// What a task does, in a few words: beside what it should do, if others wait for it.
    fn activity(&self, task: &TaskView) -> String {
        if let Some(excluded) = &task.excluded {
            return format!("excluded: {}", excluded.reason);
        }
        let awaited = self.status_of(task.task) == TaskStatus::Awaited;
        match task.standing {
            TaskPhase::Missing if task.lives.is_empty() => "not registered".into(),
            TaskPhase::Missing => "not registered again".into(),
            TaskPhase::Registering => "registered, waits for the others".into(),
            TaskPhase::Disconnected => "shut down".into(),
            TaskPhase::Failed => "failed".into(),
            TaskPhase::Suspect => "connection lost".into(),
            TaskPhase::Connected if !task.waits_at.is_empty() => {
                let names: Vec<String> = task.waits_at.iter().map(|id| barrier_name(id)).collect();
                format!("waits at {}{}", names.join(", "), if awaited { " instead" } else { "" })
            }
            TaskPhase::Connected if !task.waits_for.is_empty() => {
                let keys: Vec<String> = task.waits_for.iter().map(|wait| key_name(&wait.key)).collect();
                format!("waits for {}, which no task has written", keys.join(", "))
            }
            TaskPhase::Connected if self.overdue(task).is_some() => {
                "connected, but its heartbeats are overdue".into()
            }
            TaskPhase::Connected if task.unsynced => "restarted, has not completed a barrier since".into(),
            TaskPhase::Connected if awaited => "connected, not at any barrier".into(),
            TaskPhase::Connected => match task.lives.len().saturating_sub(1) {
                0 => "connected".into(),
                1 => "connected, 1 restart in this run".into(),
                many => format!("connected, {many} restarts in this run"),
            },
        }
    }

    /// The barriers in progress, the longest waiting first.
    pub fn barriers(&self) -> Vec<&BarrierView> {
        let mut barriers: Vec<&BarrierView> = self.view.run.barriers.iter().collect();
        barriers.sort_by_key(|barrier| (barrier.since, barrier.counter));
        barriers
    }

    /// The number of tasks that the job has.
    pub fn tasks(&self) -> usize {
        self.view.run.tasks.len()
    }
}

/// A live-set question as what it is for those who wait: a barrier of the live tasks.
fn live_set_as_barrier(of: LiveSetRequestView) -> BarrierView {
    BarrierView {
        id: "live-set question".to_owned(),
        counter: 0,
        kind: BarrierKind::LiveSet,
        members: of.arrived + of.missing.len(),
        arrived: of.arrived,
        missing: of.missing,
        first: of.first,
        since: of.since,
        deadline: Timestamp(u64::MAX),
        arrivals: vec![of.last],
    }
}

/// Since when the others have been complete but for each task that they wait for.
fn awaited(view: &JobView) -> HashMap<TaskId, Timestamp> {
    let mut awaited: HashMap<TaskId, Timestamp> = HashMap::new();
    for barrier in view.run.barriers.iter().filter(|barrier| barrier.kind != BarrierKind::Registration) {
        let last = last_arrival(barrier);
        for task in &barrier.missing {
            let since = awaited.entry(*task).or_insert(last);
            *since = last.min(*since);
        }
    }
    awaited
}

/// Where a task is, or was last.
pub(super) fn host(task: &TaskView) -> String {
    task.lives.iter().find_map(|life| life.peer).map(|peer| peer.to_string()).unwrap_or_default()
}

//! The snapshot of one job that all viewers of its pages share.
//!
//! [`JobSnapshot::capture`] copies the state once, and keeps those open findings whose condition holds in this
//! copy. Begin at [`JobSnapshot::capture`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::fragment::Fragment;
use super::links::{JobPages, TaskLabel};
use super::status::{TaskStatus, awaited_key_text, barrier_display_name};
use crate::coordination::{
    BarrierKind, BarrierRecordWithArrivals, BarrierView, Coordinator, HostAssignment, HostView, JobId,
    JobName, JobView, LiveSetRequestView, RunNumber, RunSummary, TaskId, TaskIncarnations, TaskPhase,
    TaskView, Timestamp, silence_if_heartbeat_overdue,
};
use crate::http::extractors::{JobPath, no_such_run};
use crate::http::page_times::PageClock;
use crate::http::{AppState, Problem};
use crate::service::findings::{self, Finding};
use crate::service::reports::TransferReportStore;
use crate::service::stacks::{StackCollector, StacksView};
use crate::service::{JobTimeline, RunStateHistory, RunStates};

/// The maximum number of awaited tasks whose stacks are shown beside them.
const STACK_PLACES_MAX: usize = 64;

/// The parts of a job's state that a snapshot copies.
pub(super) struct CapturedState {
    view: JobView,
    roster: TaskIncarnations,
    hosts: Vec<HostView>,
    host_assignment: HostAssignment,
}

impl CapturedState {
    /// Copies the state of a job; `None` if it does not exist.
    pub fn capture(core: &Coordinator, id: JobId, now: Timestamp) -> Option<Self> {
        let job = core.job(id)?;
        let (view, hosts, host_assignment) = job.view_with_hosts(now);
        Some(Self { view, roster: job.task_incarnations(), hosts, host_assignment })
    }

    pub fn run(&self) -> RunNumber {
        self.view.run.number
    }
}

/// The records of a job by the engine's observers.
pub(super) struct JobRecords {
    pub timeline: JobTimeline,
    /// The latest ended barriers, the newest first.
    pub ended_barriers: Vec<Arc<BarrierRecordWithArrivals>>,
    /// The changes of tasks in the run.
    pub state_history: RunStateHistory,
    /// The transfer reports, which the pages that show them read.
    pub reports: Arc<TransferReportStore>,
}

/// The state of a job at one moment: in its present run, or at the end of an earlier one.
pub(super) struct JobSnapshot {
    pub id: JobId,
    /// The pages that show it.
    pub pages: JobPages,
    /// The time of the page. The time of the state is [`JobSnapshot::captured_at`], which is the end of an ended run.
    page_time: Timestamp,
    /// The summary of the run, if the next one has opened.
    pub past: Option<RunSummary>,
    /// The present incarnations of the tasks.
    pub roster: TaskIncarnations,
    /// The hosts of the present run, in the order of their first task.
    pub hosts: Vec<HostView>,
    /// The host of each task.
    pub host_assignment: HostAssignment,
    pub records: JobRecords,
    /// The requests for stacks, which the pages that show them read.
    pub stacks: Arc<StackCollector>,
    pub view: JobView,
    pub findings: Vec<Finding>,
    /// The status of each task, by task number.
    pub statuses: Vec<TaskStatus>,
    /// The time since which others have waited for a task.
    awaited: HashMap<TaskId, Timestamp>,
    /// Where the main threads of awaited tasks were, by the latest stacks of the present run.
    stack_places: BTreeMap<TaskId, String>,
    /// The number of devices that each task has published.
    devices: HashMap<TaskId, usize>,
    /// The fragments rendered so far, by page and query, shared by all viewers.
    made: Mutex<BTreeMap<String, Arc<Vec<Fragment>>>>,
}

impl JobSnapshot {
    /// Takes a snapshot of a job; `None` if it does not exist.
    pub fn capture(site: &AppState, id: JobId) -> Option<Self> {
        // Findings are checked against the state that the page shows.
        let found = site.findings.has_open_findings(id);
        let (state, seen) = site.engine.read(|core, now| {
            let seen = if found { core.observe_job(id, now) } else { None };
            Some((CapturedState::capture(core, id, now)?, seen))
        })?;
        let hold = |seen| {
            findings::open_findings_that_hold(&site.engine, &site.worker_reports(), &site.findings, &seen)
        };
        let open = seen.map_or_else(Vec::new, hold);
        let records = JobRecords {
            timeline: site.timelines.timeline_of(id),
            ended_barriers: site.barriers.latest_of_run(id, state.run()),
            state_history: site.states.of_run(id, state.run()),
            reports: Arc::clone(&site.transfers),
        };
        Some(Self::new(id, state, open, records).with_stacks(Arc::clone(&site.stacks)))
    }

    /// Takes a snapshot of the job of a request.
    pub fn capture_for_request(site: &AppState, job: &JobPath) -> Result<Self, Problem> {
        let seen = Self::capture(site, job.id);
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }

    /// Takes a snapshot of the job of a request in the run that its address names, or else in the present run. The snapshot
    /// of a run has no findings, because findings are about the present.
    pub fn capture_in_run(site: &AppState, job: &JobPath, run: Option<RunNumber>) -> Result<Self, Problem> {
        let Some(run) = run else { return Self::capture_for_request(site, job) };
        let id = job.id;
        let captured = site.engine.read(|core, now| {
            let in_run = core.job(id)?.in_run(run)?;
            let (view, hosts, host_assignment) = in_run.view_with_hosts(now);
            let roster = in_run.reader().task_incarnations();
            Some((CapturedState { view, roster, hosts, host_assignment }, in_run.past().cloned(), now))
        });
        let (state, past, now) = captured.ok_or_else(|| no_such_run(job, run))?;
        let records = JobRecords {
            timeline: site.timelines.timeline_of(id).of_run(run),
            ended_barriers: site.barriers.latest_of_run(id, run),
            state_history: site.states.of_run(id, run),
            reports: Arc::clone(&site.transfers),
        };
        let pages = JobPages { name: job.name.clone(), run: Some(run) };
        Ok(Self { pages, page_time: now, past, ..Self::new(id, state, Vec::new(), records) })
    }

    pub fn new(id: JobId, state: CapturedState, open: Vec<Finding>, records: JobRecords) -> Self {
        let CapturedState { mut view, roster, hosts, host_assignment } = state;
        let questions = std::mem::take(&mut view.run.live_sets);
        view.run.barriers.extend(questions.into_iter().map(live_set_as_barrier));
        let awaited = awaited_since_by_task(&view);
        let look =
            |task: &TaskView| TaskStatus::of_task(task, awaited.get(&task.task).copied(), view.seen_at);
        let looks = view.run.tasks.iter().map(look).collect();
        let mut devices = HashMap::new();
        for device in view.run.devices.iter() {
            *devices.entry(device.task).or_default() += 1;
        }
        Self {
            id,
            pages: JobPages { name: view.name.clone(), run: None },
            page_time: view.seen_at,
            past: None,
            roster,
            hosts,
            host_assignment,
            records,
            stacks: Arc::default(),
            stack_places: BTreeMap::new(),
            view,
            findings: open,
            statuses: looks,
            awaited,
            devices,
            made: Mutex::default(),
        }
    }

    /// Adds the stacks, and where the tasks are for which others wait.
    fn with_stacks(self, stacks: Arc<StackCollector>) -> Self {
        let mut awaited: BTreeMap<TaskId, Timestamp> =
            self.awaited.iter().map(|(task, at)| (*task, *at)).collect();
        while awaited.len() > STACK_PLACES_MAX && awaited.pop_last().is_some() {}
        let stack_places = stacks.places_of(self.id, &self.roster, &awaited);
        Self { stacks, stack_places, ..self }
    }

    /// Returns the latest request for stacks, with the first groups of main threads and of others.
    pub fn stacks_view(&self, most: usize) -> StacksView {
        self.stacks.view(self.id, &self.roster, self.captured_at(), None, most)
    }

    /// Returns the fragments under this name, and renders them if they are not cached.
    pub fn cached_or_rendered_fragments(
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

    /// Returns the moment as of which the texts of its pages are written.
    pub fn page_clock(&self) -> PageClock {
        PageClock { now: self.page_time, run_ended_at: self.past.as_ref().map(|past| past.ended_at) }
    }

    /// Returns the time of the state.
    pub fn captured_at(&self) -> Timestamp {
        self.view.seen_at
    }

    pub fn job_name(&self) -> &JobName {
        &self.pages.name
    }

    /// Returns the states of the tasks over the run.
    pub fn run_states(&self) -> RunStates {
        let run = &self.view.run;
        let phases: Vec<_> = run.tasks.iter().map(|task| (task.standing, task.since)).collect();
        let interval = (run.opened_at, run.ended_at);
        RunStates::new(&self.records.state_history, run.number, &phases, interval, self.captured_at())
    }

    pub fn find_task(&self, id: TaskId) -> Option<&TaskView> {
        self.view.run.tasks.get(usize::try_from(id.0).ok()?)
    }

    pub fn status_of(&self, id: TaskId) -> TaskStatus {
        let look = usize::try_from(id.0).ok().and_then(|at| self.statuses.get(at));
        look.copied().unwrap_or(TaskStatus::Missing)
    }

    /// Returns the time since which a task has had its status. For an awaited task that is the time since
    /// which all others have been complete.
    pub fn status_since(&self, task: &TaskView) -> Timestamp {
        let awaited =
            self.awaited.get(&task.task).filter(|_| self.status_of(task.task) == TaskStatus::Awaited);
        awaited.copied().unwrap_or(task.since)
    }

    /// Returns the time since the last heartbeat of a connected task, if its next one is overdue.
    pub fn silence_if_heartbeat_overdue(&self, task: &TaskView) -> Option<Duration> {
        let is_connected = task.standing == TaskPhase::Connected;
        let timeout = self.view.settings.heartbeat_timeout;
        let last = task.last_heartbeat.filter(|_| is_connected);
        silence_if_heartbeat_overdue(last, heartbeat_interval_us(task), timeout, self.captured_at())
    }

    /// Returns the barrier in progress with this id and counter.
    pub fn find_barrier(&self, id: &str, counter: i64) -> Option<&BarrierView> {
        self.view.run.barriers.iter().find(|barrier| barrier.id == id && barrier.counter == counter)
    }

    /// Returns each status with its number of tasks, the most urgent first.
    pub fn status_counts(&self) -> Vec<(TaskStatus, usize)> {
        count_statuses(self.statuses.iter().copied())
    }

    /// Returns each status of these tasks with its number of tasks, the most urgent first.
    pub fn status_counts_of(&self, tasks: &[TaskId]) -> Vec<(TaskStatus, usize)> {
        count_statuses(tasks.iter().map(|task| self.status_of(*task)))
    }

    pub fn device_count_of(&self, task: TaskId) -> usize {
        self.devices.get(&task).copied().unwrap_or_default()
    }

    /// Returns whether a task failed because its run had failed, so that it is a consequence of the first
    /// cause.
    pub fn is_consequence(&self, id: TaskId) -> bool {
        let trouble = matches!(self.status_of(id), TaskStatus::Failed | TaskStatus::Suspect);
        trouble && self.find_task(id).is_some_and(|task| self.view.run.is_consequence_of_first_cause(task))
    }

    /// Returns a task with its host and its activity.
    pub fn task_label(&self, id: TaskId) -> TaskLabel {
        let task = self.find_task(id);
        let mut doing = task.map(|task| self.task_activity_text(task)).unwrap_or_default();
        if self.is_consequence(id) {
            doing.push_str(", following the first cause");
        }
        if let Some(place) = self.stack_places.get(&id) {
            doing.push_str("; its stack: ");
            doing.push_str(place);
        }
        TaskLabel {
            task: id,
            address: task.map(task_address_text).unwrap_or_default(),
            host: task.and_then(|task| task.host.clone()),
            status: self.status_of(id),
            activity: doing,
            heard: task.and_then(|task| task.last_heartbeat),
            heartbeat_interval_us: task.map_or(0, heartbeat_interval_us),
        }
    }

    /// Returns the activity of a task in a few words, with what it should do if others wait for it.
    fn task_activity_text(&self, task: &TaskView) -> String {
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
                let names: Vec<String> = task.waits_at.iter().map(|id| barrier_display_name(id)).collect();
                format!("waits at {}{}", names.join(", "), if awaited { " instead" } else { "" })
            }
            TaskPhase::Connected if !task.waits_for.is_empty() => {
                let keys: Vec<String> =
                    task.waits_for.iter().map(|wait| awaited_key_text(&wait.key)).collect();
                format!("waits for {}, which no task has written", keys.join(", "))
            }
            TaskPhase::Connected if self.silence_if_heartbeat_overdue(task).is_some() => {
                "connected, but its heartbeats are overdue".into()
            }
            TaskPhase::Connected if task.unsynced => "restarted, has not completed a barrier since".into(),
            TaskPhase::Connected if awaited => "connected, not at any barrier".into(),
            TaskPhase::Connected => match task.lives.len().saturating_sub(1) {
                0 => "connected".into(),
                restarts => {
                    let may_have_more = restarts >= self.view.settings.bounds.incarnations_kept;
                    let restarts = findings::restart_count_text(restarts, may_have_more);
                    format!("connected, {restarts} in this run")
                }
            },
        }
    }

    /// Returns the barriers in progress, the longest waiting first.
    pub fn barriers_in_progress(&self) -> Vec<&BarrierView> {
        let mut barriers: Vec<&BarrierView> = self.view.run.barriers.iter().collect();
        barriers.sort_by_key(|barrier| (barrier.since, barrier.counter));
        barriers
    }

    /// Returns the latest run before the one of the snapshot.
    pub fn previous_run(&self) -> Option<&RunSummary> {
        // The newest comes first.
        self.view.history.iter().find(|run| run.number < self.view.run.number)
    }

    /// Returns the number of tasks of the job.
    pub fn task_count(&self) -> usize {
        self.view.run.tasks.len()
    }
}

/// Returns each status that occurs with its number, the most urgent first.
fn count_statuses(statuses: impl Iterator<Item = TaskStatus>) -> Vec<(TaskStatus, usize)> {
    let mut counts: BTreeMap<TaskStatus, usize> = BTreeMap::new();
    for status in statuses {
        *counts.entry(status).or_default() += 1;
    }
    counts.into_iter().collect()
}

/// Returns a live-set request as a barrier of the live tasks, which it is for its callers.
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

/// Returns, for each awaited task, the time since which all others have waited.
fn awaited_since_by_task(view: &JobView) -> HashMap<TaskId, Timestamp> {
    let mut awaited: HashMap<TaskId, Timestamp> = HashMap::new();
    for barrier in view.run.barriers.iter().filter(|barrier| barrier.kind != BarrierKind::Registration) {
        let last = last_arrival_time(barrier);
        for task in &barrier.missing {
            let since = awaited.entry(*task).or_insert(last);
            *since = last.min(*since);
        }
    }
    awaited
}

/// Returns the time of the latest arrival at a barrier.
pub(super) fn last_arrival_time(barrier: &BarrierView) -> Timestamp {
    barrier.arrivals.last().map_or(barrier.since, |arrival| arrival.at)
}

/// Returns the usual interval between the heartbeats of a task in microseconds; 0 if it is not known.
pub(super) fn heartbeat_interval_us(task: &TaskView) -> u64 {
    task.pulse.as_ref().map_or(0, |pulse| pulse.interval_us)
}

/// Returns the present or last address of a task.
pub(super) fn task_address_text(task: &TaskView) -> String {
    task.lives.iter().find_map(|life| life.peer).map(|peer| peer.to_string()).unwrap_or_default()
}

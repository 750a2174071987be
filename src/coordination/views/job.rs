//! Read access to one job. A reader requests the whole job or one part of it, and only the requested part is
//! computed.
//!
//! Begin at [`JobReader`].

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::barrier::BarrierView;
use super::device_comparison::{self, DeviceComparison};
use super::devices::decode_topology;
use super::exclusion::ExclusionView;
use super::host_assignment::HostAssignment;
use super::preemption::PreemptionView;
use super::run::{LiveTask, LiveTasksView, RunListItem, RunView};
use super::store::{KeyEntry, StoredValue};
use super::task::TaskView;
use crate::coordination::barrier_record::BarrierRecord;
use crate::coordination::coordinator::Coordinator;
use crate::coordination::event::FirstCause;
use crate::coordination::ids::{JobId, JobName, RunNumber, TaskId, TaskIncarnation, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::key_value_store::normalise_key;
use crate::coordination::past_runs::PastRun;
use crate::coordination::run_state::{RunState, RunSummary};
use crate::coordination::settings::JobSettings;
use crate::coordination::task::Task;
use crate::coordination::topology::{Device, TopologyKey, TopologyValues};

/// A job and its present run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobView {
    /// The job's name.
    pub name: JobName,
    /// Its settings.
    pub settings: JobSettings,
    /// The time of the view.
    pub seen_at: Timestamp,
    /// The present run; one that has ended stays until the next opens.
    pub run: RunView,
    /// Earlier runs, newest first.
    pub history: Vec<RunSummary>,
    /// The exclusions in force, by number.
    #[serde(default)]
    pub exclusions: Vec<ExclusionView>,
}

/// The summary of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSummary {
    /// Its name.
    pub name: JobName,
    /// The number of tasks of its present run.
    pub tasks: usize,
    /// Whether its tasks may fail and return.
    pub recoverable: bool,
    /// Its present run.
    pub run: RunNumber,
    /// The state of the present run.
    pub state: RunState,
    /// The number of live tasks: connected or suspect, and not excluded.
    pub live: usize,
    /// The number of exclusions in force.
    #[serde(default)]
    pub exclusions: usize,
    /// The first error of the present run.
    pub first_cause: Option<FirstCause>,
}

/// The present incarnations of a job's tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskIncarnations {
    /// The run.
    pub run: RunNumber,
    /// The connected incarnation, if any, by task.
    pub incarnations: Vec<Option<TaskIncarnation>>,
}

impl TaskIncarnations {
    /// Returns the present incarnation of a task.
    #[must_use]
    pub fn incarnation_of(&self, task: TaskId) -> Option<TaskIncarnation> {
        *self.incarnations.get(usize::try_from(task.0).ok()?)?
    }
}

/// The present incarnation of one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CurrentIncarnation {
    /// The run.
    pub run: RunNumber,
    /// The time at which the run opened.
    pub opened_at: Timestamp,
    /// The number of tasks of the run.
    pub tasks: usize,
    /// The connected incarnation, if any.
    pub incarnation: Option<TaskIncarnation>,
}

/// Read access to one job.
#[derive(Clone, Copy)]
pub struct JobReader<'a> {
    job: &'a Job,
}

impl Coordinator {
    /// Returns read access to a job.
    #[must_use]
    pub fn job(&self, job: JobId) -> Option<JobReader<'_>> {
        Some(JobReader { job: self.job_state(job)? })
    }

    /// Returns the view of a job.
    #[must_use]
    pub fn job_view(&self, job: JobId, now: Timestamp) -> Option<JobView> {
        let job = self.job(job)?;
        Some(job.view_on_hosts(now, &job.job_state().assign_hosts()))
    }
}

/// The number of ended runs that are listed with their devices.
const RUNS_LISTED_WITH_DEVICES: usize = 2;

/// Returns the ended runs, newest first, the newest ones with their devices.
fn past_runs_with_devices(job: &Job) -> impl Iterator<Item = RunSummary> {
    let decode = |(place, past): (usize, &PastRun)| {
        let devices = match place {
            0..RUNS_LISTED_WITH_DEVICES => decode_topology(&past.topology),
            _ => Vec::new(),
        };
        RunSummary { devices, ..past.summary.clone() }
    };
    job.past.iter().enumerate().map(decode)
}

/// Returns whether topology values tell of devices.
fn has_devices(topology: &TopologyValues) -> bool {
    topology.values().any(|it| !matches!(it.key, TopologyKey::Identity { .. }))
}

impl<'a> JobReader<'a> {
    /// Returns read access to the state of a job.
    pub(super) fn of_state(job: &'a Job) -> Self {
        Self { job }
    }

    /// Returns the state of the job.
    pub(super) fn job_state(&self) -> &'a Job {
        self.job
    }
}

impl JobReader<'_> {
    /// Returns the view of the job, whose tasks are on these hosts.
    pub(super) fn view_on_hosts(&self, now: Timestamp, assigned: &HostAssignment) -> JobView {
        let job = self.job;
        JobView {
            name: job.name.clone(),
            settings: job.settings.clone(),
            seen_at: now,
            run: job.run_view_with_hosts(assigned),
            history: past_runs_with_devices(job).collect(),
            exclusions: job.exclusion_views(false),
        }
    }

    /// Returns the summary of the job.
    #[must_use]
    pub fn summary(&self) -> JobSummary {
        let Job { name, settings, run, exclusions, .. } = self.job;
        JobSummary {
            name: name.clone(),
            tasks: run.tasks.len(),
            recoverable: settings.recoverable,
            run: run.number,
            state: run.state(),
            live: run.connected_tasks,
            exclusions: exclusions.len(),
            first_cause: run.first_cause.clone(),
        }
    }

    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &JobSettings {
        &self.job.settings
    }

    /// Returns the number of exclusions in force.
    #[must_use]
    pub fn exclusions_in_force_count(&self) -> usize {
        self.job.exclusions.len()
    }

    /// Returns the exclusions in force, by number, then the ended ones, newest end first.
    #[must_use]
    pub fn exclusions(&self) -> Vec<ExclusionView> {
        self.job.exclusion_views(true)
    }

    /// Returns every known run, the present one first.
    #[must_use]
    pub fn runs(&self) -> Vec<RunListItem> {
        let past = self.job.past_runs().map(RunSummary::list_item);
        std::iter::once(self.job.run.list_item()).chain(past).collect()
    }

    /// Returns the number of the present run, the time at which it opened, and the time at which it ended.
    #[must_use]
    pub fn run_interval(&self) -> (RunNumber, Timestamp, Option<Timestamp>) {
        let run = &self.job.run;
        (run.number, run.opened_at, run.ended.map(|(_, at)| at))
    }

    /// Returns the hosts of the present run with the host of each task.
    #[must_use]
    pub fn task_hosts(&self) -> HostAssignment {
        self.job.assign_hosts()
    }

    /// Returns the latest ended barriers of the present run, the newest first.
    #[must_use]
    pub fn recent_barriers(&self) -> Vec<BarrierRecord> {
        self.job.run.recent.iter().rev().cloned().collect()
    }

    /// Returns every task of the present run.
    #[must_use]
    pub fn tasks(&self) -> Vec<TaskView> {
        self.job.task_views()
    }

    /// Returns the present incarnations of the tasks.
    #[must_use]
    pub fn task_incarnations(&self) -> TaskIncarnations {
        let run = &self.job.run;
        let connected = |task: &Task| task.incarnation.filter(|_| task.is_connected());
        TaskIncarnations { run: run.number, incarnations: run.tasks.iter().map(connected).collect() }
    }

    /// Returns the number of tasks of the present run.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.job.run.tasks.len()
    }

    /// Returns the present incarnation of a task.
    #[must_use]
    pub fn current_incarnation(&self, task: TaskId) -> CurrentIncarnation {
        let run = &self.job.run;
        CurrentIncarnation {
            run: run.number,
            opened_at: run.opened_at,
            tasks: run.tasks.len(),
            incarnation: run.task(task).filter(|task| task.is_connected()).and_then(|task| task.incarnation),
        }
    }

    /// Returns one task of the present run, with its gaps over time.
    #[must_use]
    pub fn task(&self, task: TaskId) -> Option<TaskView> {
        self.job.task_view(task)
    }

    /// Returns the barriers in progress.
    #[must_use]
    pub fn barriers(&self) -> Vec<BarrierView> {
        self.job.run.barrier_views()
    }

    /// Returns the live set.
    #[must_use]
    pub fn live_tasks(&self) -> LiveTasksView {
        let run = &self.job.run;
        let live = run.task_ids().filter(|id| run.expect_task(*id).is_connected()).map(|id| {
            let task = run.expect_task(id);
            let incarnation = task.incarnation.map(|i| i.to_string()).unwrap_or_default();
            LiveTask { task: id, incarnation, peer: task.peer }
        });
        LiveTasksView {
            run: run.number,
            version: run.version,
            tasks: live.collect(),
            questions: run.live_set_views(),
        }
    }

    /// Returns the devices that the tasks of the present run have published.
    #[must_use]
    pub fn devices(&self) -> Arc<Vec<Device>> {
        self.job.run.devices()
    }

    /// Returns the devices of a run beside those of an earlier one: by default of the present run, beside the last run
    /// that had some. Returns `None` if a run is named whose devices are not known.
    #[must_use]
    pub fn compare_devices(
        &self,
        run: Option<RunNumber>,
        before: Option<RunNumber>,
    ) -> Option<DeviceComparison> {
        let runs = self.runs_with_devices();
        let run = run.unwrap_or(self.job.run.number);
        let before = match before {
            Some(before) if before >= run => return None,
            Some(before) => Some(before),
            None => runs.iter().copied().find(|number| *number < run),
        };
        let old = before.map_or_else(|| Some(Arc::default()), |before| self.devices_of_run(before))?;
        let places = device_comparison::match_devices(&old, &self.devices_of_run(run)?);
        Some(DeviceComparison { run, previous: before, runs, places })
    }

    /// Returns the present run, and the ended ones whose devices are known, newest first.
    #[must_use]
    pub fn runs_with_devices(&self) -> Vec<RunNumber> {
        let ended = self.job.past.iter().filter(|past| has_devices(&past.topology));
        std::iter::once(self.job.run.number).chain(ended.map(|past| past.summary.number)).collect()
    }

    /// Returns the devices of a run; `None` if they are not known.
    fn devices_of_run(&self, run: RunNumber) -> Option<Arc<Vec<Device>>> {
        if run == self.job.run.number {
            return Some(self.devices());
        }
        let past = self.job.past.find(run)?;
        has_devices(&past.topology).then(|| Arc::new(decode_topology(&past.topology)))
    }

    /// Returns the coordinated save of the present run, once one was requested.
    #[must_use]
    pub fn preemption(&self) -> Option<PreemptionView> {
        self.job.run.preemption()
    }

    /// Returns the entries below a directory, in byte order: its direct children, or every key of the whole
    /// tree. Returns at most `limit` entries, after the entry `after`; the empty directory is the root.
    #[must_use]
    pub fn list_keys(&self, directory: &[u8], after: &[u8], whole_tree: bool, limit: usize) -> Vec<KeyEntry> {
        self.job.run.store.list_entries(directory, after, whole_tree, limit)
    }

    /// Returns one value.
    #[must_use]
    pub fn stored_value(&self, key: &[u8]) -> Option<StoredValue> {
        let entry = self.job.run.store.get(key)?;
        let key = Bytes::from(normalise_key(key).into_owned());
        Some(StoredValue { key, value: entry.value.clone(), written_at: entry.at, written_by: entry.by })
    }
}

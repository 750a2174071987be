//! Read access to one job, part by part, so that a reader pays only for what it asks for.
//!
//! The parts are made in `view_builder.rs`. Begin at [`JobReader`].

use bytes::Bytes;

use super::barrier_record::BarrierRecord;
use super::coordinator::Coordinator;
use super::device_map::{self, DeviceMap};
use super::devices::Device;
use super::ids::{JobId, RunNumber, TaskId, TaskIncarnation, Timestamp};
use super::job::Job;
use super::settings::JobSettings;
use super::store::normalise;
use super::task::Task;
use super::view::{
    BarrierView, ExclusionView, JobSummary, KeyEntry, LiveTask, LiveTasksView, PreemptionView, RunListItem,
    RunSummary, StoredValue, TaskView,
};

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
}

impl JobReader<'_> {
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
    pub fn exclusions_in_force(&self) -> usize {
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
        let past = self.job.past_runs().map(RunSummary::line);
        std::iter::once(self.job.run.line()).chain(past).collect()
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
    pub fn live(&self) -> LiveTasksView {
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
    pub fn devices(&self) -> Vec<Device> {
        self.job.run.devices()
    }

    /// Returns the present run's devices beside those of the last run that had some.
    #[must_use]
    pub fn device_map(&self) -> DeviceMap {
        let previous = self.job.past_runs_with_devices().find(|run| !run.devices.is_empty());
        let before = previous.as_ref().map_or(&[][..], |run| &run.devices);
        DeviceMap {
            run: self.job.run.number,
            previous: previous.as_ref().map(|run| run.number),
            places: device_map::match_devices(before, &self.devices()),
        }
    }

    /// Returns the coordinated save of the present run, once one was requested.
    #[must_use]
    pub fn preemption(&self) -> Option<PreemptionView> {
        self.job.run.preemption()
    }

    /// Returns the entries below a directory, in byte order: its direct children, or every key of the whole
    /// tree. Returns at most `limit` entries, after the entry `after`; the empty directory is the root.
    #[must_use]
    pub fn keys(&self, directory: &[u8], after: &[u8], whole_tree: bool, limit: usize) -> Vec<KeyEntry> {
        self.job.run.store.list_entries(directory, after, whole_tree, limit)
    }

    /// Returns one value.
    #[must_use]
    pub fn key(&self, key: &[u8]) -> Option<StoredValue> {
        let entry = self.job.run.store.get(key)?;
        let key = Bytes::from(normalise(key).into_owned());
        Some(StoredValue { key, value: entry.value.clone(), written_at: entry.at, written_by: entry.by })
    }
}

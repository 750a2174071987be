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

/// Which lives of a job's tasks count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskIncarnations {
    /// In which run.
    pub run: RunNumber,
    /// By task: the life that is connected, if one is.
    pub incarnations: Vec<Option<TaskIncarnation>>,
}

impl TaskIncarnations {
    /// The life of a task that counts.
    #[must_use]
    pub fn incarnation_of(&self, task: TaskId) -> Option<TaskIncarnation> {
        *self.incarnations.get(usize::try_from(task.0).ok()?)?
    }
}

/// Which life of one task counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CurrentIncarnation {
    /// In which run.
    pub run: RunNumber,
    /// When that opened.
    pub opened_at: Timestamp,
    /// How many tasks it has.
    pub tasks: usize,
    /// The life that is connected, if one is.
    pub incarnation: Option<TaskIncarnation>,
}

/// A job to look at.
#[derive(Clone, Copy)]
pub struct JobReader<'a> {
    job: &'a Job,
}

impl Coordinator {
    /// A job to look at, part by part.
    #[must_use]
    pub fn job(&self, job: JobId) -> Option<JobReader<'_>> {
        Some(JobReader { job: self.job_state(job)? })
    }
}

impl JobReader<'_> {
    /// The job in short.
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

    /// Its settings.
    #[must_use]
    pub fn settings(&self) -> &JobSettings {
        &self.job.settings
    }

    /// How many exclusions are in force.
    #[must_use]
    pub fn exclusions_in_force(&self) -> usize {
        self.job.exclusions.len()
    }

    /// The exclusions in force, by number, then those that are over, newest end first.
    #[must_use]
    pub fn exclusions(&self) -> Vec<ExclusionView> {
        self.job.exclusion_views(true)
    }

    /// Every run that is known, the present one first.
    #[must_use]
    pub fn runs(&self) -> Vec<RunListItem> {
        let past = self.job.past_runs().map(RunSummary::line);
        std::iter::once(self.job.run.line()).chain(past).collect()
    }

    /// The last barriers of the present run that ended, the latest first.
    #[must_use]
    pub fn recent_barriers(&self) -> Vec<BarrierRecord> {
        self.job.run.recent.iter().rev().cloned().collect()
    }

    /// Every task of the present run.
    #[must_use]
    pub fn tasks(&self) -> Vec<TaskView> {
        self.job.task_views()
    }

    /// Which lives of its tasks count.
    #[must_use]
    pub fn task_incarnations(&self) -> TaskIncarnations {
        let run = &self.job.run;
        let connected = |task: &Task| task.incarnation.filter(|_| task.is_connected());
        TaskIncarnations { run: run.number, incarnations: run.tasks.iter().map(connected).collect() }
    }

    /// How many tasks the present run has.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.job.run.tasks.len()
    }

    /// Which life of a task counts.
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

    /// One task of the present run, with its gaps over time.
    #[must_use]
    pub fn task(&self, task: TaskId) -> Option<TaskView> {
        self.job.task_view(task)
    }

    /// The barriers in progress.
    #[must_use]
    pub fn barriers(&self) -> Vec<BarrierView> {
        self.job.run.barrier_views()
    }

    /// The live set.
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

    /// The devices that the tasks of the present run have published.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.job.run.devices()
    }

    /// The present run's devices beside those of the last run that had some.
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

    /// The coordinated save of the present run, once one was asked for.
    #[must_use]
    pub fn preemption(&self) -> Option<PreemptionView> {
        self.job.run.preemption()
    }

    /// What lies below a directory, in byte order: its direct children, or every key of the tree below it. At most
    /// `limit`, after the line `after`; the empty directory is the root.
    #[must_use]
    pub fn keys(&self, directory: &[u8], after: &[u8], whole_tree: bool, limit: usize) -> Vec<KeyEntry> {
        self.job.run.store.list_entries(directory, after, whole_tree, limit)
    }

    /// One value.
    #[must_use]
    pub fn key(&self, key: &[u8]) -> Option<StoredValue> {
        let entry = self.job.run.store.get(key)?;
        let key = Bytes::from(normalise(key).into_owned());
        Some(StoredValue { key, value: entry.value.clone(), written_at: entry.at, written_by: entry.by })
    }
}

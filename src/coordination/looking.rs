//! Parts of a job as people see it: each made alone, so that who asks for one does not pay for all.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::coordinator::Coordinator;
use super::device_map::{self, DeviceMap};
use super::devices::Device;
use super::event::RunOutcome;
use super::ids::{JobId, JobName, RunNumber, TaskId, TaskIncarnation, Timestamp};
use super::job::Job;
use super::settings::JobSettings;
use super::store::normalise;
use super::task::Task;
use super::view::{
    BarrierView, ExclusionView, FirstCause, LiveSetView, PreemptionView, RunState, RunSummary, TaskView,
};

/// A job in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSummary {
    /// Its name.
    pub name: JobName,
    /// How many tasks it has.
    pub tasks: u32,
    /// Its tasks may fail and come back.
    pub recoverable: bool,
    /// Its present run.
    pub run: RunNumber,
    /// Where that stands.
    pub state: RunState,
    /// How many tasks are connected.
    pub live: usize,
    /// How many exclusions are in force.
    #[serde(default)]
    pub exclusions: usize,
    /// The first error of the present run.
    pub first_cause: Option<FirstCause>,
}

/// One run in short, the present one or an ended one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunLine {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// Where it stands, or how it ended.
    pub state: RunState,
    /// When its registration opened.
    pub opened_at: Timestamp,
    /// When every task that it waited for had registered.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
}

/// A task of the live set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveTask {
    /// Which.
    pub task: TaskId,
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// Where it registered from.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
}

/// The live set, and the questions about it that are in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveView {
    /// In which run.
    pub run: RunNumber,
    /// Grows with every change of any task's state; what watchers wait for.
    pub version: i64,
    /// Who is alive: connected, and not excluded.
    pub tasks: Vec<LiveTask>,
    /// The questions in progress.
    pub questions: Vec<LiveSetView>,
}

/// A key of the store, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLine {
    /// The key, as it is stored; a directory, with a slash at its end.
    pub key: Bytes,
    /// Its value's length in bytes; `None` for a directory.
    pub value_bytes: Option<usize>,
    /// When the value was written last.
    pub written_at: Option<Timestamp>,
    /// Which task wrote it, where that is known.
    pub written_by: Option<TaskId>,
    /// How many keys lie below the directory.
    pub keys_below: usize,
    /// How many bytes the values of those have.
    pub bytes_below: usize,
}

/// A value of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key, as it is stored.
    pub key: Bytes,
    /// The value.
    pub value: Bytes,
    /// When it was written last.
    pub written_at: Timestamp,
    /// Which task wrote it, where that is known.
    pub written_by: Option<TaskId>,
}

/// Which lives of a job's tasks count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    /// In which run.
    pub run: RunNumber,
    /// By task: the life that is connected, if one is.
    pub lives: Vec<Option<TaskIncarnation>>,
}

impl Roster {
    /// The life of a task that counts.
    #[must_use]
    pub fn life(&self, task: TaskId) -> Option<TaskIncarnation> {
        *self.lives.get(usize::try_from(task.0).ok()?)?
    }
}

/// Which life of one task counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PresentLife {
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
pub struct JobLook<'a> {
    job: &'a Job,
}

impl Coordinator {
    /// A job to look at, part by part.
    #[must_use]
    pub fn job(&self, job: JobId) -> Option<JobLook<'_>> {
        Some(JobLook { job: self.job_of(job)? })
    }
}

impl JobLook<'_> {
    /// The job in short.
    #[must_use]
    pub fn summary(&self) -> JobSummary {
        let Job { name, settings, run, exclusions, .. } = self.job;
        JobSummary {
            name: name.clone(),
            tasks: settings.tasks,
            recoverable: settings.recoverable,
            run: run.number,
            state: run.state(),
            live: run.connected,
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
    pub fn runs(&self) -> Vec<RunLine> {
        let run = &self.job.run;
        let present = RunLine {
            number: run.number,
            incarnation: run.incarnation.to_string(),
            state: run.state(),
            opened_at: run.opened_at,
            started_at: run.started_at,
            ended_at: run.ended.map(|(_, at): (RunOutcome, Timestamp)| at),
            first_cause: run.first_cause.clone(),
        };
        let past = self.job.history().map(|past: &RunSummary| RunLine {
            number: past.number,
            incarnation: past.incarnation.clone(),
            state: RunState::ended(past.outcome),
            opened_at: past.opened_at,
            started_at: past.started_at,
            ended_at: Some(past.ended_at),
            first_cause: past.first_cause.clone(),
        });
        std::iter::once(present).chain(past).collect()
    }

    /// Every task of the present run.
    #[must_use]
    pub fn tasks(&self) -> Vec<TaskView> {
        self.job.task_views()
    }

    /// Which lives of its tasks count.
    #[must_use]
    pub fn roster(&self) -> Roster {
        let run = &self.job.run;
        let connected = |task: &Task| task.incarnation.filter(|_| task.is_connected());
        Roster { run: run.number, lives: run.tasks.iter().map(connected).collect() }
    }

    /// How many tasks the present run has.
    #[must_use]
    pub fn roster_len(&self) -> usize {
        self.job.run.tasks.len()
    }

    /// Which life of a task counts.
    #[must_use]
    pub fn present_life(&self, task: TaskId) -> PresentLife {
        let run = &self.job.run;
        PresentLife {
            run: run.number,
            opened_at: run.opened_at,
            tasks: run.tasks.len(),
            incarnation: run.task(task).filter(|task| task.is_connected()).and_then(|task| task.incarnation),
        }
    }

    /// The barriers in progress.
    #[must_use]
    pub fn barriers(&self) -> Vec<BarrierView> {
        self.job.run.barrier_views()
    }

    /// The live set.
    #[must_use]
    pub fn live(&self) -> LiveView {
        let run = &self.job.run;
        let live = run.ids().filter(|id| run.own(*id).is_connected()).map(|id| {
            let task = run.own(id);
            let incarnation = task.incarnation.map(|i| i.to_string()).unwrap_or_default();
            LiveTask { task: id, incarnation, peer: task.peer }
        });
        LiveView {
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
        let previous = self.job.history().find(|run| !run.devices.is_empty());
        let before = previous.map_or(&[][..], |run| &run.devices);
        DeviceMap {
            run: self.job.run.number,
            previous: previous.map(|run| run.number),
            places: device_map::map(before, &self.devices()),
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
    pub fn keys(&self, directory: &[u8], after: &[u8], whole_tree: bool, limit: usize) -> Vec<KeyLine> {
        self.job.run.store.lines(directory, after, whole_tree, limit)
    }

    /// One value.
    #[must_use]
    pub fn key(&self, key: &[u8]) -> Option<KeyValue> {
        let entry = self.job.run.store.get(key)?;
        let key = Bytes::from(normalise(key).into_owned());
        Some(KeyValue { key, value: entry.value.clone(), written_at: entry.at, written_by: entry.by })
    }
}

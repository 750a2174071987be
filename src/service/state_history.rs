//! The states of each task over time: when it registered, connected, was suspected, failed or left, in each of the
//! job's latest runs.
//!
//! [`StateHistory`] is an [`Observer`], which records the changes from the events of the driver. A record takes 16 bytes;
//! the changes of 10,000 tasks that register, connect and leave fit about twice. `state_periods.rs` turns the changes of a run
//! into periods. Begin at [`StateHistory::of_run`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::records_by_run::{BoundedRecord, RecordBounds, RecordsByRun};
use super::saved_contents;
use crate::coordination::{
    BarrierRecordWithArrivals, EventKind, ExclusionId, ExclusionTarget, FailureClass, JobEvent, JobId,
    REGISTRATION_BARRIER_ID, RunNumber, TaskId, Timestamp,
};
use crate::engine::{ContentsSerialiser, Observer, PersistentObserver};

/// The number of changes in a chunk. A view shares all chunks; adding a change copies at most the last one.
const CHANGES_OF_CHUNK: usize = 1 << 10;
/// The most tasks of exclusions in force that are remembered, to know which tasks a readmission is about.
const EXCLUDED_TASKS_KEPT: usize = 1 << 16;

/// The task of a change that is about all tasks.
const NO_TASK: TaskId = TaskId(-1);

/// A change of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StateChange {
    Registering,
    /// Its registration was withdrawn.
    Withdrawn,
    /// The registration of all tasks that had registered failed. It names no task.
    RegistrationFailed,
    Connected,
    ConnectedAgain,
    Superseded,
    Suspected,
    Returned,
    Disconnected,
    Failed(FailureClass),
    Excluded,
    Readmitted,
}

/// A change of a task, with its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StateChangeRecord {
    pub at: Timestamp,
    pub task: TaskId,
    pub change: StateChange,
}

type Chunk = Arc<Vec<StateChangeRecord>>;

impl BoundedRecord for Chunk {
    /// At most 65,536 changes, of 16 bytes each. Each run begins a chunk, and so the latest 64 runs are kept at most.
    const BOUNDS: RecordBounds = RecordBounds { records_of_run: 64, weight: 64 };
}

/// The kinds of marks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RunMarkKind {
    /// The first error of the run.
    FirstCause,
    /// An operator requested a drain.
    DrainRequested,
    /// The preemption notice was written: a coordinated save was requested.
    PreemptionNoticed,
    /// The service started again.
    ServiceRestarted,
    /// The run ended.
    Ended,
}

impl RunMarkKind {
    /// Returns the name of the kind in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::FirstCause => "first cause",
            Self::DrainRequested => "drain requested",
            Self::PreemptionNoticed => "preemption notice",
            Self::ServiceRestarted => "service restarted",
            Self::Ended => "run ended",
        }
    }
}

/// A moment of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunMark {
    /// The time.
    pub at: Timestamp,
    /// The kind of the mark.
    pub kind: RunMarkKind,
    /// The task that it is about, if it is about one.
    pub task: Option<TaskId>,
}

impl BoundedRecord for RunMark {
    const BOUNDS: RecordBounds = RecordBounds { records_of_run: 32, weight: 256 };
}

/// The changes in one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStateHistory {
    pub(super) chunks: Vec<Chunk>,
    pub(super) marks: Vec<RunMark>,
    /// The oldest changes were dropped.
    pub(super) is_truncated: bool,
}

impl RunStateHistory {
    /// Returns the changes, the oldest first.
    pub(super) fn changes(&self) -> impl Iterator<Item = StateChangeRecord> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().copied())
    }
}

/// The changes in a job's latest runs.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct JobStateHistory {
    chunks: RecordsByRun<Chunk>,
    marks: RecordsByRun<RunMark>,
    /// The tasks of exclusions in force. Each exclusion has a task.
    excluded: BTreeMap<ExclusionId, Vec<TaskId>>,
}

impl JobStateHistory {
    /// Returns whether a restored history keeps its bounds.
    fn is_valid(&self) -> bool {
        let lengths = 1..=CHANGES_OF_CHUNK;
        self.chunks.latest_first().all(|chunk| lengths.contains(&chunk.len()))
            && self.excluded.values().all(|tasks| !tasks.is_empty())
            && self.excluded_tasks() <= EXCLUDED_TASKS_KEPT
    }

    fn excluded_tasks(&self) -> usize {
        self.excluded.values().map(Vec::len).sum()
    }

    fn add_change(&mut self, run: RunNumber, at: Timestamp, task: TaskId, change: StateChange) {
        let record = StateChangeRecord { at, task, change };
        match self.chunks.newest_mut(run).filter(|chunk| chunk.len() < CHANGES_OF_CHUNK) {
            Some(chunk) => Arc::make_mut(chunk).push(record),
            None => {
                // The first chunk of a run grows as it needs, because most jobs are small.
                let is_first = self.chunks.of_run(run).is_none();
                let mut chunk = Vec::with_capacity(if is_first { 16 } else { CHANGES_OF_CHUNK });
                chunk.push(record);
                self.chunks.add(run, Arc::new(chunk));
            }
        }
    }

    fn add_changes(&mut self, run: RunNumber, at: Timestamp, tasks: &[TaskId], change: StateChange) {
        for task in tasks {
            self.add_change(run, at, *task, change);
        }
    }

    fn add_event(&mut self, event: &JobEvent) {
        let (run, at) = (event.run, event.at);
        let (task, change) = match &event.what {
            EventKind::TaskRegistering { task, .. } => (*task, StateChange::Registering),
            EventKind::RegistrationWithdrawn { task } => (*task, StateChange::Withdrawn),
            EventKind::BarrierFailed { barrier, .. } if **barrier == *REGISTRATION_BARRIER_ID => {
                (NO_TASK, StateChange::RegistrationFailed)
            }
            EventKind::TaskConnected { task, again: true, .. } => (*task, StateChange::ConnectedAgain),
            EventKind::TaskConnected { task, .. } => (*task, StateChange::Connected),
            EventKind::TaskSuperseded { task, .. } => (*task, StateChange::Superseded),
            EventKind::TaskSuspected { task } => (*task, StateChange::Suspected),
            EventKind::TaskReturned { task } => (*task, StateChange::Returned),
            EventKind::TaskDisconnected { task } => (*task, StateChange::Disconnected),
            EventKind::TaskFailed { task, class } => (*task, StateChange::Failed(*class)),
            EventKind::Excluded { exclusion, target, tasks, .. } => {
                let mut tasks = tasks.clone();
                if let ExclusionTarget::Task(task) = target
                    && !tasks.contains(task)
                {
                    tasks.push(*task);
                }
                self.add_changes(run, at, &tasks, StateChange::Excluded);
                if !tasks.is_empty() && self.excluded_tasks() + tasks.len() <= EXCLUDED_TASKS_KEPT {
                    self.excluded.insert(*exclusion, tasks);
                }
                return;
            }
            EventKind::Readmitted { exclusion, .. } => {
                let tasks = self.excluded.remove(exclusion).unwrap_or_default();
                return self.add_changes(run, at, &tasks, StateChange::Readmitted);
            }
            EventKind::FirstCause { task } => return self.add_mark(event, RunMarkKind::FirstCause, *task),
            EventKind::DrainRequested { .. } => {
                return self.add_mark(event, RunMarkKind::DrainRequested, None);
            }
            EventKind::PreemptionNoticed => {
                return self.add_mark(event, RunMarkKind::PreemptionNoticed, None);
            }
            EventKind::ServiceRestarted => {
                return self.add_mark(event, RunMarkKind::ServiceRestarted, None);
            }
            EventKind::RunEnded { .. } => return self.add_mark(event, RunMarkKind::Ended, None),
            _ => return,
        };
        self.add_change(run, at, task, change);
    }

    fn add_mark(&mut self, event: &JobEvent, kind: RunMarkKind, task: Option<TaskId>) {
        self.marks.add(event.run, RunMark { at: event.at, kind, task });
    }
}

/// The changes of all jobs.
///
/// As saved contents, those of a job take up to 1 MiB: 13 bytes for each change, and 3 for each task of an exclusion.
#[derive(Debug, Default)]
pub struct StateHistory(Mutex<BTreeMap<JobId, JobStateHistory>>);

impl StateHistory {
    fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, JobStateHistory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the changes in a run of a job.
    #[must_use]
    pub fn of_run(&self, job: JobId, run: RunNumber) -> RunStateHistory {
        let jobs = self.lock_jobs();
        let of_job = jobs.get(&job);
        let chunks = of_job.and_then(|of_job| of_job.chunks.of_run(run));
        let marks = of_job.and_then(|of_job| of_job.marks.of_run(run));
        // Without a chunk, a run had no change, or all were dropped.
        let is_truncated = match chunks {
            Some(chunks) => chunks.is_truncated,
            None => of_job.is_some_and(|of_job| of_job.chunks.has_dropped(run)),
        };
        RunStateHistory {
            chunks: chunks.map_or_else(Vec::new, |of_run| of_run.records.iter().cloned().collect()),
            marks: marks.map_or_else(Vec::new, |of_run| of_run.records.iter().cloned().collect()),
            is_truncated,
        }
    }
}

impl Observer for StateHistory {
    fn on_event(&self, event: &JobEvent) {
        match event.what {
            // Barriers have most events.
            EventKind::BarrierStarted { .. } | EventKind::BarrierPassed { .. } => {}
            EventKind::JobDeleted { .. } => drop(self.lock_jobs().remove(&event.job)),
            _ => self.lock_jobs().entry(event.job).or_default().add_event(event),
        }
    }

    fn on_barrier_ended(&self, _ending: &Arc<BarrierRecordWithArrivals>) {}
}

impl PersistentObserver for StateHistory {
    fn name(&self) -> &'static str {
        "states"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        saved_contents::serialise_later(self.lock_jobs().clone())
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let jobs = saved_contents::restore_jobs(bytes, |_, history: &JobStateHistory| history.is_valid())?;
        *self.lock_jobs() = jobs;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_chunks_and_exclusions_keep_their_bounds() {
        let restore = |changes: usize, excluded: &[usize]| {
            let record =
                StateChangeRecord { at: Timestamp(1), task: TaskId(0), change: StateChange::Connected };
            let mut history = JobStateHistory::default();
            history.chunks.add(RunNumber(1), Arc::new(vec![record; changes]));
            let exclusions = (0..).map(ExclusionId).zip(excluded.iter().map(|many| vec![TaskId(0); *many]));
            history.excluded = exclusions.collect();
            let bytes = postcard::to_stdvec(&BTreeMap::from([(JobId(0), history)])).unwrap();
            StateHistory::default().restore(&bytes)
        };
        assert_eq!(restore(CHANGES_OF_CHUNK, &[EXCLUDED_TASKS_KEPT - 1, 1]), Ok(()));
        assert!(restore(CHANGES_OF_CHUNK + 1, &[]).is_err());
        assert!(restore(0, &[]).is_err());
        assert!(restore(1, &[EXCLUDED_TASKS_KEPT, 1]).is_err());
        assert!(restore(1, &[0]).is_err());
    }
}

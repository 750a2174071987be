//! The ended runs of a job: a record of each, and of the newest ones the whole state as it was when the next run opened.
//!
//! `run_lifecycle.rs` adds a run when the next one opens, and `views/job_in_run.rs` shows it. Begin at [`PastRuns::add`].
//!
//! Invariants: The newest run comes first. The newest run has its state, however many tasks it had. The states of
//! older runs are kept from the newest on, until their tasks are more than [`TASKS_KEPT`]; and so are topology values,
//! until their bytes are more than [`TOPOLOGY_BYTES_KEPT`]. A record without a state keeps its summary.

use std::collections::{VecDeque, vec_deque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::deferred_free::DeferredFree;
use super::derived_value::DerivedValue;
use super::exclusion::ExclusionTable;
use super::ids::{HostId, RunNumber, ServiceIncarnation, TaskIncarnation};
use super::run::Run;
use super::run_state::RunSummary;
use super::settings::JobSettings;
use super::task_owner_table::TaskOwnerTable;
use super::topology::TopologyValues;

/// The number of ended runs whose incarnations are remembered, to recognise surviving processes of those
/// runs.
const RUNS_WITH_INCARNATIONS: usize = 8;

/// The most bytes of topology values of ended runs that a job keeps, to show which devices moved: those of the newest runs.
const TOPOLOGY_BYTES_KEPT: usize = 64 << 20;

/// The most tasks of ended runs whose states a job keeps, those of the newest run not counted. A task takes about
/// two kilobytes.
const TASKS_KEPT: usize = 1 << 13;

/// The record of an ended run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PastRun {
    pub summary: RunSummary,
    pub incarnation: ServiceIncarnation,
    /// Every incarnation of its tasks, ascending; empty once the run is too old.
    pub known_incarnations: Vec<TaskIncarnation>,
    /// The topology values that its tasks published; empty once newer runs have filled the bound on them.
    pub topology: TopologyValues,
    /// The length of these values, in bytes.
    topology_bytes: usize,
    /// The state of the run; `None` once newer runs have filled the bound on it.
    pub state: Option<EndedRunState>,
    /// The host of the task that caused its first error; `None` if one of them is not known.
    #[serde(skip)]
    pub first_cause_host: DerivedValue<Option<HostId>>,
}

/// The state of a run when the next one opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndedRunState {
    /// The run without what only its callers needed: its store, and the results of its barriers.
    pub run: Run,
    pub settings: JobSettings,
    pub exclusions: Arc<ExclusionTable>,
    pub task_owners: Arc<TaskOwnerTable>,
}

impl EndedRunState {
    /// Removes what only callers of the run needed, so that it can be freed.
    pub fn remove_callers_tables(&mut self) -> DeferredFree {
        let run = &mut self.run;
        let weight = run.approximate_allocations();
        let tables = (
            std::mem::take(&mut run.store),
            std::mem::take(&mut run.waiters),
            std::mem::take(&mut run.exchanged),
            std::mem::take(&mut run.timers),
            std::mem::take(&mut run.tasks_without_timer),
            run.barriers.take_results(),
        );
        DeferredFree::of_value_with_weight(tables, weight)
    }
}

/// The ended runs of a job, the newest first.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PastRuns(VecDeque<Arc<PastRun>>);

impl PastRuns {
    /// Adds an ended run, and returns what is dropped for it. `most` is the number of runs to keep.
    pub fn add(
        &mut self,
        summary: RunSummary,
        topology: TopologyValues,
        state: EndedRunState,
        most: usize,
    ) -> DeferredFree {
        let mut lives: Vec<TaskIncarnation> = state
            .run
            .tasks
            .iter()
            .flat_map(|task| {
                task.incarnation.into_iter().chain(task.past_incarnations.iter().map(|life| life.incarnation))
            })
            .collect();
        lives.sort_unstable();
        self.0.push_front(Arc::new(PastRun {
            summary,
            incarnation: state.run.incarnation,
            known_incarnations: lives,
            topology_bytes: topology.values().map(|it| it.value.len()).sum(),
            topology,
            state: Some(state),
            first_cause_host: DerivedValue::default(),
        }));
        if let Some(old) = self.0.get_mut(RUNS_WITH_INCARNATIONS) {
            Arc::make_mut(old).known_incarnations = Vec::new();
        }
        let (mut tasks, mut bytes) = (0, 0);
        let mut dropped = Vec::new();
        for (place, past) in self.0.iter_mut().enumerate() {
            bytes += past.topology_bytes;
            if bytes > TOPOLOGY_BYTES_KEPT && !past.topology.is_empty() {
                dropped.push((Some(std::mem::take(&mut Arc::make_mut(past).topology)), None));
            }
            let Some(state) = past.state.as_ref().filter(|_| place > 0) else { continue };
            tasks += state.run.tasks.len();
            if tasks > TASKS_KEPT {
                dropped.push((None, Arc::make_mut(past).state.take()));
            }
        }
        let weight = dropped.len() * TASKS_KEPT;
        let mut freed = self.truncate(most);
        freed.add(DeferredFree::of_value_with_weight(dropped, weight));
        freed
    }

    /// Keeps this many runs, and returns the others.
    pub fn truncate(&mut self, most: usize) -> DeferredFree {
        let dropped = self.0.split_off(most.min(self.0.len()));
        let weight = dropped.iter().filter_map(|past| past.state.as_ref()).map(|it| it.run.tasks.len()).sum();
        DeferredFree::of_value_with_weight(dropped, weight)
    }

    /// Returns the record of a run, if it is kept.
    pub fn find(&self, run: RunNumber) -> Option<&PastRun> {
        self.iter().find(|past| past.summary.number == run)
    }

    /// Returns the runs that ended before this one.
    pub fn before(&self, run: RunNumber) -> Self {
        Self(self.0.iter().filter(|past| past.summary.number < run).cloned().collect())
    }

    /// Returns the runs, the newest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &PastRun> {
        let runs: vec_deque::Iter<'_, Arc<PastRun>> = self.0.iter();
        runs.map(Arc::as_ref)
    }

    /// Checks the invariants.
    pub fn check_invariants(&self, most: usize) -> Result<(), String> {
        if self.0.len() > most {
            return Err(format!("{} ended runs are kept, {most} are allowed", self.0.len()));
        }
        let numbers: Vec<RunNumber> = self.iter().map(|past| past.summary.number).collect();
        if !numbers.is_sorted_by(|newer, older| newer > older) {
            return Err(format!("the ended runs are out of order: {numbers:?}"));
        }
        if self.iter().next().is_some_and(|newest| newest.state.is_none()) {
            return Err("the newest ended run has no state".to_owned());
        }
        let older = self.iter().skip(1).filter_map(|past| past.state.as_ref());
        let tasks: usize = older.map(|state| state.run.tasks.len()).sum();
        if tasks > TASKS_KEPT {
            return Err(format!("the states of {tasks} tasks of ended runs are kept"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::event::RunOutcome;
    use crate::coordination::ids::Timestamp;

    fn add_run(past: &mut PastRuns, number: u64, tasks: u32, most: usize) {
        let settings = JobSettings::new(tasks);
        let run = Run::new(RunNumber(number), ServiceIncarnation(number), &settings, Timestamp(number));
        let summary = RunSummary {
            number: RunNumber(number),
            incarnation: String::new(),
            outcome: RunOutcome::Completed,
            opened_at: Timestamp(number),
            started_at: None,
            ended_at: Timestamp(number),
            length_us: 0,
            end_reason: String::new(),
            first_cause: None,
            tasks: tasks as usize,
            keys: 0,
            store_bytes: 0,
            devices: Vec::new(),
        };
        let state = EndedRunState { run, settings, exclusions: Arc::default(), task_owners: Arc::default() };
        drop(past.add(summary, TopologyValues::default(), state, most));
        past.check_invariants(most).unwrap();
    }

    fn kept(past: &PastRuns) -> Vec<(u64, bool)> {
        past.iter().map(|run| (run.summary.number.0, run.state.is_some())).collect()
    }

    #[test]
    fn the_newest_run_has_its_state_and_older_ones_have_it_while_there_is_room() {
        let mut past = PastRuns::default();
        add_run(&mut past, 1, 4_000, 3);
        add_run(&mut past, 2, 4_000, 3);
        add_run(&mut past, 3, 10_000, 3);
        assert_eq!(kept(&past), [(3, true), (2, true), (1, true)]);
        add_run(&mut past, 4, 10_000, 3);
        assert_eq!(kept(&past), [(4, true), (3, false), (2, false)], "the state of run 3 leaves no room");
        add_run(&mut past, 5, 8, 3);
        assert_eq!(kept(&past), [(5, true), (4, false), (3, false)]);
        assert!(past.find(RunNumber(2)).is_none() && past.before(RunNumber(4)).iter().count() == 1);
        add_run(&mut past, 6, 8, 0);
        assert_eq!(kept(&past), []);
    }
}

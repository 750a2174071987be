//! The views of runs: the present run in full, a list item for every known run, and the live set.
//!
//! Begin at [`RunView`], then `Job::run_view`.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::barrier::{BarrierView, LiveSetRequestView};
use super::devices::decode_topology;
use super::host_assignment::HostAssignment;
use super::preemption::PreemptionView;
use super::task::TaskView;
use super::task_state::TaskCounts;
use crate::coordination::barrier_record::BarrierRecord;
use crate::coordination::event::FirstCause;
use crate::coordination::ids::{RunNumber, TaskId, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::run::Run;
use crate::coordination::run_state::{RunInterval, RunState, RunSummary};
use crate::coordination::topology::Device;

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunView {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// The state of the run.
    pub state: RunState,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Option<Timestamp>,
    /// The reason for its end, in words, once it has ended.
    #[serde(default)]
    pub end_reason: Option<String>,
    /// The number of live tasks: connected or suspect, and not excluded.
    pub live: usize,
    /// The number of tasks in each state.
    #[serde(default)]
    pub counts: TaskCounts,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// Every task.
    pub tasks: Vec<TaskView>,
    /// The barriers in progress, registration and shutdown among them.
    pub barriers: Vec<BarrierView>,
    /// The latest ended barriers, the newest first (setting `bounds.barriers-recent`).
    #[serde(default)]
    pub recent_barriers: Vec<BarrierRecord>,
    /// The live-set requests in progress.
    pub live_sets: Vec<LiveSetRequestView>,
    /// The number of keys in the store.
    pub keys: usize,
    /// The size of all keys and values in the store, in bytes.
    pub store_bytes: usize,
    /// The state of the coordinated save, once one was requested.
    pub preemption: Option<PreemptionView>,
    /// The devices that the tasks have published.
    #[schema(value_type = Vec<Device>)]
    pub devices: Arc<Vec<Device>>,
}

impl RunView {
    /// Returns whether the task's present state began after the first error, and that error came from another
    /// task: its trouble is then a consequence.
    #[must_use]
    pub fn is_consequence_of_first_cause(&self, task: &TaskView) -> bool {
        let cause = self.first_cause.as_ref();
        cause.is_some_and(|cause| cause.task != Some(task.task) && task.since >= cause.at)
    }

    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn measured_interval(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}

/// The list item of a run, the present one or an ended one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RunLine)]
pub struct RunListItem {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// The state of the run.
    pub state: RunState,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task that it waited for had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Option<Timestamp>,
    /// Its length in microseconds, once it has ended: from `started_at`, or from `opened_at` if it never started, to its end.
    #[serde(default)]
    pub length_us: Option<u64>,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
}

impl RunListItem {
    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn measured_interval(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}

/// A task of the live set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveTask {
    /// The task.
    pub task: TaskId,
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// The address from which it registered.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
}

/// The live set, and the live-set requests in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveView)]
pub struct LiveTasksView {
    /// The run.
    pub run: RunNumber,
    /// The version of the task states, which grows with every change; watchers wait for it.
    pub version: i64,
    /// The live tasks: connected, and not excluded.
    pub tasks: Vec<LiveTask>,
    /// The live-set requests in progress.
    pub questions: Vec<LiveSetRequestView>,
}

impl Job {
    /// Returns the view of the present run, with hosts and exclusions.
    pub(super) fn run_view_with_hosts(&self, hosts: &HostAssignment) -> RunView {
        let mut view = self.run.run_view();
        self.add_hosts_and_exclusions_to_views(&mut view.tasks, hosts);
        view.counts = TaskCounts::count_tasks(&view.tasks);
        view
    }
}

impl Run {
    pub(super) fn run_view(&self) -> RunView {
        RunView {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            state: self.state(),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: self.ended.map(|(_, at)| at),
            end_reason: self.ended.map(|_| self.end_reason.clone()),
            live: self.connected_tasks,
            counts: TaskCounts::default(),
            first_cause: self.first_cause.clone(),
            tasks: self.task_views(),
            barriers: self.barrier_views(),
            recent_barriers: self.recent.iter().rev().cloned().collect(),
            live_sets: self.live_set_views(),
            keys: self.store.len(),
            store_bytes: self.store.total_bytes(),
            preemption: self.preemption(),
            devices: self.devices(),
        }
    }

    /// Returns the list item of the run.
    pub(super) fn list_item(&self) -> RunListItem {
        RunListItem {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            state: self.state(),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: self.ended.map(|(_, at)| at),
            length_us: self.measured_interval().final_duration_us(),
            first_cause: self.first_cause.clone(),
        }
    }

    pub(super) fn devices(&self) -> Arc<Vec<Device>> {
        self.store
            .decoded_topology()
            .devices
            .get_or_compute(|| Arc::new(decode_topology(self.store.topology_values())))
    }

    fn measured_interval(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended.map(|(_, at)| at))
    }
}

impl RunSummary {
    /// Returns the list item of the run.
    pub(super) fn list_item(&self) -> RunListItem {
        RunListItem {
            number: self.number,
            incarnation: self.incarnation.clone(),
            state: RunState::ended(self.outcome),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: Some(self.ended_at),
            length_us: self.measured_interval().final_duration_us(),
            first_cause: self.first_cause.clone(),
        }
    }
}

//! The bodies about what is over: ended barriers with their arrivals, and the states of tasks over a run.
//!
//! Begin at [`EndedBarrierView`] and [`TaskStatesPage`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{BarrierArrival, BarrierRecord, HostId, RunNumber, TaskId, Timestamp};
use crate::service::{RunMark, TaskPeriods};

/// An ended instance of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = EndedBarrier)]
pub struct EndedBarrierView {
    /// The time from the first arrival to its end, in microseconds.
    pub duration_us: u64,
    /// Its record.
    #[serde(flatten)]
    pub record: BarrierRecord,
}

impl From<BarrierRecord> for EndedBarrierView {
    fn from(record: BarrierRecord) -> Self {
        Self { duration_us: record.ended.0.saturating_sub(record.began.0), record }
    }
}

/// A task over a run, with its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskStatesView {
    /// The host on which it is, or was at the end of the run, if one is known.
    pub host: Option<HostId>,
    /// The task.
    #[serde(flatten)]
    pub states: TaskPeriods,
}

/// The states of tasks over a run: a page of tasks, by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskStatesPage {
    /// The run.
    pub run: RunNumber,
    /// The time at which the run opened.
    pub opened_at: Timestamp,
    /// The time up to which the states are known: the end of the run or the last change after it, or now.
    pub until: Timestamp,
    /// The time from which on the states are known, if the oldest changes are no longer kept.
    pub known_since: Option<Timestamp>,
    /// The moments of the run, the oldest first.
    pub marks: Vec<RunMark>,
    /// The tasks of this page.
    pub tasks: Vec<TaskStatesView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

/// An ended barrier with every arrival.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BarrierArrivalsView {
    /// The run.
    pub run: RunNumber,
    /// The record of the barrier.
    #[serde(flatten)]
    pub barrier: EndedBarrierView,
    /// Every arrival, by task.
    pub arrivals: Vec<BarrierArrival>,
}

/// The latest ended barriers of a job with their arrivals, the newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BarrierArrivalsPage {
    /// The barriers.
    pub barriers: Vec<BarrierArrivalsView>,
}

//! The records of an ended barrier instance: [`BarrierRecord`] is a summary, and [`BarrierRecordWithArrivals`] adds
//! every arrival. Begin at [`BarrierRecord`].
//!
//! `unmeasured_barrier.rs` computes the summary. `barrier_stats.rs` keeps the summary in the run, and gives the
//! record with all arrivals to the driver as an effect.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ids::{JobId, RunNumber, TaskId, Timestamp};

/// The id under which clients and events know the barrier of registration: that of the C++ service.
pub const REGISTRATION_BARRIER_ID: &str = "[Init]Wait_for_all_tasks_to_register";

/// The kind of a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierKind {
    /// All tasks register together.
    Registration,
    /// All tasks shut down together.
    Shutdown,
    /// All tasks exchange their devices (generation A).
    Devices,
    /// A barrier that clients name.
    Client,
    /// A live-set request: its callers wait for the others as at a barrier.
    LiveSet,
}

impl BarrierKind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Registration, Self::Shutdown, Self::Devices, Self::Client, Self::LiveSet];

    /// Returns the name of the kind, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Registration => "registration",
            Self::Shutdown => "shutdown",
            Self::Devices => "devices",
            Self::Client => "client",
            Self::LiveSet => "live-set",
        }
    }
}

/// The arrival of a member at a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ArrivalView)]
pub struct BarrierArrival {
    /// The member.
    pub task: TaskId,
    /// The time of the arrival.
    pub at: Timestamp,
}

/// The outcome of an instance of a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierOutcome {
    /// It passed.
    Passed,
    /// It failed for all waiting members.
    Failed,
}

impl BarrierOutcome {
    /// Returns the name of the outcome, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
        }
    }
}

/// The record of one ended instance of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierRecord {
    /// The barrier's id.
    #[schema(value_type = String)]
    pub id: Arc<str>,
    /// The counter of the instance.
    pub counter: i64,
    /// The kind of the barrier.
    pub kind: BarrierKind,
    /// The time of the first arrival.
    pub began: Timestamp,
    /// The time at which it passed or failed.
    pub ended: Timestamp,
    /// The number of members.
    pub members: usize,
    /// The number of members that had arrived.
    pub arrived: usize,
    /// The first member to arrive, of those that were waiting at the end.
    pub first: Option<TaskId>,
    /// The last member to arrive.
    pub last: Option<TaskId>,
    /// The time from the first arrival to the last, in microseconds.
    pub skew_us: u64,
    /// The waiting times of all members that had arrived, added up, in microseconds.
    pub waited_us: u64,
    /// The outcome.
    pub outcome: BarrierOutcome,
    /// The members that had not arrived: the first eight of them.
    pub without: Vec<TaskId>,
    /// The latest arrivals, the last one first: eight at most.
    pub latest: Vec<BarrierArrival>,
}

impl BarrierRecord {
    /// The greatest number of latest arrivals, and of absent members, in a record.
    pub const LISTED_MAX: usize = 8;

    /// Returns how many members had not arrived: [`Self::without`] names the first of them.
    #[must_use]
    pub const fn absent(&self) -> usize {
        self.members.saturating_sub(self.arrived)
    }

    /// Returns how long after the first arrival this one of [`Self::latest`] was, in microseconds.
    #[must_use]
    pub fn lateness_us(&self, arrival: &BarrierArrival) -> u64 {
        let last = self.latest.first().map_or(arrival.at, |last| last.at);
        self.skew_us.saturating_sub(last.0.saturating_sub(arrival.at.0))
    }
}

/// An ended instance of a barrier: its record and every arrival.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierRecordWithArrivals {
    /// The job.
    pub job: JobId,
    /// The run of the job.
    pub run: RunNumber,
    /// The record that is kept of it.
    pub record: BarrierRecord,
    /// Every arrival, by task.
    pub arrivals: Vec<BarrierArrival>,
}

impl BarrierRecordWithArrivals {
    /// Returns the time of the first of the arrivals; the begin of the instance if there is none. The caller that began
    /// the instance may have hung up since.
    #[must_use]
    pub fn first_arrival_at(&self) -> Timestamp {
        self.arrivals.iter().map(|arrival| arrival.at).min().unwrap_or(self.record.began)
    }
}

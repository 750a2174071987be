//! The record of one ended instance of a barrier, and the same with all its arrivals.
//!
//! `barrier_stats.rs` makes it. [`BarrierCompletion`] leaves as an effect with every arrival; the record that is kept
//! has none.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ids::{JobId, RunNumber, TaskId, Timestamp};

/// Whose barrier it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierKind {
    /// All tasks register together.
    Registration,
    /// All tasks shut down together.
    Shutdown,
    /// All tasks exchange their devices (generation A).
    Devices,
    /// One that clients named.
    Client,
    /// A live-set question: who is in it waits for the others as at a barrier.
    LiveSet,
}

impl BarrierKind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Registration, Self::Shutdown, Self::Devices, Self::Client, Self::LiveSet];

    /// Its name, as in JSON.
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

/// A member that has come to a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ArrivalView)]
pub struct BarrierArrival {
    /// Who.
    pub task: TaskId,
    /// When.
    pub at: Timestamp,
}

/// How an instance of a barrier ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierOutcome {
    /// It passed.
    Passed,
    /// It failed for all who waited at it.
    Failed,
}

impl BarrierOutcome {
    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
        }
    }
}

/// One use of a barrier that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierRecord {
    /// Its id.
    #[schema(value_type = String)]
    pub id: Arc<str>,
    /// Which use of it.
    pub counter: i64,
    /// Whose barrier it is.
    pub kind: BarrierKind,
    /// When the first member came.
    pub began: Timestamp,
    /// When it passed or failed.
    pub ended: Timestamp,
    /// How many members it had.
    pub members: usize,
    /// How many of them had come.
    pub arrived: usize,
    /// The member that came first, of those that were there in the end.
    pub first: Option<TaskId>,
    /// The member that came last.
    pub last: Option<TaskId>,
    /// The last arrival less the first, in microseconds.
    pub skew_us: u64,
    /// How long those who had come waited, added up, in microseconds.
    pub waited_us: u64,
    /// How it ended.
    pub outcome: BarrierOutcome,
    /// Members that had not come: the first eight of them.
    pub without: Vec<TaskId>,
    /// The latest arrivals, the last one first: eight at most.
    pub latest: Vec<BarrierArrival>,
}

impl BarrierRecord {
    /// How long after the first member this one of [`Self::latest`] came, in microseconds.
    #[must_use]
    pub fn lateness_us(&self, arrival: &BarrierArrival) -> u64 {
        let last = self.latest.first().map_or(arrival.at, |last| last.at);
        self.skew_us.saturating_sub(last.0.saturating_sub(arrival.at.0))
    }
}

/// An instance of a barrier has ended: its record, and everybody who came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierCompletion {
    /// In which job.
    pub job: JobId,
    /// In which of its runs.
    pub run: RunNumber,
    /// What is kept of it.
    pub record: BarrierRecord,
    /// Every arrival, by task.
    pub arrivals: Vec<BarrierArrival>,
}

//! Short descriptions of a run: its state, the interval that counts as its duration, and the summary of an ended run.
//!
//! The run itself is in `run.rs`, and what a job keeps of its ended runs in `past_runs.rs`. Begin at [`RunState`] and [`RunSummary`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::event::{FirstCause, RunOutcome};
use super::ids::{RunNumber, Timestamp};
use super::topology::Device;

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// It waits for its tasks to register.
    Forming,
    /// Every task has registered.
    Running,
    /// Every task shut down.
    Completed,
    /// A task failed and ended the run.
    Failed,
    /// The last live task of a recoverable run was lost.
    Abandoned,
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forming => "forming",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Abandoned => "abandoned",
        })
    }
}

impl RunState {
    /// Returns the state of a run that ended with this outcome.
    #[must_use]
    pub fn ended(outcome: RunOutcome) -> Self {
        match outcome {
            RunOutcome::Completed => Self::Completed,
            RunOutcome::Failed => Self::Failed,
            RunOutcome::Abandoned => Self::Abandoned,
        }
    }
}

/// The interval over which a run is measured. It begins when every task that the run waited for had
/// registered, and ends with the run. For a run that never started it begins when registration opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunInterval {
    /// The beginning.
    pub began: Timestamp,
    /// The end, if the run has ended.
    pub ended: Option<Timestamp>,
}

impl RunInterval {
    /// Returns the interval of a run.
    #[must_use]
    pub fn new(opened_at: Timestamp, started_at: Option<Timestamp>, ended_at: Option<Timestamp>) -> Self {
        Self { began: started_at.unwrap_or(opened_at), ended: ended_at }
    }

    /// Returns its length, up to now if the run has not ended.
    #[must_use]
    pub fn duration(self, now: Timestamp) -> Duration {
        self.ended.unwrap_or(now).since(self.began)
    }

    /// Returns its length in microseconds, if the run has ended.
    #[must_use]
    pub fn final_duration_us(self) -> Option<u64> {
        self.ended.map(|ended| ended.0.saturating_sub(self.began.0))
    }
}

/// An ended run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunSummary {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// Its outcome.
    pub outcome: RunOutcome,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Timestamp,
    /// Its length in microseconds: from `started_at`, or from `opened_at` if it never started, to its end.
    #[serde(default)]
    pub length_us: u64,
    /// The reason for its end, in words.
    #[serde(default)]
    pub end_reason: String,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// The number of its tasks.
    #[serde(default)]
    pub tasks: usize,
    /// The number of keys in its store when the next run opened.
    #[serde(default)]
    pub keys: usize,
    /// The size of these keys and their values, in bytes.
    #[serde(default)]
    pub store_bytes: usize,
    /// The devices that its tasks had published.
    pub devices: Vec<Device>,
}

impl RunSummary {
    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn measured_interval(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, Some(self.ended_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_measured_from_when_it_was_complete() {
        let at = |seconds: u64| Timestamp(seconds * 1_000_000);
        let whole = RunInterval::new(at(10), Some(at(40)), Some(at(132)));
        assert_eq!((whole.duration(at(500)).as_secs(), whole.final_duration_us()), (92, Some(92_000_000)));
        let never = RunInterval::new(at(10), None, None);
        assert_eq!((never.duration(at(15)).as_secs(), never.final_duration_us()), (5, None));
    }
}

//! Reports on communicators by RAS, NCCL's own monitoring, which needs nothing loaded.
//!
//! Every process of NCCL 2.24 or newer has a thread for RAS ("reliability, availability, serviceability"). These threads know
//! one another, and any of them answers for all processes whose communicators hang together. RAS counts what programs have
//! called, and knows neither begin nor end on the GPU. It finds processes that do not answer, and errors of communicators.
//! So RAS is the second source, for ranks of which the plug-in reports nothing. Begin at [`ask_ras`].
//!
//! | file | owns |
//! | --- | --- |
//! | `client.rs` | the connection to a process, within limits of time and memory |
//! | `answer.rs` | NCCL's JSON, one communicator at a time |
//!
//! The numbers of ranks come from different moments, a few milliseconds apart. In a job that advances, ranks differ.

mod answer;
mod client;

pub use client::{RAS_DEFAULT_ADDRESS, RAS_TIMEOUT, RasError, ask_ras, ras_address_of_environment};

/// The most ranks of a communicator that are named.
pub const NOTABLE_RANKS_MAX: usize = 64;

/// The RAS report on the communicators of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RasReport {
    /// NCCL's version, such as `2.29.1`.
    pub nccl_version: String,
    /// In RAS's order.
    pub communicators: Vec<RasCommunicator>,
}

/// One communicator with all its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RasCommunicator {
    /// NCCL's hash of the unique id.
    pub hash: u64,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of ranks that have answered.
    pub answered: u32,
    /// The most collectives that a rank has called, of those that have answered.
    pub front: u64,
    /// The fewest.
    pub back: u64,
    /// The sum over the ranks: it rises while any of them advances.
    pub total_called: u64,
    /// The ranks whose state or number of calls is not that of most: the worst state first, then those that have called least. At most
    /// [`NOTABLE_RANKS_MAX`].
    pub notable: Vec<RasRank>,
    /// The number of all ranks that differ.
    pub notable_count: u32,
}

/// One rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RasRank {
    /// The rank.
    pub rank: u32,
    /// The address of its host, as RAS writes it.
    pub host: String,
    /// Its process; 0 if RAS does not know it.
    pub pid: u32,
    /// Its state.
    pub state: RasRankState,
    /// The number of collectives that its program has called, if it has answered.
    pub called: Option<u64>,
}

/// The state of a rank, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RasRankState {
    /// RAS has given it up: no answer for a minute.
    Dead,
    /// Its process has not answered.
    Unresponsive,
    /// Its communicator has an error: a code of `ncclResult_t`.
    Failed(i32),
    /// Its program has aborted the communicator.
    Aborted,
    /// Its process has answered, and is no member: it has not begun, or has ended the communicator.
    Absent,
    /// Its communicator is being made.
    Starting,
    /// It has answered.
    Answers,
}

impl RasRankState {
    /// The names of the states in which a rank cannot go on by itself.
    pub const TROUBLE_NAMES: [&str; 4] = ["dead", "unresponsive", "failed", "aborted"];

    /// Returns its name, as in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Unresponsive => "unresponsive",
            Self::Failed(_) => "failed",
            Self::Aborted => "aborted",
            Self::Absent => "absent",
            Self::Starting => "starting",
            Self::Answers => "answers",
        }
    }

    /// Returns all states, the worst first. `error` is the code of the failed one.
    const fn all(error: i32) -> [Self; 7] {
        [
            Self::Dead,
            Self::Unresponsive,
            Self::Failed(error),
            Self::Aborted,
            Self::Absent,
            Self::Starting,
            Self::Answers,
        ]
    }

    /// Returns the state of this name; `error` is the code of a failed one.
    #[must_use]
    pub fn from_name(name: &str, error: i32) -> Option<Self> {
        Self::all(error).into_iter().find(|state| state.name() == name)
    }

    /// Returns whether the rank cannot go on by itself.
    #[must_use]
    pub fn is_trouble(self) -> bool {
        matches!(self, Self::Dead | Self::Unresponsive | Self::Failed(_) | Self::Aborted)
    }

    /// Returns it as the predicate of a sentence about one process.
    #[must_use]
    pub fn predicate(self) -> String {
        match self {
            Self::Dead => "is dead: it has not answered its peers for a minute".to_owned(),
            Self::Unresponsive => "does not answer its peers".to_owned(),
            Self::Failed(code) => format!("has an error: {}", error_text(code)),
            Self::Aborted => "has aborted the communicator".to_owned(),
            Self::Absent => "answers, and is not in the communicator".to_owned(),
            Self::Starting => "answers, and is still making the communicator".to_owned(),
            Self::Answers => "answers".to_owned(),
        }
    }
}

/// Returns the meaning of a code of `ncclResult_t` (`nccl.h`).
fn error_text(code: i32) -> String {
    let text = match code {
        1 => "a call of CUDA failed",
        2 => "a call of the system failed",
        3 => "an internal error of NCCL",
        4 => "an invalid argument",
        5 => "an invalid use of NCCL",
        6 => "another process has ended, or the network failed",
        8 => "a timeout",
        _ => return format!("code {code}"),
    };
    format!("{text} (code {code})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_state() {
        let all = RasRankState::all(6);
        assert!(all.is_sorted(), "{all:?}: the worst first");
        let names = ["dead", "unresponsive", "failed", "aborted", "absent", "starting", "answers"];
        assert_eq!(all.map(RasRankState::name), names);
        assert_eq!(names.map(|name| RasRankState::from_name(name, 6)), all.map(Some));
        assert_eq!(RasRankState::from_name("well", 0), None);
        let troubles: Vec<_> =
            all.iter().filter(|state| state.is_trouble()).map(|state| state.name()).collect();
        assert_eq!(troubles, RasRankState::TROUBLE_NAMES);
    }
}

//! The report of a server's start on its journal ([`RestoreReport`]).

use std::time::Duration;

use muster_journal::JournalCut;

pub use super::state_digest::DigestComparison;
use crate::coordination::Timestamp;

/// The report of a restart on the journal.
#[derive(Debug, Clone, Default)]
pub struct RestoreReport {
    /// The number of inputs that were applied again.
    pub inputs: u64,
    /// Whether there was a snapshot to begin from.
    pub had_snapshot: bool,
    /// The bytes of the segments that were read.
    pub bytes: u64,
    /// The time that it took.
    pub took: Duration,
    /// The time of the last input.
    pub last_input: Timestamp,
    /// Damaged snapshots that were passed over.
    pub damaged_snapshots: Vec<String>,
    /// The records that were cut off.
    pub cut: Option<JournalCut>,
    /// The records of inputs that ended this program. They were not applied.
    pub set_aside: Vec<u64>,
    /// How the state compares with the last digest in the journal.
    pub digest: DigestComparison,
    /// How the former process ended, in a clause, if that is known.
    pub after: Option<String>,
    /// The connections that go on from the former process.
    pub continued_connections: usize,
    /// The connections of the former process that were to go on and could not.
    pub lost_connections: usize,
}

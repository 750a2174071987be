//! The body of the answer about the journal ([`JournalView`]).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::Timestamp;
use crate::engine::{DigestComparison, Durability, JournalState};

/// The journal of the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JournalView {
    /// The durability of an answer when it leaves; `none` if the server keeps no journal.
    pub durability: Durability,
    /// The number of records, over all lives of the server.
    pub records: u64,
    /// The number of records that are not on the disk yet.
    pub records_not_on_disk: u64,
    /// The bytes that this process has appended.
    pub appended_bytes: u64,
    /// The space that the journal takes on the disk.
    pub disk_bytes: u64,
    /// The snapshots that this process has written.
    pub snapshots: u64,
    /// The starts of the server that found a state in the journal.
    pub restarts: u64,
    /// The inputs that the start of this process applied again.
    pub replayed_inputs: u64,
    /// How long the start of this process read the journal, in seconds.
    pub replay_seconds: f64,
    /// The time of the last input before this process.
    pub last_input_before: Option<Timestamp>,
    /// How the process before this one ended, in a clause, if the server has a keeper that saw it.
    pub previous_end: Option<String>,
    /// The connections of the process before this one that go on in this process.
    pub continued_connections: usize,
    /// The connections of the process before this one that were kept, and could not go on.
    pub lost_connections: usize,
    /// The records whose inputs the start of this process did not apply, because they end the process.
    pub set_aside_records: Vec<u64>,
    /// How the state that was restored compares with the last digest in the journal.
    pub digest: DigestComparison,
    /// The calls and commands that were refused because the journal could not be written.
    pub refused_changes: u64,
    /// Why changes are refused now, in a sentence.
    pub trouble: Option<String>,
}

impl JournalView {
    /// Describes a journal; `None`: there is none.
    #[must_use]
    pub fn new(state: Option<&JournalState>) -> Self {
        let files = state.map(|state| state.files.clone()).unwrap_or_default();
        let restored = state.map(|state| state.restored.clone()).unwrap_or_default();
        Self {
            durability: state.map_or(Durability::None, |state| state.durability),
            records: files.records,
            records_not_on_disk: files.records_not_on_disk(),
            appended_bytes: files.appended_bytes,
            disk_bytes: files.disk_bytes,
            snapshots: files.snapshots,
            restarts: state.map_or(0, |state| state.restarts),
            replayed_inputs: restored.inputs,
            replay_seconds: restored.took.as_secs_f64(),
            last_input_before: Some(restored.last_input).filter(|at| at.0 > 0),
            previous_end: restored.after,
            continued_connections: restored.continued_connections,
            lost_connections: restored.lost_connections,
            set_aside_records: restored.set_aside,
            digest: restored.digest,
            refused_changes: state.map_or(0, |state| state.refused_changes),
            trouble: files.trouble,
        }
    }
}

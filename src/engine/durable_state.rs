//! The part of the engine's state that survives the process: a snapshot of the journal has it, and a replay restores it
//! ([`DurableState`]).
//!
//! Its encoding is part of the journal: see `ENCODING_VERSION` in `recorder.rs`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::event_history::EventHistory;
use crate::coordination::{Coordinator, JobName, JobSettings};

/// The state that survives the process. Waiting calls do not: their connections end with it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct DurableState {
    /// The jobs and connections.
    pub coordinator: Coordinator,
    /// The number of the next call.
    pub next_call: u64,
    /// The number of the next connection.
    pub next_connection: u64,
    /// The retained events.
    pub history: EventHistory,
    /// The number of the next event, from 1.
    pub next_event: u64,
    /// The number of applied inputs.
    pub inputs: u64,
    /// The settings with which the configuration last declared each job.
    pub declared: BTreeMap<JobName, JobSettings>,
    /// The number of starts that found a state in the journal.
    pub restarts: u64,
}

impl Default for DurableState {
    fn default() -> Self {
        Self {
            coordinator: Coordinator::default(),
            next_call: 0,
            next_connection: 0,
            history: EventHistory::default(),
            next_event: 1,
            inputs: 0,
            declared: BTreeMap::new(),
            restarts: 0,
        }
    }
}

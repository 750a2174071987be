//! The state that an agent and its background tasks share.
//!
//! `engine_host.rs` has the part that an attachment also has. Begin at [`AgentShared`].

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::coordination_client::CoordinationClient;
use super::engine_host::EngineHost;

/// The state of the agreement on a step (`preemption.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct StepAgreement {
    pub(super) step: u64,
    pub(super) phase: AgreementPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum AgreementPhase {
    #[default]
    Idle,
    Agreeing,
    Agreed(u64),
    Failed,
}

/// The state that the agent and its background tasks share: an engine host that has registered.
pub(super) struct AgentShared {
    pub host: Arc<EngineHost>,
    pub service: Arc<CoordinationClient>,
    pub tasks: u32,
    pub notice: watch::Sender<Option<String>>,
    pub sync: watch::Sender<StepAgreement>,
    pub counters: Mutex<HashMap<String, i64>>,
}

impl AgentShared {
    /// Returns the state of an incarnation that has just joined.
    pub fn new(host: Arc<EngineHost>, service: Arc<CoordinationClient>, tasks: u32) -> Self {
        Self {
            host,
            service,
            tasks,
            notice: watch::Sender::new(None),
            sync: watch::Sender::default(),
            counters: Mutex::default(),
        }
    }
}

impl Deref for AgentShared {
    type Target = EngineHost;

    fn deref(&self) -> &EngineHost {
        &self.host
    }
}

//! The state that an agent and its background tasks share.
//!
//! `engine_host.rs` has the part that an attachment also has. Begin at [`AgentShared`].

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::coordination_client::CoordinationClient;
use super::engine_host::EngineHost;
use super::preemption;

/// The state that the agent and its background tasks share: an engine host that has registered.
pub(super) struct AgentShared {
    pub host: Arc<EngineHost>,
    pub service: Arc<CoordinationClient>,
    pub tasks: u32,
    pub notice: watch::Sender<Option<String>>,
    pub sync: watch::Sender<preemption::StepAgreement>,
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

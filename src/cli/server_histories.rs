//! The histories of a server, which its journal keeps over a restart. Begin at [`ServiceHistories`].

use std::sync::Arc;

use crate::engine::PersistentObserver;
use crate::service::reports::TransferReportStore;
use crate::service::{ActivityHistory, AuditLog, BarrierHistory, StateHistory, Timelines};

/// The observers whose contents are in the journal.
#[derive(Clone)]
pub struct ServiceHistories {
    pub audit: Arc<AuditLog>,
    pub timelines: Arc<Timelines>,
    pub barriers: Arc<BarrierHistory>,
    pub states: Arc<StateHistory>,
    pub activity: Arc<ActivityHistory>,
    pub transfers: Arc<TransferReportStore>,
}

impl ServiceHistories {
    pub fn new(audit: Arc<AuditLog>) -> Self {
        let (timelines, barriers) = (Arc::default(), Arc::default());
        let (states, activity, transfers) = (Arc::default(), Arc::default(), Arc::default());
        Self { audit, timelines, barriers, states, activity, transfers }
    }

    pub fn as_persistent_observers(&self) -> Vec<Arc<dyn PersistentObserver>> {
        let Self { audit, timelines, barriers, states, activity, transfers } = self.clone();
        vec![audit, timelines, barriers, states, activity, transfers]
    }
}

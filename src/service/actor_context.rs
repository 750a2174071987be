//! The author of a change, with the trace context of the request. [`ActorContext`] creates the audit entry of the
//! change.
//!
//! The HTTP port authenticates the author. Begin at [`ActorContext`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::AccessRole;
use super::audit::AuditEntry;
use crate::coordination::{Actor, CommandReason, JobName};
use crate::telemetry::traces::TraceParent;

/// The author of a change, with the context of the request.
#[derive(Debug, Clone)]
pub struct ActorContext {
    /// The name, the address and the interface.
    pub actor: Actor,
    /// The role; `None` for unauthenticated authors and for rules of the server.
    pub role: Option<AccessRole>,
    /// The trace context that the caller sent.
    pub parent: Option<TraceParent>,
    audited: Arc<AtomicBool>,
}

impl ActorContext {
    /// Creates a context without a request.
    #[must_use]
    pub fn new(actor: Actor, role: Option<AccessRole>, parent: Option<TraceParent>) -> Self {
        Self { actor, role, parent, audited: Arc::default() }
    }

    /// Returns the audit entry of a change: its verb and its subject.
    pub(crate) fn create_audit_entry(
        &self,
        job: Option<JobName>,
        act: &'static str,
        subject: String,
        reason: Option<CommandReason>,
    ) -> AuditEntry {
        self.audited.store(true, Ordering::Relaxed);
        AuditEntry { actor: self.actor.clone(), role: self.role, job, act, subject, reason }
    }

    /// Whether the change has an audit entry.
    pub(crate) fn is_audited(&self) -> bool {
        self.audited.load(Ordering::Relaxed)
    }
}

//! Changes by operators and rules, and their audit, independent of any port.
//!
//! It knows no port: the HTTP port translates requests into [`Operation`]s, and findings ask for remedies. Begin at
//! [`Operations::act`].
//!
//! | file | what it holds |
//! | --- | --- |
//! | `operations.rs` | commands upon jobs: done, written to the audit, linked to the trace |
//! | `audit/` | the audit log: its lines, its file, its aggregated refusals |
//! | `actor_context.rs` | the author of a change |
//! | `role.rs` | viewer < operator < admin |

mod actor_context;
mod audit;
mod operations;
mod role;

pub use actor_context::ActorContext;
pub use audit::{AuditFailurePolicy, AuditLine, AuditLog, AuditOutcome, AuditPage};
pub use operations::{Operation, Operations};
pub use role::Role;

//! Changes by operators and rules, their audit, findings and transfer reports, independent of any port.
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
//! | `findings/` | detectors: conclusions from measurements, and the remedies that jobs ask for |
//! | `reports/` | transfer reports of native workers, outside of the state machine |

mod actor_context;
mod audit;
pub mod findings;
mod operations;
pub mod reports;
mod role;

pub use actor_context::ActorContext;
pub use audit::{AuditFailurePolicy, AuditLine, AuditLog, AuditOutcome, AuditPage};
pub use operations::{Operation, Operations};
pub use role::Role;

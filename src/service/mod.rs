//! The parts of the server that use no port: changes by operators and automatic rules, their audit, findings,
//! timelines, transfer reports and stacks.
//!
//! The HTTP port translates requests to [`JobOperation`]s. Findings can request automatic exclusions. Begin at
//! [`AuditedOperations::perform_audited`].
//!
//! | file | what it owns |
//! | --- | --- |
//! | `operations.rs` | commands on jobs, with their audit lines and traces |
//! | `audit/` | the audit log: its lines, its file, its aggregated refusals |
//! | `actor_context.rs` | the author of a change, with the context of the request |
//! | `role.rs` | the roles: viewer < operator < admin |
//! | `findings/` | detectors: conclusions from measurements, and automatic exclusions |
//! | `barrier_history.rs` | the latest ended barriers of each job, with every arrival |
//! | `timelines.rs` | the timeline of each job, recorded from its events |
//! | `reports/` | transfer reports of native workers, outside of the state machine |
//! | `stacks/` | requests for the stacks of tasks, and their answers, grouped by equal stacks |
//! | `stack_requests.rs` | these requests with their audit, by operators and for findings |

mod actor_context;
mod audit;
mod barrier_history;
pub mod findings;
mod operations;
pub mod reports;
mod role;
mod stack_requests;
pub mod stacks;
mod timelines;

pub use actor_context::ActorContext;
pub use audit::{AuditFailurePolicy, AuditLine, AuditLog, AuditOutcome, AuditPage};
pub use barrier_history::BarrierHistory;
pub use operations::{AuditedOperations, JobOperation};
pub use role::AccessRole;
pub use stack_requests::request_stacks_for_findings;
pub use timelines::{
    CausalRole, JobTimeline, TIMELINE_ENTRIES_MAX, TimelineEntry, TimelineTone, Timelines,
    barrier_display_name,
};

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
//! | `activity.rs` | what each job did over the last ten minutes, in steps of ten seconds |
//! | `barrier_history.rs` | the latest ended barriers of each job, with every arrival |
//! | `timelines.rs` | the timeline of each job, recorded from its events |
//! | `state_history.rs` | the states of each task over time, recorded from the same events |
//! | `state_periods.rs` | the periods of each task of a run, computed from these states |
//! | `records_by_run.rs` | a bounded list of records of a job's latest runs, which these three use |
//! | `saved_contents.rs` | the form in which the four histories are saved |
//! | `collectives/` | the collectives of jobs: cliques that wait, and for whom |
//! | `reports/` | transfer reports of native workers, outside of the state machine |
//! | `stacks/` | requests for the stacks of tasks, and their answers, grouped by equal stacks |
//! | `stack_requests.rs` | these requests with their audit, by operators and for findings |

mod activity;
mod actor_context;
mod audit;
mod barrier_history;
pub mod collectives;
pub mod findings;
mod operations;
mod records_by_run;
pub mod reports;
mod role;
mod saved_contents;
mod stack_requests;
pub mod stacks;
mod state_history;
mod state_periods;
mod timelines;

pub use activity::{ACTIVITY_STEPS, ActivityHistory, ActivityStep, JobActivity};
pub use actor_context::ActorContext;
pub use audit::{AuditFailurePolicy, AuditLine, AuditLog, AuditOutcome, AuditPage};
pub use barrier_history::BarrierHistory;
pub use operations::{AuditedOperations, JobOperation};
pub use role::AccessRole;
pub use stack_requests::request_stacks_for_findings;
pub use state_history::{RunMark, RunMarkKind, RunStateHistory, StateHistory};
pub use state_periods::{RunStates, StatePeriod, TaskMark, TaskMarkKind, TaskPeriods};
pub use timelines::{
    CausalRole, JobTimeline, TIMELINE_ENTRIES_MAX, TimelineEntry, TimelineTone, Timelines,
    barrier_display_name,
};

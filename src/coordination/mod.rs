//! The state machine of the coordination service: jobs, runs, tasks, barriers, the key-value store, live sets, and
//! every rule between them.
//!
//! [`Coordinator::apply`] takes the time and one [`Input`], and appends [`Effect`]s, which are instructions to the
//! driver. [`Coordinator::next_wakeup`] returns the time at which the state machine needs a tick. The state machine
//! does no IO, reads no clock, draws no randomness, starts no thread, and contains no encoding of calls, no page and
//! no metric. Its driver is `engine::Engine`. The ports (`grpc`, `http`) translate calls to inputs and effects to
//! replies. Begin at [`Coordinator::apply`], then read `input.rs` (inputs and effects), `job_input_handlers.rs` and
//! `call_dispatch.rs`.
//!
//! Invariants of the state machine:
//!
//! - The same inputs at the same times produce the same state and the same effects, bit for bit. All state can be
//!   serialised, and every table is ordered, so no iteration depends on a hash seed.
//! - An input that affects many calls or tasks changes the state at once, but sends at most 128 queued answers. Later
//!   ticks send the other answers. All jobs share these ticks, and other inputs may come between two ticks. Because
//!   the state changes at once, no input finds a barrier that only half of its members have passed. There is one
//!   exception: the exclusion of a host with many tasks evicts some of them in later ticks.
//! - Measurements (heartbeat gaps, lateness) are computed from the times of inputs, so a replay gives the same
//!   measurements.
//! - Every transition has a reason that a person can read.
//!
//! Data and rules are in separate files. The table lists the files from the lowest layer to the highest. A file
//! imports only files of its own row and of the rows above. `tests/structure/layers.rs` has the exact layers, and a
//! test enforces them.
//!
//! | file | holds |
//! | --- | --- |
//! | `ids.rs`, `actor.rs`, `process_identity.rs` | identifiers; authors of commands; process identities |
//! | `settings.rs`, `failure.rs`, `shared_failures.rs` | settings and bounds; errors |
//! | `request_reply.rs`, `store_entry.rs` | requests and replies of tasks; entries of the store |
//! | `exclusion.rs`, `task_owner_table.rs` | tables: exclusions, owners of task ids |
//! | `event.rs`, `barrier_record.rs` | events; records of ended barriers |
//! | `command.rs`, `input.rs` | commands and their outcomes; inputs and effects |
//! | `deferred_free.rs`, `derived_value.rs` | memory to free; a value that is computed when it is first needed |
//! | `heartbeat_stats.rs`, `heartbeat_history.rs` | statistics of a task's heartbeats |
//! | `straggler_stats.rs` | statistics of a task's lateness at barriers |
//! | `key_value_store.rs`, `topology.rs`, `live_set_request.rs` | keys; topology; a live-set request |
//! | `fatal_gpu_error.rs` | the error of a GPU that a process tells in the store |
//! | `barrier_table.rs`, `unmeasured_barrier.rs` | barriers; an ended barrier to be measured |
//! | `waiters.rs`, `timers.rs` | unanswered calls and decided answers; deadlines |
//! | `unpublished_events.rs` | events to publish |
//! | `task.rs`, `run.rs`, `run_state.rs` | one task; one run; short descriptions of a run |
//! | `context.rs` | the context of a transition |
//! | `live_set_rules.rs`, `error_polls.rs` | live sets; error polls |
//! | `barrier_stats.rs`, `store_calls.rs` | the measurement of barriers; calls on the store |
//! | `peer_job_calls.rs`, `run_start.rs` | calls of other jobs; the start of a run |
//! | `barrier_ends_and_task_removal.rs` | the end of barriers, and tasks that leave the run |
//! | `barrier_completion.rs`, `barrier_arrival.rs` | the completion of barriers; the arrival of tasks at barriers |
//! | `failure_detection.rs`, `registration.rs` | heartbeats, lost connections and reported errors; registration |
//! | `shutdown.rs`, `preemption.rs` | shutdown; the drain |
//! | `call_dispatch.rs`, `pending_work.rs` | the dispatch of calls to rules; queued answers and due timers |
//! | `past_runs.rs` | the ended runs of a job |
//! | `job.rs` | a job: its tables |
//! | `connections.rs`, `peer_jobs.rs` | connections and their end; jobs that exchange transfers |
//! | `exclusion_rules.rs` | the effects of exclusions on tasks |
//! | `run_lifecycle.rs`, `fencing.rs` | the sequence of runs; the admission of calls |
//! | `job_settings.rs` | changed settings |
//! | `task_id_claims.rs` | the assignment of task ids to processes |
//! | `job_input_handlers.rs` | the inputs of a job: calls, ticks and others |
//! | `exclusion_preview.rs`, `operator_commands.rs` | the preview of an exclusion; the commands of operators |
//! | `coordinator.rs` | every job and connection |
//! | `views/` | the read models |
//! | `invariants.rs` | the invariants, checked from scratch |

mod actor;
mod barrier_arrival;
mod barrier_completion;
mod barrier_ends_and_task_removal;
mod barrier_record;
mod barrier_stats;
mod barrier_table;
mod call_dispatch;
mod command;
mod connections;
mod context;
mod coordinator;
mod deferred_free;
mod derived_value;
mod error_polls;
mod event;
mod exclusion;
mod exclusion_preview;
mod exclusion_rules;
mod failure;
mod failure_detection;
mod fatal_gpu_error;
mod fencing;
mod heartbeat_history;
mod heartbeat_stats;
mod ids;
mod input;
mod invariants;
mod job;
mod job_input_handlers;
mod job_settings;
mod key_value_store;
mod live_set_request;
mod live_set_rules;
mod operator_commands;
mod past_runs;
mod peer_job_calls;
mod peer_jobs;
mod pending_work;
mod preemption;
mod process_identity;
mod registration;
mod request_reply;
mod run;
mod run_lifecycle;
mod run_start;
mod run_state;
mod settings;
mod shared_failures;
mod shutdown;
mod store_calls;
mod store_entry;
mod straggler_stats;
mod task;
mod task_id_claims;
mod task_owner_table;
mod timers;
mod topology;
mod unmeasured_barrier;
mod unpublished_events;
mod views;
mod waiters;

pub use actor::*;
pub use barrier_completion::PASSED_WITHOUT_EXCLUDED;
pub use barrier_record::*;
pub use command::*;
pub use coordinator::Coordinator;
pub use deferred_free::DeferredFree;
pub use event::*;
pub use exclusion::{
    ExcludedHost, ExclusionEndKind, ExclusionEndRecord, ExclusionTarget, ExclusionTargetFields,
};
pub use failure::*;
pub use failure_detection::is_unreachable_host;
pub use fatal_gpu_error::FatalGpuError;
pub use heartbeat_history::HeartbeatGap;
pub use heartbeat_stats::{GAP_BUCKETS, GapHistogram, HeartbeatStatsView, silence_if_heartbeat_overdue};
pub use ids::*;
pub use input::*;
pub use process_identity::ProcessIdentity;
pub use request_reply::*;
pub use run_state::{RunInterval, RunState, RunSummary};
pub use settings::*;
pub use store_entry::DirectoryListing;
pub use straggler_stats::StragglerView;
pub use task_owner_table::{ClaimAnswer, ClaimRefusal, ClaimWaitReason, TaskClaim};
pub use topology::{Device, TopologyKey};
pub use views::*;

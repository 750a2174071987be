//! The state machine of the coordination service: jobs, runs, tasks, barriers, the key-value store, live sets, and
//! every rule between them.
//!
//! [`Coordinator::apply`] takes the time and one [`Input`] and appends [`Effect`]s; [`Coordinator::next_wakeup`]
//! returns when the state machine wants a tick. It does no IO, reads no clock, draws no randomness, starts no
//! thread, and knows no wire format, page or metric. The engine drives it; the edges translate for it. Begin at
//! [`Coordinator::apply`], then read `input.rs` (what goes in and comes out), `job.rs` and `run.rs`.
//!
//! Invariants of the whole:
//!
//! - The same inputs at the same times produce the same state and the same effects, bit for bit. All state can be
//!   serialised, and every table is ordered, so no iteration depends on a hash seed.
//! - An input that affects many calls or tasks decides everything at once and does a bounded part of the work (256
//!   answers). Ticks do the rest, other inputs come in between, and jobs share the ticks. The state of tasks,
//!   barriers and live sets changes whole: no input meets a barrier that half of its members have passed.
//! - Numbers that are measured (heartbeat gaps, lateness) are computed from the times of inputs, so a replay
//!   measures the same.
//! - Every transition carries a reason that a person can read.
//!
//! Data is apart from rules, and files import downwards only (`tests/structure` enforces it). From the bottom:
//!
//! | file | holds |
//! | --- | --- |
//! | `ids.rs`, `actor.rs`, `settings.rs`, `failure.rs`, `failure_texts.rs` | identifiers; operators and their reasons; settings and bounds; errors |
//! | `call.rs`, `command.rs`, `directory.rs` | requests and replies of tasks; commands of operators and their outcomes |
//! | `event.rs`, `barrier_record.rs`, `input.rs`, `deferred_free.rs` | events; records of ended barriers; inputs and effects; memory to free |
//! | `heartbeat_stats.rs`, `heartbeat_history.rs`, `straggler_stats.rs` | statistics of a task: heartbeats, heartbeats over time, lateness at barriers |
//! | `store.rs`, `topology.rs`, `barrier.rs`, `pending_barrier_stats.rs`, `live_set.rs`, `exclusion.rs` | tables: keys, barriers, live-set requests, exclusions |
//! | `waiters.rs`, `timers.rs`, `event_queue.rs` | unanswered calls and decided answers; deadlines; events to publish |
//! | `task.rs`, `run.rs`, `context.rs` | one task; one run and the dispatch of its calls; the context of a transition |
//! | `registration.rs`, `shutdown.rs`, `task_failure.rs` | registration; shutdown; heartbeats, lost connections, failure and its propagation |
//! | `barrier_arrival.rs`, `barrier_completion.rs`, `barrier_stats.rs`, `live_set_rules.rs` | arrival at barriers; their completion; their measurement; live sets |
//! | `job.rs` | the sequence of runs, admission and fencing |
//! | `operator_commands.rs`, `exclusion_rules.rs`, `preemption.rs`, `job_settings.rs` | the commands of operators |
//! | `coordinator.rs` | every job and connection |
//! | `task_state.rs`, `view.rs`, `view_builder.rs` | shared figures; the read models and how they are made |
//! | `job_reader.rs`, `store_listing.rs`, `devices.rs`, `device_map.rs`, `observation.rs` | parts of the read models; numbers for metrics and detectors |
//! | `invariants.rs` | the invariants, checked from scratch |

mod actor;
mod barrier;
mod barrier_arrival;
mod barrier_completion;
mod barrier_record;
mod barrier_stats;
mod call;
mod command;
mod context;
mod coordinator;
mod deferred_free;
mod device_map;
mod devices;
mod directory;
mod event;
mod event_queue;
mod exclusion;
mod exclusion_rules;
mod failure;
mod failure_texts;
mod heartbeat_history;
mod heartbeat_stats;
mod ids;
mod input;
mod invariants;
mod job;
mod job_reader;
mod job_settings;
mod live_set;
mod live_set_rules;
mod observation;
mod operator_commands;
mod pending_barrier_stats;
mod preemption;
mod registration;
mod run;
mod settings;
mod shutdown;
mod store;
mod store_listing;
mod straggler_stats;
mod task;
mod task_failure;
mod task_state;
mod timers;
mod topology;
mod view;
mod view_builder;
mod waiters;

pub use actor::*;
pub use barrier_record::*;
pub use call::*;
pub use command::*;
pub use coordinator::Coordinator;
pub use deferred_free::DeferredFree;
pub use device_map::{DeviceChange, DeviceIdentity, DeviceMap, DeviceMapEntry};
pub use devices::{Device, decode_topology_values as decode_devices};
pub use directory::Directory;
pub use event::*;
pub use exclusion::{ExclusionEndKind, ExclusionEndRecord, ExclusionTarget};
pub use failure::*;
pub use heartbeat_history::HeartbeatGap;
pub use heartbeat_stats::{GAP_BUCKETS, GapHistogram, HeartbeatStatsView, heartbeat_overdue_by};
pub use ids::*;
pub use input::*;
pub use job_reader::{CurrentIncarnation, JobReader, TaskIncarnations};
pub use observation::*;
pub use settings::*;
pub use straggler_stats::StragglerView;
pub use task_state::{RunInterval, TaskCounts, TaskPhase, TaskState, barrier_label};
pub use topology::TopologyKey;
pub use view::*;

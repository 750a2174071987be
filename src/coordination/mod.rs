//! The state machine: jobs, runs, tasks, barriers, the store, live sets, and every rule that holds between them.
//!
//! [`Coordinator::apply`] takes the time and one [`Input`] and appends [`Effect`]s; [`Coordinator::next_wake`] says when it
//! wants a tick. Nothing in here does IO, reads a clock, draws randomness or knows of threads, and the whole state can be
//! serialised: the same inputs at the same times make the same state and the same effects, bit for bit.
//!
//! Data is apart from rules, and files look down only (`tests/structure` holds it). From the bottom:
//!
//! | file | holds |
//! | --- | --- |
//! | `ids.rs`, `actor.rs`, `settings.rs`, `failure.rs`, `failure_texts.rs` | numbers and names; who acts, and why; settings and bounds; errors |
//! | `call.rs`, `command.rs`, `directory.rs` | what tasks ask; what operators ask; what both are answered |
//! | `event.rs`, `barrier_record.rs`, `input.rs`, `discarded.rs` | what is told; what goes in and what comes out |
//! | `pulse.rs`, `course.rs`, `straggling.rs` | what is measured of a task: heartbeats, also over time; how it comes to barriers |
//! | `store.rs`, `topology.rs`, `barrier.rs`, `measure.rs`, `live_set.rs`, `exclusion.rs` | the tables: keys, barriers, live sets, exclusions |
//! | `waiters.rs`, `timers.rs`, `outbox.rs` | unanswered calls and decided answers; deadlines; events that are published next |
//! | `task.rs`, `run.rs`, `context.rs` | one task; one run, and the calls upon it; what a transition works with |
//! | `registration.rs`, `leaving.rs`, `failing.rs` | coming and going; signs of life, lost connections, the first cause, who is told |
//! | `meeting.rs`, `parting.rs`, `barrier_stats.rs`, `live.rs` | how barriers fill, how they end, how they are measured; live sets |
//! | `job.rs` | run after run; who may speak in the present one (fencing) |
//! | `steering.rs`, `excluding.rs`, `draining.rs`, `configuring.rs` | what operators do to a job |
//! | `coordinator.rs` | every job and connection |
//! | `figures.rs`, `view.rs`, `viewing.rs` | what several places count, once; the state as people see it |
//! | `looking.rs`, `store_listing.rs`, `devices.rs`, `device_map.rs`, `observation.rs` | parts of it, each made alone; the state as instruments see it |
//! | `audit.rs` | the invariants of all this, checked from scratch |

mod actor;
mod audit;
mod barrier;
mod barrier_record;
mod barrier_stats;
mod call;
mod command;
mod configuring;
mod context;
mod coordinator;
mod course;
mod device_map;
mod devices;
mod directory;
mod discarded;
mod draining;
mod event;
mod excluding;
mod exclusion;
mod failing;
mod failure;
mod failure_texts;
mod figures;
mod ids;
mod input;
mod job;
mod leaving;
mod live;
mod live_set;
mod looking;
mod measure;
mod meeting;
mod observation;
mod outbox;
mod parting;
mod pulse;
mod registration;
mod run;
mod settings;
mod steering;
mod store;
mod store_listing;
mod straggling;
mod task;
mod timers;
mod topology;
mod view;
mod viewing;
mod waiters;

pub use actor::*;
pub use barrier_record::*;
pub use call::*;
pub use command::*;
pub use coordinator::Coordinator;
pub use course::HeartbeatGap;
pub use device_map::{DeviceChange, DeviceIdentity, DeviceMap, DeviceMapEntry};
pub use devices::{Device, decode_topology_values as decode_devices};
pub use directory::Directory;
pub use discarded::DeferredFree;
pub use event::*;
pub use exclusion::{ExclusionEndKind, ExclusionEndRecord, ExclusionTarget};
pub use failure::*;
pub use figures::{RunInterval, TaskCounts, TaskPhase, TaskState, barrier_label};
pub use ids::*;
pub use input::*;
pub use looking::{CurrentIncarnation, JobReader, TaskIncarnations};
pub use observation::*;
pub use pulse::{GAP_BUCKETS, GapHistogram, HeartbeatStatsView, heartbeat_overdue_by};
pub use settings::*;
pub use straggling::StragglerView;
pub use topology::TopologyKey;
pub use view::*;

//! The state machine: jobs, runs, tasks, barriers, the store, live sets, and every rule that holds between them.
//!
//! [`Coordinator::apply`] takes the time and one [`Input`] and appends [`Effect`]s; [`Coordinator::next_wake`] says when it
//! wants a tick. Nothing in here does IO, reads a clock, draws randomness or knows of threads, and the whole state can be
//! serialised: the same inputs at the same times make the same state and the same effects, bit for bit.
//!
//! | file | holds |
//! | --- | --- |
//! | `coordinator.rs` | every job and connection |
//! | `job.rs` | run after run; who may speak in the present one (fencing) |
//! | `run.rs` | one run's state, and the calls upon it |
//! | `task.rs` | one task: its standing, lives and health |
//! | `registration.rs`, `leaving.rs` | coming and going |
//! | `failing.rs` | signs of life, lost connections, the first cause, who is told |
//! | `steering.rs` | what operators do: acts, and why they are refused |
//! | `actor.rs` | who they are and why they act |
//! | `exclusion.rs`, `excluding.rs` | the table of exclusions; what they mean for the tasks |
//! | `draining.rs`, `configuring.rs` | asking for a coordinated save; other settings |
//! | `barrier.rs`, `meeting.rs`, `parting.rs` | the table of barriers; how they fill; how they end |
//! | `live.rs` | the live-set question |
//! | `store.rs` | the key-value store |
//! | `waiters.rs`, `timers.rs` | who waits; what waits for the clock |
//! | `devices.rs` | devices out of the topology values |
//! | `pulse.rs`, `course.rs`, `straggling.rs` | what is measured: heartbeats, also over time; barriers and who is late to them |
//! | `observation.rs` | the state as instruments see it |
//! | `looking.rs`, `store_listing.rs`, `keys.rs`, `device_map.rs` | parts of it, each made alone |
//! | `view.rs`, `viewing.rs` | the state as people see it |
//! | `figures.rs` | what several places count and measure, once |
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
pub use course::GapAt;
pub use device_map::{DeviceFate, DeviceIdentity, DeviceMap, DeviceMove};
pub use devices::{Device, decode_values as decode_devices};
pub use directory::Directory;
pub use discarded::Discarded;
pub use event::*;
pub use exclusion::{ExclusionEnd, ExclusionEnded, Target};
pub use failure::*;
pub use figures::{RunSpan, TaskCounts, TaskStanding, TaskState, barrier_label};
pub use ids::*;
pub use input::*;
pub use looking::{JobLook, PresentLife, Roster};
pub use observation::*;
pub use pulse::{GAP_CLASSES, Gaps, PulseView, overdue};
pub use settings::*;
pub use straggling::StragglingView;
pub use topology::TopologyKey;
pub use view::*;

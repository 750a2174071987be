//! Simulates the tasks of a large job: real clients of the protocol over real sockets, many of them in one process. A
//! story says how they behave and what happens to them.
//!
//! The module has no server and prints nothing: `cli/simulate.rs` does both. Begin at [`Story`], then
//! [`SimulatedCluster::start`].
//!
//! | file | what it does |
//! | --- | --- |
//! | `story.rs`, `story_values.rs`, `built_in.rs` | a story as a file; the stories of this program |
//! | `layout.rs` | which tasks share a host, and which share a connection |
//! | `schedule.rs` | which action comes when, for which tasks |
//! | `narration.rs` | the words for an action, and what the service should do |
//! | `connection.rs` | the connections, which can be reset |
//! | `task.rs`, `cluster.rs` | one task; all tasks |
//! | `clique.rs` | the collectives of all tasks |
//! | `tally.rs` | steps, registrations and errors |

mod built_in;
mod clique;
mod cluster;
mod connection;
mod layout;
mod narration;
mod schedule;
mod story;
mod story_values;
mod tally;
mod task;

pub use built_in::{built_in_names, built_in_text};
pub use cluster::{SimulatedCluster, SimulationError, check_service, plan_connections};
pub use connection::SimulatedTarget;
pub use layout::{ConnectionPlan, host_name};
pub use narration::{describe_action, describe_expectation};
pub use schedule::{Schedule, ScheduledAction};
pub use story::{Story, StoryError, StoryOverrides};
pub use tally::SimulationSummary;

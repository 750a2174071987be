//! The state machine.
mod call;
mod coordinator;
mod devices;
mod event;
mod failure;
mod ids;
mod input;
mod settings;
mod view;

pub use call::*;
pub use coordinator::*;
pub use devices::{Device, TopologyKey};
pub use event::*;
pub use failure::*;
pub use ids::*;
pub use input::*;
pub use settings::*;
pub use view::*;

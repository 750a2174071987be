//! The state machine.
mod call;
mod coordinator;
mod event;
mod failure;
mod ids;
mod input;
mod settings;

pub use call::*;
pub use coordinator::*;
pub use event::*;
pub use failure::*;
pub use ids::*;
pub use input::*;
pub use settings::*;

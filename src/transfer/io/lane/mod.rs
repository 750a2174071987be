//! A lane: one wire of a connection, with the frames that are partly sent and partly received on it.
//!
//! Lanes never block. A thread that has something to send pumps the lane's output, unless another one does at
//! this moment. The [reactor](super::reactor) pumps it again when the wire accepts more, and is the only one
//! to pump the input. A lane knows its session by [`LaneHost`] only.

mod input;
mod output;
mod receive;
mod send;
mod state;

pub use state::{Lane, LaneError, LaneHost, Replies};

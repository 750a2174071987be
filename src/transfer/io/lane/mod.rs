//! A lane: one wire of a connection, with what is half sent and half received on it.
//!
//! Lanes never block. A thread that has something to send pumps the lane's output, if no other does at this moment; the
//! [reactor](super::reactor) pumps it again when the wire takes more, and is the only one to pump the input. A lane
//! knows its session by [`LaneHost`] only.

mod input;
mod output;
mod receive;
mod send;
mod state;

pub use state::{Lane, LaneError, LaneHost, Replies};

//! A lane: one wire of a connection, with the frame that is being sent and the frame that is being received on it.
//!
//! Lanes never block. To *pump* the output of a lane is to send as much as its wire accepts. A thread that has queued
//! something pumps the output, unless another thread is doing so. When the wire accepts more, the
//! [reactor](super::reactor) pumps the output again. Only the reactor reads the input. A lane calls its session (the
//! connection) only through [`LaneHost`]. Begin at [`Lane`].

mod input;
mod output;
mod receive;
mod send;
mod staged_chunks;
mod staging;
mod state;

pub use state::{Lane, LaneError, LaneHost, PendingReplies};

//! One side of a link: the messages between two engines, as a state machine without IO.
//!
//! On each side, a launch is one part of the next *group* of its channel. Each side sends `Go`, which names its list
//! of transfers. When both sides have sent `Go`, each side compares the two lists. If the lists are equal, the bytes
//! move as soon as the source holds its contents and the destination may be written: the sides announce both in `Go`
//! or in `Ready`. The bytes of a group in one direction are one stream, in the order of the list. Unless the receiver
//! fetches the stream, or `Go` carries it, the stream is cut into chunks. So a thousand small buffers are one chunk
//! with one header and one checksum. The tests simulate two links against each other (`tests/`). Begin at
//! [`LinkSide::launch`].
//!
//! Launches are matched by number, and their lists are compared by a digest. If two engines launch in different
//! orders, both get an error that names both orders before a byte moves. They never deadlock.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `link_side.rs` | when a group begins, ends, or is cancelled |
//! | `receive.rs` | what a control frame of the peer changes |
//! | `interface.rs` | nothing: it has the types of inputs and outputs |
//! | `launch_numbers.rs` | the numbers of launches |
//! | `control_queue.rs` | which control frames are sent again after a reconnection |
//! | `chunk_flow.rs`, `chunks.rs` | which chunk a lane sends next; which chunks have arrived, or are sent again |
//! | `chunk_scheduler.rs` | which group sends the next chunk |
//! | `launch_definition.rs` | what both sides must agree on |
//! | `leave_handshake.rs` | when an unused connection may end |
//!
//! Chunks are not acknowledged one by one. The receiver names lost control frames by number, and lost chunks by a
//! bitmap. The sender sends them again.
//!
//! Invariants (`LinkSide::assert_invariants` checks them after every step of the simulation):
//! 1. At most one lane receives a chunk at any moment. After a chunk was received whole, no lane receives it again.
//! 2. No byte is written to a destination until both sides' lists are found equal and the receiver's buffers may be
//!    written.
//! 3. A side sends `Stop` or `Stopped` for a group only when no byte of the group can be written to its own buffers
//!    any more. It accepts nothing for the group afterwards.
//! 4. A group is forgotten only when neither side waits for a frame or a byte of it.
//! 5. Every table is within its bound.
//!
//! `leave_handshake.rs` has the invariants for the end of a connection.

mod chunk_flow;
mod chunk_scheduler;
mod chunks;
mod control_queue;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod interface;
pub mod launch_definition;
mod launch_numbers;
mod leave_handshake;
mod link_side;
mod receive;
#[cfg(test)]
mod tests;

pub use chunk_scheduler::{GroupId, PriorityClass};
pub use interface::{
    ChunkDestination, ControlFrame, DefinitionMismatch, LaunchParameters, LinkOutput, LinkTerms,
    OutgoingChunk, ProtocolViolation, WaitersToWake,
};
pub use launch_numbers::LaunchNumbers;
pub use link_side::{LAUNCHES_MAX, LinkSide};

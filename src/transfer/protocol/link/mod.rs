//! The messages of two engines, without IO: one side of a link.
//!
//! A launch is the next *group* of its channel on both sides. Each side sends `Go` with its list of transfers; when
//! both have, the lists are compared, and the bytes move as soon as the source is defined and the destination may
//! be written. The bytes of a group in one direction are one stream, in the order of the definition, cut into
//! chunks: a thousand small buffers are one chunk, one header and one checksum. Two links are simulated against
//! each other (`tests/`). Begin at [`Link::launch`].
//!
//! Launches are matched by number and their lists compared by a digest, so ranks that disagree get an error that
//! names both orders, before a byte moves, and never a deadlock.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `state.rs` | when a group begins, ends, or is given up |
//! | `receive.rs` | what a control frame of the peer changes |
//! | `message.rs` | inputs and outputs of a link |
//! | `numbers.rs` | the numbers of launches |
//! | `control.rs` | that control frames arrive once, in order, over whatever connection there is |
//! | `stream.rs`, `chunks.rs` | which chunks are sent by which lane, landed, lost, sent again |
//! | `schedule.rs` | which group sends the next chunk |
//! | `definition.rs` | what both sides must agree on |
//! | `departure.rs` | when an unused connection may end |
//!
//! Nothing is acknowledged chunk by chunk while all goes well. Lost control frames are sent again by number, lost
//! chunks by a bitmap that the receiver sends.
//!
//! Invariants (`Link::audit` checks them after every step of the simulation):
//! 1. A chunk is landing on one lane at most, and never after it has landed.
//! 2. Nothing lands before both sides' lists were found equal and the receiver's buffers were free to be written.
//! 3. `Stop` and `Stopped` are sent only when nothing can land here any more; nothing is accepted for the group
//!    afterwards.
//! 4. A group is forgotten only when neither side waits for anything of it.
//! 5. Every table is within its bound.
//!
//! `departure.rs` has those of the end of a connection.

mod chunks;
mod control;
pub mod definition;
mod departure;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod message;
mod numbers;
mod receive;
mod schedule;
mod state;
mod stream;
#[cfg(test)]
mod tests;

pub use message::{Difference, Frame, Landing, Launching, Output, Push, Terms, Urgency, Violation};
pub use numbers::Numbers;
pub use schedule::{Class, GroupId};
pub use state::{LAUNCHES_MAX, Link};

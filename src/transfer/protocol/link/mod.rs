//! The messages of two engines, without IO: one side of a link.
//!
//! A launch is the next *group* of its channel on both sides. Each side sends `Go` with its list of transfers; when
//! both have, the lists are compared, and the bytes move as soon as the source is defined and the destination may
//! be written. The bytes of a group in one direction are one stream, in the order of the definition, cut into
//! chunks: a thousand small buffers are one chunk, one header and one checksum. Two links are simulated against
//! each other (`tests/`). Begin at [`Link::launch`].
//!
//! Launches are matched by number and their lists are compared by a digest. If the ranks launch in different
//! orders, they get an error that names both orders, before a byte moves, and never a deadlock.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `state.rs` | when a group begins, ends, or is cancelled |
//! | `receive.rs` | what a control frame of the peer changes |
//! | `message.rs` | inputs and outputs of a link |
//! | `numbers.rs` | the numbers of launches |
//! | `control.rs` | that control frames arrive once and in order, across reconnections |
//! | `stream.rs`, `chunks.rs` | the chunks that a lane sends next, and that are landed, lost, or sent again |
//! | `schedule.rs` | which group sends the next chunk |
//! | `definition.rs` | what both sides must agree on |
//! | `departure.rs` | when an unused connection may end |
//!
//! Chunks are not acknowledged one by one. Lost control frames are sent again by number, lost chunks by a
//! bitmap that the receiver sends.
//!
//! Invariants (`Link::audit` checks them after every step of the simulation):
//! 1. A chunk is landing on one lane at most, and never after it has landed.
//! 2. No byte lands before both sides' lists were found equal and the receiver's buffers were free to be
//!    written.
//! 3. A side sends `Stop` and `Stopped` only when no byte can land there any more; it accepts nothing for the
//!    group afterwards.
//! 4. A group is forgotten only when neither side waits for any part of it.
//! 5. Every table is within its bound.
//!
//! `departure.rs` has the invariants of the end of a connection.

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

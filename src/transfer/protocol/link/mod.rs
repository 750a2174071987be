//! What two engines say to each other, without IO: one side of a link.
//!
//! A launch is the next *group* of its channel on both sides. Each side says `Go` with its list of transfers; when both
//! have, the lists are compared, and the bytes move as soon as what is sent is defined and what is received into may be
//! written. The bytes of a group in one direction are one stream, in the order of the definition, cut into chunks.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `state.rs` | when a group begins, ends, or is given up |
//! | `receive.rs` | what a control frame of the peer changes |
//! | `message.rs` | what goes into a link and comes out of it |
//! | `numbers.rs` | the numbers of launches |
//! | `control.rs` | that control frames arrive once, in order, over whatever connection there is |
//! | `stream.rs`, `chunks.rs` | which chunks are sent by which lane, landed, lost, sent again |
//! | `schedule.rs` | whose chunk is next |
//! | `definition.rs` | what both sides must agree on |
//! | `departure.rs` | when an unused connection may end |
//!
//! Invariants (checked by [`Link::audit`] after every step of the simulation in `tests.rs`):
//! 1. A chunk is landing on one lane at most, and never after it has landed.
//! 2. Nothing lands before both sides' lists were found equal and the receiver's buffers were free to be written.
//! 3. `Stop` and `Stopped` are said only when nothing can land here any more; nothing is accepted for the group
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

//! The server's side of HTTP/2 (RFC 9113), as far as gRPC needs it, without IO.
//!
//! Bytes that arrive go through the [`Receiver`], which gives one [`Event`] after another; what is to be sent goes
//! through the [`Sender`], which keeps to the windows of the peer. Neither holds on to a buffer while
//! nothing is on its way: an idle connection is a few hundred bytes. Requests that look like others before them, which is what
//! clients of a cluster send all day, cost a comparison of their header blocks.
//!
//! Peers are hostile until shown otherwise. What they make the server keep is charged to a [`StateBudget`](budget::StateBudget) first; what
//! they make it do is counted as it is done, so that a turn can end ([`Sender::should_look_at_clock`]); frames that ask for
//! nothing add to an [`AbuseScore`](abuse::AbuseScore).

mod abuse;
mod budget;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod head;
mod hpack;
mod huffman;
mod output;
mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(crate) use budget::{OverBudget, StatePool};
pub(crate) use frame::{Fault, PREFACE, Reason, StreamId};
pub(crate) use head::{FromHead, Head, HeaderBlockCache};
pub(crate) use hpack::{GRPC_ANSWER, GRPC_OK, block};
pub(crate) use output::Output;
pub(crate) use receive::{Event, Receiver, Unfinished};
pub(crate) use send::Sender;

/// What the server allows on one connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// Streams at once.
    pub(crate) streams: u32,
    /// The largest frame, in bytes.
    pub(crate) frame: u32,
    /// What may be on its way on one stream, in bytes.
    pub(crate) stream_window: u32,
    /// What may be on its way on the whole connection, in bytes.
    pub(crate) connection_window: u32,
    /// The size of a header list as RFC 9113 counts it (6.5.2).
    pub(crate) header_list: u32,
    /// The memory that the streams in progress may take, in bytes.
    pub(crate) state_bytes: usize,
}

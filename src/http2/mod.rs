//! The server's side of HTTP/2 (RFC 9113), as far as gRPC needs it, without IO.
//!
//! It knows no gRPC, socket or clock: `grpc::connection` drives it. Received bytes go through the [`Receiver`],
//! which returns one [`ReceiveEvent`] after another; responses go through the [`Sender`], which keeps within the peer's
//! windows. Begin there; `tests.rs` plays a peer frame by frame.
//!
//! - It exists because a general library took two thirds of the time in user space. An idle connection here is a
//!   few hundred bytes.
//! - Clients are told to keep no header table, so a header block always means the same. A repeated request
//!   head is recognised by the bytes of its block (`request_head.rs`).
//! - Peers are untrusted. State that a peer makes the server keep is charged to a
//!   [`StateBudget`](state_budget::StateBudget) before it is allocated; work that a peer causes is counted
//!   while it is done, so that a turn can end ([`Sender::is_clock_check_due`]); frames that ask for nothing
//!   add to an [`AbuseScore`](abuse_score::AbuseScore).

mod abuse_score;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod hpack;
mod huffman;
mod output_buffer;
mod receiver;
mod request_head;
mod sender;
mod state_budget;
#[cfg(test)]
mod tests;

pub(crate) use frame::{ConnectionError, ErrorCode, PREFACE, StreamId};
pub(crate) use hpack::{GRPC_OK_TRAILERS, GRPC_RESPONSE_HEADERS, encode_block};
pub(crate) use output_buffer::OutputBuffer;
pub(crate) use receiver::{IncompleteInput, ReceiveEvent, Receiver};
pub(crate) use request_head::{FromRequestHead, HeaderBlockCache, RequestHead};
pub(crate) use sender::Sender;
pub(crate) use state_budget::{OverBudget, StatePool};

/// The limits that the server announces for one connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// Concurrent streams.
    pub(crate) streams: u32,
    /// The largest frame payload, in bytes.
    pub(crate) frame: u32,
    /// The receive window of a stream, in bytes.
    pub(crate) stream_window: u32,
    /// The receive window of the connection, in bytes.
    pub(crate) connection_window: u32,
    /// The size of a header list, by RFC 9113, 6.5.2.
    pub(crate) header_list: u32,
    /// The memory for the state of streams in progress, in bytes.
    pub(crate) state_bytes: usize,
}

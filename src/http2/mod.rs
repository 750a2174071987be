//! The server side of HTTP/2 (RFC 9113), as far as gRPC needs it.
//!
//! This module opens no socket and reads no clock; `grpc::connection` calls it. The [`Http2Receiver`] takes received
//! bytes and returns one [`ReceiveEvent`] after another. The [`Http2Sender`] takes responses and keeps within the
//! peer's windows. The [`OutputBuffer`] writes to the caller's socket. In `tests.rs`, a peer is simulated frame by
//! frame. Begin at [`Http2Receiver`] and [`Http2Sender`].
//!
//! - This implementation exists because a general HTTP/2 library used two thirds of the server's CPU time in user
//!   space. In this implementation, an idle connection takes a few hundred bytes.
//! - The server's settings disable the dynamic header table of clients, so equal header blocks always have the same
//!   meaning. A repeated request head is recognised by the bytes of its block (`request_head.rs`).
//! - Peers are untrusted. State that a peer causes is charged to a
//!   [`StateMemoryBudget`](state_budget::StateMemoryBudget) before it is allocated. Work that a peer causes is
//!   counted, so that the turn of its connection can end in time ([`Http2Sender::is_clock_check_due`]). Frames that
//!   request no useful work raise an [`AbuseScore`](abuse_score::AbuseScore).

mod abuse_score;
mod charged_buffer;
mod frame;
mod frame_check;
mod frame_writer;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod goaway;
mod header_reader;
mod hpack;
mod huffman;
mod output_buffer;
mod peer_settings;
mod receive_event;
mod receive_window;
mod receiver;
mod request_admission;
mod request_head;
mod saved_sender;
mod send_queue;
mod sender;
mod sender_changes;
mod state_budget;
mod stream;
mod stream_hash;
mod stream_table;
#[cfg(any(test, feature = "fuzzing"))]
mod test_support;
#[cfg(test)]
mod tests;
mod unbuffered_frame;
mod work_meter;

pub(crate) use frame::{ConnectionError, ErrorCode, PREFACE, StreamId};
pub(crate) use hpack::{GRPC_OK_TRAILERS, GRPC_RESPONSE_HEADERS, encode_header_block};
pub(crate) use output_buffer::OutputBuffer;
pub(crate) use receive_event::ReceiveEvent;
pub(crate) use receiver::{Http2Receiver, IncompleteInput, SavedReceiver};
pub(crate) use request_head::{FromRequestHead, HeaderBlockCache, RequestHead};
pub(crate) use saved_sender::{SavedSender, SavedStream};
pub(crate) use send_queue::{QueueChange, RestoredFrames, SavedFrames, SentFrames};
pub(crate) use sender::Http2Sender;
pub(crate) use state_budget::{OverBudget, StateMemoryPool};

/// The limits that the server announces for one connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnnouncedSettings {
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

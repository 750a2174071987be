//! The events that the [`Http2Receiver`](super::Http2Receiver) returns: requests, data, resets, and the peer's
//! GOAWAY.
//!
//! Begin at [`ReceiveEvent`].

use std::sync::Arc;

use super::abuse_score::points;
use super::frame::{ConnectionError, ErrorCode, StreamId};
use super::sender::Http2Sender;

/// An event caused by the peer.
#[derive(Debug)]
pub(crate) enum ReceiveEvent<'a, H> {
    /// A new request.
    Request {
        stream: StreamId,
        head: Arc<H>,
        /// Whether the request has no body.
        ended: bool,
    },
    /// A part of a request's body. It counts against the windows until it is released.
    Data {
        stream: StreamId,
        bytes: &'a [u8],
        /// Whether the body ends here.
        ended: bool,
    },
    /// A request that ended early, because the peer cancelled it or violated the protocol. The caller knows
    /// it by its slot.
    Reset { stream: StreamId, slot: Option<u64> },
    /// The peer will send no further requests.
    GoAway,
}

/// An event, or `None` if the step caused none.
pub(super) type ReceiveResult<'a, H> = Result<Option<ReceiveEvent<'a, H>>, ConnectionError>;

impl<H> ReceiveEvent<'_, H> {
    /// Resets a stream whose peer violated the protocol, and reports that.
    pub(super) fn reset_stream(stream: StreamId, reason: ErrorCode, sender: &mut Http2Sender) -> Self {
        let slot = sender.slot_of_stream(stream);
        sender.reset_stream(stream, reason);
        Self::Reset { stream, slot }
    }

    /// Resets a stream with a malformed request, and reports that.
    pub(super) fn reset_malformed_stream(stream: StreamId, sender: &mut Http2Sender) -> Self {
        sender.abuse.add_points(points::BAD_HEADERS);
        Self::reset_stream(stream, ErrorCode::Protocol, sender)
    }

    /// Resets a stream, if it is open; otherwise the violation ends the connection.
    pub(super) fn reset_stream_or_fail(
        stream: StreamId,
        sender: &mut Http2Sender,
        what: &'static str,
    ) -> Result<Self, ConnectionError> {
        if sender.streams.contains(stream) {
            return Ok(Self::reset_malformed_stream(stream, sender));
        }
        Err(ConnectionError::protocol_error(what))
    }
}

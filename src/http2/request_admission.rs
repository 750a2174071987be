//! Decides whether a request is accepted, and whether the trailers that end a request are accepted.
//!
//! A request is refused on its stream if too many streams are open, if there is no memory for its state, if its head
//! is malformed or too long, or if the request arrives after the final GOAWAY. Begin at [`open_request_stream`].

use std::sync::Arc;

use super::abuse_score::points;
use super::frame::{ConnectionError, ErrorCode, StreamId};
use super::receive_event::{ReceiveEvent, ReceiveResult};
use super::request_head::{FromRequestHead, HeaderError};
use super::sender::Http2Sender;

/// `:status: 431`
const TOO_LONG: &[u8] = b"\x08\x03431";

/// Opens the stream of a new request, or refuses it.
pub(super) fn open_request_stream<'a, H: FromRequestHead>(
    stream: StreamId,
    ended: bool,
    head: Result<Arc<H>, HeaderError>,
    sender: &mut Http2Sender,
) -> Option<ReceiveEvent<'a, H>> {
    if !sender.record_opened_stream(stream) {
        sender.abuse.add_points(points::REFUSED);
        sender.refuse_stream(stream, ended, ErrorCode::RefusedStream);
        return None;
    }
    let length_matches = |head: &Arc<H>| !ended || head.content_length().is_none_or(|length| length == 0);
    let head = match head {
        Ok(head) if length_matches(&head) => head,
        Err(HeaderError::TooLong) => {
            sender.abuse.add_points(points::BAD_HEADERS);
            sender.refuse_stream_with_headers(stream, ended, TOO_LONG);
            return None;
        }
        Ok(_) | Err(HeaderError::Malformed) => {
            sender.abuse.add_points(points::BAD_HEADERS);
            sender.refuse_stream(stream, ended, ErrorCode::Protocol);
            return None;
        }
    };
    if sender.open_stream(stream, ended, head.content_length()).is_err() {
        sender.abuse.add_points(points::REFUSED);
        sender.refuse_stream(stream, ended, ErrorCode::EnhanceYourCalm);
        return None;
    }
    Some(ReceiveEvent::Request { stream, head, ended })
}

/// Ends a request by its trailers; `ended` says whether they end the peer's side of the stream.
pub(super) fn end_request_by_trailers<'a, H>(
    id: StreamId,
    ended: bool,
    flaw: Option<HeaderError>,
    sender: &mut Http2Sender,
) -> ReceiveResult<'a, H> {
    let Some(stream) = sender.streams.get_mut(id) else {
        if sender.streams.was_cut_short(id, ended) {
            // The request was answered or cancelled meanwhile.
            return Ok(None);
        }
        return Err(if sender.streams.was_skipped(id) {
            ConnectionError::protocol_error("a stream whose number is lower than that of one before it")
        } else {
            ConnectionError::new(ErrorCode::StreamClosed, "headers on a stream that is closed")
        });
    };
    Ok(Some(if stream.input.is_ended() {
        ReceiveEvent::reset_stream(id, ErrorCode::StreamClosed, sender)
    } else if ended && flaw.is_none() && stream.input.end_by_trailers() {
        ReceiveEvent::Data { stream: id, bytes: &[], ended: true }
    } else {
        ReceiveEvent::reset_malformed_stream(id, sender)
    }))
}

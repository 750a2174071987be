//! Sends a response on a stream: a message, a failure, or an HTTP error status.
//!
//! `reply_encoder.rs` encodes replies, and `status.rs` encodes failures. Begin at `send_outcome`.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};

use super::decoded_call::{ReplyFormat, ReplyKind};
use super::dialect::Dialect;
use super::encoded_replies::EncodedReplyCache;
use super::frame::{MessageChunks, encode_framed_message, message_too_long_failure};
use super::reply_encoder::{directory_reply_copied_bytes, encode_reply};
use super::status;
use crate::coordination::{CallOutcome, Code, Failure, Reply};
use crate::http2::{GRPC_OK_TRAILERS, GRPC_RESPONSE_HEADERS, Http2Sender, StreamId, encode_header_block};

static GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Sends the outcome of a call. If the peer is gone meanwhile, nothing happens.
pub(super) fn send_outcome(
    sender: &mut Http2Sender,
    stream: StreamId,
    outcome: &CallOutcome,
    form: &ReplyFormat,
    replies: &EncodedReplyCache,
    most: usize,
) {
    match outcome {
        Ok(_) if form.kind == ReplyKind::Poll => {
            let text = "there is no error to tell of, and none will be told of to this poll";
            send_failure(sender, stream, &Failure::without_details(Code::Cancelled, text), form.dialect);
        }
        Ok(reply) => send_success(sender, stream, reply, form, replies, most),
        Err(error) => send_failure(sender, stream, error, form.dialect),
    }
}

/// The size beyond which an answer that is encoded for one caller is charged to the budget.
const CHARGED: usize = 1 << 20;

fn send_success(
    sender: &mut Http2Sender,
    stream: StreamId,
    reply: &Reply,
    form: &ReplyFormat,
    replies: &EncodedReplyCache,
    most: usize,
) {
    if let Reply::Directory(entries) = reply {
        let copied = directory_reply_copied_bytes(entries);
        if copied >= CHARGED
            && let Err(over) = sender.charge_answer(stream, copied)
        {
            let why = Failure::without_details(Code::ResourceExhausted, over.to_string());
            return send_failure(sender, stream, &why, form.dialect);
        }
    }
    match encode_reply(reply, form, replies, most) {
        Ok(MessageChunks::Short(message)) => {
            sender.send_short_response(stream, &GRPC_RESPONSE_HEADERS, message.bytes(), &GRPC_OK_TRAILERS)
        }
        Ok(MessageChunks::One(part)) => send_framed_message(sender, stream, [part]),
        Ok(MessageChunks::Many(parts)) => send_framed_message(sender, stream, parts),
        Err(length) => send_failure(sender, stream, &message_too_long_failure(length, most), form.dialect),
    }
}

/// Answers a call with a message.
pub(super) fn send_message(sender: &mut Http2Sender, stream: StreamId, message: &impl prost::Message) {
    send_framed_message(sender, stream, [encode_framed_message(message)]);
}

fn send_framed_message(sender: &mut Http2Sender, stream: StreamId, parts: impl IntoIterator<Item = Bytes>) {
    sender.send_response(stream, &GRPC_RESPONSE_HEADERS, parts, &GRPC_OK_TRAILERS);
}

/// Answers a call with a failure.
pub(super) fn send_failure(sender: &mut Http2Sender, stream: StreamId, failure: &Failure, dialect: Dialect) {
    send_failure_head(sender, stream, StatusCode::OK, HeaderMap::new(), failure, dialect);
}

/// Refuses a request that is not a gRPC call.
pub(super) fn send_http_refusal(
    sender: &mut Http2Sender,
    stream: StreamId,
    status: StatusCode,
    why: &Failure,
) {
    let mut fields = HeaderMap::new();
    if status == StatusCode::METHOD_NOT_ALLOWED {
        fields.insert(ALLOW, HeaderValue::from_static("POST"));
    }
    send_failure_head(sender, stream, status, fields, why, Dialect::Number);
}

/// Refuses an unknown compression and names the known ones.
pub(super) fn send_encoding_refusal(sender: &mut Http2Sender, stream: StreamId, why: &Failure) {
    let mut fields = HeaderMap::new();
    fields.insert("grpc-accept-encoding", HeaderValue::from_static("identity,gzip"));
    send_failure_head(sender, stream, StatusCode::OK, fields, why, Dialect::Number);
}

fn send_failure_head(
    sender: &mut Http2Sender,
    stream: StreamId,
    status: StatusCode,
    mut fields: HeaderMap,
    why: &Failure,
    dialect: Dialect,
) {
    fields.insert(CONTENT_TYPE, GRPC.clone());
    status::put_failure_headers(&mut fields, why, dialect);
    sender.send_response_head(stream, &encode_header_block(Some(status.as_u16()), &fields), true);
}

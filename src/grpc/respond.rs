//! Sends a response on a stream: a message, a failure, or an HTTP refusal.
//!
//! It encodes nothing itself: `answer.rs` encodes replies, `status.rs` failures. Begin at `outcome`.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};

use super::answer::{directory_copied, encode};
use super::call::{Dialect, Form, Kind};
use super::frame::{Parts, framed, too_long};
use super::status;
use crate::coordination::{Code, Failure, Outcome, Reply};
use crate::http2::{GRPC_ANSWER, GRPC_OK, Sender, StreamId, block};

static GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Answers a call. That the peer may have gone meanwhile is no concern of the caller's.
pub(super) fn outcome(sender: &mut Sender, stream: StreamId, outcome: &Outcome, form: &Form, most: usize) {
    match outcome {
        Ok(_) if form.kind == Kind::Poll => {
            let text = "there is no error to tell of, and none will be told of to this poll";
            failure(sender, stream, &Failure::plain(Code::Cancelled, text), form.dialect);
        }
        Ok(reply) => success(sender, stream, reply, form, most),
        Err(error) => failure(sender, stream, error, form.dialect),
    }
}

/// Answers that are put together for one caller are charged for if they are longer than this.
const CHARGED: usize = 1 << 20;

fn success(sender: &mut Sender, stream: StreamId, reply: &Reply, form: &Form, most: usize) {
    if let Reply::Directory(entries) = reply {
        let copied = directory_copied(entries);
        if copied >= CHARGED
            && let Err(over) = sender.charge_answer(stream, copied)
        {
            let why = Failure::plain(Code::ResourceExhausted, over.to_string());
            return failure(sender, stream, &why, form.dialect);
        }
    }
    match encode(reply, form, most) {
        Ok(Parts::One(part)) => answer(sender, stream, [part]),
        Ok(Parts::Many(parts)) => answer(sender, stream, parts),
        Err(length) => failure(sender, stream, &too_long(length, most), form.dialect),
    }
}

/// Answers a call with a message.
pub(super) fn message(sender: &mut Sender, stream: StreamId, message: &impl prost::Message) {
    answer(sender, stream, [framed(message)]);
}

fn answer(sender: &mut Sender, stream: StreamId, parts: impl IntoIterator<Item = Bytes>) {
    sender.answer(stream, &GRPC_ANSWER, parts, &GRPC_OK);
}

/// Answers a call with a failure.
pub(super) fn failure(sender: &mut Sender, stream: StreamId, failure: &Failure, dialect: Dialect) {
    refused(sender, stream, StatusCode::OK, HeaderMap::new(), failure, dialect);
}

/// Refuses a request that is no gRPC call.
pub(super) fn refuse(sender: &mut Sender, stream: StreamId, status: StatusCode, why: &Failure) {
    let mut fields = HeaderMap::new();
    if status == StatusCode::METHOD_NOT_ALLOWED {
        fields.insert(ALLOW, HeaderValue::from_static("POST"));
    }
    refused(sender, stream, status, fields, why, Dialect::Number);
}

/// Refuses a compression that is not known here, naming those that are.
pub(super) fn refuse_encoding(sender: &mut Sender, stream: StreamId, why: &Failure) {
    let mut fields = HeaderMap::new();
    fields.insert("grpc-accept-encoding", HeaderValue::from_static("identity,gzip"));
    refused(sender, stream, StatusCode::OK, fields, why, Dialect::Number);
}

fn refused(
    sender: &mut Sender,
    stream: StreamId,
    status: StatusCode,
    mut fields: HeaderMap,
    why: &Failure,
    dialect: Dialect,
) {
    fields.insert(CONTENT_TYPE, GRPC.clone());
    status::failed(&mut fields, why, dialect);
    sender.head(stream, &block(Some(status.as_u16()), &fields), true);
}

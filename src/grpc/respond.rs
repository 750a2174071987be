//! Sending answers.

use std::sync::Arc;

use bytes::{Buf, Bytes};
use h2::server::SendResponse;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};

use super::answer::encode;
use super::call::{Dialect, Form, Kind};
use super::frame::{Parts, too_long};
use super::mailbox::Mailbox;
use super::status;
use crate::coordination::{Code, Failure, Outcome, Reply};

/// A piece of an answer. It counts as unsent until HTTP/2 is done with it.
pub(super) struct Piece {
    bytes: Bytes,
    charged: usize,
    mailbox: Arc<Mailbox>,
}

impl Piece {
    pub(super) fn new(bytes: Bytes, mailbox: &Arc<Mailbox>) -> Self {
        let charged = bytes.len();
        mailbox.charge(charged);
        Self { bytes, charged, mailbox: Arc::clone(mailbox) }
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.mailbox.discharge(self.charged);
    }
}

/// Answers go here.
pub(super) type Respond = SendResponse<Piece>;

static GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

fn head() -> Response<()> {
    let mut head = Response::new(());
    head.headers_mut().insert(CONTENT_TYPE, GRPC.clone());
    head
}

/// Answers a call. That the peer may have gone meanwhile is no concern of the caller's.
pub(super) fn outcome(
    respond: &mut Respond,
    outcome: &Outcome,
    form: &Form,
    most: usize,
    mailbox: &Arc<Mailbox>,
) {
    match outcome {
        Ok(_) if form.kind == Kind::Poll => {
            let text = "there is no error to tell of, and none will be told of to this poll";
            failure(respond, &Failure::plain(Code::Cancelled, text), form.dialect);
        }
        Ok(reply) => success(respond, reply, form, most, mailbox),
        Err(error) => failure(respond, error, form.dialect),
    }
}

fn success(respond: &mut Respond, reply: &Reply, form: &Form, most: usize, mailbox: &Arc<Mailbox>) {
    let parts = match encode(reply, form, most) {
        Ok(parts) => parts,
        Err(length) => return failure(respond, &too_long(length, most), form.dialect),
    };
    // From here on a failure means that the stream is gone.
    let Ok(mut stream) = respond.send_response(head(), false) else { return };
    let mut send = |part| stream.send_data(Piece::new(part, mailbox), false).is_ok();
    let sent = match parts {
        Parts::One(part) => send(part),
        Parts::Many(parts) => parts.into_iter().all(send),
    };
    if sent {
        let _ = stream.send_trailers(status::ok());
    }
}

/// Answers a call with a failure.
pub(super) fn failure(respond: &mut Respond, failure: &Failure, dialect: Dialect) {
    let mut head = head();
    status::failed(head.headers_mut(), failure, dialect);
    let _ = respond.send_response(head, true);
}

/// Refuses a request that is no gRPC call.
pub(super) fn refuse(respond: &mut Respond, status: StatusCode, why: &Failure) {
    let mut head = head();
    *head.status_mut() = status;
    if status == StatusCode::METHOD_NOT_ALLOWED {
        head.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
    }
    status::failed(head.headers_mut(), why, Dialect::Number);
    let _ = respond.send_response(head, true);
}

/// Refuses a compression that is not known here, naming those that are.
pub(super) fn refuse_encoding(respond: &mut Respond, why: &Failure) {
    let mut head = head();
    head.headers_mut().insert("grpc-accept-encoding", HeaderValue::from_static("identity,gzip"));
    status::failed(head.headers_mut(), why, Dialect::Number);
    let _ = respond.send_response(head, true);
}

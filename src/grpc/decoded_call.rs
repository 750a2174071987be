//! A decoded call, and the format of its reply: the dialect (`dialect.rs`), the kind of reply, the method, and the
//! key that some replies repeat.
//!
//! `generation_a.rs` and `generation_c.rs` decode calls. Begin at [`DecodedCall`].

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::call_counts::CountedMethod;
use super::dialect::{Dialect, PEER_JOBS_SERVICE};
use super::frame::RequestMessage;
use super::task_set_cache::TaskSetCache;
use crate::coordination::{Failure, Request, StatedIncarnations};

/// A function that decodes the request of one method.
pub(super) type RequestDecoder = fn(&RequestMessage, &TaskSetCache) -> Result<DecodedCall, Failure>;

/// A decoded call.
pub(super) struct DecodedCall {
    pub(super) request: Request,
    /// The incarnations that the caller states.
    pub(super) claim: Option<StatedIncarnations>,
    pub(super) form: ReplyFormat,
}

impl DecodedCall {
    pub(super) fn new(dialect: Dialect, claim: Option<StatedIncarnations>, request: Request) -> Self {
        let method = CountedMethod::of_request(&request);
        Self {
            request,
            claim,
            form: ReplyFormat { dialect, key: Bytes::new(), kind: ReplyKind::Plain, method },
        }
    }

    /// Returns the same call with another kind of reply.
    pub(super) fn with_reply_kind(mut self, kind: ReplyKind) -> Self {
        self.form.kind = kind;
        self
    }

    /// Returns the same call; its reply repeats `key`.
    pub(super) fn with_echoed_key(mut self, key: Bytes) -> Self {
        self.form.key = key;
        self
    }
}

/// The kind of a method's reply, if it differs from other replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ReplyKind {
    /// It is like most replies.
    Plain,
    /// It must not be a success: clients abort if it is.
    Poll,
    /// States are sent without their version.
    Unversioned,
}

/// The data of a call that the encoding of its reply needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ReplyFormat {
    pub(super) dialect: Dialect,
    /// The key, as the caller spelled it.
    pub(super) key: Bytes,
    pub(super) kind: ReplyKind,
    /// The method, for the count of calls.
    pub(super) method: CountedMethod,
}

impl ReplyFormat {
    /// Returns the name of the service.
    pub(super) fn service_name(&self) -> &'static str {
        if self.method.is_peer_jobs_method() { PEER_JOBS_SERVICE } else { self.dialect.service_name() }
    }
}

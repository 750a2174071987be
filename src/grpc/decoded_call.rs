//! A decoded call, and the data that its reply needs: dialect, method, key.
//!
//! It decodes nothing: `generation_a.rs` and `generation_c.rs` do. Begin at [`DecodedCall`].

use bytes::Bytes;
use prost::DecodeError;

use super::call_counts::Method;
use super::frame::Message;
use super::task_set_cache::TaskSetCache;
use crate::coordination::{ClaimedIncarnations, Code, Failure, Request};

/// Reads one method's request.
pub(super) type RequestDecoder = fn(&Message, &TaskSetCache) -> Result<DecodedCall, Failure>;

/// What a caller asks, in the words of the state machine.
pub(super) struct DecodedCall {
    pub(super) request: Request,
    /// Whom the caller believes to speak to.
    pub(super) claim: Option<ClaimedIncarnations>,
    pub(super) form: ReplyFormat,
}

impl DecodedCall {
    pub(super) fn new(dialect: Dialect, claim: Option<ClaimedIncarnations>, request: Request) -> Self {
        let method = Method::of(&request);
        Self {
            request,
            claim,
            form: ReplyFormat { dialect, key: Bytes::new(), kind: ReplyKind::Plain, method },
        }
    }

    /// The same call, answered in another manner.
    pub(super) fn with_kind(mut self, kind: ReplyKind) -> Self {
        self.form.kind = kind;
        self
    }

    /// The same call; its answer repeats `key`.
    pub(super) fn with_echoed_key(mut self, key: Bytes) -> Self {
        self.form.key = key;
        self
    }
}

/// How a caller spells tasks: the only thing in which the answers of the generations differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Generation A from a client that names its job: jaxlib up to 0.8.3.
    Named,
    /// Generation A from a client that does not: jaxlib 0.9.
    Unnamed,
    /// Generation C: plain numbers.
    Number,
}

impl Dialect {
    /// Generation A's dialect, by whether the client names its job.
    pub(super) fn named(named: bool) -> Self {
        if named { Self::Named } else { Self::Unnamed }
    }

    /// The service that is called so.
    pub(super) fn service(self) -> &'static str {
        match self {
            Self::Named | Self::Unnamed => super::generation_a::SERVICE,
            Self::Number => super::generation_c::SERVICE,
        }
    }

    /// Where a shared answer keeps its encoded form in this dialect.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// What is particular about the answer to a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyKind {
    /// Nothing.
    Plain,
    /// It must not succeed: clients abort if it does.
    Poll,
    /// States are answered without their version.
    Unversioned,
}

/// The form that a call's answer takes.
#[derive(Debug, Clone)]
pub(super) struct ReplyFormat {
    pub(super) dialect: Dialect,
    /// The key as the caller spelled it.
    pub(super) key: Bytes,
    pub(super) kind: ReplyKind,
    /// For the count of calls.
    pub(super) method: Method,
}

/// The failure of a request that is no message of its method.
pub(super) fn decode_failure(error: &DecodeError) -> Failure {
    Failure::without_details(Code::InvalidArgument, format!("the request cannot be read: {error}"))
}

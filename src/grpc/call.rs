//! A decoded call, and the data that its reply needs: dialect, method, key.
//!
//! It decodes nothing: `generation_a.rs` and `generation_c.rs` do. Begin at [`Call`].

use bytes::Bytes;
use prost::DecodeError;

use super::count::Method;
use super::frame::Message;
use super::sets::TaskSets;
use crate::coordination::{Claim, Code, Failure, Request};

/// Reads one method's request.
pub(super) type Reader = fn(&Message, &TaskSets) -> Result<Call, Failure>;

/// What a caller asks, in the words of the state machine.
pub(super) struct Call {
    pub(super) request: Request,
    /// Whom the caller believes to speak to.
    pub(super) claim: Option<Claim>,
    pub(super) form: Form,
}

impl Call {
    pub(super) fn new(dialect: Dialect, claim: Option<Claim>, request: Request) -> Self {
        let method = Method::of(&request);
        Self { request, claim, form: Form { dialect, key: Bytes::new(), kind: Kind::Plain, method } }
    }

    /// The same call, answered in another manner.
    pub(super) fn of_kind(mut self, kind: Kind) -> Self {
        self.form.kind = kind;
        self
    }

    /// The same call; its answer repeats `key`.
    pub(super) fn echoing(mut self, key: Bytes) -> Self {
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
    pub(super) fn form(self) -> usize {
        self as usize
    }
}

/// What is particular about the answer to a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing.
    Plain,
    /// It must not succeed: clients abort if it does.
    Poll,
    /// States are answered without their version.
    Unversioned,
}

/// The form that a call's answer takes.
#[derive(Debug, Clone)]
pub(super) struct Form {
    pub(super) dialect: Dialect,
    /// The key as the caller spelled it.
    pub(super) key: Bytes,
    pub(super) kind: Kind,
    /// For the count of calls.
    pub(super) method: Method,
}

/// The failure of a request that is no message of its method.
pub(super) fn unreadable(error: &DecodeError) -> Failure {
    Failure::plain(Code::InvalidArgument, format!("the request cannot be read: {error}"))
}

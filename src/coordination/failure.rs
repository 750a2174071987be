//! The failure of a call: a status code, a text, the payloads that clients interpret, and a short cause for people.
//!
//! `grpc::status` encodes failures. The texts are the same as those of jaxlib's C++ service and do not change,
//! because people search for them and clients interpret some of them. Pages, the command line, events and the log
//! show [`Failure::cause`], which states the cause in a few words. Begin at [`Failure`].

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ids::{ServiceIncarnation, TaskId};

/// The status codes of gRPC (and of absl), by their numbers.
///
/// A task may report any number at all as its error; [`Code::Other`] keeps it. On the wire an
/// unknown number reads as `UNKNOWN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the codes are those of gRPC")]
pub enum Code {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
    /// A number without a gRPC name, as it was reported.
    Other(i32),
}

impl Code {
    /// The codes that have a name, in ascending order from 1.
    pub(crate) const NAMED: [(Self, i32, &str); 16] = [
        (Self::Cancelled, 1, "CANCELLED"),
        (Self::Unknown, 2, "UNKNOWN"),
        (Self::InvalidArgument, 3, "INVALID_ARGUMENT"),
        (Self::DeadlineExceeded, 4, "DEADLINE_EXCEEDED"),
        (Self::NotFound, 5, "NOT_FOUND"),
        (Self::AlreadyExists, 6, "ALREADY_EXISTS"),
        (Self::PermissionDenied, 7, "PERMISSION_DENIED"),
        (Self::ResourceExhausted, 8, "RESOURCE_EXHAUSTED"),
        (Self::FailedPrecondition, 9, "FAILED_PRECONDITION"),
        (Self::Aborted, 10, "ABORTED"),
        (Self::OutOfRange, 11, "OUT_OF_RANGE"),
        (Self::Unimplemented, 12, "UNIMPLEMENTED"),
        (Self::Internal, 13, "INTERNAL"),
        (Self::Unavailable, 14, "UNAVAILABLE"),
        (Self::DataLoss, 15, "DATA_LOSS"),
        (Self::Unauthenticated, 16, "UNAUTHENTICATED"),
    ];

    /// Returns the code with this number; `None` for 0, which is success.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        if number == 0 {
            return None;
        }
        let named = Self::NAMED.iter().find(|(_, n, _)| *n == number);
        Some(named.map_or(Self::Other(number), |(code, _, _)| *code))
    }

    /// Returns the number, as it was reported.
    #[must_use]
    pub fn number(self) -> i32 {
        match self {
            Self::Other(number) => number,
            named => Self::NAMED.iter().find(|(code, _, _)| *code == named).map_or(2, |(_, n, _)| *n),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(code, _, _)| code == self) {
            Some((_, _, name)) => name.fmt(f),
            None => write!(f, "CODE_{}", self.number()),
        }
    }
}

/// A mark on errors that the service itself states (`CoordinationServiceError`).
///
/// Clients take an error with this mark for the service's statement, and one without it for a transport
/// failure.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceErrorMark {
    /// Whether a task reported the error itself.
    pub reported: bool,
    /// The task that caused the error; `None` for errors about the caller's own call.
    pub source: Option<TaskId>,
}

/// The barrier instance that a failure is about (`BarrierError`). Clients take their next counter from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierRef {
    /// The barrier's id.
    pub id: Arc<str>,
    /// The service's counter of the instance.
    pub counter: i64,
}

/// A failed call, or the error of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Failure {
    /// The status code.
    pub code: Code,
    /// The message for people. It may be longer than the wire carries.
    pub message: String,
    /// A short cause for people, where the message keeps to the text that clients and users know. Never on
    /// the wire.
    #[serde(default)]
    pub cause: Option<Arc<str>>,
    /// The mark of the service's own statements (nearly all failures have it).
    pub service_error: Option<ServiceErrorMark>,
    /// Present when a barrier instance failed.
    pub barrier: Option<BarrierRef>,
    /// The present service incarnation, if the caller named another one. Fatal to clients.
    pub service_mismatch: Option<ServiceIncarnation>,
}

impl Failure {
    /// Returns a failure that the service states about the caller's own call.
    #[must_use]
    pub fn from_service(code: Code, message: impl Into<String>) -> Self {
        Self { service_error: Some(ServiceErrorMark::default()), ..Self::without_details(code, message) }
    }

    /// Returns a failure without details, which clients read like a transport failure.
    #[must_use]
    pub fn without_details(code: Code, message: impl Into<String>) -> Self {
        let (message, cause) = (message.into(), None);
        Self { code, message, cause, service_error: None, barrier: None, service_mismatch: None }
    }

    /// Returns the same failure with a short cause.
    #[must_use]
    pub fn with_cause(mut self, cause: &str) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// Returns the short cause, or the message if there is none.
    #[must_use]
    pub fn summary(&self) -> &str {
        self.cause.as_deref().unwrap_or(&self.message)
    }

    /// Returns the same failure with the task that caused it.
    #[must_use]
    pub fn with_source(mut self, task: TaskId) -> Self {
        self.service_error.get_or_insert_default().source = Some(task);
        self
    }

    /// Returns the same failure with this barrier instance.
    #[must_use]
    pub fn with_barrier(mut self, id: &Arc<str>, counter: i64) -> Self {
        self.service_error.get_or_insert_default();
        self.barrier = Some(BarrierRef { id: Arc::clone(id), counter });
        self
    }

    /// Returns whether the failure is an exclusion: the task may come back once that has ended.
    pub(super) fn is_exclusion(&self) -> bool {
        self.code == Code::PermissionDenied && self.service_error.is_some_and(|e| !e.reported)
    }

    /// Returns whether the task was lost, rather than reported an error or broke a rule: a lost task may
    /// return.
    pub(super) fn is_task_loss(&self) -> bool {
        self.code == Code::Unavailable && self.service_error.is_some_and(|e| !e.reported)
    }
}

//! The identifiers of the state machine (job, run, task, host, incarnation, connection, call, exclusion) and
//! [`Timestamp`].
//!
//! The driver numbers connections and calls, and draws the incarnations of the service. Begin at
//! [`TaskIncarnation`] and [`ServiceIncarnation`], which must never be confused.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use crate::clock::Timestamp;

/// A task's number within its job, as it stands on the wire: valid ids are `0..tasks`.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
pub struct TaskId(pub i32);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The identity of one life of a task, chosen at random by its client at start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct TaskIncarnation(pub u64);

impl fmt::Display for TaskIncarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The identity of one run of a job. Clients learn it at registration and name it in later calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServiceIncarnation(pub u64);

impl fmt::Display for ServiceIncarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The number of a run within its job, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct RunNumber(pub u64);

impl fmt::Display for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of an exclusion within its job, from 1; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct ExclusionId(pub u64);

impl fmt::Display for ExclusionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a job in the coordinator's table; never used again for another job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u32);

/// The number of a client connection. The driver assigns it and never reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ConnectionId(pub u64);

/// The number of a call. The driver assigns it and never reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId(pub u64);

/// The name of a job: one DNS label, so that `NAME.host:port` can name it on a shared listener.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String)]
pub struct JobName(Arc<str>);

impl JobName {
    /// The name of the job of callers that name none.
    pub const DEFAULT: &str = "default";

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// Lets a table by name be searched with plain text.
impl std::borrow::Borrow<str> for JobName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl Default for JobName {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The text by which the service knows a host: the host in the identity of its processes, or its boot id, or its
/// address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[schema(value_type = String)]
pub struct HostId(Arc<str>);

impl HostId {
    pub(crate) fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The error for a text that is not a job name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a job name: use 1 to 63 lower-case letters, digits or hyphens, beginning and ending with a letter or digit"
)]
pub struct InvalidJobName(pub String);

impl std::str::FromStr for JobName {
    type Err = InvalidJobName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = text.as_bytes();
        let valid = (1..=63).contains(&bytes.len())
            && bytes.iter().all(|&b| inner(b) || b == b'-')
            && bytes.first().is_some_and(|&b| inner(b))
            && bytes.last().is_some_and(|&b| inner(b));
        if valid { Ok(Self(text.into())) } else { Err(InvalidJobName(text.into())) }
    }
}

impl TryFrom<String> for JobName {
    type Error = InvalidJobName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<JobName> for String {
    fn from(name: JobName) -> Self {
        name.0.as_ref().into()
    }
}

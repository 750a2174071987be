//! A line of the audit ([`AuditLine`]), and the entry from which a line is made ([`AuditEntry`]). An entry has no
//! number, time or outcome yet.
//!
//! `mod.rs` keeps the lines, and `writer.rs` writes them to the file. Begin at [`AuditLine`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{Actor, CommandReason, JobName, Timestamp};
use crate::service::role::AccessRole;

/// The outcome of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    /// The action was done.
    Done,
    /// The action was refused.
    Refused,
}

impl AuditOutcome {
    /// Returns its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
        }
    }
}

/// One line of the audit: an action, done or refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditLine {
    /// Its number among all lines of this server, from 1.
    pub number: u64,
    /// The time, in microseconds since the Unix epoch.
    pub at: Timestamp,
    /// The actor: name, address and kind of client.
    pub actor: Actor,
    /// The role of the actor; `None` for clients without credentials and for rules of the server.
    #[serde(default)]
    pub role: Option<AccessRole>,
    /// The job, if the action is about one.
    pub job: Option<JobName>,
    /// The action in a word: `exclude`, `readmit`, `drain`, …
    pub act: String,
    /// The object of the action.
    pub subject: String,
    /// The reason that the actor gave.
    pub reason: Option<CommandReason>,
    /// The outcome.
    pub outcome: AuditOutcome,
    /// The reason of a refusal, or the result of the action.
    pub detail: String,
    /// The number of refusals that the line stands for: those of the same client network since its last line.
    #[serde(default = "default_times")]
    pub times: u64,
}

fn default_times() -> u64 {
    1
}

/// An audit line before it has a number.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    pub actor: Actor,
    pub role: Option<AccessRole>,
    pub job: Option<JobName>,
    pub act: &'static str,
    pub subject: String,
    pub reason: Option<CommandReason>,
}

//! Defines the errors of an agent and which of them are transient.
//!
//! Begin at `AgentError`.

use std::time::Duration;

use super::cluster_env::ClusterEnvError;

/// What went wrong. Where it is the service's own word, its text says who did it and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The place of this process in its job is not known.
    #[error(transparent)]
    ClusterEnv(#[from] ClusterEnvError),
    /// The settings contradict one another.
    #[error("{0}")]
    Settings(String),
    /// What is needed to speak TLS cannot be used.
    #[error("no TLS to the service: {0}")]
    Tls(String),
    /// The transfer engine cannot start.
    #[error("the transfer engine cannot start: {0}")]
    Engine(String),
    /// The connection to the service is gone, or there never was one.
    #[error("the service at {service} cannot be reached ({call}): {why}")]
    Unreachable {
        /// Where.
        service: String,
        /// Which call.
        call: &'static str,
        /// What the transport says.
        why: String,
    },
    /// No answer in time.
    #[error("{call}: no answer within {limit:?}")]
    TimedOut {
        /// Which call.
        call: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Not all tasks have asked who lives.
    #[error(
        "live set: not all tasks have come within {limit:?}: waited for {who}. See what it does, end it, or take it out with \
         `muster exclude`"
    )]
    IncompleteLiveSet {
        /// How long they were waited for.
        limit: Duration,
        /// Who was waited for, in words.
        who: String,
    },
    /// The service says no.
    #[error("{call}: the service answered {code:?}: {message}")]
    Refused {
        /// Which call.
        call: &'static str,
        /// The status.
        code: tonic::Code,
        /// In the service's words.
        message: String,
    },
    /// Another service, or another run, answers now.
    #[error(
        "{call}: the run has another service incarnation now ({now:016x}, it was {was:016x}): register again"
    )]
    RunChanged {
        /// Which call.
        call: &'static str,
        /// The one that this task registered with.
        was: u64,
        /// The one that answers.
        now: u64,
    },
    /// What the service answered makes no sense.
    #[error("{call}: the service broke the protocol: {what}")]
    Protocol {
        /// Which call.
        call: &'static str,
        /// How.
        what: String,
    },
    /// The service does not count this life of the task any more.
    #[error("this life of task {task} is over: {why}")]
    LifeEnded {
        /// The task.
        task: u32,
        /// In the service's words.
        why: String,
    },
    /// The error that ended the run, or this life of the task.
    #[error("the service has ended this: {code:?}: {message}")]
    Ended {
        /// The status.
        code: tonic::Code,
        /// In the service's words.
        message: String,
    },
    /// A restarted task came with other devices than it had.
    #[error(
        "task {task} was here before with other devices ({key}): start it with the same, or let a new run begin"
    )]
    DevicesChanged {
        /// The task.
        task: u32,
        /// Where they stand.
        key: String,
    },
}

impl AgentError {
    /// Whether the same call may do better in a moment: it was the transport, not the service, that failed.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// The status, where it is the service's own.
    #[must_use]
    pub const fn code(&self) -> Option<tonic::Code> {
        match self {
            Self::Refused { code, .. } | Self::Ended { code, .. } => Some(*code),
            _ => None,
        }
    }
}

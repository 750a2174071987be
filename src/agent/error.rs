//! Defines the errors of an agent and which of them are transient.
//!
//! Begin at `AgentError`.

use std::time::Duration;

use super::cluster_env::ClusterEnvError;
use crate::transfer::{Incarnation, PeerJob};

/// The error of an agent. If the service states it, its text names the actor and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The place of this process in its job is unknown.
    #[error(transparent)]
    ClusterEnv(#[from] ClusterEnvError),
    /// The settings contradict one another.
    #[error("{0}")]
    Settings(String),
    /// A certificate or key for TLS is unusable.
    #[error("no TLS to the service: {0}")]
    Tls(String),
    /// The transfer engine cannot start.
    #[error("the transfer engine cannot start: {0}")]
    Engine(String),
    /// The service cannot be reached.
    #[error("the service at {service} cannot be reached ({call}): {why}")]
    Unreachable {
        /// The address of the service.
        service: String,
        /// The call.
        call: &'static str,
        /// The transport's error.
        why: String,
    },
    /// The call was not answered in time.
    #[error("{call}: no answer within {limit:?}")]
    TimedOut {
        /// The call.
        call: &'static str,
        /// The timeout.
        limit: Duration,
    },
    /// The service has not granted a task id in time.
    #[error("{identity} has no task id after {limit:?}: {why}")]
    NoTask {
        /// The identity of the process.
        identity: String,
        /// The timeout.
        limit: Duration,
        /// The service's reason.
        why: String,
    },
    /// Not all tasks have requested the live set.
    #[error(
        "live set: not all tasks have come within {limit:?}: waited for {who}. See what it does, end it, or take it out with \
         `muster exclude`"
    )]
    IncompleteLiveSet {
        /// The timeout.
        limit: Duration,
        /// The tasks that have not called, in words.
        who: String,
    },
    /// The service refused the call.
    #[error("{call}: the service answered {code:?}: {message}")]
    Refused {
        /// The call.
        call: &'static str,
        /// The status.
        code: tonic::Code,
        /// The service's message.
        message: String,
    },
    /// Another service, or another run, answers now.
    #[error(
        "{call}: the run has another service incarnation now ({now:016x}, it was {was:016x}): register again"
    )]
    RunChanged {
        /// The call.
        call: &'static str,
        /// The service incarnation with which this task registered.
        was: u64,
        /// The service incarnation that answers.
        now: u64,
    },
    /// The service's answer is invalid.
    #[error("{call}: the service broke the protocol: {what}")]
    Protocol {
        /// The call.
        call: &'static str,
        /// The violation.
        what: String,
    },
    /// The engines of some tasks did not become known in time.
    #[error(
        "not all engines{job} are known within {limit:?}:{}{}",
        describe_each_task(connected, "connected, but has no transfer engine yet"),
        describe_each_task(gone, "not connected")
    )]
    EnginesMissing {
        /// The job of the tasks.
        job: PeerJob,
        /// The timeout.
        limit: Duration,
        /// The tasks that are connected and have published no engine.
        connected: Vec<u32>,
        /// The tasks that are not connected.
        gone: Vec<u32>,
    },
    /// Too many launches wait for the engines of their peers.
    #[error(
        "{bound} launches wait for tasks that have not attached their engines, the most at a time, those included that were \
         cancelled or came too late: wait until the tasks have attached"
    )]
    TooManyWaitingLaunches {
        /// The most launches that may wait.
        bound: usize,
    },
    /// The engine record of a task is unusable.
    #[error("the engine of task {task}{job} cannot be used: {why}")]
    EngineUnusable {
        /// Its job.
        job: PeerJob,
        /// The task.
        task: u32,
        /// The reason.
        why: String,
    },
    /// The settings of this job and of another one do not allow transfers between them.
    #[error("{why}")]
    PeerJobRefused {
        /// The other job.
        job: PeerJob,
        /// The missing setting, and how to set it.
        why: String,
    },
    /// The service knows no such job.
    #[error("{why}")]
    NoSuchPeerJob {
        /// The job.
        job: PeerJob,
        /// The service's message.
        why: String,
    },
    /// This incarnation of the task had a transfer engine before.
    #[error(
        "incarnation {incarnation} of task {task} has had a transfer engine already, and its peers know that one: start the task again"
    )]
    EngineExists {
        /// The task.
        task: u32,
        /// The incarnation.
        incarnation: Incarnation,
    },
    /// The service has replaced this incarnation of the task.
    #[error("this life of task {task} is over: {why}")]
    LifeEnded {
        /// The task.
        task: u32,
        /// The service's message.
        why: String,
    },
    /// The error that ended the run, or this incarnation of the task.
    #[error("the service has ended this: {code:?}: {message}")]
    Ended {
        /// The status.
        code: tonic::Code,
        /// The service's message.
        message: String,
    },
    /// A restarted task has other devices than before.
    #[error(
        "task {task} was here before with other devices ({key}): start it with the same, or let a new run begin"
    )]
    DevicesChanged {
        /// The task.
        task: u32,
        /// The key of its published devices.
        key: String,
    },
}

impl AgentError {
    /// Returns whether the same call may succeed later, because the transport failed and not the service.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Returns the status, if the service stated the error.
    #[must_use]
    pub const fn grpc_code(&self) -> Option<tonic::Code> {
        match self {
            Self::Refused { code, .. } | Self::Ended { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Returns a clause about tasks; nothing if there are none.
fn describe_each_task(tasks: &[u32], what: &str) -> String {
    tasks.iter().map(|task| format!(" task {task} is {what};")).collect()
}

//! Inputs and effects: everything that can happen to the state machine, and everything that its driver must do.
//!
//! It decides nothing: [`Coordinator::apply`](super::Coordinator::apply) does. Begin at [`Input`], then [`Effect`].
//!
//! The driver owns what the state machine must not: it numbers connections and calls, draws the incarnations of
//! runs ([`Effect::RequestIncarnation`]), and frees memory after releasing its lock ([`Effect::FreeLater`]). Findings
//! and transfer failures enter the order of events as [`Input::FindingChanged`] and [`Input::TransferFailed`], so a replay
//! repeats them; they change nothing else.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actor::{Actor, Reason};
use super::barrier_record::BarrierCompletion;
use super::call::{CallOutcome, Caller, Request};
use super::command::{CommandOutcome, CommandRefusal, OperatorCommand};
use super::deferred_free::DeferredFree;
use super::event::JobEvent;
use super::ids::{CallId, ConnectionId, JobId, JobName, ServiceIncarnation, TaskId};
use super::settings::JobSettings;

/// How a connection ended: the evidence that is kept of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionEnd {
    /// The peer closed it in good order.
    Closed,
    /// The peer's host reset it, as it does when the process is gone.
    Reset,
    /// The peer's host did not answer any more.
    TimedOut,
    /// Something else, in the transport's words.
    Broken(String),
}

impl ConnectionEnd {
    /// What happened to a connection, in a word; [`fmt::Display`] has the words that clients are told.
    #[must_use]
    pub fn word(&self) -> String {
        match self {
            Self::Closed => "closed".to_owned(),
            Self::Reset => "reset".to_owned(),
            Self::TimedOut => "timed out".to_owned(),
            Self::Broken(how) => format!("broken ({how})"),
        }
    }
}

impl fmt::Display for ConnectionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("was closed by the peer"),
            Self::Reset => f.write_str("was reset by the peer's host"),
            Self::TimedOut => f.write_str("timed out: the peer's host stopped answering"),
            Self::Broken(how) => write!(f, "broke ({how})"),
        }
    }
}

/// What an observer of a job has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingNote {
    /// The name of the finding.
    pub finding: Arc<str>,
    /// It holds from now on; otherwise it holds no more.
    pub open: bool,
    /// The tasks that it is about: a few of them.
    pub tasks: Vec<TaskId>,
    /// What it is, in a sentence.
    pub reason: String,
}

/// What a worker has reported of a transfer that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferFailure {
    /// The task that reports it.
    pub task: TaskId,
    /// The task at the other end.
    pub with: TaskId,
    /// Why it failed: one of a fixed few words.
    pub error: Arc<str>,
    /// How many failures for this reason this tells of.
    pub count: u64,
    /// What it is, in a sentence.
    pub reason: String,
}

/// Everything that can happen to the state machine. Applying the same inputs at the same times to
/// the same state gives the same state and the same effects, bit for bit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// There shall be a job of this name; its first run opens at once under `incarnation`.
    DeclareJob {
        /// The job's place; the driver numbers jobs from 0 on and never reuses a number.
        job: JobId,
        /// The job's name.
        name: JobName,
        /// The job's settings.
        settings: JobSettings,
        /// The identity of its first run.
        incarnation: ServiceIncarnation,
        /// Who asked for it; `None` if the service was configured so.
        actor: Option<Actor>,
    },
    /// An identity for the job's next run, in answer to [`Effect::RequestIncarnation`].
    NextIncarnation {
        /// The job.
        job: JobId,
        /// An unguessable identity.
        incarnation: ServiceIncarnation,
    },
    /// A client has connected.
    ConnectionOpened {
        /// The connection's number.
        connection: ConnectionId,
        /// Where it comes from.
        peer: SocketAddr,
    },
    /// A connection is gone, and with it every call that waits on it.
    ConnectionClosed {
        /// The connection's number.
        connection: ConnectionId,
        /// How it ended.
        ending: ConnectionEnd,
    },
    /// A client asks something.
    Call {
        /// The job that it asks.
        job: JobId,
        /// The number of the call; its answer carries it.
        call: CallId,
        /// Who asks.
        caller: Caller,
        /// What it asks.
        request: Request,
    },
    /// The caller does not wait any more (it cancelled, or its deadline passed).
    CallCancelled {
        /// The job that it asked.
        job: JobId,
        /// The number of the call.
        call: CallId,
    },
    /// Something that was concluded from what is measured, for the order of events: it changes nothing else.
    FindingChanged {
        /// The job that it is about.
        job: JobId,
        /// What was found.
        note: FindingNote,
    },
    /// A worker reported transfers that failed, for the order of events: it changes nothing else.
    TransferFailed {
        /// The job of the worker.
        job: JobId,
        /// What it reported.
        note: TransferFailure,
    },
    /// An operator acts upon a job; answered with [`Effect::CommandDone`] at once.
    Command {
        /// The job.
        job: JobId,
        /// Who acts.
        actor: Actor,
        /// Why.
        reason: Reason,
        /// What shall be done.
        act: OperatorCommand,
    },
    /// Time has passed.
    Tick,
    /// The driver itself could not run for a while: nobody is to blame for the silence since.
    DriverLagged,
    /// The service stops: every waiting call is answered, polls in the way that lets clients live on.
    Stop,
    /// The state comes from before a restart of the service: every connection and waiting call of it is gone,
    /// and nobody is to blame for the silence since.
    Resumed,
}

/// What the driver must do after an input.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Answer a call. Every call is answered once at most, and not at all once it is gone.
    Reply(CallId, CallOutcome),
    /// What has become of the [`Input::Command`] that was applied.
    CommandDone(Result<CommandOutcome, CommandRefusal>),
    /// Something changed that people or machines may want to know.
    Event(JobEvent),
    /// An instance of a barrier has ended, with everybody who came to it. For instruments: it is kept nowhere.
    BarrierEnded(Box<BarrierCompletion>),
    /// Free memory, without holding up anybody.
    FreeLater(DeferredFree),
    /// The job has used up its spare identity: give it another with [`Input::NextIncarnation`].
    RequestIncarnation(JobId),
}

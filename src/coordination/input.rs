//! The inputs of the state machine, and its effects: the instructions that it gives to its driver.
//!
//! [`Coordinator::apply`](super::Coordinator::apply) handles an input and returns effects. Begin at [`Input`], then
//! [`Effect`].
//!
//! Work that would make a transition slow or not repeatable belongs to the driver. The driver numbers connections and
//! calls, draws the incarnations of runs ([`Effect::RequestIncarnation`]), and frees memory after releasing its lock
//! ([`Effect::FreeLater`]). Findings and transfer failures ([`Input::FindingChanged`], [`Input::TransferFailed`])
//! only publish an event. They are inputs, so that each has a place in the order of events and a replay publishes the
//! same events.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actor::{Actor, CommandReason};
use super::barrier_record::BarrierRecordWithArrivals;
use super::command::{CommandOutcome, CommandRefusal, OperatorCommand};
use super::deferred_free::DeferredFree;
use super::event::JobEvent;
use super::ids::{CallId, ConnectionId, JobId, JobName, ServiceIncarnation, TaskId};
use super::request_reply::{CallOutcome, Caller, Request};
use super::settings::JobSettings;
use super::task_owner_table::{ClaimAnswer, ClaimRefusal, TaskClaim};

/// The way in which a connection ended: evidence about the tasks that used it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionEnd {
    /// The peer closed it in good order.
    Closed,
    /// The peer's host reset it, which it does when the process has ended.
    Reset,
    /// The peer's host stopped responding.
    TimedOut,
    /// Another failure, in the transport's words.
    Broken(String),
}

impl ConnectionEnd {
    /// Returns a short description of the end; [`fmt::Display`] writes the text that clients receive.
    #[must_use]
    pub fn short_text(&self) -> String {
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

/// A finding that an observer of a job opened or closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingChange {
    /// The name of the finding.
    pub finding: Arc<str>,
    /// Whether the finding opens; otherwise it closes.
    pub open: bool,
    /// Some of the tasks that it names.
    pub tasks: Vec<TaskId>,
    /// The finding, in a sentence.
    pub reason: String,
}

/// A worker's report of failed transfers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferFailure {
    /// The task that reports it.
    pub task: TaskId,
    /// The task at the other end.
    pub with: TaskId,
    /// The reason: one of a few fixed words.
    pub error: Arc<str>,
    /// The number of failures with this reason.
    pub count: u64,
    /// The failure, in a sentence.
    pub reason: String,
}

/// Everything that can happen to the state machine. The same inputs at the same times, applied to the same
/// state, give the same state and the same effects, bit for bit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// Declares a job; its first run opens at once under `incarnation`.
    DeclareJob {
        /// The job's number; the driver counts from 0 and never reuses a number.
        job: JobId,
        /// The job's name.
        name: JobName,
        /// The job's settings.
        settings: Box<JobSettings>,
        /// The identity of its first run.
        incarnation: ServiceIncarnation,
        /// The operator; `None` if the job is part of the server's configuration.
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
        /// The peer's address.
        peer: SocketAddr,
    },
    /// A connection ended, and with it every call that waits on it.
    ConnectionClosed {
        /// The connection's number.
        connection: ConnectionId,
        /// The way in which it ended.
        ending: ConnectionEnd,
    },
    /// A client makes a call.
    Call {
        /// The called job.
        job: JobId,
        /// The number of the call; the reply carries it.
        call: CallId,
        /// The origin of the call.
        caller: Caller,
        /// The request.
        request: Request,
    },
    /// The caller stopped waiting: it cancelled, or its deadline passed.
    CallCancelled {
        /// The called job.
        job: JobId,
        /// The number of the call.
        call: CallId,
    },
    /// A finding opened or closed. It enters the order of events and changes nothing else.
    FindingChanged {
        /// The job.
        job: JobId,
        /// The finding.
        note: FindingChange,
    },
    /// A worker reported failed transfers. The report enters the order of events and changes nothing else.
    TransferFailed {
        /// The job of the worker.
        job: JobId,
        /// The report.
        note: TransferFailure,
    },
    /// A process asks which task it is; answered with [`Effect::ClaimAnswered`] at once.
    ClaimTask {
        /// The job.
        job: JobId,
        /// The claim.
        claim: TaskClaim,
    },
    /// An operator issues a command; answered with [`Effect::CommandDone`] at once.
    Command {
        /// The job.
        job: JobId,
        /// The operator.
        actor: Actor,
        /// The stated reason.
        reason: CommandReason,
        /// The command.
        act: OperatorCommand,
    },
    /// Time has passed.
    Tick,
    /// The driver itself could not run for a while: the silence since then fails no task.
    DriverLagged,
    /// The service stops: every waiting call is answered; polls get the answer that lets clients continue.
    Stop,
    /// The service restarted with this state: all connections but some are gone, with every call that waits on them, and
    /// the silence since then fails no task.
    Resumed {
        /// How the former process ended, in a clause, if that is known.
        after: Option<String>,
        /// The connections that go on.
        kept: Vec<ConnectionId>,
    },
}

/// A task for the driver after an input.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Reply to a call. A call gets at most one reply, and none after it was withdrawn.
    Reply(CallId, CallOutcome),
    /// The outcome of the applied [`Input::Command`].
    CommandDone(Result<CommandOutcome, CommandRefusal>),
    /// The answer to the applied [`Input::ClaimTask`].
    ClaimAnswered(Result<ClaimAnswer, ClaimRefusal>),
    /// Publish an event.
    Event(JobEvent),
    /// Hand an ended barrier instance with all its arrivals to the observers; the state does not keep it.
    BarrierEnded(Arc<BarrierRecordWithArrivals>),
    /// Free memory while no caller waits.
    FreeLater(DeferredFree),
    /// Give the job another incarnation with [`Input::NextIncarnation`]: it has used its spare one.
    RequestIncarnation(JobId),
}

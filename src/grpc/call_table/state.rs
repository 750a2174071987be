//! Defines the [`CallTable`] of one connection and the states of a call. The table records the start of the present
//! turn, decides whether too many answers are unread, and reports the end of the connection to the driver.
//!
//! `call_table.rs` and the other files of this folder move a call from state to state. Begin at [`CallTable`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;

use super::logged_calls::LoggedCalls;
use crate::coordination::{CallId, Code, ConnectionEnd, ConnectionId, Failure, JobId, TaskId};
use crate::engine::AnswerInbox;
use crate::grpc::auxiliary::{AuxiliaryCall, AuxiliaryCalls};
use crate::grpc::body_memory::ConnectionQuota;
use crate::grpc::call_counts;
use crate::grpc::deadlines::SlotDeadlines;
use crate::grpc::decoded_call::ReplyFormat;
use crate::grpc::dialect::Dialect;
use crate::grpc::job_resolver::{ConnectionJobResolver, ListenerJobRule};
use crate::grpc::limits::GrpcLimits;
use crate::grpc::mailbox::Mailbox;
use crate::grpc::request_body::RequestBody;
use crate::grpc::request_meta::{CallHandler, RequestMeta};
use crate::grpc::responses;
use crate::grpc::server::GrpcServer;
use crate::grpc::slot_table::SlotTable;
use crate::http2::{Http2Sender, OverBudget, StreamId};
use crate::meter::Moment;
use crate::telemetry::traces::CallSpan;

/// The time after the first check at which a turn ends.
const TURN_NANOS: u64 = 250_000;
/// The number of calls beyond which a connection's calls are dropped on the reaper's thread: it would take
/// milliseconds.
const CALLS_DROPPED_HERE: usize = 1 << 10;
/// The work of an answer, in steps.
pub(super) const ANSWER_WORK: usize = 8;
/// The bytes of a body that count as one step.
pub(super) const BYTES_PER_STEP: usize = 256;
/// The memory charged for an auxiliary call: its task, and what it has not read of its request.
pub(super) const AUXILIARY_BYTES: usize = 80 << 10;

/// A deferred request: the peer has too many answers to take.
pub(super) struct DeferredRequest {
    pub(super) head: Arc<RequestMeta>,
    pub(super) stream: StreamId,
    pub(super) bytes: Vec<u8>,
    pub(super) ended: bool,
    /// The bytes charged for it.
    pub(super) charged: usize,
}

/// The trace of a call, with the calling task; `None` if calls are not traced.
pub(super) type PendingTrace = Option<Box<(CallSpan, Option<TaskId>)>>;

/// A call that waits for the engine's answer.
pub(super) struct Waiting {
    pub(super) call: CallId,
    pub(super) job: JobId,
    pub(super) form: ReplyFormat,
    pub(super) stream: StreamId,
    pub(super) trace: PendingTrace,
    pub(super) since: Moment,
    /// The bytes charged for its stored data.
    pub(super) charged: usize,
    pub(super) due: Option<Instant>,
}

/// A request whose body is arriving.
pub(super) struct ReceivingCall {
    pub(super) body: RequestBody,
    pub(super) callee: CallHandler,
    pub(super) job: JobId,
    pub(super) stream: StreamId,
    pub(super) due: Option<Instant>,
    /// The time by which it must have made progress.
    pub(super) stall: Instant,
    /// The time of the next check.
    pub(super) check: Instant,
    pub(super) waker: Waker,
    pub(super) deferred: bool,
    /// Whether the message is complete and only the end of the request is missing.
    pub(super) is_whole: bool,
    pub(super) trace: PendingTrace,
    pub(super) since: Moment,
    /// The bytes charged for the data that it holds back.
    pub(super) charged: usize,
    /// The path of the call.
    pub(super) path: Arc<str>,
    pub(super) log: LoggedBody,
}

/// The part of a body in the log of a kept connection.
#[derive(Default)]
pub(super) struct LoggedBody {
    /// The number of bytes.
    pub(super) bytes: usize,
    /// Whether the log cannot have the body, because its message is being inflated.
    pub(super) is_unloggable: bool,
}

/// A call, by its state.
pub(super) enum CallState {
    Deferred(DeferredRequest),
    Receiving(Box<ReceivingCall>),
    Waiting(Waiting),
    Auxiliary(Box<AuxiliaryCall>),
}

/// The deadline of a call.
#[derive(Clone, Copy)]
pub(super) enum CallDeadline {
    /// The time from now; the clock has not been read yet.
    After(Option<Duration>),
    At(Option<Instant>),
}

impl CallDeadline {
    pub(super) fn instant(self) -> Option<Instant> {
        match self {
            Self::After(wait) => wait.and_then(|wait| Instant::now().checked_add(wait)),
            Self::At(at) => at,
        }
    }
}

/// The calls of one connection. Dropping it tells the engine that the connection is gone.
pub(in crate::grpc) struct CallTable {
    pub(super) server: Arc<GrpcServer>,
    pub(super) id: ConnectionId,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) inbox: Arc<dyn AnswerInbox>,
    pub(super) route: ConnectionJobResolver,
    pub(super) slots: SlotTable<CallState>,
    pub(super) deadlines: SlotDeadlines,
    pub(super) quota: ConnectionQuota,
    pub(super) auxiliary: AuxiliaryCalls,
    /// The slots that continue when the peer has taken its answers.
    pub(super) deferred: VecDeque<u64>,
    pub(super) ending: Option<ConnectionEnd>,
    /// The beginning of the present turn, once it was needed.
    pub(super) turn: Option<Moment>,
    /// The time of the first check of the turn's length, in nanoseconds of the engine's clock.
    pub(super) turn_checked_at: Option<u64>,
    pub(super) closed: bool,
    /// The number of calls by their state, and what the log of a kept connection does not have of them.
    pub(super) logged: LoggedCalls,
}

impl CallTable {
    /// Returns the table of a new connection.
    pub(in crate::grpc) fn open(
        server: Arc<GrpcServer>,
        peer: SocketAddr,
        routing: ListenerJobRule,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let id = server.engine.register_connection(peer);
        Self::with_id(server, id, routing, mailbox)
    }

    /// Returns the table of a connection that the engine knows, without calls.
    pub(in crate::grpc) fn with_id(
        server: Arc<GrpcServer>,
        id: ConnectionId,
        routing: ListenerJobRule,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let inbox: Arc<dyn AnswerInbox> = Arc::clone(&mailbox) as Arc<dyn AnswerInbox>;
        let auxiliary = AuxiliaryCalls::new(server.limits.auxiliary_calls_per_connection);
        let route = ConnectionJobResolver::new(routing);
        let quota = ConnectionQuota::new(&server.bodies);
        let (slots, deadlines) = (SlotTable::default(), SlotDeadlines::default());
        let parked = VecDeque::new();
        let (ending, turn) = (None, None);
        Self {
            server,
            id,
            mailbox,
            inbox,
            route,
            slots,
            deadlines,
            quota,
            auxiliary,
            deferred: parked,
            ending,
            turn,
            turn_checked_at: None,
            closed: false,
            logged: LoggedCalls::default(),
        }
    }

    /// Returns the engine's number of the connection.
    pub(in crate::grpc) fn connection_id(&self) -> ConnectionId {
        self.id
    }

    // --- changes of state

    /// Stores a call that waits, and returns its slot.
    pub(super) fn insert_waiting_call(&mut self, waiting: Waiting) -> u64 {
        let slot = self.slots.insert(CallState::Waiting(waiting));
        self.logged.waiting += 1;
        self.logged.record_change(slot);
        slot
    }

    /// Removes a call that waits.
    pub(super) fn take_waiting_call(&mut self, slot: u64) -> Option<Waiting> {
        let Some(CallState::Waiting(_)) = self.slots.get_mut(slot) else { return None };
        let Some(CallState::Waiting(waiting)) = self.slots.remove(slot) else { return None };
        self.logged.waiting -= 1;
        self.logged.record_end(waiting.stream);
        Some(waiting)
    }

    /// Stores a request whose body is arriving, and returns its slot.
    pub(super) fn insert_receiving_call(&mut self, arriving: Box<ReceivingCall>) -> u64 {
        let slot = self.slots.insert(CallState::Receiving(arriving));
        self.logged.receiving += 1;
        self.logged.record_change(slot);
        slot
    }

    /// Removes a request whose body is arriving.
    pub(super) fn take_receiving_call(&mut self, slot: u64) -> Option<Box<ReceivingCall>> {
        let Some(CallState::Receiving(_)) = self.slots.get_mut(slot) else { return None };
        let Some(CallState::Receiving(arriving)) = self.slots.remove(slot) else { return None };
        self.logged.receiving -= 1;
        self.logged.unloggable -= usize::from(arriving.log.is_unloggable);
        self.logged.record_end(arriving.stream);
        Some(arriving)
    }

    /// Records that the body in this slot has changed.
    pub(super) fn record_body_change(&mut self, slot: u64) {
        self.logged.record_change(slot);
    }

    /// Begins a turn. All input of a turn counts as received at its beginning: one reading of the clock
    /// serves all of it, and the time that a call waits behind others of its turn is part of its duration.
    pub(in crate::grpc) fn begin_turn(&mut self) {
        self.turn = None;
        self.turn_checked_at = None;
    }

    /// Returns whether the turn has lasted so long that other connections should have theirs. Called after
    /// much work.
    pub(in crate::grpc) fn is_turn_over(&mut self) -> bool {
        let now = self.server.engine.clock().elapsed_nanos();
        now.saturating_sub(*self.turn_checked_at.get_or_insert(now)) > TURN_NANOS
    }

    /// Returns the time since the server started.
    pub(in crate::grpc) fn server_uptime(&self) -> Duration {
        Duration::from_nanos(self.server.engine.clock().elapsed_nanos())
    }

    /// Returns the limits of the port.
    pub(in crate::grpc) fn limits(&self) -> &GrpcLimits {
        &self.server.limits
    }

    /// Sets a deadline of the connection itself, `within` from now.
    pub(in crate::grpc) fn add_connection_deadline(&mut self, key: u64, within: Duration) {
        self.deadlines.add(Instant::now() + within, key);
    }

    /// Returns whether deferred requests can continue now.
    pub(in crate::grpc) fn can_resume_deferred(&self, sender: &Http2Sender) -> bool {
        !self.deferred.is_empty() && !self.is_backpressured(sender)
    }

    pub(super) fn turn_start(&mut self) -> Moment {
        match self.turn {
            Some(turn) => turn,
            None => *self.turn.insert(self.now()),
        }
    }

    pub(super) fn now(&self) -> Moment {
        match self.server.calls {
            Some(_) => Moment::now(self.server.engine.clock()),
            // Durations are not measured.
            None => Moment::default(),
        }
    }

    /// Records how the connection ended; the engine is told when the table is dropped.
    pub(in crate::grpc) fn record_connection_end(&mut self, ending: ConnectionEnd) {
        self.ending.get_or_insert(ending);
    }

    /// Closes the table and tells the engine at once, before the connection itself is dropped.
    pub(in crate::grpc) fn close_and_report_connection_end(&mut self, ending: ConnectionEnd) {
        self.record_connection_end(ending);
        self.report_connection_closed();
        self.slots = SlotTable::default();
        self.logged.forget_all();
        self.deferred = VecDeque::new();
    }

    /// Returns whether the peer has so many answers to take that no further calls are accepted.
    pub(in crate::grpc) fn is_backpressured(&self, sender: &Http2Sender) -> bool {
        sender.unsent_bytes() > self.server.limits.unsent_bytes_per_connection
    }

    /// Counts received and sent bytes.
    pub(in crate::grpc) fn count_bytes(&self, received: u64, sent: u64) {
        let counts = self.server.counts.shard_of_this_thread();
        if received > 0 {
            counts.received.add_many(received);
        }
        if sent > 0 {
            counts.sent.add_many(sent);
        }
    }

    /// Returns how long data may stay unacknowledged.
    pub(in crate::grpc) fn unacknowledged_timeout(&self) -> Duration {
        self.server.limits.unacknowledged
    }

    /// Refuses a call before it reaches the state machine.
    pub(super) fn refuse_call(&self, sender: &mut Http2Sender, stream: StreamId, why: &Failure) {
        self.server.counts.shard_of_this_thread().calls.increment();
        self.server.counts.shard_of_this_thread().refused_calls.increment();
        responses::send_failure(sender, stream, why, Dialect::Number);
    }
}

pub(super) fn over_budget_failure(over: OverBudget) -> Failure {
    Failure::without_details(Code::ResourceExhausted, over.to_string())
}

pub(super) fn deadline_exceeded_failure() -> Failure {
    Failure::without_details(Code::DeadlineExceeded, "the call's own deadline has passed")
}

impl Drop for CallTable {
    fn drop(&mut self) {
        self.report_connection_closed();
    }
}

impl CallTable {
    /// Tells the engine, once, that the connection has ended and its calls are withdrawn.
    fn report_connection_closed(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        let calls: Vec<CallId> = self
            .slots
            .iter()
            .filter_map(|entry| match entry {
                CallState::Waiting(waiting) => Some(waiting.call),
                _ => None,
            })
            .collect();
        let ending = self.ending.take().unwrap_or_else(|| {
            ConnectionEnd::Broken(
                if std::thread::panicking() {
                    "the server failed in serving it"
                } else {
                    "the server stopped"
                }
                .into(),
            )
        });
        self.server.counts.shard_of_this_thread().endings[call_counts::ending_index(&ending)].increment();
        let many = calls.len() > CALLS_DROPPED_HERE;
        self.server.engine.report_connection_closed(self.id, ending, calls);
        if many {
            self.server.engine.drop_in_background(std::mem::take(&mut self.slots));
        }
    }
}

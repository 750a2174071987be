//! The calls of one connection. A call is being received, is deferred, waits for the engine, or belongs to an
//! auxiliary service.
//!
//! The [`GrpcConnection`](super::connection::GrpcConnection) reads the socket and passes requests to the table. The
//! table owns a slot for each request that was not answered at once, the deadlines of these requests, and the
//! connection's quota for bodies. `request_bodies.rs` handles requests whose bodies are arriving, and
//! `engine_calls.rs` handles calls that wait for the engine. Begin at [`CallTable::accept_request`].
//!
//! While a peer leaves more than 16 MiB of answers unread, its new requests are deferred. Its frames are still
//! processed, because the answers wait for its window updates.
//!
//! Dropping the table reports the end of the connection to the engine, which then withdraws the waiting calls of
//! the connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;

use super::auxiliary::{AuxiliaryCall, AuxiliaryCalls};
use super::body_memory::ConnectionQuota;
use super::call_counts;
use super::deadlines::SlotDeadlines;
use super::decoded_call::Dialect;
use super::frame::RequestMessage;
use super::job_resolver::{ConnectionJobResolver, ListenerJobRule};
use super::limits::GrpcLimits;
use super::mailbox::{Mailbox, slot_waker};
use super::request_body::RequestBody;
use super::request_meta::{CallHandler, RequestMeta, RequestRefusal, RequestTarget};
use super::responses;
use super::server::GrpcServer;
use super::slot_table::SlotTable;
use crate::coordination::{CallId, Code, ConnectionEnd, ConnectionId, Failure};
use crate::engine::AnswerInbox;
use crate::http2::{Http2Sender, OverBudget, StreamId};
use crate::meter::Moment;

mod engine_calls;
mod request_bodies;

use engine_calls::{PendingTrace, Waiting};
use request_bodies::ReceivingCall;

/// A deferred request: the peer has too many answers to take.
struct DeferredRequest {
    head: Arc<RequestMeta>,
    stream: StreamId,
    bytes: Vec<u8>,
    ended: bool,
    /// The bytes charged for it.
    charged: usize,
}

enum CallState {
    Deferred(DeferredRequest),
    Receiving(Box<ReceivingCall>),
    Waiting(Waiting),
    Auxiliary(Box<AuxiliaryCall>),
}

/// The deadline of a call.
#[derive(Clone, Copy)]
enum CallDeadline {
    /// The time from now; the clock has not been read yet.
    After(Option<Duration>),
    At(Option<Instant>),
}

impl CallDeadline {
    fn instant(self) -> Option<Instant> {
        match self {
            Self::After(wait) => wait.and_then(|wait| Instant::now().checked_add(wait)),
            Self::At(at) => at,
        }
    }
}

/// The calls of one connection. Dropping it tells the engine that the connection is gone.
pub(super) struct CallTable {
    server: Arc<GrpcServer>,
    id: ConnectionId,
    mailbox: Arc<Mailbox>,
    inbox: Arc<dyn AnswerInbox>,
    route: ConnectionJobResolver,
    slots: SlotTable<CallState>,
    deadlines: SlotDeadlines,
    quota: ConnectionQuota,
    auxiliary: AuxiliaryCalls,
    /// The slots that continue when the peer has taken its answers.
    deferred: VecDeque<u64>,
    ending: Option<ConnectionEnd>,
    /// The beginning of the present turn, once it was needed.
    turn: Option<Moment>,
    /// The time of the first check of the turn's length, in nanoseconds of the engine's clock.
    turn_checked_at: Option<u64>,
    closed: bool,
}

/// The key of the deadline of an incomplete frame. The keys of a connection's own deadlines belong to no slot.
pub(super) const PARTIAL_FRAME_DEADLINE: u64 = u64::MAX;
/// The key of the deadline of an incomplete DATA frame.
pub(super) const BEGUN_DATA_DEADLINE: u64 = u64::MAX - 1;
/// The key of the deadline of output that the peer has not taken.
pub(super) const UNTAKEN_OUTPUT_DEADLINE: u64 = u64::MAX - 2;

/// The result of a check of the deadlines.
pub(super) enum ExpiredDeadlines {
    /// No deadline has passed.
    Nothing,
    /// Deadlines of calls have passed.
    Calls,
    /// This deadline of the connection has passed.
    Connection(u64),
}

/// The time after the first check at which a turn ends.
const TURN_NANOS: u64 = 250_000;
/// The number of deadlines processed before answers are sent. The caller checks again while there were any.
const DEADLINES_PER_TURN: usize = 1 << 10;
/// The work of accepting a call, in steps.
const CALL_WORK: usize = 32;
/// The work of an answer, in steps.
const ANSWER_WORK: usize = 8;
/// The bytes of a body that count as one step.
const BYTES_PER_STEP: usize = 256;
/// The number of calls beyond which a connection's calls are dropped on the reaper's thread: it would take
/// milliseconds.
const CALLS_DROPPED_HERE: usize = 1 << 10;
/// The memory charged for an auxiliary call: its task, and what it has not read of its request.
const AUXILIARY_BYTES: usize = 80 << 10;

impl CallTable {
    /// Returns the table of a new connection.
    pub(super) fn open(
        server: Arc<GrpcServer>,
        peer: SocketAddr,
        routing: ListenerJobRule,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let id = server.engine.register_connection(peer);
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
        }
    }

    /// Begins a turn. All input of a turn counts as received at its beginning: one reading of the clock
    /// serves all of it, and the time that a call waits behind others of its turn is part of its duration.
    pub(super) fn begin_turn(&mut self) {
        self.turn = None;
        self.turn_checked_at = None;
    }

    /// Returns whether the turn has lasted so long that other connections should have theirs. Called after
    /// much work.
    pub(super) fn is_turn_over(&mut self) -> bool {
        let now = self.server.engine.clock().elapsed_nanos();
        now.saturating_sub(*self.turn_checked_at.get_or_insert(now)) > TURN_NANOS
    }

    /// Returns the time since the server started.
    pub(super) fn uptime(&self) -> Duration {
        Duration::from_nanos(self.server.engine.clock().elapsed_nanos())
    }

    /// Returns the limits of the port.
    pub(super) fn limits(&self) -> &GrpcLimits {
        &self.server.limits
    }

    /// Sets a deadline of the connection itself, `within` from now.
    pub(super) fn add_connection_deadline(&mut self, key: u64, within: Duration) {
        self.deadlines.add(Instant::now() + within, key);
    }

    /// Returns whether deferred requests can continue now.
    pub(super) fn can_resume_deferred(&self, sender: &Http2Sender) -> bool {
        !self.deferred.is_empty() && !self.is_backpressured(sender)
    }

    fn turn_start(&mut self) -> Moment {
        match self.turn {
            Some(turn) => turn,
            None => *self.turn.insert(self.now()),
        }
    }

    fn now(&self) -> Moment {
        match self.server.calls {
            Some(_) => Moment::now(self.server.engine.clock()),
            // Durations are not measured.
            None => Moment::default(),
        }
    }

    /// Records how the connection ended; the engine is told when the table is dropped.
    pub(super) fn record_connection_end(&mut self, ending: ConnectionEnd) {
        self.ending.get_or_insert(ending);
    }

    /// Closes the table and tells the engine at once, before the connection itself is dropped.
    pub(super) fn close_and_report(&mut self, ending: ConnectionEnd) {
        self.record_connection_end(ending);
        self.report_connection_closed();
        self.slots = SlotTable::default();
        self.deferred = VecDeque::new();
    }

    /// Returns whether the peer has so many answers to take that no further calls are accepted.
    pub(super) fn is_backpressured(&self, sender: &Http2Sender) -> bool {
        sender.unsent_bytes() > self.server.limits.unsent_bytes_per_connection
    }

    /// Counts received and sent bytes.
    pub(super) fn count_bytes(&self, received: u64, sent: u64) {
        let counts = self.server.counts.local();
        if received > 0 {
            counts.received.add_many(received);
        }
        if sent > 0 {
            counts.sent.add_many(sent);
        }
    }

    /// Returns how long data may stay unacknowledged.
    pub(super) fn unacknowledged_timeout(&self) -> Duration {
        self.server.limits.unacknowledged
    }

    /// Accepts a new request with the received part of its body.
    pub(super) fn accept_request(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        head: Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        sender.count_work(CALL_WORK + bytes.len() / BYTES_PER_STEP);
        if self.is_backpressured(sender) || !self.deferred.is_empty() {
            let charged = head.memory_bytes() + bytes.len();
            if let Err(over) = sender.budget.charge(charged) {
                sender.release_windows(stream, bytes.len());
                return self.refuse_call(sender, stream, &over_budget_failure(over));
            }
            let parked = DeferredRequest { head, stream, bytes: bytes.to_vec(), ended, charged };
            let slot = self.slots.insert(CallState::Deferred(parked));
            sender.assign_slot(stream, slot);
            return self.deferred.push_back(slot);
        }
        self.begin_request(sender, stream, &head, bytes, ended);
    }

    /// Continues deferred requests, as long as the peer takes its answers.
    pub(super) fn resume_deferred(&mut self, sender: &mut Http2Sender) {
        while !self.is_backpressured(sender) && !sender.should_yield() {
            let Some(slot) = self.deferred.pop_front() else { return };
            match self.slots.get_mut(slot) {
                Some(CallState::Deferred(_)) => {
                    if let Some(CallState::Deferred(DeferredRequest {
                        head,
                        stream,
                        bytes,
                        ended,
                        charged,
                    })) = self.slots.remove(slot)
                    {
                        sender.count_work(CALL_WORK + bytes.len() / BYTES_PER_STEP);
                        sender.budget.release(charged);
                        self.begin_request(sender, stream, &head, &bytes, ended);
                    }
                }
                _ => self.poll_slot(sender, slot),
            }
        }
    }

    fn begin_request(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        head: &Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        let callee = match &head.target {
            Ok(RequestTarget::Call(callee)) => *callee,
            Ok(RequestTarget::Auxiliary(request)) => {
                return self.begin_auxiliary_call(sender, stream, &request.0, &request.1, bytes, ended);
            }
            Err(refused) => {
                sender.release_windows(stream, bytes.len());
                self.server.counts.local().calls.increment();
                self.server.counts.local().refused_calls.increment();
                return match refused {
                    RequestRefusal::Http(status, why) => {
                        responses::send_http_refusal(sender, stream, *status, why)
                    }
                    RequestRefusal::Call(why) => {
                        responses::send_failure(sender, stream, why, Dialect::Number)
                    }
                    RequestRefusal::Encoding(why) => responses::send_encoding_refusal(sender, stream, why),
                };
            }
        };
        let job =
            match self.route.resolve_job(&self.server.engine, &self.server.unroutable_log, &head.authority) {
                Ok(job) => job,
                Err(why) => {
                    sender.release_windows(stream, bytes.len());
                    return self.refuse_call(sender, stream, &why);
                }
            };
        let due = CallDeadline::After(head.timeout);
        let trace = match callee {
            CallHandler::Coordination(_) | CallHandler::PeerJobs(_) => self.begin_call_trace(head),
            CallHandler::Reports | CallHandler::Claims => None,
        };
        let since = self.turn_start();
        let most = self.server.limits.message_bytes;
        if ended && let Some(message) = RequestMessage::of_short_body(bytes, most) {
            sender.release_windows(stream, bytes.len());
            return self.dispatch_request(sender, job, callee, &message, stream, due, trace, since);
        }
        let mut body = RequestBody::new(head.compresses);
        let pushed = body.receive_data(bytes, ended, &mut self.quota, &self.server.sets, most);
        // A body that is complete wakes no task.
        let polled = match pushed {
            Ok(()) => body.poll_message(&mut Context::from_waker(Waker::noop()), &mut self.quota, most),
            Err(why) => Poll::Ready(Err(why)),
        };
        match polled {
            Poll::Ready(result) => {
                sender.release_windows(stream, bytes.len());
                match result {
                    Ok(message) => {
                        self.dispatch_request(sender, job, callee, &message, stream, due, trace, since)
                    }
                    Err(why) => self.refuse_call(sender, stream, &why),
                }
            }
            Poll::Pending => {
                // Bytes that wait for memory stay charged to the budget, but do not use the connection's
                // window: otherwise the body whose turn it is could not continue.
                sender.release_connection_window(bytes.len());
                sender.release_stream_window(stream, body.take_consumed());
                self.wait_for_body(sender, body, callee, job, stream, due, trace, since);
            }
        }
    }

    fn begin_auxiliary_call(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        path: &str,
        fields: &HeaderMap,
        bytes: &[u8],
        ended: bool,
    ) {
        self.server.counts.local().calls.increment();
        sender.release_windows(stream, bytes.len());
        if let Err(over) = sender.budget.charge(AUXILIARY_BYTES) {
            return responses::send_failure(sender, stream, &over_budget_failure(over), Dialect::Number);
        }
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        match self.auxiliary.begin_call(&self.server.services, (path, fields), stream, waker) {
            Err(why) => {
                sender.budget.release(AUXILIARY_BYTES);
                responses::send_failure(sender, stream, &why, Dialect::Number);
            }
            Ok(mut call) => {
                call.push_request_data(bytes, ended);
                let slot = self.slots.insert(CallState::Auxiliary(Box::new(call)));
                sender.assign_slot(stream, slot);
                self.poll_slot(sender, slot);
            }
        }
    }

    /// Refuses a call before it reaches the state machine.
    fn refuse_call(&self, sender: &mut Http2Sender, stream: StreamId, why: &Failure) {
        self.server.counts.local().calls.increment();
        self.server.counts.local().refused_calls.increment();
        responses::send_failure(sender, stream, why, Dialect::Number);
    }

    /// Checks a slot that was woken.
    pub(super) fn poll_slot(&mut self, sender: &mut Http2Sender, slot: u64) {
        let full = self.is_backpressured(sender);
        match self.slots.get_mut(slot) {
            None | Some(CallState::Waiting(_) | CallState::Deferred(_)) => {}
            Some(CallState::Auxiliary(call)) if full => {
                if !std::mem::replace(&mut call.deferred, true) {
                    self.deferred.push_back(slot);
                }
            }
            Some(CallState::Receiving(arriving)) if full => {
                if !std::mem::replace(&mut arriving.deferred, true) {
                    self.deferred.push_back(slot);
                }
            }
            Some(CallState::Auxiliary(call)) => {
                call.deferred = false;
                sender.count_work(ANSWER_WORK);
                if call.forward_response(sender) {
                    self.slots.remove(slot);
                    sender.budget.release(AUXILIARY_BYTES);
                }
            }
            Some(CallState::Receiving(_)) => self.poll_body(sender, slot),
        }
    }

    /// Drops the request in this slot, because the peer has cancelled it.
    pub(super) fn on_stream_reset(&mut self, sender: &mut Http2Sender, slot: u64) {
        match self.slots.get_mut(slot) {
            None => {}
            Some(CallState::Waiting(_)) => {
                self.cancel_waiting_call(sender, slot, Code::Cancelled);
            }
            Some(CallState::Receiving(_)) => {
                self.remove_receiving(sender, slot);
            }
            Some(CallState::Auxiliary(_)) => {
                self.slots.remove(slot);
                sender.budget.release(AUXILIARY_BYTES);
            }
            Some(CallState::Deferred(_)) => {
                if let Some(CallState::Deferred(parked)) = self.slots.remove(slot) {
                    sender.release_connection_window(parked.bytes.len());
                    sender.budget.release(parked.charged);
                }
                self.sweep_deferred();
            }
        }
    }

    /// Removes deferred slots that no longer exist, if there are many.
    fn sweep_deferred(&mut self) {
        if self.deferred.len() > 2 * self.slots.len() + 64 {
            let Self { deferred: parked, slots, .. } = self;
            parked.retain(|slot| slots.get_mut(*slot).is_some());
            parked.shrink_to(2 * parked.len() + 64);
        }
    }

    /// Ends the calls whose deadlines have passed.
    pub(super) fn expire_deadlines(
        &mut self,
        cx: &mut Context<'_>,
        sender: &mut Http2Sender,
    ) -> ExpiredDeadlines {
        let mut elapsed = ExpiredDeadlines::Nothing;
        let live = self.slots.len();
        self.deadlines.sweep_removed_slots(live, |slot| {
            slot >= UNTAKEN_OUTPUT_DEADLINE || self.slots.get_mut(slot).is_some()
        });
        for _ in 0..DEADLINES_PER_TURN {
            let Poll::Ready((slot, now)) = self.deadlines.poll_expired(cx) else { break };
            if slot >= UNTAKEN_OUTPUT_DEADLINE {
                return ExpiredDeadlines::Connection(slot);
            }
            elapsed = ExpiredDeadlines::Calls;
            sender.count_work(ANSWER_WORK);
            match self.slots.get_mut(slot) {
                None | Some(CallState::Deferred(_) | CallState::Auxiliary(_)) => {}
                Some(CallState::Waiting(_)) => {
                    if let Some((stream, dialect)) =
                        self.cancel_waiting_call(sender, slot, Code::DeadlineExceeded)
                    {
                        responses::send_failure(sender, stream, &deadline_exceeded_failure(), dialect);
                    }
                }
                Some(CallState::Receiving(_)) => self.check_body_progress(sender, slot, now),
            }
        }
        elapsed
    }
}

fn over_budget_failure(over: OverBudget) -> Failure {
    Failure::without_details(Code::ResourceExhausted, over.to_string())
}

fn deadline_exceeded_failure() -> Failure {
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
        self.server.counts.local().endings[call_counts::ending_index(&ending)].increment();
        let many = calls.len() > CALLS_DROPPED_HERE;
        self.server.engine.report_connection_closed(self.id, ending, calls);
        if many {
            self.server.engine.drop_in_background(std::mem::take(&mut self.slots));
        }
    }
}

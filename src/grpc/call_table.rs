//! The calls of one connection: received, deferred, waiting for the engine, or auxiliary.
//!
//! It reads no socket; the [`GrpcConnection`](super::connection::GrpcConnection) feeds it. It owns a slot for
//! each request that was not answered at once, the deadlines of these requests, and the connection's quota
//! for bodies. Begin at [`CallTable::accept_request`]; `request_bodies.rs` has the requests whose bodies are
//! arriving, `engine_calls.rs` those that wait for the engine.
//!
//! While a peer does not take its answers (16 MiB are unsent), no further call of it is served: its new
//! requests are deferred. Its frames are still processed, because they open the windows for which everything
//! waits.
//!
//! Dropping the table tells the engine that the connection has ended; the engine then withdraws its waiting calls.

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
use super::deadlines::Deadlines;
use super::decoded_call::Dialect;
use super::job_route::{JobRoute, Routing};
use super::limits::GrpcLimits;
use super::mailbox::{Mailbox, slot_waker};
use super::request_body::RequestBody;
use super::request_meta::{CallHandler, RequestMeta, RequestRefusal, RequestTarget};
use super::respond;
use super::server::Server;
use super::slot_table::SlotTable;
use crate::coordination::{CallId, Code, ConnectionEnd, ConnectionId, Failure};
use crate::engine::AnswerInbox;
use crate::http2::{OverBudget, Sender, StreamId};
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
    fn at(self) -> Option<Instant> {
        match self {
            Self::After(wait) => wait.and_then(|wait| Instant::now().checked_add(wait)),
            Self::At(at) => at,
        }
    }
}

/// The calls of one connection. Dropping it tells the engine that the connection is gone.
pub(super) struct CallTable {
    server: Arc<Server>,
    id: ConnectionId,
    mailbox: Arc<Mailbox>,
    inbox: Arc<dyn AnswerInbox>,
    route: JobRoute,
    slots: SlotTable<CallState>,
    deadlines: Deadlines,
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

/// The key of a deadline of the connection itself: an incomplete frame. Such keys belong to no slot.
pub(super) const PARTIAL_FRAME_DEADLINE: u64 = u64::MAX;
/// The key of the deadline of data that was begun.
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
        server: Arc<Server>,
        peer: SocketAddr,
        routing: Routing,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let id = server.engine.connection_opened(peer);
        let inbox: Arc<dyn AnswerInbox> = Arc::clone(&mailbox) as Arc<dyn AnswerInbox>;
        let auxiliary = AuxiliaryCalls::new(server.limits.auxiliary_calls_per_connection);
        let route = JobRoute::new(routing);
        let quota = ConnectionQuota::new(&server.bodies);
        let (slots, deadlines) = (SlotTable::default(), Deadlines::default());
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
    pub(super) fn can_resume_deferred(&self, sender: &Sender) -> bool {
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

    /// Closes the table with the way in which the connection ended.
    pub(super) fn close(&mut self, ending: ConnectionEnd) {
        self.ending.get_or_insert(ending);
    }

    /// Closes the table and tells the engine at once, before the connection itself is dropped.
    pub(super) fn close_now(&mut self, ending: ConnectionEnd) {
        self.close(ending);
        self.report_closed();
        self.slots = SlotTable::default();
        self.deferred = VecDeque::new();
    }

    /// Returns whether the peer has so many answers to take that no further calls are accepted.
    pub(super) fn is_backpressured(&self, sender: &Sender) -> bool {
        sender.unsent() > self.server.limits.unsent_bytes_per_connection
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
    pub(super) fn unacknowledged(&self) -> Duration {
        self.server.limits.unacknowledged
    }

    /// Accepts a new request with the received part of its body.
    pub(super) fn accept_request(
        &mut self,
        sender: &mut Sender,
        stream: StreamId,
        head: Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        sender.count_work(CALL_WORK + bytes.len() / BYTES_PER_STEP);
        if self.is_backpressured(sender) || !self.deferred.is_empty() {
            let charged = head.bytes() + bytes.len();
            if let Err(over) = sender.budget.charge(charged) {
                sender.release(stream, bytes.len());
                return self.refuse(sender, stream, &over_budget(over));
            }
            let parked = DeferredRequest { head, stream, bytes: bytes.to_vec(), ended, charged };
            let slot = self.slots.insert(CallState::Deferred(parked));
            sender.assign_slot(stream, slot);
            return self.deferred.push_back(slot);
        }
        self.begin(sender, stream, &head, bytes, ended);
    }

    /// Continues deferred requests, as long as the peer takes its answers.
    pub(super) fn resume_deferred(&mut self, sender: &mut Sender) {
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
                        self.begin(sender, stream, &head, &bytes, ended);
                    }
                }
                _ => self.poll_slot(sender, slot),
            }
        }
    }

    fn begin(
        &mut self,
        sender: &mut Sender,
        stream: StreamId,
        head: &Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        let callee = match &head.target {
            Ok(RequestTarget::Call(callee)) => *callee,
            Ok(RequestTarget::Auxiliary(request)) => {
                return self.begin_auxiliary(sender, stream, &request.0, &request.1, bytes, ended);
            }
            Err(refused) => {
                sender.release(stream, bytes.len());
                self.server.counts.local().calls.add();
                self.server.counts.local().refused_calls.add();
                return match refused {
                    RequestRefusal::Http(status, why) => respond::send_refusal(sender, stream, *status, why),
                    RequestRefusal::Call(why) => respond::send_failure(sender, stream, why, Dialect::Number),
                    RequestRefusal::Encoding(why) => respond::send_encoding_refusal(sender, stream, why),
                };
            }
        };
        let job = match self.route.job(&self.server.engine, &self.server.unroutable_log, &head.authority) {
            Ok(job) => job,
            Err(why) => {
                sender.release(stream, bytes.len());
                return self.refuse(sender, stream, &why);
            }
        };
        let due = CallDeadline::After(head.timeout);
        let trace = match callee {
            CallHandler::Coordination(_) => self.begin_trace(head),
            CallHandler::Reports => None,
        };
        let since = self.turn_start();
        let mut body = RequestBody::new(head.compresses);
        let most = self.server.limits.message_bytes;
        let pushed = body.push(bytes, ended, &mut self.quota, &self.server.sets, most);
        // A body that is complete wakes no task.
        let polled = match pushed {
            Ok(()) => body.poll(&mut Context::from_waker(Waker::noop()), &mut self.quota, most),
            Err(why) => Poll::Ready(Err(why)),
        };
        match polled {
            Poll::Ready(result) => {
                sender.release(stream, bytes.len());
                match result {
                    Ok(message) => self.dispatch(sender, job, callee, &message, stream, due, trace, since),
                    Err(why) => self.refuse(sender, stream, &why),
                }
            }
            Poll::Pending => {
                // Bytes that wait for memory stay charged to the budget, but do not use the connection's
                // window: otherwise the body whose turn it is could not continue.
                sender.release_connection(bytes.len());
                sender.release_stream(stream, body.take_consumed());
                self.wait_for_body(sender, body, callee, job, stream, due, trace, since);
            }
        }
    }

    fn begin_auxiliary(
        &mut self,
        sender: &mut Sender,
        stream: StreamId,
        path: &str,
        fields: &HeaderMap,
        bytes: &[u8],
        ended: bool,
    ) {
        self.server.counts.local().calls.add();
        sender.release(stream, bytes.len());
        if let Err(over) = sender.budget.charge(AUXILIARY_BYTES) {
            return respond::send_failure(sender, stream, &over_budget(over), Dialect::Number);
        }
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        match self.auxiliary.begin(&self.server.services, (path, fields), stream, waker) {
            Err(why) => {
                sender.budget.release(AUXILIARY_BYTES);
                respond::send_failure(sender, stream, &why, Dialect::Number);
            }
            Ok(mut call) => {
                call.push(bytes, ended);
                let slot = self.slots.insert(CallState::Auxiliary(Box::new(call)));
                sender.assign_slot(stream, slot);
                self.poll_slot(sender, slot);
            }
        }
    }

    /// Refuses a call before it reaches the state machine.
    fn refuse(&self, sender: &mut Sender, stream: StreamId, why: &Failure) {
        self.server.counts.local().calls.add();
        self.server.counts.local().refused_calls.add();
        respond::send_failure(sender, stream, why, Dialect::Number);
    }

    /// Checks a slot that was woken.
    pub(super) fn poll_slot(&mut self, sender: &mut Sender, slot: u64) {
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
    pub(super) fn on_reset(&mut self, sender: &mut Sender, slot: u64) {
        match self.slots.get_mut(slot) {
            None => {}
            Some(CallState::Waiting(_)) => {
                self.cancel_waiting(sender, slot, Code::Cancelled);
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
                    sender.release_connection(parked.bytes.len());
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
    pub(super) fn expire_deadlines(&mut self, cx: &mut Context<'_>, sender: &mut Sender) -> ExpiredDeadlines {
        let mut elapsed = ExpiredDeadlines::Nothing;
        let live = self.slots.len();
        self.deadlines
            .sweep_dead(live, |slot| slot >= UNTAKEN_OUTPUT_DEADLINE || self.slots.get_mut(slot).is_some());
        for _ in 0..DEADLINES_PER_TURN {
            let Poll::Ready((slot, now)) = self.deadlines.poll(cx) else { break };
            if slot >= UNTAKEN_OUTPUT_DEADLINE {
                return ExpiredDeadlines::Connection(slot);
            }
            elapsed = ExpiredDeadlines::Calls;
            sender.count_work(ANSWER_WORK);
            match self.slots.get_mut(slot) {
                None | Some(CallState::Deferred(_) | CallState::Auxiliary(_)) => {}
                Some(CallState::Waiting(_)) => {
                    if let Some((stream, dialect)) = self.cancel_waiting(sender, slot, Code::DeadlineExceeded)
                    {
                        respond::send_failure(sender, stream, &too_late(), dialect);
                    }
                }
                Some(CallState::Receiving(_)) => self.check_body_progress(sender, slot, now),
            }
        }
        elapsed
    }
}

fn over_budget(over: OverBudget) -> Failure {
    Failure::without_details(Code::ResourceExhausted, over.to_string())
}

fn too_late() -> Failure {
    Failure::without_details(Code::DeadlineExceeded, "the call's own deadline has passed")
}

impl Drop for CallTable {
    fn drop(&mut self) {
        self.report_closed();
    }
}

impl CallTable {
    /// Tells the engine, once, that the connection has ended and its calls are withdrawn.
    fn report_closed(&mut self) {
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
        self.server.counts.local().endings[call_counts::ending_index(&ending)].add();
        let many = calls.len() > CALLS_DROPPED_HERE;
        self.server.engine.connection_closed(self.id, ending, calls);
        if many {
            self.server.engine.drop_later(std::mem::take(&mut self.slots));
        }
    }
}

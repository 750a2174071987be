//! The calls of one connection: where they come in, wait and are answered.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;

use super::auxiliary::{AuxiliaryCall, AuxiliaryCalls};
use super::body::{self, Body};
use super::call::{Dialect, Form};
use super::count;
use super::deadlines::Deadlines;
use super::frame::Message;
use super::head::{Callee, Refused, RequestMeta, Target};
use super::limits::Limits;
use super::mailbox::{Mailbox, slot_waker};
use super::memory::ConnectionQuota;
use super::respond;
use super::route::{Route, Routing};
use super::server::Server;
use super::slots::Slots;
use crate::coordination::{CallId, Caller, Code, ConnectionId, Ending, Failure, JobId, Outcome, TaskId};
use crate::engine::{Called, Inbox};
use crate::http2::{OverBudget, Sender, StreamId};
use crate::meter::Moment;
use crate::proto::muster::v1::TransferReportAck;
use crate::telemetry::traces::{CallEnd, CallTrace};

/// A request that is looked at later: the peer has too many answers to take.
struct Parked {
    head: Arc<RequestMeta>,
    stream: StreamId,
    bytes: Vec<u8>,
    ended: bool,
    /// The bytes that were charged for it.
    charged: usize,
}

/// The trace of a call, with the task that makes it; `None` where calls are not traced.
type Trace = Option<Box<(CallTrace, Option<TaskId>)>>;

/// A request whose body is on its way.
struct Arriving {
    body: Body,
    callee: Callee,
    job: JobId,
    stream: StreamId,
    due: Option<Instant>,
    /// When it must have made progress, and when it is looked at next.
    stall: Instant,
    check: Instant,
    waker: Waker,
    parked: bool,
    /// The message is there, and the end of the request is awaited.
    is_whole: bool,
    trace: Trace,
    since: Moment,
    /// The bytes that were charged for what it holds back.
    charged: usize,
}

/// A call that the state machine has not answered yet.
struct Waiting {
    call: CallId,
    job: JobId,
    form: Form,
    stream: StreamId,
    trace: Trace,
    since: Moment,
    /// The bytes that were charged for what is remembered of it.
    charged: usize,
}

enum Entry {
    Parked(Parked),
    Arriving(Box<Arriving>),
    Waiting(Waiting),
    Auxiliary(Box<AuxiliaryCall>),
}

/// When the caller stops waiting.
#[derive(Clone, Copy)]
enum Due {
    /// So long after now, which nobody has looked up yet.
    After(Option<Duration>),
    At(Option<Instant>),
}

impl Due {
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
    inbox: Arc<dyn Inbox>,
    route: Route,
    slots: Slots<Entry>,
    deadlines: Deadlines,
    quota: ConnectionQuota,
    auxiliary: AuxiliaryCalls,
    /// Slots that are looked at when the peer has taken its answers.
    parked: VecDeque<u64>,
    ending: Option<Ending>,
    /// When the present turn began, once somebody has asked.
    turn: Option<Moment>,
    /// When its length was first looked at, in nanoseconds of the engine's clock.
    looked: Option<u64>,
    closed: bool,
}

/// Keys of deadlines that belong to no slot, but to the connection.
pub(super) const INPUT: u64 = u64::MAX;
pub(super) const PASSING: u64 = u64::MAX - 1;
pub(super) const OUTPUT: u64 = u64::MAX - 2;

/// What the time that has passed has brought.
pub(super) enum Elapsed {
    /// Nothing.
    Nothing,
    /// Calls came to their end.
    Calls,
    /// This deadline of the connection.
    Connection(u64),
}

/// A turn ends so long after it was found to be long.
const TURN_NANOS: u64 = 1_000_000;
/// So many deadlines are looked at before answers are sent. The caller comes back while there were any.
const DEADLINES: usize = 1 << 10;
/// The work of taking a call, and of its answer; so many bytes of a body are as much as a step.
const CALL_WORK: usize = 32;
const ANSWER_WORK: usize = 8;
const BYTES_A_STEP: usize = 256;
/// What a call to an auxiliary service may hold: its task, and what it has not read of its request.
const AUXILIARY_BYTES: usize = 80 << 10;

impl CallTable {
    /// Opens the table of a new connection.
    pub(super) fn open(
        server: Arc<Server>,
        peer: SocketAddr,
        routing: Routing,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let id = server.engine.connection_opened(peer);
        let inbox: Arc<dyn Inbox> = Arc::clone(&mailbox) as Arc<dyn Inbox>;
        let auxiliary = AuxiliaryCalls::new(server.limits.auxiliary_calls_per_connection);
        let route = Route::new(routing);
        let quota = ConnectionQuota::new(&server.bodies);
        let (slots, deadlines) = (Slots::default(), Deadlines::default());
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
            parked,
            ending,
            turn,
            looked: None,
            closed: false,
        }
    }

    /// A turn begins. Everything that comes in it has come at its beginning, as far as times are measured: one look at
    /// the clock serves them all, and who waits behind others of its turn has waited.
    pub(super) fn begin_turn(&mut self) {
        self.turn = None;
        self.looked = None;
    }

    /// Whether the turn has lasted so long that others should have theirs. Whoever has done much asks this.
    pub(super) fn is_turn_over(&mut self) -> bool {
        let now = self.server.engine.clock().nanos();
        now.saturating_sub(*self.looked.get_or_insert(now)) > TURN_NANOS
    }

    /// The time since the server began.
    pub(super) fn uptime(&self) -> Duration {
        Duration::from_nanos(self.server.engine.clock().nanos())
    }

    /// The bounds of the wire edge.
    pub(super) fn limits(&self) -> &Limits {
        &self.server.limits
    }

    /// Adds a deadline of the connection itself, so long after now.
    pub(super) fn watch(&mut self, key: u64, within: Duration) {
        self.deadlines.add(Instant::now() + within, key);
    }

    /// Whether requests that were put off can be taken now.
    pub(super) fn can_unpark(&self, sender: &Sender) -> bool {
        !self.parked.is_empty() && !self.is_full(sender)
    }

    fn turn(&mut self) -> Moment {
        match self.turn {
            Some(turn) => turn,
            None => *self.turn.insert(self.now()),
        }
    }

    fn now(&self) -> Moment {
        match self.server.calls {
            Some(_) => Moment::now(self.server.engine.clock()),
            // Nobody wants to know.
            None => Moment::default(),
        }
    }

    /// Closes it, noting how the connection ended.
    pub(super) fn close(&mut self, ending: Ending) {
        self.ending.get_or_insert(ending);
    }

    /// Closes it and tells the engine at once, before the connection itself is gone.
    pub(super) fn close_now(&mut self, ending: Ending) {
        self.close(ending);
        self.tell_engine();
        self.slots = Slots::default();
        self.parked = VecDeque::new();
    }

    /// Whether the peer has so many answers to take that no further calls are taken from it.
    pub(super) fn is_full(&self, sender: &Sender) -> bool {
        sender.unsent() > self.server.limits.unsent_bytes_per_connection
    }

    /// Counts bytes that came and went.
    pub(super) fn moved(&self, received: u64, sent: u64) {
        let counts = self.server.counts.mine();
        if received > 0 {
            counts.received.add_many(received);
        }
        if sent > 0 {
            counts.sent.add_many(sent);
        }
    }

    /// How long data may go unacknowledged.
    pub(super) fn unacknowledged(&self) -> Duration {
        self.server.limits.unacknowledged
    }

    /// Takes a new request, with what has arrived of its body.
    pub(super) fn take(
        &mut self,
        sender: &mut Sender,
        stream: StreamId,
        head: Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        sender.count_work(CALL_WORK + bytes.len() / BYTES_A_STEP);
        if self.is_full(sender) || !self.parked.is_empty() {
            let charged = head.bytes() + bytes.len();
            if let Err(over) = sender.budget.charge(charged) {
                sender.release(stream, bytes.len());
                return self.refuse(sender, stream, &over_budget(over));
            }
            let parked = Parked { head, stream, bytes: bytes.to_vec(), ended, charged };
            let slot = self.slots.insert(Entry::Parked(parked));
            sender.assign(stream, slot);
            return self.parked.push_back(slot);
        }
        self.begin(sender, stream, &head, bytes, ended);
    }

    /// Looks at what was put off, as long as the peer takes its answers.
    pub(super) fn unpark(&mut self, sender: &mut Sender) {
        while !self.is_full(sender) && !sender.is_busy() {
            let Some(slot) = self.parked.pop_front() else { return };
            match self.slots.get_mut(slot) {
                Some(Entry::Parked(_)) => {
                    if let Some(Entry::Parked(Parked { head, stream, bytes, ended, charged })) =
                        self.slots.remove(slot)
                    {
                        sender.count_work(CALL_WORK + bytes.len() / BYTES_A_STEP);
                        sender.budget.release(charged);
                        self.begin(sender, stream, &head, &bytes, ended);
                    }
                }
                _ => self.look_at(sender, slot),
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
            Ok(Target::Call(callee)) => *callee,
            Ok(Target::Auxiliary(request)) => {
                return self.begin_auxiliary(sender, stream, &request.0, &request.1, bytes, ended);
            }
            Err(refused) => {
                sender.release(stream, bytes.len());
                self.server.counts.mine().calls.add();
                self.server.counts.mine().refused_calls.add();
                return match refused {
                    Refused::Http(status, why) => respond::refuse(sender, stream, *status, why),
                    Refused::Call(why) => respond::failure(sender, stream, why, Dialect::Number),
                    Refused::Encoding(why) => respond::refuse_encoding(sender, stream, why),
                };
            }
        };
        let job = match self.route.job(&self.server.engine, &self.server.lost, &head.authority) {
            Ok(job) => job,
            Err(why) => {
                sender.release(stream, bytes.len());
                return self.refuse(sender, stream, &why);
            }
        };
        let due = Due::After(head.timeout);
        let trace = match callee {
            Callee::Coordination(_) => self.begin_trace(head),
            Callee::Reports => None,
        };
        let since = self.turn();
        let mut body = Body::new(head.compresses);
        let most = self.server.limits.message_bytes;
        let pushed = body.push(bytes, ended, &mut self.quota, &self.server.sets, most);
        // Nobody is woken for a body that is there.
        let polled = match pushed {
            Ok(()) => body.poll(&mut Context::from_waker(Waker::noop()), &mut self.quota, most),
            Err(why) => Poll::Ready(Err(why)),
        };
        match polled {
            Poll::Ready(result) => {
                sender.release(stream, bytes.len());
                match result {
                    Ok(message) => self.ask(sender, job, callee, &message, stream, due, trace, since),
                    Err(why) => self.refuse(sender, stream, &why),
                }
            }
            Poll::Pending => {
                // What waits for memory stays charged to the budget, and does not keep other bodies of the connection out of its
                // window: the one whose turn it is could not go on.
                sender.release_connection(bytes.len());
                sender.release_stream(stream, body.take_used());
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
        self.server.counts.mine().calls.add();
        sender.release(stream, bytes.len());
        if let Err(over) = sender.budget.charge(AUXILIARY_BYTES) {
            return respond::failure(sender, stream, &over_budget(over), Dialect::Number);
        }
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        match self.auxiliary.begin(&self.server.services, (path, fields), stream, waker) {
            Err(why) => {
                sender.budget.release(AUXILIARY_BYTES);
                respond::failure(sender, stream, &why, Dialect::Number);
            }
            Ok(mut call) => {
                call.push(bytes, ended);
                let slot = self.slots.insert(Entry::Auxiliary(Box::new(call)));
                sender.assign(stream, slot);
                self.look_at(sender, slot);
            }
        }
    }

    /// Answers a call that does not come before the state machine.
    fn refuse(&self, sender: &mut Sender, stream: StreamId, why: &Failure) {
        self.server.counts.mine().calls.add();
        self.server.counts.mine().refused_calls.add();
        respond::failure(sender, stream, why, Dialect::Number);
    }

    #[expect(clippy::too_many_arguments, reason = "what a request is made of")]
    fn wait_for_body(
        &mut self,
        sender: &mut Sender,
        body: Body,
        callee: Callee,
        job: JobId,
        stream: StreamId,
        due: Due,
        trace: Trace,
        since: Moment,
    ) {
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        let due = due.at();
        let stall = Instant::now() + self.server.limits.body_stall;
        let (parked, charged) = (false, body.held());
        if let Err(over) = sender.budget.charge(charged) {
            return self.refuse(sender, stream, &over_budget(over));
        }
        let check = due.map_or(stall, |due| due.min(stall));
        let arriving = Box::new(Arriving {
            body,
            callee,
            job,
            stream,
            due,
            stall,
            check,
            waker,
            parked,
            is_whole: false,
            trace,
            since,
            charged,
        });
        let slot = self.slots.insert(Entry::Arriving(arriving));
        sender.assign(stream, slot);
        self.deadlines.add(check, slot);
        self.look_at(sender, slot);
    }

    /// Takes more of the body of a request.
    pub(super) fn more(&mut self, sender: &mut Sender, stream: StreamId, bytes: &[u8], ended: bool) {
        let slot = sender.slot(stream);
        let Some((slot, entry)) = slot.and_then(|slot| Some((slot, self.slots.get_mut(slot)?))) else {
            return sender.release(stream, bytes.len());
        };
        sender.count_work(bytes.len() / BYTES_A_STEP);
        match entry {
            // What follows an ended request does not come through.
            Entry::Waiting(_) => sender.release(stream, bytes.len()),
            Entry::Parked(parked) => {
                // Room grows by doubling.
                let charged = 2 * bytes.len();
                if let Err(over) = sender.budget.charge(charged) {
                    self.give_up(sender, slot);
                    sender.release_connection(bytes.len());
                    return self.refuse(sender, stream, &over_budget(over));
                }
                parked.charged += charged;
                parked.bytes.extend_from_slice(bytes);
                parked.ended |= ended;
            }
            Entry::Auxiliary(call) => {
                sender.release(stream, bytes.len());
                call.push(bytes, ended);
            }
            Entry::Arriving(arriving) => {
                sender.release_connection(bytes.len());
                sender.release_stream(stream, arriving.body.take_used());
                let charged = if arriving.body.held() == 0 { 0 } else { 2 * bytes.len() };
                let most = self.server.limits.message_bytes;
                let pushed = match sender.budget.charge(charged) {
                    Ok(()) => {
                        arriving.charged += charged;
                        arriving.body.push(bytes, ended, &mut self.quota, &self.server.sets, most)
                    }
                    Err(over) => Err(over_budget(over)),
                };
                if let Err(why) = pushed {
                    sender.budget.release(arriving.charged);
                    self.slots.remove(slot);
                    return self.refuse(sender, stream, &why);
                }
                self.look_at(sender, slot);
            }
        }
    }

    /// Where the next bytes of the body of `stream` may be read to, and how many of them at most.
    pub(super) fn room(&mut self, sender: &Sender, stream: StreamId) -> Option<(&mut Vec<u8>, usize)> {
        match self.slots.get_mut(sender.slot(stream)?)? {
            Entry::Arriving(arriving) => arriving.body.room(),
            _ => None,
        }
    }

    /// Notes that so many bytes of the body of `stream` were read to their room.
    pub(super) fn filled(&mut self, sender: &mut Sender, stream: StreamId, bytes: usize) {
        let slot = sender.slot(stream);
        if let Some(Entry::Arriving(arriving)) = slot.and_then(|slot| self.slots.get_mut(slot)) {
            arriving.body.filled(bytes);
            sender.release_connection(bytes);
            sender.release_stream(stream, arriving.body.take_used());
        }
        if let Some(slot) = slot {
            self.expect_end(slot);
        }
    }

    /// A message that is there must be followed by the end of its request in time.
    fn expect_end(&mut self, slot: u64) {
        let Some(Entry::Arriving(arriving)) = self.slots.get_mut(slot) else { return };
        if !arriving.body.awaits_end() || std::mem::replace(&mut arriving.is_whole, true) {
            return;
        }
        arriving.stall = arriving.stall.min(Instant::now() + self.server.limits.handshake);
        if arriving.stall < arriving.check {
            arriving.check = arriving.stall;
            self.deadlines.add(arriving.check, slot);
        }
    }

    /// Removes an arriving request.
    fn drop_body(&mut self, sender: &mut Sender, slot: u64) -> Option<Box<Arriving>> {
        let Some(Entry::Arriving(arriving)) = self.slots.remove(slot) else { return None };
        sender.budget.release(arriving.charged);
        Some(arriving)
    }

    /// Takes what a worker reports. Answered at once: nothing waits for it.
    fn take_report(&self, sender: &mut Sender, job: JobId, message: &Message, stream: StreamId) {
        match self.server.transfers.take(&self.server.engine, job, &message.bytes()) {
            Ok(interval_ms) => {
                self.server.counts.mine().calls.add();
                let now_us = self.server.engine.clock().now().0;
                respond::message(sender, stream, &TransferReportAck { interval_ms, now_us });
            }
            Err(refusal) => self.refuse(sender, stream, &refusal.into()),
        }
    }

    /// Puts a call to a job: to the state machine, but for reports.
    #[expect(clippy::too_many_arguments, reason = "what a request is made of")]
    fn ask(
        &mut self,
        sender: &mut Sender,
        job: JobId,
        callee: Callee,
        message: &Message,
        stream: StreamId,
        due: Due,
        mut trace: Trace,
        since: Moment,
    ) {
        let reader = match callee {
            Callee::Coordination(reader) => reader,
            Callee::Reports => return self.take_report(sender, job, message, stream),
        };
        let call = match reader(message, &self.server.sets) {
            Ok(call) => call,
            Err(why) => return self.refuse(sender, stream, &why),
        };
        self.server.counts.mine().calls.add();
        // Of a call that waits, what its answer repeats is kept.
        let charged = call.form.key.len();
        if let Err(over) = sender.budget.charge(charged) {
            return self.refuse(sender, stream, &over_budget(over));
        }
        let caller = Caller { connection: self.id, claim: call.claim };
        let slot = self.slots.next_key();
        if let Some(trace) = &mut trace {
            trace.1 = call.request.task();
        }
        match self.server.engine.call(job, caller, call.request, &self.inbox, slot) {
            Called::Now(outcome) => {
                sender.budget.release(charged);
                self.end_trace(trace, job, &call.form, outcome.as_ref().err().map(|failure| failure.code));
                self.send(sender, stream, &outcome, &call.form);
                let now = self.now();
                self.count(&call.form, outcome.as_ref().err().map(|failure| failure.code), (since, now));
            }
            Called::Waiting(id) => {
                let form = call.form;
                self.slots.insert(Entry::Waiting(Waiting {
                    call: id,
                    job,
                    form,
                    stream,
                    trace,
                    since,
                    charged,
                }));
                sender.assign(stream, slot);
                if let Some(due) = due.at() {
                    self.deadlines.add(due, slot);
                }
            }
        }
    }

    fn send(&self, sender: &mut Sender, stream: StreamId, outcome: &Outcome, form: &Form) {
        respond::outcome(sender, stream, outcome, form, self.server.limits.message_bytes);
    }

    fn begin_trace(&self, head: &RequestMeta) -> Trace {
        let traces = self.server.traces.as_ref()?;
        let trace = traces
            .begin(head.trace.as_deref().unwrap_or(&HeaderMap::new()), self.server.engine.clock().now());
        Some(Box::new((trace, None)))
    }

    fn end_trace(&self, trace: Trace, job: JobId, form: &Form, code: Option<Code>) {
        let (Some(traces), Some(trace)) = (&self.server.traces, trace) else { return };
        let end = CallEnd {
            job,
            service: form.dialect.service(),
            method: form.method.name(),
            code: code.map_or(0, Code::number),
            at: self.server.engine.clock().now(),
        };
        traces.end(&trace.0, trace.1, &end);
    }

    /// Counts a call that lasted from a moment to another; without a code it has succeeded.
    fn count(&self, form: &Form, code: Option<Code>, times: (Moment, Moment)) {
        if let Some(calls) = &self.server.calls {
            calls.mine().add(form.method, form.dialect, code, times);
        }
    }

    /// Sends the answer to a call that waited.
    pub(super) fn answer(&mut self, sender: &mut Sender, slot: u64, outcome: &Outcome) {
        sender.count_work(ANSWER_WORK);
        if let Some(Entry::Waiting(mut waiting)) = self.slots.remove(slot) {
            sender.budget.release(waiting.charged);
            let code = outcome.as_ref().err().map(|failure| failure.code);
            self.end_trace(waiting.trace.take(), waiting.job, &waiting.form, code);
            self.send(sender, waiting.stream, outcome, &waiting.form);
            let now = self.turn();
            self.count(&waiting.form, code, (waiting.since, now));
        }
    }

    /// Looks at a slot for which something may have come about.
    pub(super) fn look_at(&mut self, sender: &mut Sender, slot: u64) {
        let full = self.is_full(sender);
        match self.slots.get_mut(slot) {
            None | Some(Entry::Waiting(_) | Entry::Parked(_)) => {}
            Some(Entry::Auxiliary(call)) if full => {
                if !std::mem::replace(&mut call.parked, true) {
                    self.parked.push_back(slot);
                }
            }
            Some(Entry::Arriving(arriving)) if full => {
                if !std::mem::replace(&mut arriving.parked, true) {
                    self.parked.push_back(slot);
                }
            }
            Some(Entry::Auxiliary(call)) => {
                call.parked = false;
                sender.count_work(ANSWER_WORK);
                if call.pass_on(sender) {
                    self.slots.remove(slot);
                    sender.budget.release(AUXILIARY_BYTES);
                }
            }
            Some(Entry::Arriving(arriving)) => {
                let Arriving { body, waker, stream, parked, .. } = &mut **arriving;
                *parked = false;
                let was_reserved = body.is_reserved();
                let most = self.server.limits.message_bytes;
                let polled = body.poll(&mut Context::from_waker(waker), &mut self.quota, most);
                sender.release_stream(*stream, body.take_used());
                if body.held() == 0 {
                    sender.budget.release(std::mem::take(&mut arriving.charged));
                }
                let Poll::Ready(result) = polled else {
                    if !was_reserved && arriving.body.is_reserved() {
                        arriving.check = arriving.check.min(Instant::now() + body::PACE_PERIOD);
                        self.deadlines.add(arriving.check, slot);
                    }
                    return self.expect_end(slot);
                };
                let Some(arriving) = self.drop_body(sender, slot) else { return };
                let Arriving { callee, job, stream, due, trace, since, .. } = *arriving;
                match result {
                    Ok(message) => {
                        self.ask(sender, job, callee, &message, stream, Due::At(due), trace, since);
                    }
                    Err(why) => self.refuse(sender, stream, &why),
                }
            }
        }
    }

    /// The peer has given up the request in this slot.
    pub(super) fn give_up(&mut self, sender: &mut Sender, slot: u64) {
        match self.slots.get_mut(slot) {
            None => {}
            Some(Entry::Waiting(_)) => {
                self.hang_up(sender, slot, Code::Cancelled);
            }
            Some(Entry::Arriving(_)) => {
                self.drop_body(sender, slot);
            }
            Some(Entry::Auxiliary(_)) => {
                self.slots.remove(slot);
                sender.budget.release(AUXILIARY_BYTES);
            }
            Some(Entry::Parked(_)) => {
                if let Some(Entry::Parked(parked)) = self.slots.remove(slot) {
                    sender.release_connection(parked.bytes.len());
                    sender.budget.release(parked.charged);
                }
                self.forget_parked();
            }
        }
    }

    /// Sweeps out what was put off and has gone, if it is much.
    fn forget_parked(&mut self) {
        if self.parked.len() > 2 * self.slots.len() + 64 {
            let Self { parked, slots, .. } = self;
            parked.retain(|slot| slots.get_mut(*slot).is_some());
            parked.shrink_to(2 * parked.len() + 64);
        }
    }

    fn hang_up(&mut self, sender: &mut Sender, slot: u64, code: Code) -> Option<(StreamId, Dialect)> {
        let Some(Entry::Waiting(mut waiting)) = self.slots.remove(slot) else { return None };
        sender.budget.release(waiting.charged);
        self.server.engine.hang_up(waiting.job, waiting.call);
        let now = self.turn();
        self.count(&waiting.form, Some(code), (waiting.since, now));
        self.end_trace(waiting.trace.take(), waiting.job, &waiting.form, Some(code));
        Some((waiting.stream, waiting.form.dialect))
    }

    /// Ends the calls whose time is up.
    pub(super) fn keep_time(&mut self, cx: &mut Context<'_>, sender: &mut Sender) -> Elapsed {
        let mut elapsed = Elapsed::Nothing;
        let live = self.slots.len();
        self.deadlines.forget_dead(live, |slot| slot >= OUTPUT || self.slots.get_mut(slot).is_some());
        for _ in 0..DEADLINES {
            let Poll::Ready((slot, now)) = self.deadlines.poll(cx) else { break };
            if slot >= OUTPUT {
                return Elapsed::Connection(slot);
            }
            elapsed = Elapsed::Calls;
            sender.count_work(ANSWER_WORK);
            match self.slots.get_mut(slot) {
                None | Some(Entry::Parked(_) | Entry::Auxiliary(_)) => {}
                Some(Entry::Waiting(_)) => {
                    if let Some((stream, dialect)) = self.hang_up(sender, slot, Code::DeadlineExceeded) {
                        respond::failure(sender, stream, &too_late(), dialect);
                    }
                }
                Some(Entry::Arriving(_)) => self.check_arrival(sender, slot, now),
            }
        }
        elapsed
    }

    /// A body is to have made progress by now.
    fn check_arrival(&mut self, sender: &mut Sender, slot: u64, now: Instant) {
        let stall = self.server.limits.body_stall;
        let Some(Entry::Arriving(arriving)) = self.slots.get_mut(slot) else { return };
        if now < arriving.check {
            // It has been looked at since this deadline was set, and has a later one.
            return;
        }
        let why = if arriving.due.is_some_and(|due| due <= now) {
            too_late()
        } else if now >= arriving.stall && arriving.body.awaits_end() {
            not_ended(self.server.limits.handshake)
        } else if now >= arriving.stall && !arriving.body.has_moved() {
            stalled(stall)
        } else if arriving.body.is_too_slow(&self.quota) {
            too_slow()
        } else {
            if now >= arriving.stall {
                arriving.stall = now + stall;
            }
            let pace = arriving.body.is_reserved().then(|| now + body::PACE_PERIOD);
            let next = [Some(arriving.stall), arriving.due, pace].into_iter().flatten().min();
            arriving.check = next.unwrap_or(arriving.stall);
            return self.deadlines.add(arriving.check, slot);
        };
        if let Some(arriving) = self.drop_body(sender, slot) {
            self.refuse(sender, arriving.stream, &why);
        }
    }
}

fn over_budget(over: OverBudget) -> Failure {
    Failure::plain(Code::ResourceExhausted, over.to_string())
}

fn too_slow() -> Failure {
    let text = "the request's body arrives too slowly while others wait for the memory that it holds";
    Failure::plain(Code::ResourceExhausted, text)
}

fn too_late() -> Failure {
    Failure::plain(Code::DeadlineExceeded, "the call's own deadline has passed")
}

fn not_ended(within: Duration) -> Failure {
    let text = format!("the request did not end within {} s after its message", within.as_secs());
    Failure::plain(Code::DeadlineExceeded, text)
}

fn stalled(stall: Duration) -> Failure {
    let text =
        format!("the request's body did not arrive, nor the next 4 MiB of it, within {} s", stall.as_secs());
    Failure::plain(Code::DeadlineExceeded, text)
}

impl Drop for CallTable {
    fn drop(&mut self) {
        self.tell_engine();
    }
}

impl CallTable {
    /// Tells the engine, once, that the connection has ended and nobody waits here any more.
    fn tell_engine(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        let calls: Vec<CallId> = self
            .slots
            .iter()
            .filter_map(|entry| match entry {
                Entry::Waiting(waiting) => Some(waiting.call),
                _ => None,
            })
            .collect();
        let ending = self.ending.take().unwrap_or_else(|| {
            Ending::Broken(
                if std::thread::panicking() {
                    "the server failed in serving it"
                } else {
                    "the server stopped"
                }
                .into(),
            )
        });
        self.server.counts.mine().endings[count::place_of(&ending)].add();
        self.server.engine.connection_closed(self.id, ending, &calls);
    }
}

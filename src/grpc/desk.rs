//! The calls of one connection: where they come in, wait and are answered.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::time::Instant;

use super::body::{Body, Wallet};
use super::call::{Dialect, Form};
use super::count;
use super::deadlines::Deadlines;
use super::frame::Message;
use super::head::{Callee, Heading, Refused, Target};
use super::mailbox::{Mailbox, slot_waker};
use super::respond;
use super::route::{Route, Routing};
use super::server::Server;
use super::side::{Side, SideCall};
use super::slots::Slots;
use crate::coordination::{CallId, Caller, Code, ConnectionId, Ending, Failure, JobId, Outcome, TaskId};
use crate::engine::{Called, Inbox};
use crate::http2::{Sender, StreamId};
use crate::meter::Moment;
use crate::proto::muster::v1::TransferReportAck;
use crate::telemetry::traces::{CallEnd, CallTrace};

/// A request that is looked at later: the peer has too many answers to take.
struct Parked {
    head: Arc<Heading>,
    stream: StreamId,
    bytes: Vec<u8>,
    ended: bool,
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
    waker: Waker,
    parked: bool,
    trace: Trace,
    since: Moment,
}

/// A call that the state machine has not answered yet.
struct Waiting {
    call: CallId,
    job: JobId,
    form: Form,
    stream: StreamId,
    trace: Trace,
    since: Moment,
}

enum Entry {
    Parked(Parked),
    Arriving(Box<Arriving>),
    Waiting(Waiting),
    Side(Box<SideCall>),
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
pub(super) struct Desk {
    server: Arc<Server>,
    id: ConnectionId,
    mailbox: Arc<Mailbox>,
    inbox: Arc<dyn Inbox>,
    route: Route,
    slots: Slots<Entry>,
    deadlines: Deadlines,
    wallet: Wallet,
    side: Side,
    /// Slots that are looked at when the peer has taken its answers.
    parked: VecDeque<u64>,
    ending: Option<Ending>,
    /// When the present turn began, once somebody has asked.
    turn: Option<Moment>,
}

impl Desk {
    /// Opens the desk of a new connection.
    pub(super) fn open(
        server: Arc<Server>,
        peer: SocketAddr,
        routing: Routing,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        let id = server.engine.connection_opened(peer);
        let inbox: Arc<dyn Inbox> = Arc::clone(&mailbox) as Arc<dyn Inbox>;
        let side = Side::new(server.limits.side_calls_per_connection);
        let route = Route::new(routing);
        let wallet = Wallet::new(&server.budget, server.limits.message_bytes);
        let (slots, deadlines) = (Slots::default(), Deadlines::default());
        let parked = VecDeque::new();
        let (ending, turn) = (None, None);
        Self { server, id, mailbox, inbox, route, slots, deadlines, wallet, side, parked, ending, turn }
    }

    /// A turn begins. Everything that comes in it has come at its beginning, as far as times are measured: one look at
    /// the clock serves them all, and who waits behind others of its turn has waited.
    pub(super) fn begin_turn(&mut self) {
        self.turn = None;
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
        head: Arc<Heading>,
        bytes: &[u8],
        ended: bool,
    ) {
        if self.is_full(sender) || !self.parked.is_empty() {
            let parked = Parked { head, stream, bytes: bytes.to_vec(), ended };
            let slot = self.slots.insert(Entry::Parked(parked));
            sender.assign(stream, slot);
            return self.parked.push_back(slot);
        }
        self.begin(sender, stream, &head, bytes, ended);
    }

    /// Looks at what was put off, as long as the peer takes its answers.
    pub(super) fn unpark(&mut self, sender: &mut Sender) {
        while !self.is_full(sender) {
            let Some(slot) = self.parked.pop_front() else { return };
            match self.slots.get_mut(slot) {
                Some(Entry::Parked(_)) => {
                    if let Some(Entry::Parked(Parked { head, stream, bytes, ended })) =
                        self.slots.remove(slot)
                    {
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
        head: &Arc<Heading>,
        bytes: &[u8],
        ended: bool,
    ) {
        let callee = match &head.target {
            Ok(Target::Call(callee)) => *callee,
            Ok(Target::Side) => return self.begin_side(sender, stream, head, bytes, ended),
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
        let job = match self.route.job(&self.server.engine, &head.head.authority) {
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
        let pushed = body.push(bytes, ended, &self.wallet, &self.server.sets);
        // Nobody is woken for a body that is there.
        let polled = match pushed {
            Ok(()) => body.poll(&mut Context::from_waker(Waker::noop()), &self.wallet),
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
                sender.release(stream, body.take_used());
                self.wait_for_body(sender, body, callee, job, stream, due, trace, since);
            }
        }
    }

    fn begin_side(
        &mut self,
        sender: &mut Sender,
        stream: StreamId,
        head: &Heading,
        bytes: &[u8],
        ended: bool,
    ) {
        self.server.counts.mine().calls.add();
        sender.release(stream, bytes.len());
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        match self.side.begin(&self.server.services, &head.head, stream, waker) {
            Err(why) => respond::failure(sender, stream, &why, Dialect::Number),
            Ok(mut call) => {
                call.push(bytes, ended);
                let slot = self.slots.insert(Entry::Side(Box::new(call)));
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
        let parked = false;
        let arriving = Box::new(Arriving { body, callee, job, stream, due, waker, parked, trace, since });
        let slot = self.slots.insert(Entry::Arriving(arriving));
        sender.assign(stream, slot);
        self.deadlines.add(due.map_or(stall, |due| due.min(stall)), slot);
        self.look_at(sender, slot);
    }

    /// Takes more of the body of a request.
    pub(super) fn more(&mut self, sender: &mut Sender, stream: StreamId, bytes: &[u8], ended: bool) {
        let slot = sender.slot(stream);
        let Some((slot, entry)) = slot.and_then(|slot| Some((slot, self.slots.get_mut(slot)?))) else {
            return sender.release(stream, bytes.len());
        };
        match entry {
            // What follows an ended request does not come through.
            Entry::Waiting(_) => sender.release(stream, bytes.len()),
            Entry::Parked(parked) => {
                parked.bytes.extend_from_slice(bytes);
                parked.ended |= ended;
            }
            Entry::Side(call) => {
                sender.release(stream, bytes.len());
                call.push(bytes, ended);
            }
            Entry::Arriving(arriving) => {
                sender.release(stream, arriving.body.take_used());
                let held = arriving.body.held();
                if let Err(why) = arriving.body.push(bytes, ended, &self.wallet, &self.server.sets) {
                    self.slots.remove(slot);
                    // Whatever of it the body had counted already: every byte is given back once.
                    sender.release_connection(held + bytes.len());
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
            sender.release(stream, arriving.body.take_used());
        }
    }

    /// Removes an arriving request; what it held counts as used.
    fn drop_body(&mut self, sender: &mut Sender, slot: u64) -> Option<Box<Arriving>> {
        let Some(Entry::Arriving(mut arriving)) = self.slots.remove(slot) else { return None };
        sender.release_connection(arriving.body.held() + arriving.body.take_used());
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
        let caller = Caller { connection: self.id, claim: call.claim };
        let slot = self.slots.next_key();
        if let Some(trace) = &mut trace {
            trace.1 = call.request.task();
        }
        match self.server.engine.call(job, caller, call.request, &self.inbox, slot) {
            Called::Now(outcome) => {
                self.end_trace(trace, job, &call.form, outcome.as_ref().err().map(|failure| failure.code));
                self.send(sender, stream, &outcome, &call.form);
                let now = self.now();
                self.count(&call.form, outcome.as_ref().err().map(|failure| failure.code), (since, now));
            }
            Called::Waiting(id) => {
                let form = call.form;
                self.slots.insert(Entry::Waiting(Waiting { call: id, job, form, stream, trace, since }));
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

    fn begin_trace(&self, head: &Heading) -> Trace {
        let traces = self.server.traces.as_ref()?;
        let trace = traces.begin(&head.head.fields, self.server.engine.clock().now());
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
        if let Some(Entry::Waiting(mut waiting)) = self.slots.remove(slot) {
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
            Some(Entry::Side(call)) if full => {
                if !std::mem::replace(&mut call.parked, true) {
                    self.parked.push_back(slot);
                }
            }
            Some(Entry::Arriving(arriving)) if full => {
                if !std::mem::replace(&mut arriving.parked, true) {
                    self.parked.push_back(slot);
                }
            }
            Some(Entry::Side(call)) => {
                call.parked = false;
                if call.pass_on(sender) {
                    self.slots.remove(slot);
                }
            }
            Some(Entry::Arriving(arriving)) => {
                let Arriving { body, waker, stream, parked, .. } = &mut **arriving;
                *parked = false;
                let polled = body.poll(&mut Context::from_waker(waker), &self.wallet);
                sender.release(*stream, body.take_used());
                let Poll::Ready(result) = polled else { return };
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
                self.hang_up(slot, Code::Cancelled);
            }
            Some(Entry::Arriving(_)) => {
                self.drop_body(sender, slot);
            }
            Some(Entry::Parked(_) | Entry::Side(_)) => {
                if let Some(Entry::Parked(parked)) = self.slots.remove(slot) {
                    sender.release_connection(parked.bytes.len());
                }
            }
        }
    }

    fn hang_up(&mut self, slot: u64, code: Code) -> Option<(StreamId, Dialect)> {
        let Some(Entry::Waiting(mut waiting)) = self.slots.remove(slot) else { return None };
        self.server.engine.hang_up(waiting.job, waiting.call);
        let now = self.turn();
        self.count(&waiting.form, Some(code), (waiting.since, now));
        self.end_trace(waiting.trace.take(), waiting.job, &waiting.form, Some(code));
        Some((waiting.stream, waiting.form.dialect))
    }

    /// Ends the calls whose time is up; whether there were any.
    pub(super) fn keep_time(&mut self, cx: &mut Context<'_>, sender: &mut Sender) -> bool {
        let mut any = false;
        let live = self.slots.len();
        self.deadlines.forget_dead(live, |slot| self.slots.get_mut(slot).is_some());
        while let Poll::Ready((slot, now)) = self.deadlines.poll(cx) {
            any = true;
            match self.slots.get_mut(slot) {
                None | Some(Entry::Parked(_) | Entry::Side(_)) => {}
                Some(Entry::Waiting(_)) => {
                    if let Some((stream, dialect)) = self.hang_up(slot, Code::DeadlineExceeded) {
                        respond::failure(sender, stream, &too_late(), dialect);
                    }
                }
                Some(Entry::Arriving(arriving)) => {
                    let stall = self.server.limits.body_stall;
                    let over = arriving.due.is_some_and(|due| due <= now);
                    if !over && arriving.body.has_moved() {
                        let next = arriving.due.map_or(now + stall, |due| due.min(now + stall));
                        self.deadlines.add(next, slot);
                        continue;
                    }
                    let Some(arriving) = self.drop_body(sender, slot) else { continue };
                    let why = if over { too_late() } else { stalled(stall) };
                    self.refuse(sender, arriving.stream, &why);
                }
            }
        }
        any
    }
}

fn too_late() -> Failure {
    Failure::plain(Code::DeadlineExceeded, "the call's own deadline has passed")
}

fn stalled(stall: Duration) -> Failure {
    let text = format!("the request's body made no progress for {} s", stall.as_secs());
    Failure::plain(Code::DeadlineExceeded, text)
}

impl Drop for Desk {
    fn drop(&mut self) {
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

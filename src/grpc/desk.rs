//! The calls of one connection: where they come in, wait and are answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use h2::RecvStream;
use http::Request;
use tokio::time::Instant;

use super::body::{Body, Broken, Wallet};
use super::call::{Dialect, Form, Reader};
use super::count;
use super::deadlines::Deadlines;
use super::frame::Message;
use super::head::{self, Refused, Target};
use super::mailbox::{Mailbox, slot_waker};
use super::respond::{self, Respond};
use super::route::{Route, Routing};
use super::server::Server;
use super::side::Side;
use super::slots::Slots;
use crate::coordination::{CallId, Caller, Code, ConnectionId, Ending, Failure, JobId, Outcome};
use crate::engine::{Called, Inbox};

/// A request whose body is on its way.
struct Arriving {
    body: Body,
    reader: Reader,
    job: JobId,
    respond: Respond,
    due: Option<Instant>,
    waker: Waker,
}

/// A call that the state machine has not answered yet.
struct Waiting {
    call: CallId,
    job: JobId,
    form: Form,
    respond: Respond,
    waker: Waker,
}

enum Entry {
    Arriving(Box<Arriving>),
    Waiting(Waiting),
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
    ending: Option<Ending>,
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
        Self { server, id, mailbox, inbox, route, slots, deadlines, wallet, side, ending: None }
    }

    /// Closes it, noting how the connection ended.
    pub(super) fn close(&mut self, ending: Ending) {
        self.ending.get_or_insert(ending);
    }

    /// Whether the peer has so many answers to take that no further calls are taken from it.
    pub(super) fn is_full(&self) -> bool {
        self.mailbox.unsent() > self.server.limits.unsent_bytes_per_connection
    }

    /// Counts bytes that came and went.
    pub(super) fn moved(&self, received: u64, sent: u64) {
        let counts = &self.server.counts;
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

    /// Takes a new request.
    pub(super) fn take(&mut self, request: Request<RecvStream>, mut respond: Respond) {
        let (head, stream) = request.into_parts();
        self.server.counts.calls.add();
        let reader = match head::target(&head) {
            Ok(Target::Coordination(reader)) => reader,
            Ok(Target::Side) => {
                let request = Request::from_parts(head, stream);
                return self.side.take(&self.server.services, request, respond, &self.mailbox);
            }
            Err(refused) => {
                self.server.counts.refused_calls.add();
                return match refused {
                    Refused::Http(status, why) => respond::refuse(&mut respond, status, &why),
                    Refused::Call(why) => respond::failure(&mut respond, &why, Dialect::Number),
                    Refused::Encoding(why) => respond::refuse_encoding(&mut respond, &why),
                };
            }
        };
        let authority = head.uri.authority().map_or("", |authority| authority.as_str());
        let job = match self.route.job(&self.server.engine, authority) {
            Ok(job) => job,
            Err(why) => return self.refuse(respond, &why),
        };
        let due = Due::After(head::timeout(&head.headers));
        let mut body = Body::new(stream, head::compresses(&head.headers));
        // Nobody is woken for a body that is there.
        match body.poll(&mut Context::from_waker(Waker::noop()), &self.wallet) {
            Poll::Ready(Ok(message)) => self.ask(job, reader, &message, respond, due),
            Poll::Ready(Err(broken)) => self.give_up(respond, &broken),
            Poll::Pending => self.wait_for_body(body, reader, job, respond, due),
        }
    }

    fn refuse(&self, mut respond: Respond, why: &Failure) {
        self.server.counts.refused_calls.add();
        respond::failure(&mut respond, why, Dialect::Number);
    }

    fn give_up(&self, respond: Respond, broken: &Broken) {
        match broken {
            Broken::Gone => {}
            Broken::Bad(why) => self.refuse(respond, why),
        }
    }

    fn wait_for_body(&mut self, body: Body, reader: Reader, job: JobId, respond: Respond, due: Due) {
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        let due = due.at();
        let stall = Instant::now() + self.server.limits.body_stall;
        let arriving = Box::new(Arriving { body, reader, job, respond, due, waker });
        let slot = self.slots.insert(Entry::Arriving(arriving));
        self.deadlines.add(due.map_or(stall, |due| due.min(stall)), slot);
        self.look_at(slot);
    }

    /// Puts a call to the state machine.
    fn ask(&mut self, job: JobId, reader: Reader, message: &Message, mut respond: Respond, due: Due) {
        let call = match reader(message, &self.server.sets) {
            Ok(call) => call,
            Err(why) => return self.refuse(respond, &why),
        };
        let caller = Caller { connection: self.id, claim: call.claim };
        let slot = self.slots.next_key();
        match self.server.engine.call(job, caller, call.request, &self.inbox, slot) {
            Called::Now(outcome) => self.send(&mut respond, &outcome, &call.form),
            Called::Waiting(id) => {
                let waker = slot_waker(&self.mailbox, slot);
                self.slots.insert(Entry::Waiting(Waiting { call: id, job, form: call.form, respond, waker }));
                if let Some(due) = due.at() {
                    self.deadlines.add(due, slot);
                }
                // From now on the slot is told if the peer gives up the call.
                self.look_at(slot);
            }
        }
    }

    fn send(&self, respond: &mut Respond, outcome: &Outcome, form: &Form) {
        let code = outcome.as_ref().err().map(|failure| failure.code);
        self.count(form, code);
        respond::outcome(respond, outcome, form, self.server.limits.message_bytes, &self.mailbox);
    }

    fn count(&self, form: &Form, code: Option<Code>) {
        if let Some(calls) = &self.server.calls {
            calls.add(form.method, form.dialect, code);
        }
    }

    /// Sends the answer to a call that waited.
    pub(super) fn answer(&mut self, slot: u64, outcome: &Outcome) {
        if let Some(Entry::Waiting(mut waiting)) = self.slots.remove(slot) {
            self.send(&mut waiting.respond, outcome, &waiting.form);
        }
    }

    /// Looks at a slot whose stream may have moved.
    pub(super) fn look_at(&mut self, slot: u64) {
        match self.slots.get_mut(slot) {
            None => {}
            Some(Entry::Waiting(waiting)) => {
                let mut cx = Context::from_waker(&waiting.waker);
                if waiting.respond.poll_reset(&mut cx).is_ready() {
                    self.hang_up(slot, Code::Cancelled);
                }
            }
            Some(Entry::Arriving(arriving)) => {
                let Arriving { body, waker, .. } = &mut **arriving;
                let polled = body.poll(&mut Context::from_waker(waker), &self.wallet);
                let Poll::Ready(result) = polled else { return };
                let Some(Entry::Arriving(arriving)) = self.slots.remove(slot) else { return };
                let Arriving { reader, job, respond, due, .. } = *arriving;
                match result {
                    Ok(message) => self.ask(job, reader, &message, respond, Due::At(due)),
                    Err(broken) => self.give_up(respond, &broken),
                }
            }
        }
    }

    fn hang_up(&mut self, slot: u64, code: Code) -> Option<(Respond, Dialect)> {
        let Some(Entry::Waiting(waiting)) = self.slots.remove(slot) else { return None };
        self.server.engine.hang_up(waiting.job, waiting.call);
        self.count(&waiting.form, Some(code));
        Some((waiting.respond, waiting.form.dialect))
    }

    /// Ends the calls whose time is up; whether there were any.
    pub(super) fn keep_time(&mut self, cx: &mut Context<'_>) -> bool {
        let mut any = false;
        let live = self.slots.len();
        self.deadlines.forget_dead(live, |slot| self.slots.get_mut(slot).is_some());
        while let Poll::Ready((slot, now)) = self.deadlines.poll(cx) {
            any = true;
            match self.slots.get_mut(slot) {
                None => {}
                Some(Entry::Waiting(_)) => {
                    if let Some((mut respond, dialect)) = self.hang_up(slot, Code::DeadlineExceeded) {
                        respond::failure(&mut respond, &too_late(), dialect);
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
                    let Some(Entry::Arriving(arriving)) = self.slots.remove(slot) else { continue };
                    self.refuse(arriving.respond, &if over { too_late() } else { stalled(stall) });
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
                Entry::Arriving(_) => None,
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
        self.server.counts.endings[count::place_of(&ending)].add();
        self.server.engine.connection_closed(self.id, ending, &calls);
    }
}

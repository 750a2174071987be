//! One client connection: a tokio task that drives HTTP/2, its deadlines and its mailbox.
//!
//! It holds no calls: `call_table.rs` does. Begin at `Connection::poll`, then `Connection::drive`.
//!
//! - *A turn.* A call whose body is complete is decoded, put to the engine and answered within one turn, and all
//!   answers of a turn leave with one write. What the peer causes is counted while it is processed. After about two
//!   thousand steps the connection reads the clock, and 250 microseconds later the turn ends: the task yields, so
//!   that the runtime polls for input of other connections.
//! - *Memory.* An idle connection holds no buffer. Input is read into a buffer of the thread, output is gathered in
//!   one, and both are free at the end of the turn unless the peer's host takes no more. A large body is read into
//!   its final place.
//! - *Deadlines.* Every wait for the peer has one: SETTINGS and incomplete frames, bodies, data that was begun,
//!   answers that are not taken. The last two are long (10 minutes), because a process that is only stopped comes
//!   back.
//! - *Silence.* `TCP_USER_TIMEOUT` is lifted while a large answer is unread. To the kernel, a stopped process with
//!   a full receive buffer looks like a host that has vanished.
//! - *The end.* A peer that breaks the protocol receives GOAWAY with the reason, and the socket lingers until it
//!   could be read.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BufMut as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::call_table::{
    BEGUN_DATA_DEADLINE, CallTable, Elapsed, PARTIAL_FRAME_DEADLINE, UNTAKEN_OUTPUT_DEADLINE,
};
use super::head::RequestMeta;
use super::listener::ConnectionGuard;
use super::mailbox::{Mailbox, Note};
use super::route::Routing;
use super::server::Server;
use super::watched::{UnfinishedInput, Untaken, Watched};
use crate::coordination::Ending;
use crate::http2::{
    Event, Fault, HeaderBlockCache, PREFACE, Reason, Receiver, Sender, Settings, StreamId, Unfinished,
};
use crate::tls;

/// So much is read in one turn before others get theirs.
const TURN: usize = 512 << 10;
/// So much is read at once.
const ROOM: usize = 128 << 10;
/// Bodies of which so much is known to follow are read to where they belong.
const DIRECT: usize = 16 << 10;
/// The largest frame.
const FRAME: u32 = 2 << 20;
/// What may be on its way on one stream, and on one connection.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// Clients send a few hundred bytes of headers.
const HEADER_LIST: u32 = 16 << 10;
/// So many notes are read before others get their turn.
const NOTES: usize = 1 << 10;
/// A peer that broke the protocol has so long to read why, and may still send so much.
const LINGER: (Duration, usize) = (Duration::from_secs(1), 4 << 20);
/// Buffers of a connection up to this size are not charged to its budget.
const BUFFERS: usize = 32 << 10;

/// What a thread needs to serve a connection, whichever it is.
struct Tools {
    room: Vec<u8>,
    headers: HeaderBlockCache<RequestMeta>,
}

impl Default for Tools {
    fn default() -> Self {
        Self { room: Vec::new(), headers: HeaderBlockCache::new() }
    }
}

thread_local! {
    static TOOLS: Cell<Tools> = Cell::default();
}

/// What a connection needs of its socket.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Lets data go unacknowledged, or not taken by the peer's process, for as long as this.
    fn set_user_timeout(&self, unacknowledged: Option<Duration>);

    /// The connection is over: says so, where saying so is more than closing the socket.
    fn send_close(&mut self, _cx: &mut Context<'_>) {}
}

impl Transport for TcpStream {
    fn set_user_timeout(&self, unacknowledged: Option<Duration>) {
        // On a socket that is gone already there is nothing left to set.
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(self).set_tcp_user_timeout(unacknowledged);
        #[cfg(not(target_os = "linux"))]
        let _ = unacknowledged;
    }
}

impl Transport for tls::Stream<TcpStream> {
    fn set_user_timeout(&self, unacknowledged: Option<Duration>) {
        self.get_ref().0.stream().set_user_timeout(unacknowledged);
    }

    fn send_close(&mut self, cx: &mut Context<'_>) {
        // What does not leave at once need not leave: the peer sees the end of the connection either way.
        let _ = Pin::new(self).poll_shutdown(cx);
    }
}

/// A request whose body has not begun.
struct NewRequest {
    stream: StreamId,
    head: Arc<RequestMeta>,
}

/// A connection in progress. Its calls stand first, so that they are cleared first when all is
/// dropped: the state machine hears at once of a connection that is gone.
pub(super) struct Connection<T> {
    calls: CallTable,
    socket: T,
    receiver: Receiver,
    sender: Sender,
    /// Bytes that came and were not counted yet.
    received: u64,
    /// What was read and has not been looked at.
    early: Vec<u8>,
    /// The latest request, if its body may come in the same piece.
    new_request: Option<NewRequest>,
    /// The peer makes no further requests.
    peer_left: bool,
    mailbox: Arc<Mailbox>,
    /// Notes that were taken from the mailbox and not read yet.
    notes: std::vec::IntoIter<Note>,
    /// The peer may take its time to acknowledge.
    patient: bool,
    /// What the deadlines are for that were set for the peer.
    watched: Option<Box<Watched>>,
    /// The bytes that have left.
    sent: u64,
    /// The bytes of buffers that are charged to the budget.
    charged: usize,
    /// The peer is not read from before it has taken its answers.
    declines: bool,
    /// The connection is over, and the peer is told why.
    lingering: Option<Box<LingeringClose>>,
    _place: ConnectionGuard,
}

/// The end of a connection whose peer broke the protocol. If the socket were closed while the peer is still sending, the peer's
/// host would discard what it has not read, and with it the reason.
struct LingeringClose {
    until: Pin<Box<Sleep>>,
    /// So many bytes are still read, for nothing.
    left: usize,
    /// The socket was closed for writing.
    shut: bool,
}

/// What one turn of driving HTTP/2 came to.
enum Driven {
    /// It waits.
    Idle,
    /// There is more to do at once.
    More,
    /// It is over.
    Over(Ending),
    /// The peer has broken the protocol, or passed a bound.
    Broken(Fault),
}

impl<T: Transport> Future for Connection<T> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.lingering.is_some() {
            return this.poll_lingering_close(cx);
        }
        this.calls.begin_turn();
        loop {
            if let Some(ending) = this.read_notes() {
                return this.end(ending, cx);
            }
            let driven = this.drive(cx);
            let sent = this.sender.output.take_sent();
            this.sent += sent;
            this.calls.moved(std::mem::take(&mut this.received), sent);
            match driven {
                Driven::Idle => match this.charge_buffers().and_then(|()| this.keep_time(cx)) {
                    Err(fault) => return this.break_off(fault, cx),
                    Ok(true) => continue,
                    Ok(false) => {}
                },
                // A connection that is never idle has deadlines, too.
                Driven::More => match this.keep_time(cx) {
                    Err(fault) => return this.break_off(fault, cx),
                    Ok(_) => return yield_turn(cx),
                },
                Driven::Over(ending) => return this.end(ending, cx),
                Driven::Broken(fault) => return this.break_off(fault, cx),
            }
            if this.notes.len() > 0 {
                continue;
            }
            if this.mailbox.rest(cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

/// Lets others have their turn, and the system tell what has come for them meanwhile: to be woken at once would come before
/// both.
fn yield_turn(cx: &mut Context<'_>) -> Poll<()> {
    let polled = pin!(tokio::task::yield_now()).poll(cx);
    if polled.is_ready() {
        cx.waker().wake_by_ref();
    }
    Poll::Pending
}

impl<T: Transport> Connection<T> {
    pub(super) fn open(
        server: Arc<Server>,
        socket: T,
        mut early: Vec<u8>,
        peer: SocketAddr,
        routing: Routing,
        place: ConnectionGuard,
    ) -> Self {
        let settings = Settings {
            streams: server.limits.streams_per_connection,
            frame: FRAME,
            stream_window: STREAM_WINDOW,
            connection_window: CONNECTION_WINDOW,
            header_list: HEADER_LIST,
            state_bytes: server.limits.state_bytes_per_connection,
        };
        let pool = Arc::clone(&server.state);
        let received = early.len() as u64;
        early.drain(..PREFACE.len());
        let mailbox = Arc::clone(place.mailbox());
        let calls = CallTable::open(server, peer, routing, Arc::clone(&mailbox));
        let (receiver, sender) = (Receiver::new(), Sender::new(settings, pool));
        Self {
            calls,
            socket,
            receiver,
            sender,
            received,
            early,
            new_request: None,
            peer_left: false,
            mailbox,
            notes: Vec::new().into_iter(),
            patient: false,
            watched: None,
            sent: 0,
            charged: 0,
            declines: false,
            lingering: None,
            _place: place,
        }
    }

    fn end(&mut self, ending: Ending, cx: &mut Context<'_>) -> Poll<()> {
        self.calls.close(ending);
        self.socket.send_close(cx);
        Poll::Ready(())
    }

    /// Ends a connection whose peer is to hear why.
    fn break_off(&mut self, fault: Fault, cx: &mut Context<'_>) -> Poll<()> {
        self.sender.send_goaway(fault);
        self.calls.close_now(Ending::Broken(fault.to_string()));
        let (within, left) = LINGER;
        self.lingering = Some(Box::new(LingeringClose { until: Box::pin(sleep(within)), left, shut: false }));
        self.poll_lingering_close(cx)
    }

    /// Sends the reason, and reads what is still on its way, until the peer closes or its time is up.
    fn poll_lingering_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(lingering) = &mut self.lingering else { return Poll::Ready(()) };
        if lingering.until.as_mut().poll(cx).is_ready() {
            self.socket.send_close(cx);
            return Poll::Ready(());
        }
        if !lingering.shut {
            match self.sender.output.poll_send(cx, &mut self.socket) {
                Poll::Pending => {}
                Poll::Ready(Err(_)) => return Poll::Ready(()),
                Poll::Ready(Ok(())) => match Pin::new(&mut self.socket).poll_shutdown(cx) {
                    Poll::Pending => {}
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(())) => lingering.shut = true,
                },
            }
        }
        let mut tools = TOOLS.take();
        tools.room.resize(ROOM, 0);
        let over = loop {
            let mut room = ReadBuf::new(&mut tools.room);
            match Pin::new(&mut self.socket).poll_read(cx, &mut room) {
                Poll::Pending => break false,
                Poll::Ready(Err(_)) => break true,
                Poll::Ready(Ok(())) => {
                    let bytes = room.filled().len();
                    self.received += bytes as u64;
                    lingering.left = lingering.left.saturating_sub(bytes);
                    if bytes == 0 || lingering.left == 0 {
                        break true;
                    }
                }
            }
        };
        TOOLS.set(tools);
        self.calls.moved(std::mem::take(&mut self.received), self.sender.output.take_sent());
        if over { Poll::Ready(()) } else { Poll::Pending }
    }

    fn read_notes(&mut self) -> Option<Ending> {
        if self.notes.len() == 0 {
            self.notes = self.mailbox.collect().into_iter();
        }
        let sender = &mut self.sender;
        for note in self.notes.by_ref().take(NOTES) {
            match note {
                Note::Answer(slot, outcome) => self.calls.answer(sender, slot, &outcome),
                Note::Stirred(slot) => self.calls.look_at(sender, slot),
                Note::Stop => sender.leave(),
                Note::Abort => return Some(Ending::Broken("the server closed it".into())),
            }
        }
        None
    }

    /// Looks at what has come to its time, and sets deadlines for what the peer has left unfinished; whether there is
    /// more to do.
    fn keep_time(&mut self, cx: &mut Context<'_>) -> Result<bool, Fault> {
        self.set_deadlines();
        match self.calls.keep_time(cx, &mut self.sender) {
            Elapsed::Nothing => return Ok(false),
            Elapsed::Calls => {}
            Elapsed::Connection(key @ (PARTIAL_FRAME_DEADLINE | BEGUN_DATA_DEADLINE)) => {
                let watched = self.watched.get_or_insert_default();
                watched.note_declining(self.declines);
                let watched =
                    if key == PARTIAL_FRAME_DEADLINE { &mut watched.input } else { &mut watched.passing };
                if let Some(was) = watched.take()
                    && self.receiver.unfinished() == Some(was.what)
                {
                    if was.declined.is_zero() {
                        return Err(Fault::new(Reason::EnhanceYourCalm, was.what.0.fault()));
                    }
                    // The peer has as much time left as this server did not read.
                    *watched = Some(UnfinishedInput { declined: Duration::ZERO, ..was });
                    self.calls.watch(key, was.declined);
                }
            }
            Elapsed::Connection(_) => {
                if let Some(was) = self.watched.get_or_insert_default().output.take()
                    && was.is_stuck(&self.untaken())
                {
                    return Err(Fault::new(Reason::EnhanceYourCalm, "answers were not taken in time"));
                }
            }
        }
        Ok(true)
    }

    /// Every wait for the peer has a deadline.
    fn set_deadlines(&mut self) {
        if let Some(unfinished) = self.receiver.unfinished() {
            let limits = self.calls.limits();
            let watched = self.watched.get_or_insert_default();
            let (key, watched, within) = match unfinished.0 {
                Unfinished::Settings | Unfinished::Frame => {
                    (PARTIAL_FRAME_DEADLINE, &mut watched.input, limits.handshake)
                }
                Unfinished::Passing => (BEGUN_DATA_DEADLINE, &mut watched.passing, limits.unread),
            };
            if watched.is_none() {
                *watched = Some(UnfinishedInput { what: unfinished, declined: Duration::ZERO });
                self.calls.watch(key, within);
            }
        }
        if let Some(watched) = &mut self.watched {
            watched.note_declining(self.declines);
        }
        if self.sender.unsent() > 0 && self.watched.as_ref().is_none_or(|watched| watched.output.is_none()) {
            let untaken = self.untaken();
            self.watched.get_or_insert_default().output = Some(untaken);
            let within = self.calls.limits().unread;
            self.calls.watch(UNTAKEN_OUTPUT_DEADLINE, within);
        }
    }

    fn untaken(&self) -> Untaken {
        let (waiting, gone) = self.sender.data_progress();
        Untaken { data: (waiting as u64, gone), bytes: (self.sender.output.len() as u64, self.sent) }
    }

    /// Charges what waits in buffers of the connection's own while it sleeps.
    fn charge_buffers(&mut self) -> Result<(), Fault> {
        let held = (self.sender.output.copied() + self.early.len()).saturating_sub(BUFFERS);
        if held > self.charged {
            let more = self.sender.budget.charge(held - self.charged);
            more.map_err(|_| Fault::new(Reason::EnhanceYourCalm, "no memory is left for what is not taken"))?;
        } else if held < self.charged {
            self.sender.budget.release(self.charged - held);
        }
        self.charged = held;
        Ok(())
    }

    /// Whether the turn has lasted so long that others should have theirs.
    fn is_turn_over(&mut self) -> bool {
        self.sender.should_look_at_clock() && self.calls.is_turn_over()
    }

    /// Takes what has come in, sends what is to be sent.
    fn drive(&mut self, cx: &mut Context<'_>) -> Driven {
        let mut read = 0;
        self.declines = false;
        loop {
            let blocked = match self.send(cx) {
                Ok(blocked) => blocked,
                Err(error) => return Driven::Over(broken(&error)),
            };
            self.be_patient(read > 0);
            let idle = self.sender.streams() == 0 && self.sender.output.is_empty() && !blocked;
            if idle && (self.peer_left || self.sender.has_left()) {
                return Driven::Over(Ending::Closed);
            }
            if read >= TURN || self.is_turn_over() {
                return Driven::More;
            }
            if !blocked && (!self.sender.output.is_empty() || self.has_put_off()) {
                continue;
            }
            // Who does not take what was asked for asks no further.
            self.declines = blocked && (self.calls.is_full(&self.sender) || !self.early.is_empty());
            if self.declines {
                return Driven::Idle;
            }
            if self.early.is_empty() && self.receiver.owes_event() && !self.sender.is_busy() {
                match self.take_owed() {
                    Ok(()) => continue,
                    Err(fault) => return Driven::Broken(fault),
                }
            }
            match self.read(cx) {
                Poll::Pending => return Driven::Idle,
                Poll::Ready(Ok(Ok(0))) => return Driven::Over(Ending::Closed),
                Poll::Ready(Ok(Ok(bytes))) => read += bytes,
                Poll::Ready(Ok(Err(fault))) => return Driven::Broken(fault),
                Poll::Ready(Err(error)) => return Driven::Over(broken(&error)),
            }
            if self.sender.may_be_abused()
                && let Err(fault) = self.sender.check_abuse(self.calls.uptime())
            {
                return Driven::Broken(fault);
            }
        }
    }

    /// Sends what there is, and takes up some of what was put off for it; whether the peer's host takes no more.
    fn send(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        self.sender.rest();
        let blocked = self.sender.output.poll_send(cx, &mut self.socket);
        if let Poll::Ready(Err(error)) = blocked {
            return Err(error);
        }
        self.sender.release_sent_answers();
        self.calls.unpark(&mut self.sender);
        self.sender.resume();
        Ok(blocked.is_pending())
    }

    /// Whether there is something that was put off and can be taken up.
    fn has_put_off(&self) -> bool {
        self.sender.can_resume() || self.calls.can_unpark(&self.sender)
    }

    /// Takes the event that needs no further input.
    fn take_owed(&mut self) -> Result<(), Fault> {
        let mut tools = TOOLS.take();
        let taken = self.take(&[], &mut tools.headers);
        TOOLS.set(tools);
        taken
    }

    /// Reads once, and takes what has come: how many bytes, or how the connection ended.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Result<usize, Fault>>> {
        if self.early.is_empty()
            && let Some((stream, left)) = self.receiver.expects().filter(|(_, left)| *left >= DIRECT)
            && let Some((body, room)) = self.calls.room(&self.sender, stream)
            && room > 0
        {
            let mut room = body.limit(room.min(left));
            let bytes = ready!(pin!(self.socket.read_buf(&mut room)).poll(cx))?;
            self.received += bytes as u64;
            self.receiver.took(bytes, &mut self.sender);
            self.calls.filled(&mut self.sender, stream, bytes);
            return Poll::Ready(Ok(self.take_owed().map(|()| bytes)));
        }
        let mut tools = TOOLS.take();
        tools.room.resize(ROOM, 0);
        let early = std::mem::take(&mut self.early);
        let polled = if early.is_empty() {
            let mut room = ReadBuf::new(&mut tools.room);
            Pin::new(&mut self.socket).poll_read(cx, &mut room).map_ok(|()| room.filled().len())
        } else {
            Poll::Ready(Ok(early.len()))
        };
        let polled = polled.map_ok(|bytes| {
            if early.is_empty() {
                self.received += bytes as u64;
            }
            let input = if early.is_empty() { tools.room.get(..bytes).unwrap_or_default() } else { &early };
            self.take(input, &mut tools.headers).map(|()| bytes)
        });
        TOOLS.set(tools);
        polled
    }

    /// Takes what has come in.
    fn take(&mut self, mut input: &[u8], cache: &mut HeaderBlockCache<RequestMeta>) -> Result<(), Fault> {
        let (calls, sender) = (&mut self.calls, &mut self.sender);
        while let Some(event) = self.receiver.next(&mut input, sender, cache)? {
            if let Some(NewRequest { stream, head }) = self.new_request.take() {
                // The whole request at once, as most are.
                if let Event::Data { stream: of, bytes, ended } = event
                    && of == stream
                {
                    calls.take(sender, stream, head, bytes, ended);
                    continue;
                }
                if !matches!(event, Event::Reset { stream: of, .. } if of == stream) {
                    calls.take(sender, stream, head, &[], false);
                }
            }
            match event {
                Event::Request { stream, head, ended: false } => {
                    self.new_request = Some(NewRequest { stream, head })
                }
                Event::Request { stream, head, ended: true } => calls.take(sender, stream, head, &[], true),
                Event::Data { stream, bytes, ended } => calls.more(sender, stream, bytes, ended),
                Event::Reset { slot: Some(slot), .. } => calls.give_up(sender, slot),
                Event::Reset { slot: None, .. } => {}
                Event::Left => self.peer_left = true,
            }
        }
        if let Some(NewRequest { stream, head }) = self.new_request.take() {
            calls.take(sender, stream, head, &[], false);
        }
        self.early = input.to_vec();
        Ok(())
    }

    /// To the system, a process that is stopped while its host has no more room for it looks like a host that has
    /// vanished. So after a large answer the connection is not given up for silence, until the peer speaks again and
    /// everything is sent.
    fn be_patient(&mut self, heard: bool) {
        if self.sender.had_large() {
            if !self.patient {
                self.patient = true;
                self.socket.set_user_timeout(None);
            }
        } else if self.patient && heard && self.sender.unsent() == 0 {
            self.patient = false;
            self.socket.set_user_timeout(Some(self.calls.unacknowledged()));
        }
    }
}

/// How the connection ended: what the socket knows is the nearest to the truth.
fn broken(error: &io::Error) -> Ending {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            Ending::Reset
        }
        io::ErrorKind::TimedOut => Ending::TimedOut,
        io::ErrorKind::UnexpectedEof => Ending::Closed,
        _ => Ending::Broken(error.to_string()),
    }
}

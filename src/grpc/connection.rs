//! One client connection: a task that drives HTTP/2 and everything on it.
//!
//! A call whose body is there, as it usually is, is read, put to the engine and answered on the
//! spot, and all answers of a turn leave with one write. Bodies that are still arriving and calls that wait take a slot;
//! what happens to them comes as a note that names the slot.

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
use tokio::time::timeout;

use super::desk::Desk;
use super::head::Heading;
use super::listener::Place;
use super::mailbox::{Mailbox, Note};
use super::route::Routing;
use super::server::Server;
use crate::coordination::Ending;
use crate::http2::{Event, Memo, PREFACE, Receiver, Sender, Settings, StreamId};
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
/// What a thread needs to serve a connection, whichever it is.
struct Tools {
    room: Vec<u8>,
    memo: Memo<Heading>,
}

impl Default for Tools {
    fn default() -> Self {
        Self { room: Vec::new(), memo: Memo::new() }
    }
}

thread_local! {
    static TOOLS: Cell<Tools> = Cell::default();
}

/// What a connection needs of its socket.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Lets data go unacknowledged, or not taken by the peer's process, for as long as this.
    fn bear_with(&self, unacknowledged: Option<Duration>);

    /// The connection is over: says so, where saying so is more than closing the socket.
    fn farewell(&mut self, _cx: &mut Context<'_>) {}
}

impl Transport for TcpStream {
    fn bear_with(&self, unacknowledged: Option<Duration>) {
        // On a socket that is gone already there is nothing left to set.
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(self).set_tcp_user_timeout(unacknowledged);
        #[cfg(not(target_os = "linux"))]
        let _ = unacknowledged;
    }
}

impl Transport for tls::Stream<TcpStream> {
    fn bear_with(&self, unacknowledged: Option<Duration>) {
        self.get_ref().0.stream().bear_with(unacknowledged);
    }

    fn farewell(&mut self, cx: &mut Context<'_>) {
        // What does not leave at once need not leave: the peer sees the end of the connection either way.
        let _ = Pin::new(self).poll_shutdown(cx);
    }
}

/// A connection that speaks HTTP/2. Each kind is driven for itself, so that a plain one pays nothing for the other.
#[expect(clippy::large_enum_variant, reason = "it is moved once, into its task, and most are plain")]
pub(super) enum Greeted {
    Plain(Connection<TcpStream>),
    Tls(Box<Connection<tls::Stream<TcpStream>>>),
}

/// What was found out about a new connection: its socket, and what came together with the preface.
enum Met {
    Plain(TcpStream, Vec<u8>),
    Tls(Box<tls::Stream<TcpStream>>, Vec<u8>),
}

/// Finds out whether a new connection speaks HTTP/2, under TLS or not, and opens it if so.
pub(super) async fn greet(
    server: Arc<Server>,
    socket: TcpStream,
    peer: SocketAddr,
    routing: Routing,
    place: Place,
) -> Option<Greeted> {
    let within = server.limits.handshake;
    let mut speaks_tls = false;
    let met = timeout(within, meet(&server, socket, peer, &mut speaks_tls)).await;
    match met {
        Ok(Ok(Some(Met::Plain(socket, early)))) => {
            return Some(Greeted::Plain(Connection::open(server, socket, early, peer, routing, place)));
        }
        Ok(Ok(Some(Met::Tls(socket, early)))) => {
            let connection = Connection::open(server, *socket, early, peer, routing, place);
            return Some(Greeted::Tls(Box::new(connection)));
        }
        // The entrance has said why.
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "a connection that is no HTTP/2"),
        Err(_) if speaks_tls => server.entrance.too_slow(peer, within),
        Err(_) => tracing::debug!(%peer, "a connection that says nothing"),
    }
    server.counts.mine().strangers.add();
    None
}

/// Reads the preface. The first byte says whether it comes under TLS; it is read together with what follows it, so that to
/// find out costs nothing.
async fn meet(
    server: &Server,
    mut socket: TcpStream,
    peer: SocketAddr,
    speaks_tls: &mut bool,
) -> io::Result<Option<Met>> {
    let mut early = Vec::with_capacity(256);
    let plain = preface(&mut socket, &mut early).await;
    if early.first() == Some(&tls::FIRST_BYTE) {
        *speaks_tls = true;
        let Some(mut socket) = server.entrance.secure(tls::Rewind::new(early, socket), peer).await else {
            return Ok(None);
        };
        let mut early = Vec::with_capacity(256);
        preface(&mut socket, &mut early).await?;
        return Ok(Some(Met::Tls(Box::new(socket), early)));
    }
    plain?;
    if !server.entrance.takes_plain() {
        server.entrance.refused_plain(peer);
        return Ok(None);
    }
    Ok(Some(Met::Plain(socket, early)))
}

/// Reads until the preface is there, or what is there is none.
async fn preface<T: Transport>(socket: &mut T, early: &mut Vec<u8>) -> io::Result<()> {
    while early.len() < PREFACE.len() {
        if socket.read_buf(early).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let there = early.len().min(PREFACE.len());
        if early.get(..there) != PREFACE.get(..there) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it does not begin with HTTP/2's preface",
            ));
        }
    }
    Ok(())
}

/// A request whose body has not begun.
struct Fresh {
    stream: StreamId,
    head: Arc<Heading>,
}

/// A connection in progress. Its desk stands first, so that it is cleared first when all is
/// dropped: the state machine hears at once of a connection that is gone.
pub(super) struct Connection<T> {
    desk: Desk,
    socket: T,
    receiver: Receiver,
    sender: Sender,
    /// Bytes that came and were not counted yet.
    received: u64,
    /// What was read and has not been looked at.
    early: Vec<u8>,
    /// The latest request, if its body may come in the same piece.
    fresh: Option<Fresh>,
    /// The peer makes no further requests.
    peer_left: bool,
    mailbox: Arc<Mailbox>,
    /// The peer may take its time to acknowledge.
    patient: bool,
    _place: Place,
}

/// What one turn of driving HTTP/2 came to.
enum Driven {
    /// It waits.
    Idle,
    /// There is more to do at once.
    More,
    /// It is over.
    Over(Ending),
}

impl<T: Transport> Future for Connection<T> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        this.desk.begin_turn();
        loop {
            if let Some(ending) = this.read_notes() {
                return this.end(ending, cx);
            }
            let driven = this.drive(cx);
            this.desk.moved(std::mem::take(&mut this.received), this.sender.output.take_sent());
            match driven {
                Driven::Idle => {
                    if this.desk.keep_time(cx, &mut this.sender) {
                        continue;
                    }
                }
                Driven::More => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Driven::Over(ending) => return this.end(ending, cx),
            }
            if this.mailbox.rest(cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

impl<T: Transport> Connection<T> {
    fn open(
        server: Arc<Server>,
        socket: T,
        mut early: Vec<u8>,
        peer: SocketAddr,
        routing: Routing,
        place: Place,
    ) -> Self {
        let settings = Settings {
            streams: server.limits.streams_per_connection,
            frame: FRAME,
            stream_window: STREAM_WINDOW,
            connection_window: CONNECTION_WINDOW,
            header_list: HEADER_LIST,
        };
        let received = early.len() as u64;
        early.drain(..PREFACE.len());
        let mailbox = Arc::clone(place.mailbox());
        let desk = Desk::open(server, peer, routing, Arc::clone(&mailbox));
        let (receiver, sender) = (Receiver::new(), Sender::new(settings));
        Self {
            desk,
            socket,
            receiver,
            sender,
            received,
            early,
            fresh: None,
            peer_left: false,
            mailbox,
            patient: false,
            _place: place,
        }
    }

    fn end(&mut self, ending: Ending, cx: &mut Context<'_>) -> Poll<()> {
        self.desk.close(ending);
        self.socket.farewell(cx);
        Poll::Ready(())
    }

    fn read_notes(&mut self) -> Option<Ending> {
        let sender = &mut self.sender;
        for note in self.mailbox.collect() {
            match note {
                Note::Answer(slot, outcome) => self.desk.answer(sender, slot, &outcome),
                Note::Stirred(slot) => self.desk.look_at(sender, slot),
                Note::Stop => sender.leave(),
                Note::Abort => return Some(Ending::Broken("the server closed it".into())),
            }
        }
        None
    }

    /// Takes what has come in, sends what is to be sent.
    fn drive(&mut self, cx: &mut Context<'_>) -> Driven {
        let mut read = 0;
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
            // Who does not take what was asked for asks no further.
            if blocked && (self.desk.is_full(&self.sender) || !self.early.is_empty()) {
                return Driven::Idle;
            }
            if read >= TURN {
                return Driven::More;
            }
            match self.read(cx) {
                Poll::Pending => return Driven::Idle,
                Poll::Ready(Ok(Ok(0))) => return Driven::Over(Ending::Closed),
                Poll::Ready(Ok(Ok(bytes))) => read += bytes,
                Poll::Ready(Ok(Err(ending))) => {
                    // The peer hears why, if it still listens.
                    let _ = self.sender.output.poll_send(cx, &mut self.socket);
                    return Driven::Over(ending);
                }
                Poll::Ready(Err(error)) => return Driven::Over(broken(&error)),
            }
        }
    }

    /// Sends all that there is, and takes up what was put off for it; whether the peer's host takes no more.
    fn send(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        loop {
            let blocked = self.sender.output.poll_send(cx, &mut self.socket);
            if let Poll::Ready(Err(error)) = blocked {
                return Err(error);
            }
            self.desk.unpark(&mut self.sender);
            if blocked.is_pending() || self.sender.output.is_empty() {
                return Ok(blocked.is_pending());
            }
        }
    }

    /// Reads once, and takes what has come: how many bytes, or how the connection ended.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Result<usize, Ending>>> {
        if self.early.is_empty()
            && let Some((stream, left)) = self.receiver.expects().filter(|(_, left)| *left >= DIRECT)
            && let Some((body, room)) = self.desk.room(&self.sender, stream)
            && room > 0
        {
            let mut room = body.limit(room.min(left));
            let bytes = ready!(pin!(self.socket.read_buf(&mut room)).poll(cx))?;
            self.received += bytes as u64;
            self.receiver.took(bytes);
            self.desk.filled(&mut self.sender, stream, bytes);
            let mut tools = TOOLS.take();
            let taken = self.take(&[], &mut tools.memo);
            TOOLS.set(tools);
            return Poll::Ready(Ok(taken.map(|()| bytes)));
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
            self.take(input, &mut tools.memo).map(|()| bytes)
        });
        TOOLS.set(tools);
        polled
    }

    /// Takes what has come in.
    fn take(&mut self, mut input: &[u8], memo: &mut Memo<Heading>) -> Result<(), Ending> {
        let (desk, sender) = (&mut self.desk, &mut self.sender);
        let fault = loop {
            let event = match self.receiver.next(&mut input, sender, memo) {
                Ok(Some(event)) => event,
                Ok(None) => break None,
                Err(fault) => break Some(fault),
            };
            if let Some(Fresh { stream, head }) = self.fresh.take() {
                // The whole request at once, as most are.
                if let Event::Data { stream: of, bytes, ended } = event
                    && of == stream
                {
                    desk.take(sender, stream, head, bytes, ended);
                    continue;
                }
                if !matches!(event, Event::Reset { stream: of, .. } if of == stream) {
                    desk.take(sender, stream, head, &[], false);
                }
            }
            match event {
                Event::Request { stream, head, ended: false } => self.fresh = Some(Fresh { stream, head }),
                Event::Request { stream, head, ended: true } => desk.take(sender, stream, head, &[], true),
                Event::Data { stream, bytes, ended } => desk.more(sender, stream, bytes, ended),
                Event::Reset { slot: Some(slot), .. } => desk.give_up(sender, slot),
                Event::Reset { slot: None, .. } => {}
                Event::Left => self.peer_left = true,
            }
        };
        if let Some(fault) = fault {
            sender.accuse(fault);
            return Err(Ending::Broken(fault.to_string()));
        }
        if let Some(Fresh { stream, head }) = self.fresh.take() {
            desk.take(sender, stream, head, &[], false);
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
                self.socket.bear_with(None);
            }
        } else if self.patient && heard && self.sender.unsent() == 0 {
            self.patient = false;
            self.socket.bear_with(Some(self.desk.unacknowledged()));
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

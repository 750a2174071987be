//! One client connection: a task that drives HTTP/2 and everything on it.
//!
//! A call whose body is there, as it usually is, is read, put to the engine and answered on the
//! spot. Bodies that are still arriving and calls that wait take a slot; what happens to them comes as a note
//! that names the slot.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use h2::server;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::cork::{Cork, Corked, End, cork};
use super::desk::Desk;
use super::listener::Place;
use super::mailbox::{Mailbox, Note};
use super::respond::Piece;
use super::route::Routing;
use super::server::Server;
use crate::coordination::Ending;

/// So many calls are taken in one turn before others get theirs.
const TURN: usize = 256;
/// The largest frame, and so the largest message that arrives in one piece.
const FRAME: u32 = 2 << 20;
/// What may be on its way on one stream, and on one connection.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// Clients send a few hundred bytes of headers.
const HEADER_LIST: u32 = 16 << 10;
/// Headers are not remembered between requests: what is remembered holds on to the buffers that it was read into, some
/// 12 KiB a connection, to save a microsecond a call.
const HEADER_TABLE: u32 = 0;
/// What a TLS client's first byte is; HTTP/2 begins with a P.
const TLS_HANDSHAKE: u8 = 0x16;

/// What a connection needs of its socket.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Lets data go unacknowledged, or not taken by the peer's process, for as long as this.
    fn bear_with(&self, unacknowledged: Option<Duration>);
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

/// Finds out whether a new connection speaks HTTP/2, and opens it if so.
pub(super) async fn greet<T>(
    server: Arc<Server>,
    socket: T,
    peer: SocketAddr,
    routing: Routing,
    place: Place,
) -> Option<Connection<T>>
where
    T: Transport,
{
    let (corked, cork) = cork(socket);
    let greeting = builder(&server).handshake(corked);
    let http = match timeout(server.limits.handshake, greeting).await {
        Ok(Ok(http)) => http,
        Ok(Err(error)) => {
            server.counts.strangers.add();
            if cork.first() == Some(TLS_HANDSHAKE) {
                tracing::info!(%peer, "a client spoke TLS to a port without it: its mTLS settings do not belong here");
            } else {
                tracing::debug!(%peer, %error, "a connection that is no HTTP/2");
            }
            return None;
        }
        Err(_) => {
            server.counts.strangers.add();
            tracing::debug!(%peer, "a connection that says nothing");
            return None;
        }
    };
    cork.close();
    let mailbox = Arc::clone(place.mailbox());
    let desk = Desk::open(server, peer, routing, Arc::clone(&mailbox));
    let waker = Waker::from(Arc::clone(&mailbox));
    Some(Connection { desk, http, cork, mailbox, waker, patient: false, _place: place })
}

fn builder(server: &Server) -> server::Builder {
    let mut builder = server::Builder::new();
    builder
        .max_frame_size(FRAME)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEADER_LIST)
        .header_table_size(HEADER_TABLE)
        .max_concurrent_streams(server.limits.streams_per_connection);
    builder
}

/// A connection in progress. Its desk stands first, so that it is cleared first when all is
/// dropped: the state machine hears at once of a connection that is gone.
pub(super) struct Connection<T> {
    desk: Desk,
    http: server::Connection<Corked<T>, Piece>,
    cork: Cork<T>,
    mailbox: Arc<Mailbox>,
    /// What HTTP/2 wakes: the mailbox.
    waker: Waker,
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
        loop {
            if let Some(ending) = this.read_notes() {
                return this.end(ending);
            }
            match this.drive() {
                Driven::Idle => {
                    if this.desk.keep_time(cx) {
                        continue;
                    }
                }
                Driven::More => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Driven::Over(ending) => return this.end(ending),
            }
            if this.mailbox.rest(cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

impl<T: Transport> Connection<T> {
    fn end(&mut self, ending: Ending) -> Poll<()> {
        self.desk.close(ending);
        Poll::Ready(())
    }

    fn read_notes(&mut self) -> Option<Ending> {
        for note in self.mailbox.collect() {
            match note {
                Note::Answer(slot, outcome) => self.desk.answer(slot, &outcome),
                Note::Stirred(slot) => self.desk.look_at(slot),
                Note::Stop => self.http.graceful_shutdown(),
                Note::Abort => return Some(Ending::Broken("the server closed it".into())),
            }
        }
        None
    }

    /// Drives HTTP/2: takes what has come in, sends what is to be sent.
    fn drive(&mut self) -> Driven {
        let mut cx = Context::from_waker(&self.waker);
        let mut taken = 0;
        loop {
            self.mailbox.calm();
            let full = self.desk.is_full();
            let next = if full {
                // Driven without taking further calls, until the peer takes its answers.
                self.http.poll_closed(&mut cx).map(|closed| closed.err().map(Err))
            } else {
                self.http.poll_accept(&mut cx)
            };
            match next {
                Poll::Ready(Some(Ok((request, respond)))) => {
                    self.desk.take(request, respond);
                    taken += 1;
                    if taken == TURN {
                        break;
                    }
                }
                Poll::Ready(Some(Err(error))) => return Driven::Over(self.ending(Some(&error))),
                Poll::Ready(None) => return Driven::Over(self.ending(None)),
                Poll::Pending if full && !self.desk.is_full() => {}
                Poll::Pending => break,
            }
        }
        // Whether that was possible shows in how the socket is.
        let _ = self.cork.poll_send(&mut cx);
        let (received, sent) = self.cork.moved();
        self.desk.moved(received, sent);
        self.be_patient(taken > 0);
        match taken {
            // The peer's end may be known before HTTP/2 gets around to it.
            _ if self.cork.end().is_some() => Driven::Over(self.ending(None)),
            TURN => Driven::More,
            _ => Driven::Idle,
        }
    }

    /// To the system, a process that is stopped while its host has no more room for it looks like a host that has
    /// vanished. So after a large answer the connection is not given up for silence, until the peer speaks again and
    /// everything is sent.
    fn be_patient(&mut self, heard: bool) {
        if self.mailbox.had_large() {
            if !self.patient {
                self.patient = true;
                self.cork.socket(|socket| socket.bear_with(None));
            }
        } else if self.patient && heard && self.mailbox.unsent() == 0 {
            self.patient = false;
            let unacknowledged = self.desk.unacknowledged();
            self.cork.socket(|socket| socket.bear_with(Some(unacknowledged)));
        }
    }

    /// How the connection ended: what the socket knows is the nearest to the truth.
    fn ending(&self, error: Option<&h2::Error>) -> Ending {
        match (self.cork.end(), error) {
            (Some(End::Finished), _) => Ending::Closed,
            (Some(End::Failed(kind, text)), _) => broken(kind, text),
            (None, Some(error)) => match error.get_io() {
                Some(error) => broken(error.kind(), error.to_string()),
                None if error.is_go_away() && error.is_remote() => Ending::Closed,
                None => Ending::Broken(error.to_string()),
            },
            (None, None) => Ending::Closed,
        }
    }
}

fn broken(kind: io::ErrorKind, text: String) -> Ending {
    match kind {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            Ending::Reset
        }
        io::ErrorKind::TimedOut => Ending::TimedOut,
        io::ErrorKind::UnexpectedEof => Ending::Closed,
        _ => Ending::Broken(text),
    }
}

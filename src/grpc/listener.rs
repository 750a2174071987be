//! Accepts connections, registers them, and closes them gracefully when the server stops.
//!
//! `open_connections.rs` has the registry, and `connection.rs` serves an accepted connection. When the server stops,
//! new connections stay in the backlog, and open connections receive GOAWAY. Connections that do not finish within
//! the drain time are closed. Begin at [`GrpcServer::serve`].

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::connection::GrpcConnection;
use super::connection_socket::ConnectionSocket as _;
use super::continued_connections::ContinuedConnections;
use super::job_resolver::ListenerJobRule;
use super::kept_log::KeptGreeting;
use super::mailbox::{MailboxGroup, MailboxMessage};
use super::open_connections::GrpcConnections;
use super::server::GrpcServer;
use super::transport_detection::{self, AcceptedConnection, BegunGreeting, GREETING_BYTES};
use crate::coordination::ConnectionEnd;

/// The length of the accept backlog. A whole cluster connects at once; the system may lower it.
const BACKLOG: i32 = 1 << 16;
/// TCP keepalive of idle connections: the first probe, the interval, and the number of probes.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(5))
    .with_interval(Duration::from_secs(5))
    .with_retries(3);
/// The shortest and the longest pause after a failed accept.
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// The time that closing takes once it is forced.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Binds a listening socket with room for a whole cluster that connects at once.
///
/// # Errors
/// If the address cannot be bound.
pub fn bind_listener(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.ip().is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    // Accepted sockets inherit it. Urgent bytes apart from the others would make the kernel's count of unread bytes wrong.
    socket.set_out_of_band_inline(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl GrpcServer {
    /// Serves the connections of a listener until `stop` turns true or its sender is gone.
    ///
    /// The connections `continued` are those of a former process that this listener accepted.
    ///
    /// The engine should be stopped just before, so that waiting calls are answered. Then new connections
    /// stay in the backlog, and present ones receive GOAWAY and have a bounded time to finish.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        routing: ListenerJobRule,
        stop: watch::Receiver<bool>,
        continued: Option<ContinuedConnections>,
    ) -> impl Future<Output = ()> + Send {
        // Not in the future: the first snapshot waits for the connections that are registered before.
        let room = Arc::new(GrpcConnections::default());
        let group = Arc::downgrade(&room) as Weak<dyn MailboxGroup>;
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(group);
        if let Some(continued) = continued {
            self.spawn_continued_connections(&room, continued, &routing, &stop);
        }
        self.accept_until_stopped(listener, routing, stop, room)
    }

    async fn accept_until_stopped(
        self: Arc<Self>,
        listener: TcpListener,
        routing: ListenerJobRule,
        mut stop: watch::Receiver<bool>,
        room: Arc<GrpcConnections>,
    ) {
        self.services.set_serving().await;
        let mut pause = ACCEPT_BACKOFF.0;
        loop {
            let accepted = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, peer)) => {
                    pause = ACCEPT_BACKOFF.0;
                    self.spawn_connection(&room, socket, peer, routing.clone(), stop.clone(), None);
                }
                Err(error) => {
                    self.counts.shard_of_this_thread().accept_errors.increment();
                    if is_accept_error_of_peer(&error) {
                        continue;
                    }
                    tracing::warn!(%error, "no connection can be taken; trying again in {pause:?}");
                    let stopped = stop.wait_for(|stop| *stop);
                    if timeout(pause, stopped).await.is_ok() {
                        break;
                    }
                    pause = (pause * 2).min(ACCEPT_BACKOFF.1);
                }
            }
        }
        self.services.set_not_serving().await;
        room.post_to_all(&|| MailboxMessage::Stop);
        if timeout(self.limits.drain, room.wait_until_empty()).await.is_err() {
            room.post_to_all(&|| MailboxMessage::Abort);
            let _ = timeout(ABORT_TIMEOUT, room.wait_until_empty()).await;
        }
    }

    fn spawn_continued_connections(
        self: &Arc<Self>,
        room: &Arc<GrpcConnections>,
        continued: ContinuedConnections,
        routing: &ListenerJobRule,
        stop: &watch::Receiver<bool>,
    ) {
        let Some(keeping) = self.connection_keeping().cloned() else { return };
        let (connections, greetings) = continued.into_parts();
        for greeting in greetings {
            let (kept, socket, early) = greeting.into_parts(&keeping.keeper);
            if let (Ok(peer), Ok(socket)) = (socket.peer_addr(), TcpStream::from_std(socket)) {
                let begun = Some(BegunGreeting { early, kept: Some(kept) });
                self.spawn_connection(room, socket, peer, routing.clone(), stop.clone(), begun);
            }
        }
        for connection in connections {
            self.connections.fetch_add(1, Ordering::Relaxed);
            let (kept, socket, saved) = connection.into_parts(&keeping.keeper);
            let (peer, id, place) = (saved.origin.peer, saved.origin.connection, room.register(self));
            if !self.engine.read_under_lock(|core| core.has_connection(id)) {
                tracing::debug!(%peer, "a connection does not go on: its end is in the journal");
                let _ = socket.shutdown(std::net::Shutdown::Both);
                continue;
            }
            let server = Arc::clone(self);
            let continue_from = || {
                let socket = TcpStream::from_std(socket).map_err(|error| error.to_string())?;
                GrpcConnection::continue_from(server, socket, saved, kept, routing.clone(), place)
            };
            // One connection must not prevent the start of the service.
            match panic::catch_unwind(AssertUnwindSafe(continue_from))
                .unwrap_or_else(|_| Err("it failed".to_owned()))
            {
                Ok(connection) => drop(tokio::spawn(connection)),
                Err(why) => {
                    tracing::warn!(%peer, why, "a connection does not go on");
                    self.engine.report_connection_closed(id, ConnectionEnd::Broken(why), Vec::new());
                }
            }
        }
    }

    /// Ends the connections that no listener continues.
    pub fn end_connections(&self, connections: ContinuedConnections) {
        for connection in connections.into_parts().0 {
            let ending =
                ConnectionEnd::Broken("the service does not listen at its address any more".to_owned());
            self.engine.report_connection_closed(connection.saved.origin.connection, ending, Vec::new());
            let _ = connection.socket.shutdown(std::net::Shutdown::Both);
        }
    }

    fn spawn_connection(
        self: &Arc<Self>,
        room: &Arc<GrpcConnections>,
        socket: TcpStream,
        peer: SocketAddr,
        routing: ListenerJobRule,
        mut stop: watch::Receiver<bool>,
        begun: Option<BegunGreeting>,
    ) {
        let present = self.connections.fetch_add(1, Ordering::Relaxed);
        if present >= self.limits.connections {
            self.connections.fetch_sub(1, Ordering::Relaxed);
            self.counts.shard_of_this_thread().refused.increment();
            return tracing::debug!(%peer, present, "closed a connection: there are too many");
        }
        if let Err(error) = configure_socket(&socket, self.limits.unacknowledged) {
            // The peer is already gone, or the system lacks an option; neither prevents the connection.
            tracing::debug!(%peer, %error, "a connection's socket could not be set up in full");
        }
        let begun = begun.unwrap_or_else(|| BegunGreeting {
            early: Vec::with_capacity(GREETING_BYTES),
            kept: self.connection_keeping().and_then(|keeping| KeptGreeting::open(keeping, socket.as_fd())),
        });
        let greeting = transport_detection::accept_connection(
            Arc::clone(self),
            socket,
            peer,
            routing,
            room.register(self),
            begun,
        );
        tokio::spawn(async move {
            let greeted = tokio::select! {
                greeted = greeting => greeted,
                // A connection that has sent nothing is not waited for.
                _ = stop.wait_for(|stop| *stop) => None,
            };
            // The connection gets its own task, as small as possible.
            match greeted {
                Some(AcceptedConnection::Plain(connection)) => drop(tokio::spawn(connection)),
                Some(AcceptedConnection::Tls(connection)) => drop(tokio::spawn(connection)),
                None => {}
            }
        });
    }
}

/// Configures a socket to send small messages at once, and to detect a vanished peer's host.
fn configure_socket(socket: &TcpStream, unacknowledged: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    SockRef::from(socket).set_tcp_keepalive(&KEEPALIVE)?;
    socket.set_tcp_user_timeout(Some(unacknowledged));
    Ok(())
}

/// Returns whether an accept failed for a reason of that one connection.
fn is_accept_error_of_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

//! The start of a connection: detects TLS or plaintext by the first byte, and then reads the HTTP/2 preface. One
//! timeout covers the detection, the TLS handshake and the preface.
//!
//! `tls::transport_policy` decides whether the transport is allowed. The first byte is read together with the bytes
//! after it, so the detection costs no system call and no copy. Plaintext and TLS connections have separate compiled
//! code. Begin at `accept_connection`.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncReadExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connection::GrpcConnection;
use super::connection_socket::ConnectionSocket;
use super::job_resolver::ListenerJobRule;
use super::kept_log::KeptGreeting;
use super::open_connections::ConnectionGuard;
use super::server::GrpcServer;
use super::thread_buffers::with_thread_buffers;
use crate::http2::PREFACE;
use crate::tls;

/// A connection that speaks HTTP/2. Each transport has its own compiled code, so a plaintext connection pays
/// nothing for TLS.
#[expect(clippy::large_enum_variant, reason = "it is moved once, into its task, and most are plain")]
pub(super) enum AcceptedConnection {
    Plain(GrpcConnection<TcpStream>),
    Tls(Box<GrpcConnection<tls::TlsStream<TcpStream>>>),
}

/// The bytes that are read at once before the preface is complete.
pub(super) const GREETING_BYTES: usize = 256;

/// The first bytes of a new connection, and its log if it is kept.
pub(super) struct BegunGreeting {
    pub(super) early: Vec<u8>,
    pub(super) kept: Option<KeptGreeting>,
}

/// The detected transport of a new connection: its socket, and the bytes that came with the preface.
enum DetectedTransport {
    Plain(TcpStream, BegunGreeting),
    Tls(Box<tls::TlsStream<TcpStream>>, Vec<u8>),
}

/// Detects whether a new connection speaks HTTP/2, over TLS or not, and opens it if so.
pub(super) async fn accept_connection(
    server: Arc<GrpcServer>,
    socket: TcpStream,
    peer: SocketAddr,
    routing: ListenerJobRule,
    place: ConnectionGuard,
    begun: BegunGreeting,
) -> Option<AcceptedConnection> {
    let within = server.limits.handshake;
    let mut speaks_tls = false;
    let met = timeout(within, detect_transport(&server, socket, peer, begun, &mut speaks_tls)).await;
    match met {
        Ok(Ok(Some(DetectedTransport::Plain(socket, BegunGreeting { early, kept })))) => {
            return Some(AcceptedConnection::Plain(GrpcConnection::open(
                server, socket, early, peer, routing, place, kept,
            )));
        }
        Ok(Ok(Some(DetectedTransport::Tls(socket, early)))) => {
            let connection = GrpcConnection::open(server, *socket, early, peer, routing, place, None);
            return Some(AcceptedConnection::Tls(Box::new(connection)));
        }
        // `TransportPolicy` has reported the reason.
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "a connection that is no HTTP/2"),
        Err(_) if speaks_tls => server.listener_tls.record_handshake_timeout(peer, within),
        Err(_) => tracing::debug!(%peer, "a connection that says nothing"),
    }
    server.counts.shard_of_this_thread().not_http2.increment();
    None
}

/// Reads the preface. The first byte tells whether TLS is used. It is read together with the bytes after it,
/// so the detection costs no system call.
async fn detect_transport(
    server: &GrpcServer,
    mut socket: TcpStream,
    peer: SocketAddr,
    mut begun: BegunGreeting,
    speaks_tls: &mut bool,
) -> io::Result<Option<DetectedTransport>> {
    let BegunGreeting { early, kept } = &mut begun;
    let plain = read_preface(&mut socket, early, kept.as_mut()).await;
    if early.first() == Some(&tls::FIRST_BYTE) {
        let early = std::mem::take(early);
        // Another process has no keys to go on with.
        *kept = None;
        *speaks_tls = true;
        let Some(mut socket) =
            server.listener_tls.accept_tls(tls::PrefixedStream::new(early, socket), peer).await
        else {
            return Ok(None);
        };
        let mut early = Vec::with_capacity(GREETING_BYTES);
        read_preface(&mut socket, &mut early, None).await?;
        return Ok(Some(DetectedTransport::Tls(Box::new(socket), early)));
    }
    plain?;
    if !server.listener_tls.allows_plaintext() {
        server.listener_tls.record_plaintext_refused(peer);
        return Ok(None);
    }
    Ok(Some(DetectedTransport::Plain(socket, begun)))
}

/// Reads until the preface is complete, or the bytes differ from it.
async fn read_preface<T: ConnectionSocket>(
    socket: &mut T,
    early: &mut Vec<u8>,
    mut kept: Option<&mut KeptGreeting>,
) -> io::Result<()> {
    while early.len() < PREFACE.len() {
        let read = match &mut kept {
            None => socket.read_buf(early).await?,
            Some(kept) => poll_fn(|cx| poll_kept_greeting(cx, socket, early, kept)).await?,
        };
        if read == 0 {
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

/// Reads to memory that outlives this process, and makes what was read valid in the log.
fn poll_kept_greeting<T: ConnectionSocket>(
    cx: &mut Context<'_>,
    socket: &mut T,
    early: &mut Vec<u8>,
    kept: &mut KeptGreeting,
) -> Poll<io::Result<usize>> {
    with_thread_buffers(|buffers| {
        let (kept_room, room, _) = buffers.split(kept.memory());
        let room = match kept_room {
            Some(kept_room) => kept_room.claim(kept.serial(), early.len() as u64),
            None => room,
        };
        let mut room = ReadBuf::new(room.get_mut(..GREETING_BYTES).unwrap_or_default());
        let polled = Pin::new(socket).poll_read(cx, &mut room);
        let read = room.filled();
        early.extend_from_slice(read);
        let read = read.len();
        if read > 0 {
            // Without memory, the connection ends with this process: its log does not have these bytes.
            kept.commit(early);
        }
        buffers.release_kept_room();
        polled.map_ok(|()| read)
    })
}

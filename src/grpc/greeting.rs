//! The start of a connection: plaintext or TLS by the first byte, then the HTTP/2 preface, all within one handshake
//! timeout.
//!
//! It performs no TLS handshake (`tls::entrance` does) and drives no connection. The first byte is read together
//! with the bytes after it, so a plaintext connection makes no further system call and copies nothing; each kind of
//! connection is compiled for itself. Begin at `greet`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connection::{Connection, Transport};
use super::listener::ConnectionGuard;
use super::route::Routing;
use super::server::Server;
use crate::http2::PREFACE;
use crate::tls;

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
    place: ConnectionGuard,
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

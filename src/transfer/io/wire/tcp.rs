//! TCP connections.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt;

use crate::base::identity::Address;
use crate::base::transport::TransportKind;
use crate::engine::config::Config;
use crate::io::sys;
use crate::io::wire::socket::Socket;
use crate::io::wire::{Listener, Medium, Nature, Received, Way, Wire, WireError};
use crate::memory::raw::Piece;

/// Room in the socket for so much that is not yet read or sent.
const SOCKET_BUFFER: usize = 2 << 20;
/// The most addresses of a peer that are tried.
const ADDRESSES_MAX: usize = 8;

const NATURE: Nature = Nature { shares: false, breaks: true, exposed: true, keeps: false };

/// Makes them.
pub struct Tcp;

impl Medium for Tcp {
    fn listen(&self, config: &Config, address: &mut Address) -> io::Result<Option<Arc<dyn Listener>>> {
        let listener = config.listen.map(TcpListener::bind).transpose()?;
        let bound = listener.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
        address.tcp = if config.advertise.is_empty() { bound } else { config.advertise.clone() };
        Ok(listener.map(|listener| Arc::new(Listening(listener)) as Arc<dyn Listener>))
    }

    fn ways(&self, _here: &Address, peer: &Address) -> Vec<Box<dyn Way>> {
        peer.tcp.iter().take(ADDRESSES_MAX).map(|at| Box::new(To(*at)) as Box<dyn Way>).collect()
    }
}

struct Listening(TcpListener);

impl Listener for Listening {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        Ok(Box::new(Connected::new(self.0.accept()?.0)?))
    }

    fn stop(&self) {
        let _woken = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

struct To(SocketAddr);

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp:{}", self.0)
    }
}

impl Way for To {
    fn nature(&self) -> Nature {
        NATURE
    }

    fn dial(&self, time: Duration) -> io::Result<Box<dyn Wire>> {
        Ok(Box::new(Connected::new(TcpStream::connect_timeout(&self.0, time)?)?))
    }
}

struct Connected {
    socket: Socket,
    source: Option<IpAddr>,
}

impl Connected {
    fn new(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        if is_within_this_host(&socket) {
            do_not_pace(&socket);
        }
        let source = socket.peer_addr().ok().map(|peer| peer.ip());
        let socket = socket2::Socket::from(socket);
        let _bounded_by_the_system = socket.set_send_buffer_size(SOCKET_BUFFER);
        let _bounded_by_the_system = socket.set_recv_buffer_size(SOCKET_BUFFER);
        Ok(Self { socket: Socket::new(socket.into()), source })
    }
}

/// Whether both ends are on this host: nothing between them can be congested.
fn is_within_this_host(socket: &TcpStream) -> bool {
    let ends = (socket.local_addr(), socket.peer_addr());
    matches!(ends, (Ok(here), Ok(there)) if here.ip() == there.ip() || there.ip().is_loopback())
}

/// Some congestion controls (BBR) give every segment a moment of its own, by timers: within a host that costs a third of
/// what a connection can carry. Over a network the system's choice stands, for it knows its routes.
fn do_not_pace(socket: &TcpStream) {
    // The second is always there, and open to everybody. Without either it is slower, and that is all.
    let _set = ["cubic", "reno"].iter().any(|unpaced| sockopt::set_tcp_congestion(socket, unpaced).is_ok());
}

impl Wire for Connected {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn nature(&self) -> Nature {
        NATURE
    }

    fn source(&self) -> Option<IpAddr> {
        self.source
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn send(&self, pieces: &[Piece<'_>]) -> Result<usize, WireError> {
        self.socket.send(pieces)
    }

    fn receive(&self, pieces: &[Piece<'_>]) -> Result<Received, WireError> {
        self.socket.receive(pieces)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        Ok(retry_on_intr(|| sys::discard(self.socket.as_fd(), len))?)
    }

    fn end(&self) {
        self.socket.end();
    }
}

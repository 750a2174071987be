//! TCP connections as wires.
//!
//! Several TCP connections carry the chunks of one connection between engines; a lane with room takes the next chunk
//! from the link. Between hosts, TCP connections keep the congestion control that the system chose, and `muster
//! doctor` reports it. Within a host, they use cubic or reno instead. There is no congestion within a host, and if
//! the system uses BBR, BBR schedules every segment with a timer, which costs a third of the rate. Begin at [`Tcp`].

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt;

use super::socket::Socket;
use super::traits::{
    Endpoint, ListenSettings, Listener, ReceivedCount, Transport, Wire, WireCapabilities, WireError,
};
use crate::base::membership::EngineAddress;
use crate::base::transport::TransportKind;
use crate::io::sys;
use crate::memory::{ReadView, WriteView};

/// The size in bytes of the send and receive buffers of a socket.
const SOCKET_BUFFER: usize = 2 << 20;
/// The most addresses of a peer that are dialled.
const ADDRESSES_MAX: usize = 8;

const CAPABILITIES: WireCapabilities =
    WireCapabilities { shares_memory: false, is_breakable: true, is_exposed: true, is_buffered: false };

/// The TCP transport.
pub struct Tcp;

impl Transport for Tcp {
    fn listen(
        &self,
        settings: &ListenSettings<'_>,
        address: &mut EngineAddress,
    ) -> io::Result<Option<Arc<dyn Listener>>> {
        let listener = settings.listen.map(TcpListener::bind).transpose()?;
        let bound = listener.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
        address.tcp = if settings.advertise.is_empty() { bound } else { settings.advertise.to_vec() };
        Ok(listener.map(|listener| Arc::new(TcpWireListener(listener)) as Arc<dyn Listener>))
    }

    fn endpoints(&self, _here: &EngineAddress, peer: &EngineAddress) -> Vec<Box<dyn Endpoint>> {
        peer.tcp
            .iter()
            .take(ADDRESSES_MAX)
            .map(|at| Box::new(TcpEndpoint(*at)) as Box<dyn Endpoint>)
            .collect()
    }
}

struct TcpWireListener(TcpListener);

impl Listener for TcpWireListener {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        Ok(Box::new(TcpWire::new(self.0.accept()?.0)?))
    }

    fn stop(&self) {
        let _woken = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

struct TcpEndpoint(SocketAddr);

impl fmt::Display for TcpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp:{}", self.0)
    }
}

impl Endpoint for TcpEndpoint {
    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    fn dial(&self, time: Duration) -> io::Result<Box<dyn Wire>> {
        Ok(Box::new(TcpWire::new(TcpStream::connect_timeout(&self.0, time)?)?))
    }
}

struct TcpWire {
    socket: Socket,
    source: Option<IpAddr>,
}

impl TcpWire {
    fn new(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        if is_within_this_host(&socket) {
            disable_pacing(&socket);
        }
        let source = socket.peer_addr().ok().map(|peer| peer.ip());
        let socket = socket2::Socket::from(socket);
        let _bounded_by_the_system = socket.set_send_buffer_size(SOCKET_BUFFER);
        let _bounded_by_the_system = socket.set_recv_buffer_size(SOCKET_BUFFER);
        Ok(Self { socket: Socket::new(socket.into()), source })
    }
}

/// Returns whether both ends are on this host, where no network between them can be congested.
fn is_within_this_host(socket: &TcpStream) -> bool {
    let ends = (socket.local_addr(), socket.peer_addr());
    matches!(ends, (Ok(here), Ok(there)) if here.ip() == there.ip() || there.ip().is_loopback())
}

/// Turns off pacing: some congestion controls (BBR) schedule every segment by a timer, which within a host
/// costs a third of the rate. Over a network the system's choice stays, because it suits its routes.
fn disable_pacing(socket: &TcpStream) {
    // Every system has reno, and lets every process use it. If neither can be set, the connection is only
    // slower.
    let _set = ["cubic", "reno"].iter().any(|unpaced| sockopt::set_tcp_congestion(socket, unpaced).is_ok());
}

impl Wire for TcpWire {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    fn source(&self) -> Option<IpAddr> {
        self.source
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        self.socket.send(views)
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        self.socket.receive(views)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        Ok(retry_on_intr(|| sys::discard(self.socket.as_fd(), len))?)
    }

    fn end(&self) {
        self.socket.end();
    }
}

//! Unix sockets with abstract names, as wires within a host. The system reports the process at the other end. The
//! sockets carry file descriptors, by which engines share memory.
//!
//! [`fetch`](crate::io::fetch) copies from shared memory. Begin at [`Unix`].

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::socket::Socket;
use super::traits::{
    Endpoint, ListenSettings, Listener, PeerProcess, ReceivedCount, Transport, Wire, WireCapabilities,
    WireError,
};
use crate::base::membership::EngineAddress;
use crate::base::transport::TransportKind;
use crate::memory::{ReadView, WriteView};

const CAPABILITIES: WireCapabilities =
    WireCapabilities { shares_memory: true, is_breakable: false, is_exposed: false, is_buffered: false };

/// The Unix transport.
pub struct Unix;

impl Transport for Unix {
    fn listen(
        &self,
        settings: &ListenSettings<'_>,
        address: &mut EngineAddress,
    ) -> io::Result<Option<Arc<dyn Listener>>> {
        address.local = settings.unique_name();
        let at = SocketAddr::from_abstract_name(&address.local)?;
        Ok(Some(Arc::new(UnixWireListener(UnixListener::bind_addr(&at)?))))
    }

    fn endpoints(&self, here: &EngineAddress, peer: &EngineAddress) -> Vec<Box<dyn Endpoint>> {
        if peer.local.is_empty() || peer.host.is_empty() || peer.host != here.host {
            return Vec::new();
        }
        vec![Box::new(UnixEndpoint(peer.local.clone()))]
    }
}

struct UnixWireListener(UnixListener);

impl Listener for UnixWireListener {
    fn kind(&self) -> TransportKind {
        TransportKind::Unix
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        let socket = self.0.accept()?.0;
        socket.set_nonblocking(true)?;
        Ok(Box::new(UnixWire::new(socket)?))
    }

    fn stop(&self) {
        let _woken = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

struct UnixEndpoint(String);

impl fmt::Display for UnixEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:@{}", self.0)
    }
}

impl Endpoint for UnixEndpoint {
    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    /// Dials without waiting: a listener whose queue is full is treated like none, because there are other
    /// endpoints.
    fn dial(&self, _time: Duration) -> io::Result<Box<dyn Wire>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(self.0.as_bytes())?)?;
        Ok(Box::new(UnixWire::new(socket.into())?))
    }
}

struct UnixWire {
    socket: Socket,
    peer: PeerProcess,
}

impl UnixWire {
    /// Wraps a non-blocking socket. Fails if the system does not report the process at the other end.
    fn new(socket: UnixStream) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        let peer = PeerProcess { pid: peer.pid.as_raw_nonzero().get(), uid: peer.uid.as_raw() };
        Ok(Self { socket: Socket::new(socket.into()), peer })
    }
}

impl Wire for UnixWire {
    fn kind(&self) -> TransportKind {
        TransportKind::Unix
    }

    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    fn peer(&self) -> Option<PeerProcess> {
        Some(self.peer)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        self.socket.send(views)
    }

    fn send_with_descriptors(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<usize, WireError> {
        let slices = [io::IoSlice::new(bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            along.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(retry_on_intr(|| rustix::net::sendmsg(&self.socket, &slices, &mut along, flags))?)
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        self.socket.receive(views)
    }

    fn receive_with_descriptors(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<ReceivedCount, WireError> {
        let room = into.len();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut along = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [io::IoSliceMut::new(into)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = retry_on_intr(|| rustix::net::recvmsg(&self.socket, &mut slices, &mut along, flags))?.bytes;
        let before = descriptors.len();
        for message in along.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                descriptors.extend(came);
            }
        }
        // The kernel ends a read where descriptors arrive, whatever follows.
        Ok(ReceivedCount { bytes: got, dry: got < room && descriptors.len() == before })
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.socket.discard(len)
    }

    fn end(&self) {
        self.socket.end();
    }
}

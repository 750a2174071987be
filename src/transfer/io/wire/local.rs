//! Unix sockets of this host, under abstract names: who the other end is comes from the system, and descriptors go along.

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

use crate::base::identity::Address;
use crate::base::transport::TransportKind;
use crate::engine::config::Config;
use crate::io::wire::socket::Socket;
use crate::io::wire::{Listener, Medium, Nature, Process, Received, Way, Wire, WireError, name_of};
use crate::memory::raw::Piece;

const NATURE: Nature = Nature { shares: true, breaks: false, exposed: false, keeps: false };

/// Makes them.
pub struct Local;

impl Medium for Local {
    fn listen(&self, config: &Config, address: &mut Address) -> io::Result<Option<Arc<dyn Listener>>> {
        address.local = name_of(config);
        let at = SocketAddr::from_abstract_name(&address.local)?;
        Ok(Some(Arc::new(Listening(UnixListener::bind_addr(&at)?))))
    }

    fn ways(&self, here: &Address, peer: &Address) -> Vec<Box<dyn Way>> {
        if peer.local.is_empty() || peer.host.is_empty() || peer.host != here.host {
            return Vec::new();
        }
        vec![Box::new(To(peer.local.clone()))]
    }
}

struct Listening(UnixListener);

impl Listener for Listening {
    fn kind(&self) -> TransportKind {
        TransportKind::Unix
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        let socket = self.0.accept()?.0;
        socket.set_nonblocking(true)?;
        Ok(Box::new(Connected::new(socket)?))
    }

    fn stop(&self) {
        let _woken = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

struct To(String);

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:@{}", self.0)
    }
}

impl Way for To {
    fn nature(&self) -> Nature {
        NATURE
    }

    /// Without waiting: a listener whose queue is full is as good as none at this moment, and there are other ways.
    fn dial(&self, _time: Duration) -> io::Result<Box<dyn Wire>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(self.0.as_bytes())?)?;
        Ok(Box::new(Connected::new(socket.into())?))
    }
}

struct Connected {
    socket: Socket,
    peer: Process,
}

impl Connected {
    /// Of a socket that does not block. Whoever cannot be told who is there does not speak to them.
    fn new(socket: UnixStream) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        let peer = Process { pid: peer.pid.as_raw_nonzero().get(), uid: peer.uid.as_raw() };
        Ok(Self { socket: Socket::new(socket.into()), peer })
    }
}

impl Wire for Connected {
    fn kind(&self) -> TransportKind {
        TransportKind::Unix
    }

    fn nature(&self) -> Nature {
        NATURE
    }

    fn peer(&self) -> Option<Process> {
        Some(self.peer)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn send(&self, pieces: &[Piece<'_>]) -> Result<usize, WireError> {
        self.socket.send(pieces)
    }

    fn send_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, WireError> {
        let slices = [io::IoSlice::new(bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            along.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(retry_on_intr(|| rustix::net::sendmsg(&self.socket, &slices, &mut along, flags))?)
    }

    fn receive(&self, pieces: &[Piece<'_>]) -> Result<Received, WireError> {
        self.socket.receive(pieces)
    }

    fn receive_with(&self, into: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<Received, WireError> {
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
        // A read ends where descriptors came, whatever follows.
        Ok(Received { bytes: got, dry: got < room && descriptors.len() == before })
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.socket.waste(len)
    }

    fn end(&self) {
        self.socket.end();
    }
}

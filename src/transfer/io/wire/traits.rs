//! The traits that every kind of wire implements, and their types.
//!
//! Each kind of wire has its own file. Begin at [`Wire`].

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::base::membership::{EngineAddress, MemberId};
use crate::base::transport::{TransportChoice, TransportKind};
use crate::memory::{ReadView, WriteView};

/// The reason why an operation of a wire failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The wire is not ready. An edge of its descriptor reports when it is.
    #[error("it can do nothing now")]
    Later,
    /// The error of the operating system.
    #[error("{0}")]
    System(Errno),
    /// TLS failed, or the peer is not trusted; the text has the remedy.
    #[error("{0}")]
    Secure(String),
}

impl From<Errno> for WireError {
    fn from(error: Errno) -> Self {
        if error == Errno::AGAIN { Self::Later } else { Self::System(error) }
    }
}

impl From<WireError> for io::Error {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Later => io::ErrorKind::WouldBlock.into(),
            WireError::System(error) => error.into(),
            WireError::Secure(why) => Self::other(why),
        }
    }
}

/// The result of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedCount {
    /// The number of bytes; 0 at the end of the stream.
    pub bytes: usize,
    /// Whether no bytes are left, and an edge of the descriptor will report more. If false, the caller must
    /// receive again.
    pub dry: bool,
}

/// The capabilities of a wire, and its exposure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireCapabilities {
    /// Whether both ends are on one host and the wire carries descriptors, so that memory can be shared. A
    /// plain read drops descriptors, so a caller that reads ahead uses [`Wire::receive_with_descriptors`].
    pub shares_memory: bool,
    /// Whether the wire may be lost while both ends live. Then a connection has several wires, their chunks
    /// carry checksums, and lost ones are reconnected. A wire that is not breakable is lost only with its
    /// peer.
    pub is_breakable: bool,
    /// Whether others than the two ends can read the wire, so that it needs TLS.
    pub is_exposed: bool,
    /// Whether `send` may leave bytes buffered even while the socket is writable; the caller calls
    /// [`Wire::flush`] when it has nothing more to send.
    pub is_buffered: bool,
}

/// The side of a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeRole {
    /// This side dialled.
    Dialled,
    /// This side accepted.
    Accepted,
}

/// The process at the other end of a wire, as this host knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerProcess {
    /// The process id, in this process's namespace.
    pub pid: i32,
    /// The user id.
    pub uid: u32,
}

/// A byte stream between two engines. Several threads may use it: one sends and one receives at a time.
pub trait Wire: Send + Sync {
    /// Returns the transport.
    fn kind(&self) -> TransportKind;

    /// Returns the capabilities.
    fn capabilities(&self) -> WireCapabilities;

    /// Returns the process at the other end, if the system knows it.
    fn peer(&self) -> Option<PeerProcess> {
        None
    }

    /// Returns the address of the other end, if it is on a network.
    fn source(&self) -> Option<IpAddr> {
        None
    }

    /// Performs the wire's own handshake before the first byte, and blocks for it, at most until then.
    fn perform_handshake(&self, _until: Instant) -> Result<(), WireError> {
        Ok(())
    }

    /// Returns the descriptor whose edges report that there is something to receive, or room to send.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Sends the bytes of the views, as many as fit. Returns their number.
    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError>;

    /// Sends bytes together with descriptors. A wire that carries none sends the bytes alone.
    fn send_with_descriptors(
        &self,
        bytes: &[u8],
        _descriptors: &[BorrowedFd<'_>],
    ) -> Result<usize, WireError> {
        self.send(&[ReadView::of_slice(bytes)])
    }

    /// Sends the buffered bytes.
    fn flush(&self) -> Result<(), WireError> {
        Ok(())
    }

    /// Receives available bytes into the views.
    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError>;

    /// Receives as [`receive`](Self::receive) does, and collects the descriptors that arrive with the bytes.
    fn receive_with_descriptors(
        &self,
        into: &mut [u8],
        _descriptors: &mut Vec<OwnedFd>,
    ) -> Result<ReceivedCount, WireError> {
        self.receive(&mut [WriteView::of_slice(into)])
    }

    /// Receives and discards up to `len` bytes. Returns their number.
    fn discard(&self, len: usize) -> Result<usize, WireError>;

    /// Sets the waker of the thread that attends to the wire. A wire that returns [`WireError::Later`]
    /// although no edge of its descriptor will follow must keep it, and call it.
    fn set_waker(&self, _waker: WireWaker) {}

    /// Ends the wire in both directions; both ends see that.
    fn end(&self);
}

/// The thread that attends to wires, as a wire knows it.
pub trait WireEventHandler: Send + Sync {
    #[cfg_attr(
        not(feature = "faults"),
        allow(dead_code, reason = "only a wire with faults withholds an edge")
    )]
    /// Makes the thread check the wire with this number, whatever its descriptor reports.
    fn request_wire_check(&self, seat: u64);
}

/// A handle that makes the attending thread check a wire again.
#[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "only a wire with faults withholds an edge"))]
pub struct WireWaker {
    attendant: Weak<dyn WireEventHandler>,
    seat: u64,
}

impl WireWaker {
    /// Creates the handle of the wire that the attendant knows by this number.
    pub const fn new(attendant: Weak<dyn WireEventHandler>, seat: u64) -> Self {
        Self { attendant, seat }
    }

    #[cfg_attr(
        not(feature = "faults"),
        allow(dead_code, reason = "only a wire with faults withholds an edge")
    )]
    /// Reports that there may be room to send, and something to receive.
    pub fn wake(&self) {
        if let Some(attendant) = self.attendant.upgrade() {
            attendant.request_wire_check(self.seat);
        }
    }
}

/// A listener that accepts wires from diallers.
pub trait Listener: Send + Sync {
    /// Returns the transport of its wires.
    fn kind(&self) -> TransportKind;

    /// Blocks until the next wire arrives.
    fn accept(&self) -> io::Result<Box<dyn Wire>>;

    /// Wakes the thread that accepts; no wire is accepted any more.
    fn stop(&self);
}

/// An address at which a peer is dialled. Errors show its `Display`.
pub trait Endpoint: Display + Send + Sync {
    /// Returns the capabilities of a wire to it.
    fn capabilities(&self) -> WireCapabilities;

    /// Dials, and waits at most `time` for the peer. It returns `ConnectionRefused` only if nothing listens
    /// there.
    fn dial(&self, time: Duration) -> io::Result<Box<dyn Wire>>;
}

/// The settings of an engine's listeners.
#[derive(Debug, Clone, Copy)]
pub struct ListenSettings<'a> {
    /// The task and incarnation of the engine.
    pub here: MemberId,
    /// The setting that says which transports may be used.
    pub transport: TransportChoice,
    /// The TCP address to listen on.
    pub listen: Option<SocketAddr>,
    /// The addresses that peers are to dial, if they differ.
    pub advertise: &'a [SocketAddr],
}

impl ListenSettings<'_> {
    /// Returns a name that no other engine has.
    pub fn unique_name(&self) -> String {
        let random = muster_clock::random_u64();
        format!("muster-{}-{}-{random:016x}", self.here.task, self.here.incarnation)
    }
}

/// A transport, which makes wires of one kind.
pub trait Transport: Sync {
    /// Starts to listen if the settings ask for it, and writes its address into `address`.
    fn listen(
        &self,
        settings: &ListenSettings<'_>,
        address: &mut EngineAddress,
    ) -> io::Result<Option<Arc<dyn Listener>>>;

    /// Returns the endpoints of a peer in order of preference; none if this transport does not reach it.
    fn endpoints(&self, here: &EngineAddress, peer: &EngineAddress) -> Vec<Box<dyn Endpoint>>;
}

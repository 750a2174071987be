//! The traits that every kind of wire implements, and their types.
//!
//! It implements none of them. Begin at [`Wire`].

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::base::identity::{Address, Member};
use crate::base::transport::{Choice, TransportKind};
use crate::memory::{ReadView, WriteView};

/// Why a wire did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It can do nothing now. An edge of its descriptor tells when it can.
    #[error("it can do nothing now")]
    Later,
    /// The operating system refuses.
    #[error("{0}")]
    System(Errno),
    /// TLS fails, or the other end is not to be trusted; in words, with what to do.
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

/// What a wire received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// How many bytes; none at the end of the stream.
    pub bytes: usize,
    /// There is no more now, and an edge of the descriptor will tell of more. If not, the caller asks again.
    pub dry: bool,
}

/// What a wire can do, and what it is exposed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireCapabilities {
    /// Both ends are on one host, and the wire carries descriptors: memory can be shared. A plain read drops descriptors,
    /// so a caller that reads ahead uses [`Wire::receive_with`].
    pub shares_memory: bool,
    /// It may be lost while both ends live: a connection has several, their chunks carry checksums, and lost ones are made
    /// anew. One that is not breakable is lost with its peer.
    pub is_breakable: bool,
    /// Others than the two ends may listen to it: TLS is for such.
    pub is_exposed: bool,
    /// `send` may leave bytes buffered even while there is room: a caller that has nothing more to send flushes it.
    pub is_buffered: bool,
}

/// Which end of a wire this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireEnd {
    /// It was dialled from here.
    Dialled,
    /// It was accepted here.
    Accepted,
}

/// The process at the other end, as this host knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its number, as this process sees it.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// A byte stream between two engines. Several threads may use it, one of them to send and one to receive at a time.
pub trait Wire: Send + Sync {
    /// Returns what it is made of.
    fn kind(&self) -> TransportKind;

    /// Returns what it can do.
    fn capabilities(&self) -> WireCapabilities;

    /// Returns the process at the other end, where the system knows it.
    fn peer(&self) -> Option<Process> {
        None
    }

    /// Returns the address of the other end, where it is on a network.
    fn source(&self) -> Option<IpAddr> {
        None
    }

    /// Does what has to be done before the first byte, and waits for it until then.
    fn begin(&self, _until: Instant) -> Result<(), WireError> {
        Ok(())
    }

    /// Returns the descriptor that tells by edges that there is something to receive, or room to send.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Sends the views, as much as fits, and returns how much.
    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError>;

    /// Sends bytes together with descriptors. Wires that carry none send the bytes alone.
    fn send_with(&self, bytes: &[u8], _descriptors: &[BorrowedFd<'_>]) -> Result<usize, WireError> {
        self.send(&[ReadView::of(bytes)])
    }

    /// Sends what is buffered.
    fn flush(&self) -> Result<(), WireError> {
        Ok(())
    }

    /// Receives what is there into the views.
    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<Received, WireError>;

    /// Receives as [`receive`](Self::receive) does, and takes the descriptors that come along.
    fn receive_with(&self, into: &mut [u8], _descriptors: &mut Vec<OwnedFd>) -> Result<Received, WireError> {
        self.receive(&mut [WriteView::of(into)])
    }

    /// Takes up to `len` bytes, and drops them.
    fn discard(&self, len: usize) -> Result<usize, WireError>;

    /// Hands over what wakes the thread that attends to it: a wire that says [`WireError::Later`] although no edge of its
    /// descriptor will come keeps this, and wakes.
    fn set_waker(&self, _waker: WireWaker) {}

    /// Ends it in both directions: both ends see that.
    fn end(&self);
}

/// The thread that attends to wires, as a wire knows it.
pub trait WireAttendant: Send + Sync {
    #[cfg_attr(
        not(feature = "faults"),
        allow(dead_code, reason = "only a wire with faults withholds an edge")
    )]
    /// Has the thread look at the wire with this number, whatever its descriptor says.
    fn look(&self, seat: u64);
}

/// Has the thread that attends to a wire look at it again.
#[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "only a wire with faults withholds an edge"))]
pub struct WireWaker {
    attendant: Weak<dyn WireAttendant>,
    seat: u64,
}

impl WireWaker {
    /// Makes one for the wire that the attendant knows by this number.
    pub const fn new(attendant: Weak<dyn WireAttendant>, seat: u64) -> Self {
        Self { attendant, seat }
    }

    #[cfg_attr(
        not(feature = "faults"),
        allow(dead_code, reason = "only a wire with faults withholds an edge")
    )]
    /// Says that there may be room to send, and something to receive.
    pub fn wake(&self) {
        if let Some(attendant) = self.attendant.upgrade() {
            attendant.look(self.seat);
        }
    }
}

/// Takes wires that others dial.
pub trait Listener: Send + Sync {
    /// Returns what its wires are made of.
    fn kind(&self) -> TransportKind;

    /// Waits for the next one.
    fn accept(&self) -> io::Result<Box<dyn Wire>>;

    /// Wakes the thread that waits; nothing is accepted any more.
    fn stop(&self);
}

/// Where a peer is dialled, as it is shown in errors.
pub trait Endpoint: Display + Send + Sync {
    /// Returns what a wire to it can do.
    fn capabilities(&self) -> WireCapabilities;

    /// Dials; the peer may take so long to answer. `ConnectionRefused` means that nobody is there, and nothing else does.
    fn dial(&self, time: Duration) -> io::Result<Box<dyn Wire>>;
}

/// Where an engine listens, and under what name.
#[derive(Debug, Clone, Copy)]
pub struct ListenSettings<'a> {
    /// Whose engine it is.
    pub here: Member,
    /// Which transports may be used.
    pub transport: Choice,
    /// Where it listens on TCP.
    pub listen: Option<SocketAddr>,
    /// What it tells others to dial, where that differs.
    pub advertise: &'a [SocketAddr],
}

impl ListenSettings<'_> {
    /// Draws a name that no other engine has.
    pub fn unique_name(&self) -> String {
        let random = muster_clock::random_u64();
        format!("muster-{}-{}-{random:016x}", self.here.task, self.here.incarnation)
    }
}

/// Makes wires of one kind.
pub trait Transport: Sync {
    /// Begins to listen, if the settings have it so, and writes into the address where that is.
    fn listen(
        &self,
        settings: &ListenSettings<'_>,
        address: &mut Address,
    ) -> io::Result<Option<Arc<dyn Listener>>>;

    /// Returns where a peer can be dialled, the best first; nothing where this transport does not reach it.
    fn endpoints(&self, here: &Address, peer: &Address) -> Vec<Box<dyn Endpoint>>;
}

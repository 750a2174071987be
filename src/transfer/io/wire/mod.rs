//! Wires: byte streams between two engines, and the ways to make them.
//!
//! | file | its reason to exist |
//! | --- | --- |
//! | `blocking.rs` | a wire that blocks, with a time limit for all of it: for the hello |
//! | `socket.rs` | what all wires over sockets share |
//! | `tcp.rs` | TCP connections |
//! | `local.rs` | Unix sockets of this host, which carry descriptors |
//! | `loopback.rs` | engines of one process, without any listening socket |
//! | `tls.rs` | around those that leave the host: TLS |
//! | `certificates.rs` | by what engines know one another under TLS |
//! | `faulty.rs` | around any of them: what goes wrong on purpose, for tests |
//!
//! A [lane](crate::io::lane) sends and receives on a [`Wire`] and asks it what it can; it knows no kind of them. A
//! [`Medium`] makes wires: it listens, and knows the ways to a peer's address. Which media an engine uses is its
//! [`Choice`]. To add one: a file here, and lines in [`dials`] and [`listens`].
//!
//! Wires do not block: what waits waits for their descriptor, by edges. So a wire has to be exact about when it is dry.

mod blocking;
mod certificates;
mod faulty;
mod local;
mod loopback;
mod socket;
mod tcp;
mod tls;

use std::fmt::Display;
use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::base::identity::Address;
use crate::base::transport::Choice;
use crate::base::transport::TransportKind;
use crate::engine::config::Config;
use crate::io::reactor::Reactor;
use crate::memory::raw::Piece;

pub use blocking::Spoken;
pub use certificates::{Certificates, Identity};
pub use faulty::Faults;

/// Why a wire did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It can do nothing now. An edge of its descriptor tells when it can.
    #[error("it can do nothing now")]
    Later,
    /// The system says so.
    #[error("{0}")]
    System(Errno),
    /// It is not safe to speak to whoever is there, or TLS fails; in words, with what to do.
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

/// What came on a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// How many bytes; none at the end of the stream.
    pub bytes: usize,
    /// There is no more now, and an edge of the descriptor will tell of more. If not, ask again.
    pub dry: bool,
}

/// What connections over such wires are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nature {
    /// Both ends are on one host, and descriptors can be sent along: memory can be shared. A plain read drops descriptors,
    /// so whoever reads ahead uses [`Wire::receive_with`].
    pub shares: bool,
    /// It may be lost while both ends live: a connection has several, their chunks carry checksums, and lost ones are made
    /// anew. One that does not break is lost with its peer.
    pub breaks: bool,
    /// Others than the two ends may listen to it: it is what TLS is for.
    pub exposed: bool,
    /// What was sent may wait in it though there is room: whoever has nothing more to send flushes it.
    pub keeps: bool,
}

/// Which end of a wire this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
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
    /// Over what.
    fn kind(&self) -> TransportKind;

    /// What connections over it are like.
    fn nature(&self) -> Nature;

    /// Who is at the other end, where the system knows it.
    fn peer(&self) -> Option<Process> {
        None
    }

    /// The address of the other end, where it is on a network.
    fn source(&self) -> Option<IpAddr> {
        None
    }

    /// Does what has to be done before the first byte, and waits for it until then.
    fn begin(&self, _until: Instant) -> Result<(), WireError> {
        Ok(())
    }

    /// What tells by edges that there is something to receive, or room to send.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Sends the pieces, as much as fits; returns how much.
    fn send(&self, pieces: &[Piece<'_>]) -> Result<usize, WireError>;

    /// Sends bytes together with descriptors. Wires that carry none send the bytes alone.
    fn send_with(&self, bytes: &[u8], _descriptors: &[BorrowedFd<'_>]) -> Result<usize, WireError> {
        self.send(&[Piece::of(bytes)])
    }

    /// Has what waits in it leave.
    fn flush(&self) -> Result<(), WireError> {
        Ok(())
    }

    /// Receives what is there into the pieces. The caller holds a visit to write them.
    fn receive(&self, pieces: &[Piece<'_>]) -> Result<Received, WireError>;

    /// As [`receive`](Self::receive), and takes the descriptors that come along.
    fn receive_with(&self, into: &mut [u8], _descriptors: &mut Vec<OwnedFd>) -> Result<Received, WireError> {
        self.receive(&[Piece::of_mut(into)])
    }

    /// Takes up to `len` bytes, and drops them.
    fn discard(&self, len: usize) -> Result<usize, WireError>;

    /// It is attended to from here on: a wire that says [`WireError::Later`] although no edge of its descriptor will come
    /// keeps this, and wakes.
    fn woken_by(&self, _wake: Wake) {}

    /// Ends it in both directions: whoever waits for it sees its end.
    fn end(&self);
}

/// Has whoever attends to a wire look at it again.
pub struct Wake {
    reactor: Weak<Reactor>,
    seat: u64,
}

impl Wake {
    /// Of the lane that a reactor knows by this number.
    pub const fn new(reactor: Weak<Reactor>, seat: u64) -> Self {
        Self { reactor, seat }
    }

    /// It may be sent on, and there may be something to receive.
    pub fn wake(&self) {
        if let Some(reactor) = self.reactor.upgrade() {
            reactor.look(self.seat);
        }
    }
}

/// Takes wires that others dial.
pub trait Listener: Send + Sync {
    /// Over what.
    fn kind(&self) -> TransportKind;

    /// Waits for the next one.
    fn accept(&self) -> io::Result<Box<dyn Wire>>;

    /// Wakes whoever waits; nothing is accepted any more.
    fn stop(&self);
}

/// A way to reach a peer, as it is shown in errors.
pub trait Way: Display + Send + Sync {
    /// What a connection by it is like.
    fn nature(&self) -> Nature;

    /// Dials; the peer may take so long to answer. `ConnectionRefused` means that nobody is there, and nothing else does.
    fn dial(&self, time: Duration) -> io::Result<Box<dyn Wire>>;
}

/// Makes wires of one kind.
trait Medium: Sync {
    /// Begins to listen, if the setting has it so, and writes into the address where that is.
    fn listen(&self, config: &Config, address: &mut Address) -> io::Result<Option<Arc<dyn Listener>>>;

    /// The ways to a peer, the best first; none where this medium does not reach it.
    fn ways(&self, here: &Address, peer: &Address) -> Vec<Box<dyn Way>>;
}

/// What an engine dials by, the best first.
const fn dials(choice: Choice) -> &'static [&'static dyn Medium] {
    match choice {
        Choice::Auto => &[&local::Local, &tcp::Tcp],
        Choice::Shm | Choice::Pvm | Choice::Unix => &[&local::Local],
        Choice::Tcp => &[&tcp::Tcp],
        Choice::Loopback => &[&loopback::Loopback],
    }
}

/// What an engine is reached by: what it insists on itself is not what others have to.
const fn listens(choice: Choice) -> &'static [&'static dyn Medium] {
    match choice {
        Choice::Auto | Choice::Shm | Choice::Pvm | Choice::Unix => &[&local::Local, &tcp::Tcp],
        Choice::Tcp => &[&tcp::Tcp],
        Choice::Loopback => &[&loopback::Loopback],
    }
}

/// Begins to listen: where the engine is reached, and what takes the wires.
pub fn listen(config: &Config) -> io::Result<(Address, Vec<Arc<dyn Listener>>)> {
    let mut address = Address { host: host(), ..Address::default() };
    let mut listeners = Vec::new();
    for medium in listens(config.transport) {
        listeners.extend(medium.listen(config, &mut address)?);
    }
    Ok((address, listeners))
}

/// The ways from here to a peer, the best first.
pub fn ways(choice: Choice, here: &Address, peer: &Address) -> Vec<Box<dyn Way>> {
    dials(choice).iter().flat_map(|medium| medium.ways(here, peer)).collect()
}

/// A wire as an engine uses it: under TLS if it has certificates and others could listen, and with faults if there are to
/// be some. They happen below TLS, where a network's would.
pub fn fit(
    wire: Box<dyn Wire>,
    side: Side,
    identity: Option<&Identity>,
    faults: Option<&Faults>,
) -> Result<Box<dyn Wire>, WireError> {
    let wire = match faults {
        Some(faults) => faults.around(wire),
        None => wire,
    };
    match identity.filter(|_| wire.nature().exposed) {
        Some(identity) => Ok(Box::new(tls::Tls::new(wire, identity, side)?)),
        None => Ok(wire),
    }
}

/// This host and its boot.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}

/// A name that no other engine has.
fn name_of(config: &Config) -> String {
    let random = muster_clock::random_u64();
    format!("muster-{}-{}-{random:016x}", config.here.task, config.here.incarnation)
}

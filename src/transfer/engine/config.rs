//! The configuration of an engine.
//!
//! It checks nothing: values out of bounds are clamped by [`Engine::start`](super::handle::Engine::start). Begin at
//! [`Config`].

use std::net::SocketAddr;
use std::time::Duration;

use crate::base::identity::{DeviceId, Member};
use crate::base::transport::Choice;
use crate::io::wire::Certificates;
#[cfg(feature = "faults")]
use crate::io::wire::Faults;

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Whose engine it is.
    pub here: Member,
    /// The devices whose buffers it moves.
    pub devices: Vec<DeviceId>,
    /// Where it listens on TCP; none to listen on this host only. Not used with [`Choice::Loopback`].
    pub listen: Option<SocketAddr>,
    /// What it tells others to dial, where that differs from `listen`.
    pub advertise: Vec<SocketAddr>,
    /// A secret by which engines know one another: every engine of a cluster has the same one, or none. At least 128 random
    /// bits: a process that an engine takes for its peer receives a proof against which it can test guesses.
    pub token: Option<Vec<u8>>,
    /// Which transports may be used.
    pub transport: Choice,
    /// TCP connections to each peer that carry chunks; one more carries control frames.
    pub lanes: usize,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Whether chunks on TCP carry checksums. Between two engines they do if either wants it.
    pub checks: bool,
    /// Threads that wait for sockets.
    pub reactors: usize,
    /// Threads that copy.
    pub copiers: usize,
    /// The most connections that are kept; idle ones are dropped first.
    pub cliques_max: usize,
    /// How long making a connection may take, and making a lost one anew.
    pub dial_timeout: Duration,
    /// Certificates, by which engines know one another, and which TCP connections are encrypted by; those within a host are
    /// as they are. Every engine of a cluster has some, or none. A token works beside them.
    pub tls: Option<Certificates>,
    /// How long a thread that waits for a small transfer within a host looks for it before it sleeps; never if it is zero.
    /// It sleeps at once where that was in vain several times in a row. By
    /// default about what it takes to wake a thread of a virtual machine, and zero where there is one processor: the peer
    /// could not run meanwhile.
    pub spin: Duration,
    /// What goes wrong on its wires on purpose, for tests.
    #[cfg(feature = "faults")]
    pub faults: Option<Faults>,
}

/// What it takes to wake a thread whose processor its host has put to sleep.
const SPIN: Duration = Duration::from_micros(50);

impl Config {
    /// Returns the defaults for a task: TCP on any port of the loopback interface, all transports, checksums.
    #[must_use]
    pub fn new(here: Member, devices: Vec<DeviceId>) -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            here,
            devices,
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            advertise: Vec::new(),
            token: None,
            transport: Choice::Auto,
            lanes: cores.clamp(1, 4),
            chunk: 256 << 10,
            checks: true,
            reactors: cores.clamp(1, 4),
            copiers: cores.clamp(1, 8),
            cliques_max: 1024,
            dial_timeout: Duration::from_secs(10),
            tls: None,
            spin: if cores > 1 { SPIN } else { Duration::ZERO },
            #[cfg(feature = "faults")]
            faults: None,
        }
    }
}

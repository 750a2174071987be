//! The configuration of an engine, with its defaults.
//!
//! [`TransferEngine::start`](super::handle::TransferEngine::start) clamps the number of lanes and the size of a chunk
//! to their bounds. Begin at [`EngineConfig`].

use std::net::SocketAddr;
use std::time::Duration;

use muster_cliques::CliqueOptions;

use crate::base::membership::{DeviceId, MemberId};
use crate::base::transport::{CliqueChoice, TransportChoice};
#[cfg(feature = "faults")]
use crate::io::wire::FaultInjector;
use crate::io::wire::PemCertificates;

/// The configuration of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The task and incarnation of the engine.
    pub here: MemberId,
    /// The devices whose buffers the engine moves.
    pub devices: Vec<DeviceId>,
    /// The TCP address to listen on; none to be reachable on this host only. Not used with
    /// [`TransportChoice::Loopback`].
    pub listen: Option<SocketAddr>,
    /// The addresses that peers are to dial, if they differ from `listen`.
    pub advertise: Vec<SocketAddr>,
    /// The cluster token, a secret that every engine of a cluster has, or none has. It should have at least
    /// 128 random bits, because a process that an engine takes for its peer receives a proof against which it
    /// can test guesses.
    pub token: Option<Vec<u8>>,
    /// The transports that may be used.
    pub transport: TransportChoice,
    /// The number of TCP connections to each peer that carry chunks; one more carries control frames.
    pub lanes: usize,
    /// The bytes of a chunk.
    pub chunk: u32,
    /// Whether chunks on TCP carry checksums. Between two engines they do if either wants it.
    pub checks: bool,
    /// The number of threads that wait for sockets.
    pub reactors: usize,
    /// The number of threads that copy from other processes, and within this one.
    pub copiers: usize,
    /// The most page-locked memory through which bytes of GPUs move, in bytes: three eighths of it for sends, three for receives, and
    /// a quarter for copies within this task. It is allocated when it is first needed.
    pub staging_bytes: usize,
    /// The most connections that are kept; unused ones are dropped first.
    pub cliques_max: usize,
    /// The longest time to make a connection, or to reconnect a lost one.
    pub dial_timeout: Duration,
    /// The certificates by which engines authenticate each other and encrypt TCP connections; connections
    /// within a host are not encrypted. Every engine of a cluster has some, or none has. A token may be used
    /// with them.
    pub tls: Option<PemCertificates>,
    /// The provider of libfabric over which engines on TCP connections read each other's host memory, such as `verbs;ofi_rxm`; empty
    /// for the library's first choice. None: all bytes go through the TCP connections. Two engines use it if both name a provider
    /// and are in one fabric. The reads are neither encrypted nor do they carry checksums, so it cannot be used with `tls`.
    pub fabric: Option<String>,
    /// Where bytes between GPUs move through a clique of NCCL: on a connection if both engines choose so. NCCL encrypts nothing, so it
    /// cannot be used with `tls`.
    pub cliques: CliqueChoice,
    /// The limits of cliques, and how they end. They must not block, and are reused.
    pub clique_options: CliqueOptions,
    /// How long a thread that waits for a small transfer within a host spins before it sleeps; zero for
    /// never. After several unsuccessful spins in a row it sleeps at once. The default is about the time that
    /// it takes to wake a thread of a virtual machine, and zero on a single processor, where the peer could
    /// not run meanwhile.
    pub spin: Duration,
    /// The faults that are injected into its wires, for tests.
    #[cfg(feature = "faults")]
    pub faults: Option<FaultInjector>,
}

/// The longest start of a clique: well below the stall limit of launches, whose bytes can be pushed afterwards.
const CLIQUE_START: Duration = Duration::from_secs(10);

/// The time that it takes to wake a thread whose processor the hypervisor has put to sleep.
const SPIN: Duration = Duration::from_micros(50);

impl EngineConfig {
    /// Returns the defaults for a task: TCP on any port of the loopback interface, all transports, checksums.
    #[must_use]
    pub fn new(here: MemberId, devices: Vec<DeviceId>) -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            here,
            devices,
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            advertise: Vec::new(),
            token: None,
            transport: TransportChoice::Auto,
            lanes: cores.clamp(1, 4),
            chunk: 256 << 10,
            checks: true,
            reactors: cores.clamp(1, 4),
            copiers: cores.clamp(1, 8),
            staging_bytes: 256 << 20,
            cliques_max: 1024,
            dial_timeout: Duration::from_secs(10),
            tls: None,
            fabric: None,
            cliques: CliqueChoice::Off,
            clique_options: CliqueOptions { start_timeout: CLIQUE_START, ..CliqueOptions::default() },
            spin: if cores > 1 { SPIN } else { Duration::ZERO },
            #[cfg(feature = "faults")]
            faults: None,
        }
    }
}

//! The code that dialling and accepting share: it wraps a wire (for example with TLS) before the handshake, and opens
//! the connection or adds the lane after the handshake.
//!
//! [`dial`](super::dial) and [`accept`](super::accept) decide which peers to connect with. Begin at
//! [`open_connection`].

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::base::transport::{CliqueChoice, TransportChoice, TransportKind};
use crate::io::fabric_reads::FabricReads;
use crate::io::lane::{Lane, LaneHost};
use crate::io::sys;
use crate::io::wire::{HandshakeRole, Wire, WireError};
use crate::memory::WriteView;
use crate::protocol::frame::CHUNK_MAX;
use crate::protocol::hello::{Hello, hash_of_fabric};
use crate::protocol::link::LinkTerms;
use crate::session::connection::{Connection, NewConnectionParts, SessionHost};
use crate::session::handshake::HelloError;

/// The time limit of a whole handshake.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Returns whether the peer may be spoken to: on this host, only processes of the same user may.
pub fn is_peer_of_own_user(wire: &dyn Wire) -> bool {
    wire.peer().is_none_or(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

/// Wraps a wire as the engine is configured (TLS, faults), and completes the TLS handshake by `until`.
pub fn wrap_and_handshake(
    shared: &EngineShared,
    wire: Box<dyn Wire>,
    side: HandshakeRole,
    until: Instant,
) -> Result<Box<dyn Wire>, WireError> {
    let wire = shared.wrapping.wrap(wire, side)?;
    wire.perform_handshake(until)?;
    Ok(wire)
}

/// Adds to a connection the lane that a hello announced.
pub fn add_lane(
    connection: &Connection,
    hello: &Hello,
    wire: Box<dyn Wire>,
    heard: u32,
) -> Result<(), HelloError> {
    let lane_host: Weak<dyn LaneHost> = connection.lane_host();
    let lane = Lane::new(lane_host, hello.lane, hello.control, connection.checks, wire);
    Ok(connection.add_lane(&lane, heard)?)
}

/// Returns the error of a connection that cannot be made.
pub fn error_of_failed_connect(peer: &MemberId, error: &dyn std::fmt::Display) -> TransferError {
    let why = error.to_string();
    TransferError::Transport { transport: TransportKind::Tcp, member: *peer, why }
}

/// Returns the address of the word that holds this incarnation.
pub fn incarnation_word_address(shared: &EngineShared) -> u64 {
    std::ptr::from_ref(&*shared.probe) as u64
}

/// Returns the hash of the fabric over which memory is read on a connection that a wire begins; 0 for none.
pub fn fabric_for_wire(shared: &EngineShared, wire: &dyn Wire) -> u32 {
    let fabric = shared.fabric.as_ref().filter(|_| wire.kind() == TransportKind::Tcp);
    fabric.map_or(0, |fabric| {
        let provider = fabric.provider();
        hash_of_fabric(&provider.provider, &provider.fabric)
    })
}

/// Returns whether bytes between GPUs may move through a clique on a connection to a peer that a wire begins.
pub fn may_use_cliques(shared: &EngineShared, wire: &dyn Wire, peer: MemberId) -> bool {
    // Tasks of two jobs can have one number, which a key of a clique has once.
    let is_chosen = match shared.config.cliques {
        CliqueChoice::Off => false,
        CliqueChoice::Auto => wire.kind() == TransportKind::Tcp,
        CliqueChoice::Always => true,
    };
    is_chosen && peer.job.is_own() && shared.nccl.is_some()
}

/// Creates the connection of a hello that was accepted, and adds it to the table.
pub fn open_connection(
    shared: &Arc<EngineShared>,
    hello: &Hello,
    wire: &dyn Wire,
    peer: MemberId,
    probe: u64,
    dialled: bool,
) -> Arc<Connection> {
    let (kind, capabilities) = (wire.kind(), wire.capabilities());
    let pid = wire.peer().map(|peer| peer.pid).filter(|pid| can_read_peer_memory(*pid, probe, peer));
    let is_over_fabric = hello.fabric != 0;
    let terms = LinkTerms {
        chunk: hello.chunk.clamp(4 << 10, CHUNK_MAX as u32),
        fetch: hello.fetch && capabilities.shares_memory || is_over_fabric || hello.cliques,
        pushes_unsourced: hello.cliques,
        lasting: !capabilities.is_breakable,
    };
    // On the dialling side, `hello.checks` includes the acceptor's answer.
    let checks = (hello.checks || shared.config.checks) && capabilities.is_breakable;
    // Without an endpoint the peer pushes, and so does this side: it announces no address.
    let fabric = shared.fabric.as_ref().filter(|_| is_over_fabric).and_then(|fabric| {
        FabricReads::open(fabric, shared.here().incarnation.get())
            .inspect_err(|error| tracing::warn!(%peer, %error, "no endpoint of the fabric"))
            .ok()
    });
    let host: Arc<dyn SessionHost> = shared.clone();
    let connection = Connection::new(NewConnectionParts {
        host: Arc::downgrade(&host),
        io: Arc::clone(&shared.io),
        counts: Arc::clone(&shared.counts),
        numbers: shared.launch_numbers(peer),
        moved: shared.byte_counters(peer.peer_task()),
        inlines: shared.config.transport != TransportChoice::Pvm,
        spin: shared.config.spin,
        me: shared.here(),
        peer,
        nonce: hello.nonce,
        dialled,
        kind,
        capabilities,
        terms,
        checks,
        pid,
        fabric,
        nccl: shared.nccl.filter(|_| hello.cliques).map(|nccl| (nccl, shared.config.clique_options)),
    });
    lock(&shared.connections).push(Arc::clone(&connection));
    shared.connected.notify_all();
    if shared.closed.load(Ordering::Acquire) {
        // The shutdown may have closed the connections in the table already.
        connection.close(TransferError::Closed);
    }
    connection
}

/// Returns whether this process can read the memory of the process `pid`, and that process is the peer.
fn can_read_peer_memory(pid: i32, probe: u64, peer: MemberId) -> bool {
    let mut word = [0; 8];
    let read = sys::read_process_memory(pid, &[probe], &mut [WriteView::of_slice(&mut word)]);
    read == Ok(8) && u64::from_ne_bytes(word) == peer.incarnation.get()
}

//! The code that dialling and accepting share: the wire before the hello, and the connection after it.
//!
//! It decides nothing about peers: [`dial`](super::dial) and [`accept`](super::accept) do. Begin at [`open_connection`].

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::sync::lock;
use crate::base::transport::{Choice, TransportKind};
use crate::io::lane::{Lane, LaneHost};
use crate::io::sys;
use crate::io::wire::{Wire, WireEnd, WireError};
use crate::memory::WriteView;
use crate::protocol::frame::CHUNK_MAX;
use crate::protocol::hello::Hello;
use crate::protocol::link::Terms;
use crate::session::connection::{Connection, ConnectionSettings, SessionHost};
use crate::session::handshake::HelloError;

/// How long a handshake may take, all of it.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Returns whether the other end may be spoken to at all: on this host, processes of the same user.
pub fn is_own_user(wire: &dyn Wire) -> bool {
    wire.peer().is_none_or(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

/// Returns a wire as this engine uses it, ready for the hello; that may take until then.
pub fn wrap(
    shared: &EngineShared,
    wire: Box<dyn Wire>,
    side: WireEnd,
    until: Instant,
) -> Result<Box<dyn Wire>, WireError> {
    let wire = shared.wrapping.around(wire, side)?;
    wire.begin(until)?;
    Ok(wire)
}

/// Gives a connection the lane that a hello was about.
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
pub fn connect_error(peer: &Member, error: &dyn std::fmt::Display) -> TransferError {
    let why = error.to_string();
    TransferError::Transport { transport: TransportKind::Tcp, member: *peer, why }
}

/// Returns where this life's word lies.
pub fn probe(shared: &EngineShared) -> u64 {
    std::ptr::from_ref(&*shared.probe) as u64
}

/// Makes the connection of an accepted hello, and puts it into the table.
pub fn open_connection(
    shared: &Arc<EngineShared>,
    hello: &Hello,
    wire: &dyn Wire,
    peer: Member,
    probe: u64,
    dialled: bool,
) -> Arc<Connection> {
    let (kind, capabilities) = (wire.kind(), wire.capabilities());
    let pid = wire.peer().map(|peer| peer.pid).filter(|pid| can_read(*pid, probe, peer));
    let terms = Terms {
        chunk: hello.chunk.clamp(4 << 10, CHUNK_MAX as u32),
        fetch: hello.fetch && capabilities.shares_memory,
        lasting: !capabilities.is_breakable,
    };
    // Of the hello if this side dialled, which knows what was answered.
    let checks = (hello.checks || shared.config.checks) && capabilities.is_breakable;
    let host: Arc<dyn SessionHost> = shared.clone();
    let connection = Connection::new(ConnectionSettings {
        host: Arc::downgrade(&host),
        io: Arc::clone(&shared.io),
        counts: Arc::clone(&shared.counts),
        numbers: shared.numbers(peer),
        moved: shared.moved(peer.task),
        inlines: shared.config.transport != Choice::Pvm,
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
    });
    lock(&shared.connections).push(Arc::clone(&connection));
    shared.connected.notify_all();
    if shared.closed.load(Ordering::Acquire) {
        // The shutdown may have looked at the connections already.
        connection.close(TransferError::Closed);
    }
    connection
}

/// Returns whether this process can read the memory of that one, and it is the peer's.
fn can_read(pid: i32, probe: u64, peer: Member) -> bool {
    let mut word = [0; 8];
    let read = sys::read_process(pid, &[probe], &mut [WriteView::of(&mut word)]);
    read == Ok(8) && u64::from_ne_bytes(word) == peer.incarnation.get()
}

//! Accepts wires from other engines: the handshake, and whether the dialler's connection or lane is admitted.
//!
//! All of it blocks, on threads of its own with time limits; nothing here touches the path of the bytes. What this side
//! dials is in [`dialling`](crate::engine::dial).

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::engine::cliques::CliqueKey;
use crate::engine::dial::make;
use crate::engine::handshake_limits::HandshakeGuard;
use crate::engine::shared::Core;
use crate::io::lane::Lane;
use crate::io::sys;
use crate::io::wire::{self, Listener, Side, Spoken, Wire, WireError};
use crate::memory::raw::Piece;
use crate::protocol::hello::{self, Answer, Hello, HelloError, Verdict};
use crate::protocol::link::Terms;
use crate::session::connection::{Connection, Making};
use muster_clock as clock;

/// How long a handshake may take, all of it.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a dialler waits for its refusal that does not know the token: so often can one thread be asked.
const UNPROVEN_PAUSE: Duration = Duration::from_secs(1);
/// How long a hello of a life that the membership does not name waits for one that does.
const MEMBERSHIP_WAIT: Duration = Duration::from_secs(3);
/// How long a lane waits for the connection that it joins: the dialler may know of it first.
const CONNECTION_WAIT: Duration = Duration::from_millis(500);

/// Accepts until the engine ends.
pub fn accept(core: &Arc<Core>, listeners: Vec<Arc<dyn Listener>>) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    for listener in listeners {
        lock(&core.listeners).push(Arc::clone(&listener));
        let core = Arc::clone(core);
        let name = format!("muster-accept-{}", listener.kind());
        threads.push(thread::Builder::new().name(name).spawn(move || {
            loop {
                let accepted = listener.accept();
                if core.closed.load(Ordering::Acquire) {
                    return;
                }
                match accepted {
                    Ok(wire) => begin_handshake(&core, wire),
                    // Out of descriptors, or a connection that was gone again: neither is a reason to stop.
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        })?);
    }
    Ok(threads)
}

/// Wakes the listening threads of an engine that ends.
pub fn stop(core: &Core) {
    let listeners = std::mem::take(&mut *lock(&core.listeners));
    for listener in listeners {
        listener.stop();
    }
    core.handshakes.close();
}

/// Whether the other end may be spoken to at all: on this host, processes of the same user.
pub fn is_ours(wire: &dyn Wire) -> bool {
    wire.peer().is_none_or(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

/// A wire as this engine uses it, ready for the hello; that may take until then.
pub fn fit(core: &Core, wire: Box<dyn Wire>, side: Side, until: Instant) -> Result<Box<dyn Wire>, WireError> {
    let wire = wire::fit(wire, side, core.identity.as_ref(), core.config.faults.as_ref())?;
    wire.begin(until)?;
    Ok(wire)
}

/// Takes a dialler's hello on a thread of its own.
fn begin_handshake(core: &Arc<Core>, wire: Box<dyn Wire>) {
    if !is_ours(&*wire) {
        return;
    }
    let Some(mut guard) = core.handshakes.admit(&*wire) else { return };
    let core = Arc::clone(core);
    let spawned = thread::Builder::new().name("muster-hello".to_owned()).spawn(move || {
        if let Err(error) = handshake(&core, wire, &mut guard) {
            tracing::debug!(%error, "a connection was not taken");
        }
    });
    if let Err(error) = spawned {
        tracing::debug!(%error, "no thread for a handshake");
    }
}

/// Waits [`UNPROVEN_PAUSE`], or until the connection is ended for another one.
fn pause(wire: &dyn Wire) {
    // No event is asked for: the end of a connection is told of all the same.
    let mut ended = [PollFd::from_borrowed_fd(wire.descriptor(), PollFlags::empty())];
    let _ended_or_over = poll(&mut ended, Timespec::try_from(UNPROVEN_PAUSE).ok().as_ref());
}

fn handshake(core: &Arc<Core>, wire: Box<dyn Wire>, guard: &mut HandshakeGuard) -> Result<(), HelloError> {
    let until = clock::monotonic() + HELLO_TIMEOUT;
    let exposed = wire.nature().exposed;
    let wire = fit(core, wire, Side::Accepted, until)?;
    let mut spoken = Spoken::new(&*wire, until);
    let dialler = match hello::accept(&mut spoken, core.key.as_ref(), &clock::random_bytes()) {
        Err(HelloError::Unproven) => {
            pause(&*wire);
            hello::refuse(&mut spoken)?;
            return Err(HelloError::Unproven);
        }
        dialler => dialler?,
    };
    // By its proof, its certificate, or as a process of this user on this host.
    let is_proven = core.key.is_some() || core.identity.is_some() || !exposed;
    if is_proven && !guard.prove() {
        return Err(HelloError::Protocol);
    }
    let hello = dialler.hello;
    let mut expected = None;
    let (verdict, joined) = admit(core, &hello, &mut expected);
    // Before it is told: whoever is turned away may look at the count at once.
    if matches!(verdict, Verdict::NotMe(_) | Verdict::NotYou(_)) {
        core.counts.fenced.fetch_add(1, Ordering::Relaxed);
    }
    let heard = joined.as_ref().map_or(0, |connection| connection.control_heard());
    let answer = Answer { verdict, heard, probe: probe(core), checks: core.config.checks };
    dialler.reply(&mut spoken, &answer).inspect_err(|_| {
        if let Some((peer, making)) = expected {
            dial_instead(core, peer, making);
        }
    })?;
    if let Some(connection) = joined {
        return add(core, &connection, &hello, wire, hello.heard);
    }
    // Only now is it known that whoever dials is of the cluster.
    let key = CliqueKey::new(core.here(), hello.from);
    let old = lock(&core.cliques).get(key).cloned();
    if let Some(old) = old {
        let how = "it began a new connection".to_owned();
        old.end(TransferError::PeerDead { member: hello.from, how });
        let mut cliques = lock(&core.cliques);
        expected = cliques.expect(key).map(|making| (hello.from, making));
    }
    let connection = begin(core, &hello, &*wire, hello.from, hello.probe, false);
    add(core, &connection, &hello, wire, hello.heard).inspect_err(|error| {
        connection.end(cannot(&hello.from, error));
        if let Some((peer, making)) = expected {
            dial_instead(core, peer, making);
        }
    })?;
    core.clique_ready(&connection);
    Ok(())
}

/// Gives a connection the lane that a hello was about.
pub fn add(
    core: &Arc<Core>,
    connection: &Arc<Connection>,
    hello: &Hello,
    wire: Box<dyn Wire>,
    heard: u32,
) -> Result<(), HelloError> {
    let lane = Lane::new(connection, hello.lane, hello.control, wire);
    Ok(connection.add_lane(core, &lane, heard)?)
}

pub fn cannot(peer: &Member, error: &dyn std::fmt::Display) -> TransferError {
    let why = error.to_string();
    TransferError::Transport { transport: TransportKind::Tcp, member: *peer, why }
}

/// The connection that was expected of a peer does not come: this side makes it, if anybody waits for it.
fn dial_instead(core: &Arc<Core>, peer: Member, making: u64) {
    let key = CliqueKey::new(core.here(), peer);
    if lock(&core.cliques).is_awaited(key, making) {
        make(core, peer, making);
    }
}

/// Where this life's word lies.
pub fn probe(core: &Core) -> u64 {
    std::ptr::from_ref(&*core.probe) as u64
}

/// Whether a hello is welcome, and which connection a lane joins. The making that is expected of a hello that begins a
/// connection is put where the caller finds it.
fn admit(
    core: &Arc<Core>,
    hello: &Hello,
    expected: &mut Option<(Member, u64)>,
) -> (Verdict, Option<Arc<Connection>>) {
    let here = core.here();
    if hello.to != here {
        let current = (hello.to.task == here.task).then_some(here.incarnation);
        return (Verdict::NotMe(current), None);
    }
    // Incarnations are random: which of two is newer is for the membership to say, once it names the dialler's task.
    let known = core.await_membership(MEMBERSHIP_WAIT, |membership| membership.has(hello.from).then_some(()));
    if known.is_none() {
        let current = core.membership().member(hello.from.task).map(|member| member.incarnation);
        return (Verdict::NotYou(current), None);
    }
    if !hello.begins {
        let wanted =
            |connection: &&Arc<Connection>| connection.peer == hello.from && connection.nonce == hello.nonce;
        if let Some(connection) = core.await_connection(CONNECTION_WAIT, wanted) {
            return (Verdict::Welcome, Some(connection));
        }
        return (Verdict::NoSuchLink, None);
    }
    let key = CliqueKey::new(here, hello.from);
    let mut cliques = lock(&core.cliques);
    if core.closed.load(Ordering::Acquire) {
        // It has forgotten what it was dialling itself, and so cannot say which of two connections would count.
        return (Verdict::NotMe(None), None);
    }
    let (pending, old) = (cliques.is_pending(key), cliques.get(key).is_some());
    // Both dial, or dialled a moment ago: the connection of the lower task counts. If the peer has lost that one,
    // this side will know in a moment, and the peer asks again.
    if (pending || old) && here.task < hello.from.task {
        return (Verdict::Busy, None);
    }
    if !pending && !old {
        if cliques.len() >= core.config.cliques_max.saturating_mul(2) {
            drop(cliques);
            core.make_room();
            return (Verdict::Full, None);
        }
        // At once, so that this side does not begin to dial as well.
        *expected = cliques.expect(key).map(|making| (hello.from, making));
    }
    (Verdict::Welcome, None)
}

/// Makes the connection of an accepted hello.
pub fn begin(
    core: &Arc<Core>,
    hello: &Hello,
    wire: &dyn Wire,
    peer: Member,
    probe: u64,
    dialled: bool,
) -> Arc<Connection> {
    let (kind, nature) = (wire.kind(), wire.nature());
    let pid = wire.peer().map(|peer| peer.pid).filter(|pid| can_read(*pid, probe, peer));
    let terms = Terms {
        chunk: hello.chunk.clamp(4 << 10, crate::protocol::frame::CHUNK_MAX as u32),
        fetch: hello.fetch && nature.shares,
        lasting: !nature.breaks,
    };
    // Of the hello if this side dialled, which knows what was answered.
    let checks = (hello.checks || core.config.checks) && nature.breaks;
    let making =
        Making { me: core.here(), peer, nonce: hello.nonce, dialled, kind, nature, terms, checks, pid };
    let connection = Connection::new(core, making);
    lock(&core.connections).push(Arc::clone(&connection));
    core.connected.notify_all();
    if core.closed.load(Ordering::Acquire) {
        // Whoever shuts down may have looked at the connections already.
        connection.end(TransferError::Closed);
    }
    connection
}

/// Whether this process can read the memory of that one, and it is the peer's.
fn can_read(pid: i32, probe: u64, peer: Member) -> bool {
    let mut word = [0; 8];
    let read = sys::read_process(pid, probe, &Piece::of_mut(&mut word));
    read == Ok(8) && u64::from_ne_bytes(word) == peer.incarnation.get()
}

//! Accepts wires from other engines: performs the handshake, decides whether to admit the dialler, and adds the wire
//! to a connection as a lane.
//!
//! Handshakes block, so each runs on its own thread, with a time limit. [`dial`](super::dial) makes connections to
//! other engines. Begin at `start_listeners`, then `admit_hello`.
//!
//! The dialler introduces itself with a *hello*. `admit_hello` refuses a hello that names another incarnation than
//! this engine's. It also refuses a hello from an incarnation that is not in the membership. If two engines dial each
//! other at the same time, they keep the connection that was dialled by the first of the two members, in the order of
//! `MemberId::precedes`. Without this rule, the engines could end up with two connections, or with none.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use muster_clock as clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::clique_cache::CliqueKey;
use super::connect::{
    HELLO_TIMEOUT, add_lane, error_of_failed_connect, fabric_for_wire, incarnation_word_address,
    is_peer_of_own_user, may_use_cliques, open_connection, wrap_and_handshake,
};
use super::dial::dial_clique;
use super::handshake_limits::HandshakeGuard;
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::membership::{MemberId, Membership};
use crate::base::sync::lock;
use crate::io::wire::{BlockingWire, HandshakeRole, Listener, Wire};
use crate::protocol::hello::{Hello, HelloAnswer, HelloVerdict};
use crate::session::connection::Connection;
use crate::session::handshake::{self, HelloError};

/// How long a dialler that does not know the token waits for its refusal, which bounds the guesses that one
/// thread answers.
const UNPROVEN_PAUSE: Duration = Duration::from_secs(1);
/// How long a hello from an incarnation that is not in the membership waits for a membership that has it.
const MEMBERSHIP_WAIT: Duration = Duration::from_secs(3);
/// How long a lane waits for the connection that it joins, because the dialler may know of the connection
/// first.
const CONNECTION_WAIT: Duration = Duration::from_millis(500);

/// Starts a thread for each listener, which accepts wires until the engine ends.
pub fn start_listeners(
    shared: &Arc<EngineShared>,
    listeners: Vec<Arc<dyn Listener>>,
    threads: &mut Vec<JoinHandle<()>>,
) -> io::Result<()> {
    for listener in listeners {
        lock(&shared.listeners).push(Arc::clone(&listener));
        let shared = Arc::clone(shared);
        let name = format!("muster-accept-{}", listener.kind());
        threads.push(thread::Builder::new().name(name).spawn(move || {
            loop {
                let accepted = listener.accept();
                if shared.closed.load(Ordering::Acquire) {
                    return;
                }
                match accepted {
                    Ok(wire) => spawn_handshake(&shared, wire),
                    // The process is out of descriptors, or the connection was gone again: neither is a
                    // reason to stop.
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        })?);
    }
    Ok(())
}

/// Wakes the listening threads of an engine that ends.
pub fn stop_listeners(shared: &EngineShared) {
    let listeners = std::mem::take(&mut *lock(&shared.listeners));
    for listener in listeners {
        listener.stop();
    }
    shared.handshakes.close();
}

/// Performs the handshake of an accepted wire on a thread of its own.
fn spawn_handshake(shared: &Arc<EngineShared>, wire: Box<dyn Wire>) {
    if !is_peer_of_own_user(&*wire) {
        return;
    }
    let Some(mut guard) = shared.handshakes.admit(&*wire) else { return };
    let shared = Arc::clone(shared);
    let spawned = thread::Builder::new().name("muster-hello".to_owned()).spawn(move || {
        if let Err(error) = accept_connection_or_lane(&shared, wire, &mut guard) {
            tracing::debug!(%error, "a connection was not taken");
        }
    });
    if let Err(error) = spawned {
        tracing::debug!(%error, "no thread for a handshake");
    }
}

/// Waits [`UNPROVEN_PAUSE`], or until the handshake is ended in favour of another one.
fn delay_refusal(wire: &dyn Wire) {
    // No event is requested: `poll` reports the end of a connection in any case.
    let mut ended = [PollFd::from_borrowed_fd(wire.descriptor(), PollFlags::empty())];
    let _ended_or_over = poll(&mut ended, Timespec::try_from(UNPROVEN_PAUSE).ok().as_ref());
}

/// Performs the handshake, and adds the lane to its connection; creates the connection if the hello begins one.
fn accept_connection_or_lane(
    shared: &Arc<EngineShared>,
    wire: Box<dyn Wire>,
    guard: &mut HandshakeGuard,
) -> Result<(), HelloError> {
    let until = clock::monotonic() + HELLO_TIMEOUT;
    let is_exposed = wire.capabilities().is_exposed;
    let wire = wrap_and_handshake(shared, wire, HandshakeRole::Accepted, until)?;
    let mut blocking = BlockingWire::new(&*wire, until);
    let dialler =
        match handshake::receive_proven_hello(&mut blocking, shared.key.as_ref(), &clock::random_bytes()) {
            Err(HelloError::Unproven) => {
                delay_refusal(&*wire);
                handshake::send_unproven_refusal(&mut blocking)?;
                return Err(HelloError::Unproven);
            }
            dialler => dialler?,
        };
    // Proven by its proof or its certificate, or as a process of this user on this host.
    let is_proven = shared.key.is_some() || shared.wrapping.identity.is_some() || !is_exposed;
    if is_proven && !guard.mark_proven() {
        return Err(HelloError::Protocol);
    }
    let mut hello = dialler.hello;
    let mut expected = None;
    let (verdict, joined) = admit_hello(shared, &mut hello, &mut expected);
    // The counter comes before the reply, because the refused dialler may read it at once.
    if matches!(verdict, HelloVerdict::StaleTarget(_) | HelloVerdict::StaleDialler(_)) {
        shared.counts.fenced.fetch_add(1, Ordering::Relaxed);
    }
    let heard = joined.as_ref().map_or(0, |connection| connection.last_received_control_number());
    if hello.fabric != fabric_for_wire(shared, &*wire) {
        hello.fabric = 0;
    }
    hello.cliques = hello.cliques && may_use_cliques(shared, &*wire, hello.from);
    let (probe, checks, fabric) = (incarnation_word_address(shared), shared.config.checks, hello.fabric != 0);
    let answer = HelloAnswer { verdict, heard, probe, checks, fabric, cliques: hello.cliques };
    dialler.send_answer(&mut blocking, &answer).inspect_err(|_| {
        if let Some((peer, making)) = expected {
            dial_after_peer_failed(shared, peer, making);
        }
    })?;
    if let Some(connection) = joined {
        return add_lane(&connection, &hello, wire, hello.heard);
    }
    // Only now has the dialler proven that it belongs to the cluster.
    let key = CliqueKey::new(shared.here(), hello.from);
    let old = lock(&shared.cliques).get(key).cloned();
    if let Some(old) = old {
        let how = "it began a new connection".to_owned();
        old.close(TransferError::PeerDead { member: hello.from, how });
        let mut cliques = lock(&shared.cliques);
        expected = cliques.await_peer_attempt(key).map(|making| (hello.from, making));
    }
    let connection = open_connection(shared, &hello, &*wire, hello.from, hello.probe, false);
    add_lane(&connection, &hello, wire, hello.heard).inspect_err(|error| {
        connection.close(error_of_failed_connect(&hello.from, error));
        if let Some((peer, making)) = expected {
            dial_after_peer_failed(shared, peer, making);
        }
    })?;
    shared.on_clique_ready(&connection);
    Ok(())
}

/// Dials the peer if the connection that it had begun does not come and a request waits for it.
fn dial_after_peer_failed(shared: &Arc<EngineShared>, peer: MemberId, making: u64) {
    let key = CliqueKey::new(shared.here(), peer);
    if lock(&shared.cliques).keep_if_awaited(key, making) {
        dial_clique(shared, peer, making);
    }
}

/// Returns the member that dials, if the membership has it. A hello names the dialler by task and incarnation; its flag
/// says whether that is a task of this job or of another one.
fn resolve_dialler(membership: &Membership, hello: &Hello) -> Option<MemberId> {
    if hello.across_jobs {
        return membership.find_member_of_other_jobs(hello.from.task, hello.from.incarnation);
    }
    membership.has(hello.from).then_some(hello.from)
}

/// Decides whether a hello is welcome, and which connection a lane joins. Writes the dialler with its job to the hello. For
/// a hello that begins a connection, writes the peer and the number of the attempt that is expected to `expected`.
fn admit_hello(
    shared: &Arc<EngineShared>,
    hello: &mut Hello,
    expected: &mut Option<(MemberId, u64)>,
) -> (HelloVerdict, Option<Arc<Connection>>) {
    let here = shared.here();
    if hello.to != here {
        let current = (hello.to.task == here.task).then_some(here.incarnation);
        return (HelloVerdict::StaleTarget(current), None);
    }
    // Incarnations are random: only a membership that names the dialler's task says which of two is newer.
    let asked = *hello;
    let known = shared.wait_for_membership(MEMBERSHIP_WAIT, |membership| resolve_dialler(membership, &asked));
    let Some(known) = known else {
        let current = shared.membership().current_member(hello.from.task).map(|member| member.incarnation);
        let stale = HelloVerdict::StaleDialler(current);
        return (if hello.across_jobs { HelloVerdict::UnknownJob } else { stale }, None);
    };
    hello.from = known;
    if !hello.begins {
        let wanted =
            |connection: &&Arc<Connection>| connection.peer == hello.from && connection.nonce == hello.nonce;
        if let Some(connection) = shared.wait_for_connection(CONNECTION_WAIT, wanted) {
            return (HelloVerdict::Welcome, Some(connection));
        }
        return (HelloVerdict::UnknownConnection, None);
    }
    let key = CliqueKey::new(here, hello.from);
    let mut cliques = lock(&shared.cliques);
    if shared.closed.load(Ordering::Acquire) {
        // The shutdown has dropped the attempts of this side, so it cannot decide which of two connections
        // takes precedence.
        return (HelloVerdict::StaleTarget(None), None);
    }
    let (pending, old) = (cliques.is_pending(key), cliques.get(key).is_some());
    // Both sides dial, or dialled a moment ago: the connection of the lower task takes precedence. If the
    // peer has lost that one, this side learns it in a moment, and the peer dials again.
    if (pending || old) && here.precedes(hello.from) {
        return (HelloVerdict::Busy, None);
    }
    if !pending && !old {
        if cliques.len() >= shared.config.cliques_max.saturating_mul(2) {
            drop(cliques);
            shared.request_surplus_evictions();
            return (HelloVerdict::Full, None);
        }
        // At once, so that this side does not begin to dial as well.
        *expected = cliques.await_peer_attempt(key).map(|making| (hello.from, making));
    }
    (HelloVerdict::Welcome, None)
}

//! Dials other engines: makes connections, and adds further lanes to them.
//!
//! Dialling blocks, so it runs on the threads of a [`thread_pool`](super::thread_pool), with time limits.
//! [`accept`](super::accept) is the other side. Begin at [`dial_clique`].

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_clock as clock;

use super::clique_cache::CliqueKey;
use super::connect::{
    HELLO_TIMEOUT, add_lane, error_of_failed_connect, fabric_for_wire, incarnation_word_address,
    is_peer_of_own_user, may_use_cliques, open_connection, wrap_and_handshake,
};
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::launch_metrics::LaunchStage;
use crate::base::membership::{EngineAddress, MemberId};
use crate::base::sync::lock;
use crate::base::transport::{TransportChoice, TransportKind};
use crate::io::wire::{self, BlockingWire, Endpoint, HandshakeRole, Wire};
use crate::protocol::hello::{Hello, HelloVerdict};
use crate::session::connection::{Connection, SessionHost};
use crate::session::handshake::{self, HelloError};

/// The number of the lane that begins a connection.
const FIRST_LANE: u16 = 0;

/// Makes a clique, on a thread of its own.
pub fn dial_clique(shared: &Arc<EngineShared>, peer: MemberId, making: u64) {
    let weak = Arc::downgrade(shared);
    let spawned = shared.diallers.run(move || {
        let Some(dialling) = weak.upgrade() else { return };
        let (key, began) = (CliqueKey::new(dialling.here(), peer), clock::monotonic());
        match dial_with_retries(&dialling, peer, making) {
            Ok(true) => dialling.launch_metrics.record_stage_time(LaunchStage::Connect, began.elapsed()),
            Ok(false) => {}
            Err(error) => dialling.on_clique_failed(key, Some(making), &error),
        }
    });
    if let Err(error) = spawned {
        let why = format!("no thread to dial on: {error}");
        let transport = transport_for_error(shared.config.transport);
        let error = TransferError::Transport { transport, member: peer, why };
        shared.on_clique_failed(CliqueKey::new(shared.here(), peer), Some(making), &error);
    }
}

/// Makes a clique whose connection this side agreed to end, unless the peer decides that it stays.
pub fn dial_after_leave_decision(shared: &Arc<EngineShared>, old: Arc<Connection>, making: u64) {
    let (weak, peer) = (Arc::downgrade(shared), old.peer);
    let key = CliqueKey::new(shared.here(), peer);
    let spawned = shared.diallers.run(move || {
        let Some(shared) = weak.upgrade() else { return };
        match old.wait_for_leave_decision(clock::monotonic() + shared.config.dial_timeout) {
            Ok(None) => dial_clique(&shared, peer, making),
            Ok(Some(kept)) if lock(&shared.cliques).is_current_attempt(key, making) => {
                shared.hand_connection_to_waiters(&kept)
            }
            // The peer has begun another connection.
            Ok(Some(_)) => {}
            Err(error) => shared.on_clique_failed(key, Some(making), &error),
        }
    });
    if let Err(error) = spawned {
        let why = format!("no thread to wait on: {error}");
        let error = TransferError::Transport { transport: TransportKind::Tcp, member: peer, why };
        shared.on_clique_failed(key, Some(making), &error);
    }
}

/// Dials until there is a connection. Returns false, without one, if no request waits for this attempt any
/// more.
fn dial_with_retries(shared: &Arc<EngineShared>, peer: MemberId, making: u64) -> Result<bool, TransferError> {
    let key = CliqueKey::new(shared.here(), peer);
    let mut until = clock::monotonic() + shared.config.dial_timeout;
    let mut why = Vec::new();
    let mut pause = Duration::from_millis(20);
    loop {
        if shared.closed.load(Ordering::Acquire) {
            return Err(TransferError::Closed);
        }
        let abandoned = {
            let mut cliques = lock(&shared.cliques);
            if !cliques.is_current_attempt(key, making) {
                return Ok(false);
            }
            cliques.abandon_if_unwanted(key, making)
        };
        if let Some(waiters) = abandoned {
            // The requests were dropped; they are told all the same, so that they release what they hold.
            waiters.into_iter().for_each(|waiter| waiter.notify(Err(TransferError::Dropped)));
            return Ok(false);
        }
        let membership = shared.membership();
        let Some(info) = membership.member_info(peer) else {
            return Err(TransferError::of_absent_member(peer, &membership));
        };
        why.clear();
        let mut refused = 0;
        let endpoints_by_preference = endpoints_by_preference(shared, peer, &info.address);
        let count = endpoints_by_preference.len();
        for endpoint in endpoints_by_preference {
            match dial_and_exchange_hellos(shared, peer, &*endpoint, None) {
                Ok(dialled) => {
                    return open_dialled_connection(shared, peer, &info.address, dialled).map(|()| true);
                }
                // The peer's connection takes precedence, and arrives in a moment.
                Err(HelloError::Refused(HelloVerdict::Busy)) => {
                    why =
                        vec![format!("{endpoint}: it is dialling as well, and its connection does not come")];
                    break;
                }
                // The program there has not named this task yet. It may at any time, so the attempt ends only with the
                // requests that wait for it.
                Err(HelloError::Refused(HelloVerdict::UnknownJob)) => {
                    until = clock::monotonic() + shared.config.dial_timeout;
                    break;
                }
                Err(HelloError::Refused(HelloVerdict::StaleTarget(current))) => {
                    shared.counts.fenced.fetch_add(1, Ordering::Relaxed);
                    return Err(TransferError::StaleIncarnation { member: peer, current });
                }
                Err(error) => {
                    let dead = matches!(&error, HelloError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
                    refused += usize::from(dead);
                    // A refusal by the peer arrived over a path that works.
                    if !endpoint.capabilities().is_breakable && !matches!(error, HelloError::Refused(_)) {
                        shared.back_off_transport(peer, &format!("{endpoint}: {error}"));
                    }
                    why.push(format!("{endpoint}: {error}"));
                }
            }
        }
        if count > 0 && refused == count {
            return Err(TransferError::PeerDead { member: peer, how: why.join("; ") });
        }
        if count == 0 {
            why.push("it has no address that the chosen transport can use".to_owned());
        }
        if clock::monotonic() + pause >= until || count == 0 {
            let transport = transport_for_error(shared.config.transport);
            return Err(TransferError::Transport { transport, member: peer, why: why.join("; ") });
        }
        shared.wait_before_retry(peer, pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Returns the transport to name in the error of a connection that could not be made: the configured one, or
/// the last that is tried.
const fn transport_for_error(choice: TransportChoice) -> TransportKind {
    match choice {
        TransportChoice::Shm => TransportKind::Shm,
        TransportChoice::Pvm => TransportKind::Pvm,
        TransportChoice::Unix => TransportKind::Unix,
        TransportChoice::Auto | TransportChoice::Tcp => TransportKind::Tcp,
        TransportChoice::Loopback => TransportKind::Loopback,
    }
}

/// Returns the endpoints of a peer in order of preference. A path that has failed comes last for a time.
fn endpoints_by_preference(
    shared: &EngineShared,
    peer: MemberId,
    address: &EngineAddress,
) -> Vec<Box<dyn Endpoint>> {
    let mut endpoints = wire::endpoints(shared.config.transport, &shared.address, address);
    if shared.backoff.is_backed_off(peer, clock::monotonic()) {
        endpoints.sort_by_key(|endpoint| !endpoint.capabilities().is_breakable);
    }
    endpoints
}

/// The lane that joins an existing connection: its number, and whether it carries control frames.
struct JoiningLane<'a> {
    connection: &'a Connection,
    lane: u16,
    control: bool,
}

struct DialledWire {
    wire: Box<dyn Wire>,
    hello: Hello,
    heard: u32,
    probe: u64,
}

fn dial_and_exchange_hellos(
    shared: &EngineShared,
    peer: MemberId,
    endpoint: &dyn Endpoint,
    joining: Option<JoiningLane<'_>>,
) -> Result<DialledWire, HelloError> {
    let wire = endpoint.dial(HELLO_TIMEOUT)?;
    if !is_peer_of_own_user(&*wire) {
        return Err(HelloError::Protocol);
    }
    let until = clock::monotonic() + HELLO_TIMEOUT;
    let wire = wrap_and_handshake(shared, wire, HandshakeRole::Dialled, until)?;
    let hello = Hello {
        from: shared.here(),
        to: peer,
        across_jobs: !peer.job.is_own(),
        nonce: joining.as_ref().map_or_else(clock::random_u64, |joining| joining.connection.nonce),
        lane: joining.as_ref().map_or(FIRST_LANE, |joining| joining.lane),
        control: joining.as_ref().is_none_or(|joining| joining.control),
        begins: joining.is_none(),
        fetch: shared.config.transport != TransportChoice::Unix,
        checks: shared.config.checks,
        chunk: shared.config.chunk,
        heard: joining.as_ref().map_or(0, |joining| joining.connection.last_received_control_number()),
        fabric: if joining.is_none() { fabric_for_wire(shared, &*wire) } else { 0 },
        cliques: joining.is_none() && may_use_cliques(shared, &*wire, peer),
        probe: incarnation_word_address(shared),
    };
    let mut blocking = BlockingWire::new(&*wire, until);
    let answer = handshake::perform_dialler_handshake(
        &mut blocking,
        &hello,
        shared.key.as_ref(),
        &clock::random_bytes(),
    )?;
    let fabric = if answer.fabric { hello.fabric } else { 0 };
    let cliques = hello.cliques && answer.cliques;
    let hello = Hello { checks: hello.checks || answer.checks, fabric, cliques, ..hello };
    Ok(DialledWire { wire, hello, heard: answer.heard, probe: answer.probe })
}

/// Gives a new connection its lanes, and serves the requests that wait for it.
fn open_dialled_connection(
    shared: &Arc<EngineShared>,
    peer: MemberId,
    address: &EngineAddress,
    dialled: DialledWire,
) -> Result<(), TransferError> {
    // The peer has accepted this connection and may use it already, so it replaces another one that was made
    // meanwhile: had that one still been in use, the peer would have refused this one as busy.
    let DialledWire { wire, hello, probe, .. } = dialled;
    let breaks = wire.capabilities().is_breakable;
    let connection = open_connection(shared, &hello, &*wire, peer, probe, true);
    if let Err(error) = add_lane(&connection, &hello, wire, 0) {
        let error = error_of_failed_connect(&peer, &error);
        connection.close(error.clone());
        return Err(error);
    }
    if breaks {
        for number in 1..=shared.config.lanes as u16 {
            // One lane is enough to go on: without chunk lanes the control lane carries chunks.
            if let Err(error) = dial_lane(shared, &connection, address, number, false) {
                tracing::debug!(%peer, %error, lane = number, "a lane could not be made");
            }
        }
    }
    shared.on_clique_ready(&connection);
    Ok(())
}

/// Adds a lane to a connection that this side dialled.
pub fn dial_lane(
    shared: &Arc<EngineShared>,
    connection: &Arc<Connection>,
    address: &EngineAddress,
    lane: u16,
    control: bool,
) -> Result<(), HelloError> {
    let mut last = HelloError::Protocol;
    for endpoint in endpoints_for_further_lanes(shared, connection.peer, address) {
        match dial_and_exchange_hellos(
            shared,
            connection.peer,
            &*endpoint,
            Some(JoiningLane { connection, lane, control }),
        ) {
            Ok(DialledWire { wire, hello, heard, .. }) => return add_lane(connection, &hello, wire, heard),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns the endpoints at which a connection that may lose lanes dials further ones.
pub fn endpoints_for_further_lanes(
    shared: &EngineShared,
    peer: MemberId,
    address: &EngineAddress,
) -> Vec<Box<dyn Endpoint>> {
    let mut endpoints_by_preference = endpoints_by_preference(shared, peer, address);
    endpoints_by_preference.retain(|endpoint| endpoint.capabilities().is_breakable);
    endpoints_by_preference
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Arena, DeviceId, EngineConfig, Incarnation, LaunchOptions, MemberInfo, Membership, TaskId,
        TransferEngine, TransferKey, TransferSpec,
    };

    #[test]
    fn what_cannot_be_dialled_is_named_by_what_was_chosen() {
        let member = |task| MemberId::of_own_job(TaskId(task), Incarnation::new(7).unwrap());
        let mut config = EngineConfig::new(member(0), vec![DeviceId(0)]);
        config.transport = TransportChoice::Unix;
        let engine = TransferEngine::start(config).unwrap();
        let peer = |task, address: EngineAddress| {
            let devices = vec![DeviceId(task)];
            (TaskId(task), MemberInfo { incarnation: member(task).incarnation, address, devices })
        };
        let peers = [peer(0, engine.address().clone()), peer(1, EngineAddress::default())].into();
        engine.on_membership(Membership::of_own_job(peers));
        let buffer = Arena::new(4096).unwrap().allocate(16).unwrap();
        let spec = TransferSpec::send(buffer.full_span(), DeviceId(0), DeviceId(1), TransferKey(1));
        let error = engine.prepare(vec![spec], LaunchOptions::default()).wait().unwrap_err().to_string();
        assert!(error.contains("unix") && !error.contains("tcp"), "{error}");
    }
}

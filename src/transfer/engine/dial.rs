//! What this side dials: connections, and lost lanes anew.
//!
//! As in [`accept`](crate::engine::accept) all of it blocks, on threads of its own with time limits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::base::error::TransferError;
use crate::base::identity::{Address, Member};
use crate::base::meters::Stage;
use crate::base::sync::lock;
use crate::base::transport::Choice;
use crate::base::transport::TransportKind;
use crate::engine::accept::{HELLO_TIMEOUT, add, begin, cannot, fit, is_ours, probe};
use crate::engine::cliques::CliqueKey;
use crate::engine::shared::Core;
use crate::io::wire::{self, Side, Spoken, Way, Wire};
use crate::protocol::hello::{self, Hello, HelloError, Verdict};
use crate::session::connection::Connection;
use muster_clock as clock;

/// A lost lane is dialled at least so often while its connection cannot do without it.
const OFTEN: Duration = Duration::from_millis(250);
/// And so often when it could not be made anew for long, and others carry the chunks.
const RARELY: Duration = Duration::from_secs(1);

/// The number of the lane that begins a connection.
const FIRST_LANE: u16 = 0;

/// Makes a clique, on a thread of its own.
pub fn make(core: &Arc<Core>, peer: Member, making: u64) {
    let dialling = Arc::clone(core);
    let spawned = core.diallers.run(move || {
        let (key, began) = (CliqueKey::new(dialling.here(), peer), clock::monotonic());
        match dial_all(&dialling, peer, making) {
            Ok(true) => dialling.meters.observe_time(Stage::Connect, began.elapsed()),
            Ok(false) => {}
            Err(error) => dialling.clique_failed(key, Some(making), &error),
        }
    });
    if let Err(error) = spawned {
        let why = format!("no thread to dial on: {error}");
        let transport = kind(core.config.transport);
        let error = TransferError::Transport { transport, member: peer, why };
        core.clique_failed(CliqueKey::new(core.here(), peer), Some(making), &error);
    }
}

/// Whether it made a connection; not if nobody wants it from here any more.
fn dial_all(core: &Arc<Core>, peer: Member, making: u64) -> Result<bool, TransferError> {
    let key = CliqueKey::new(core.here(), peer);
    let until = clock::monotonic() + core.config.dial_timeout;
    let mut why = Vec::new();
    let mut pause = Duration::from_millis(20);
    loop {
        if core.closed.load(Ordering::Acquire) {
            return Err(TransferError::Closed);
        }
        let abandoned = {
            let mut cliques = lock(&core.cliques);
            if !cliques.is_making(key, making) {
                return Ok(false);
            }
            cliques.abandon(key, making)
        };
        if let Some(waiters) = abandoned {
            // Whoever asked has gone; they are told all the same, to let go of what they hold.
            waiters.into_iter().for_each(|waiter| waiter.tell(Err(TransferError::Dropped)));
            return Ok(false);
        }
        let membership = core.membership();
        let Some(info) = membership.peers.get(&peer.task).filter(|info| info.incarnation == peer.incarnation)
        else {
            let current = membership.member(peer.task).map(|member| member.incarnation);
            return Err(TransferError::StaleIncarnation { member: peer, current });
        };
        why.clear();
        let mut refused = 0;
        let ways = ways(core, peer, &info.address);
        let count = ways.len();
        for way in ways {
            match dial(core, peer, &*way, None) {
                Ok(dialled) => return establish(core, peer, &info.address, dialled).map(|()| true),
                // Theirs counts: it will be here in a moment.
                Err(HelloError::Refused(Verdict::Busy)) => {
                    why = vec![format!("{way}: it is dialling as well, and its connection does not come")];
                    break;
                }
                Err(HelloError::Refused(Verdict::NotMe(current))) => {
                    core.counts.fenced.fetch_add(1, Ordering::Relaxed);
                    return Err(TransferError::StaleIncarnation { member: peer, current });
                }
                Err(error) => {
                    let dead = matches!(&error, HelloError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
                    refused += usize::from(dead);
                    // What was refused in words came by a way that works.
                    if !way.nature().breaks && !matches!(error, HelloError::Refused(_)) {
                        core.take_detour(peer, &format!("{way}: {error}"));
                    }
                    why.push(format!("{way}: {error}"));
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
            let transport = kind(core.config.transport);
            return Err(TransferError::Transport { transport, member: peer, why: why.join("; ") });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// What a connection is called that was not made: what was chosen, or else the last that is tried.
const fn kind(choice: Choice) -> TransportKind {
    match choice {
        Choice::Shm => TransportKind::Shm,
        Choice::Pvm => TransportKind::Pvm,
        Choice::Unix => TransportKind::Unix,
        Choice::Auto | Choice::Tcp => TransportKind::Tcp,
        Choice::Loopback => TransportKind::Loopback,
    }
}

/// The ways to a peer, the best first; one that has failed comes last for a time.
fn ways(core: &Core, peer: Member, address: &Address) -> Vec<Box<dyn Way>> {
    let mut ways = wire::ways(core.config.transport, &core.address, address);
    if core.detours.has(peer, clock::monotonic()) {
        ways.sort_by_key(|way| !way.nature().breaks);
    }
    ways
}

/// A lane of a connection that is there: which, and whether it is the one for control.
struct Joining<'a> {
    connection: &'a Connection,
    lane: u16,
    control: bool,
}

struct Dialled {
    wire: Box<dyn Wire>,
    hello: Hello,
    heard: u32,
    probe: u64,
}

fn dial(
    core: &Core,
    peer: Member,
    way: &dyn Way,
    joining: Option<Joining<'_>>,
) -> Result<Dialled, HelloError> {
    let wire = way.dial(HELLO_TIMEOUT)?;
    if !is_ours(&*wire) {
        return Err(HelloError::Protocol);
    }
    let until = clock::monotonic() + HELLO_TIMEOUT;
    let wire = fit(core, wire, Side::Dialled, until)?;
    let hello = Hello {
        from: core.here(),
        to: peer,
        nonce: joining.as_ref().map_or_else(clock::random_u64, |joining| joining.connection.nonce),
        lane: joining.as_ref().map_or(FIRST_LANE, |joining| joining.lane),
        control: joining.as_ref().is_none_or(|joining| joining.control),
        begins: joining.is_none(),
        fetch: core.config.transport != Choice::Unix,
        checks: core.config.checks,
        chunk: core.config.chunk,
        heard: joining.as_ref().map_or(0, |joining| joining.connection.control_heard()),
        probe: probe(core),
    };
    let mut spoken = Spoken::new(&*wire, until);
    let answer = hello::dial(&mut spoken, &hello, core.key.as_ref(), &clock::random_bytes())?;
    let hello = Hello { checks: hello.checks || answer.checks, ..hello };
    Ok(Dialled { wire, hello, heard: answer.heard, probe: answer.probe })
}

/// A connection was made: gives it its lanes, and serves those who wait for it.
fn establish(
    core: &Arc<Core>,
    peer: Member,
    address: &Address,
    dialled: Dialled,
) -> Result<(), TransferError> {
    // The peer has welcomed it, and may use it at this moment. So it counts, even if another one was faster meanwhile: the
    // peer would have said that it is busy if that one still were.
    let Dialled { wire, hello, probe, .. } = dialled;
    let breaks = wire.nature().breaks;
    let connection = begin(core, &hello, &*wire, peer, probe, true);
    if let Err(error) = add(core, &connection, &hello, wire, 0) {
        let error = cannot(&peer, &error);
        connection.end(error.clone());
        return Err(error);
    }
    if breaks {
        for number in 1..=core.config.lanes as u16 {
            // One of them is enough to go on; the control lane serves where there is none.
            if let Err(error) = join(core, &connection, address, number, false) {
                tracing::debug!(%peer, %error, lane = number, "a lane could not be made");
            }
        }
    }
    core.clique_ready(&connection);
    Ok(())
}

/// Adds a lane to a connection of this side's dialling.
fn join(
    core: &Arc<Core>,
    connection: &Arc<Connection>,
    address: &Address,
    lane: u16,
    control: bool,
) -> Result<(), HelloError> {
    let mut last = HelloError::Protocol;
    for way in more_ways(core, connection.peer, address) {
        match dial(core, connection.peer, &*way, Some(Joining { connection, lane, control })) {
            Ok(Dialled { wire, hello, heard, .. }) => return add(core, connection, &hello, wire, heard),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The ways by which a connection that may lose lanes gets more of them.
fn more_ways(core: &Core, peer: Member, address: &Address) -> Vec<Box<dyn Way>> {
    let mut ways = ways(core, peer, address);
    ways.retain(|way| way.nature().breaks);
    ways
}

/// Makes a lost lane anew, on a thread of its own: the side that dialled dials again, the other one finds out whether
/// there is still somebody. A peer that nobody listens for any more is dead.
pub fn mend(core: &Arc<Core>, connection: &Arc<Connection>, control: bool, how: &str) {
    let (mending, broken, how) = (Arc::clone(core), Arc::clone(connection), how.to_owned());
    let spawned = core.diallers.run(move || {
        mend_now(&mending, &broken, control, &how);
    });
    if spawned.is_err() {
        let how = "no thread to mend its connection on".to_owned();
        connection.end(TransferError::PeerDead { member: connection.peer, how });
    }
}

fn mend_now(core: &Arc<Core>, connection: &Arc<Connection>, control: bool, how: &str) {
    let peer = connection.peer;
    let until = clock::monotonic() + core.config.dial_timeout;
    let mut pause = Duration::from_millis(2);
    let dead = |what: String| connection.end(TransferError::PeerDead { member: peer, how: what });
    loop {
        if connection.over().is_some() || core.closed.load(Ordering::Acquire) {
            return;
        }
        if control && connection.has_control_lane() {
            return;
        }
        let membership = core.membership();
        let Some(info) = membership.peers.get(&peer.task).filter(|info| info.incarnation == peer.incarnation)
        else {
            return;
        };
        if connection.dialled {
            // A lane that is made anew has a number of its own: what the old one carried is told apart by it.
            let number = core.next_lane();
            match join(core, connection, &info.address, number, control) {
                Ok(()) => {
                    core.counts.lanes_made.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Err(HelloError::Refused(Verdict::NotMe(_) | Verdict::NoSuchLink)) => {
                    return dead(format!("{how}; it does not know the connection any more"));
                }
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return dead(format!("{how}; nobody listens at its address"));
                }
                // The connection goes on with the lanes that it has: only without control frames it cannot.
                Err(error) if clock::monotonic() >= until && !control => {
                    tracing::debug!(%peer, %error, "a lane cannot be made anew, and is tried again");
                    pause = RARELY;
                }
                Err(error) if clock::monotonic() >= until => {
                    return dead(format!("{how}; dialled in vain: {error}"));
                }
                Err(_) => {}
            }
        } else {
            let refused = |way: &dyn Way| {
                let dialled = way.dial(HELLO_TIMEOUT);
                dialled.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            };
            let ways = more_ways(core, peer, &info.address);
            if !ways.is_empty() && ways.iter().all(|way| refused(&**way)) {
                return dead(format!("{how}; nobody listens at its address"));
            }
            if !control {
                return;
            }
            if clock::monotonic() >= until {
                return dead(format!("{how}; it did not come back"));
            }
        }
        thread::sleep(pause);
        pause = (pause * 2).min(if pause < RARELY { OFTEN } else { RARELY });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Arena, Config, DeviceId, Engine, Incarnation, Membership, Options, Peer, Spec, TaskId, TransferKey,
    };

    #[test]
    fn what_cannot_be_dialled_is_named_by_what_was_chosen() {
        let member = |task| Member { task: TaskId(task), incarnation: Incarnation::new(7).unwrap() };
        let mut config = Config::new(member(0), vec![DeviceId(0)]);
        config.transport = Choice::Unix;
        let engine = Engine::start(config).unwrap();
        let peer = |task, address: Address| {
            let devices = vec![DeviceId(task)];
            (TaskId(task), Peer { incarnation: member(task).incarnation, address, devices })
        };
        let peers = [peer(0, engine.address().clone()), peer(1, Address::default())].into();
        engine.on_membership(Membership { peers });
        let buffer = Arena::new(4096).unwrap().allocate(16).unwrap();
        let spec = Spec::send(buffer.span(), DeviceId(0), DeviceId(1), TransferKey(1));
        let error = engine.prepare(vec![spec], Options::default()).wait().unwrap_err().to_string();
        assert!(error.contains("unix") && !error.contains("tcp"), "{error}");
    }
}

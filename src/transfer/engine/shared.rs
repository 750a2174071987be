//! What an engine consists of: its parts, how they hear of one another, and who looks after limits.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use crate::base::counts::{Counters, Counts};
use crate::base::error::TransferError;
use crate::base::identity::{Address, Member, Membership, TaskId};
use crate::base::meters::Meters;
use crate::base::sync::{lock, with_all};
use crate::base::transport::Choice;
use crate::base::transport::TransportKind;
use crate::engine::cliques::{CliqueKey, Cliques, Settled};
use crate::engine::config::Config;
use crate::engine::dial;
use crate::engine::handshake_limits::Handshakes;
use crate::engine::path_backoff::Detours;
use crate::engine::thread_pool::Threads;
use crate::io::fetch::Copiers;
use crate::io::lane::Lane;
use crate::io::reactor::Reactor;
use crate::io::wire::{Identity, Listener};
use crate::launch::outcome::Launch;
use crate::launch::peer_launch::{Limits, give_up};
use crate::protocol::hello::Key;
use crate::protocol::link::{GroupId, Numbers};
use crate::session::connection::{Connection, Kept};
use muster_clock as clock;

/// How often a peer is looked after, and asked whether it lives, within the shortest limit of what waits for it: silence
/// is known to a part of that.
const LOOKS: u32 = 32;

/// The most threads that dial: one for each connection that an engine keeps by default, so that peers that do not answer
/// hold up no others.
pub const DIALLERS_MAX: usize = 1024;

/// The inside of an engine.
pub struct Core {
    pub(crate) config: Config,
    pub(crate) address: Address,
    /// What TLS connections are made of, if there are some.
    pub(crate) identity: Option<Identity>,
    /// A word that holds this life's incarnation: whoever reads it there can read this process's memory.
    pub(crate) probe: Box<AtomicU64>,
    pub(crate) membership: RwLock<Membership>,
    pub(crate) changed: (Mutex<()>, Condvar),
    pub(crate) cliques: Mutex<Cliques>,
    pub(crate) connections: Mutex<Vec<Arc<Connection>>>,
    /// Tells whoever waits for a connection that there is another one.
    pub(crate) connected: Condvar,
    pub(crate) reactors: Vec<Arc<Reactor>>,
    pub(crate) copiers: Arc<Copiers>,
    pub(crate) counts: Counts,
    pub(crate) meters: Arc<Meters>,
    pub(crate) detours: Detours,
    pub(crate) closed: AtomicBool,
    /// What the cluster token gives, if there is one.
    pub(crate) key: Option<Key>,
    /// Those of diallers, in progress.
    pub(crate) handshakes: Handshakes,
    /// The threads that dial.
    pub(crate) diallers: Threads,
    /// Stopped when the engine ends, to wake those who accept.
    pub(crate) listeners: Mutex<Vec<Arc<dyn Listener>>>,
    pub(crate) keeper: (Mutex<Option<Instant>>, Condvar),
    pub(crate) lanes: AtomicUsize,
    pub(crate) numbers: Mutex<HashMap<Member, Numbers>>,
    /// Bytes moved with each task, whichever life of it and connection. Connections end at any moment: what they moved is
    /// counted here as they move it.
    pub(crate) moved: Mutex<BTreeMap<TaskId, Arc<Counters>>>,
    /// Launches with a deadline that may still wait for their connections.
    pub(crate) expected: Mutex<Vec<(Instant, Weak<Launch>)>>,
}

/// What ends because of who has gone.
enum Lost {
    /// A connection that is being made.
    Making(CliqueKey),
    /// One that is there.
    Connection(Arc<Connection>),
}

impl Core {
    pub(crate) const fn here(&self) -> Member {
        self.config.here
    }

    pub(crate) fn reactor(&self, lane: u16) -> &Arc<Reactor> {
        &self.reactors[lane as usize % self.reactors.len()]
    }

    /// The numbers of launches with a life of a peer.
    pub(crate) fn numbers(&self, peer: Member) -> Numbers {
        lock(&self.numbers).entry(peer).or_default().clone()
    }

    /// Where bytes are counted that are moved with a task.
    pub(crate) fn moved(&self, task: TaskId) -> Arc<Counters> {
        Arc::clone(lock(&self.moved).entry(task).or_default())
    }

    /// Nothing is launched with a number that was taken: a peer that has launched its own is told.
    pub(crate) fn withdraw(&self, peer: Member, at: GroupId) {
        let connections: Vec<_> =
            lock(&self.connections).iter().filter(|connection| connection.peer == peer).cloned().collect();
        for connection in connections {
            connection.withdraw(at, "the other side's launch of the same number failed before it began");
        }
    }

    pub(crate) fn membership(&self) -> Membership {
        self.membership.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until `ask` has an answer of the membership, or the time is over.
    pub(crate) fn await_membership<R>(
        &self,
        time: Duration,
        ask: impl Fn(&Membership) -> Option<R>,
    ) -> Option<R> {
        let until = clock::monotonic() + time;
        let mut guard = lock(&self.changed.0);
        loop {
            if let Some(answer) = ask(&self.membership.read().unwrap_or_else(PoisonError::into_inner)) {
                return Some(answer);
            }
            let left = until.checked_duration_since(clock::monotonic())?;
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            guard = self.changed.1.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until there is such a connection, or the time is over.
    pub(crate) fn await_connection(
        &self,
        time: Duration,
        wanted: impl Fn(&&Arc<Connection>) -> bool,
    ) -> Option<Arc<Connection>> {
        let until = clock::monotonic() + time;
        let mut connections = lock(&self.connections);
        loop {
            if let Some(found) = connections.iter().find(&wanted) {
                return Some(Arc::clone(found));
            }
            let left = until.checked_duration_since(clock::monotonic())?;
            let told = self.connected.wait_timeout(connections, left);
            connections = told.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A connection was made: all who wait for its clique are served, in their order.
    pub(crate) fn clique_ready(&self, connection: &Arc<Connection>) {
        self.serve(&Kept::first(connection));
        self.make_room();
    }

    /// Serves all who wait for a clique, whose connection is kept meanwhile.
    pub(crate) fn serve(&self, kept: &Kept) {
        let connection = kept.connection();
        let key = CliqueKey::new(connection.me, connection.peer);
        let replaced = loop {
            let settled = lock(&self.cliques).settle(key, connection, clock::monotonic());
            match settled {
                Settled::Waited(waiters) => {
                    waiters.into_iter().for_each(|waiter| waiter.tell(Ok(kept.again())));
                }
                Settled::Ready(replaced) => break replaced,
            }
        };
        if let Some(replaced) = replaced {
            let how = "another connection with it took the place of this one".to_owned();
            replaced.end(TransferError::PeerDead { member: replaced.peer, how });
        }
        // The membership may have changed, or the engine ended, while it was being made and nobody could see it.
        if self.closed.load(Ordering::Acquire) {
            connection.end(TransferError::Closed);
        } else if !self.membership.read().unwrap_or_else(PoisonError::into_inner).has(connection.peer) {
            let member = connection.peer;
            let current = self.membership().member(member.task).map(|member| member.incarnation);
            connection.end(TransferError::StaleIncarnation { member, current });
        }
        if connection.over().is_some() {
            lock(&self.cliques).forget(connection);
        }
    }

    /// Nobody uses a connection any more: it may be one of too many.
    pub(crate) fn is_unused(&self) {
        let crowded = lock(&self.cliques).is_crowded(self.config.cliques_max, clock::monotonic());
        if crowded {
            self.make_room();
        }
    }

    /// Asks the peers of connections that nobody uses, if there are too many, whether they may end.
    pub(crate) fn make_room(&self) {
        // Without the lock, which whatever comes of the question takes.
        let surplus = lock(&self.cliques).surplus(self.config.cliques_max, clock::monotonic());
        surplus.iter().for_each(Connection::ask_to_leave);
    }

    /// The peer has decided that a connection stays that this side had agreed to end.
    pub(crate) fn has_stayed(&self, connection: &Arc<Connection>) {
        let mut cliques = lock(&self.cliques);
        if connection.over().is_none() {
            cliques.restore(connection, clock::monotonic());
        }
    }

    /// A connection made room for others: its peer agreed.
    pub(crate) fn has_left(&self, connection: &Arc<Connection>) {
        lock(&self.cliques).evict(connection);
    }

    /// Makes a clique whose connection this side agreed to end, unless its peer decides that it stays.
    pub(crate) fn make_unless_it_stays(self: &Arc<Self>, old: Arc<Connection>, making: u64) {
        let (core, peer) = (Arc::clone(self), old.peer);
        let key = CliqueKey::new(self.here(), peer);
        let spawned = self.diallers.run(move || {
            match old.decided(clock::monotonic() + core.config.dial_timeout) {
                Ok(None) => dial::make(&core, peer, making),
                Ok(Some(kept)) if lock(&core.cliques).is_making(key, making) => core.serve(&kept),
                // The peer has begun another one.
                Ok(Some(_)) => {}
                Err(error) => core.clique_failed(key, Some(making), &error),
            }
        });
        if let Err(error) = spawned {
            let why = format!("no thread to wait on: {error}");
            let error = TransferError::Transport { transport: TransportKind::Tcp, member: peer, why };
            self.clique_failed(key, Some(making), &error);
        }
    }

    /// A clique cannot be made.
    pub(crate) fn clique_failed(&self, key: CliqueKey, making: Option<u64>, error: &TransferError) {
        let waiters = lock(&self.cliques).give_up(key, making);
        for waiter in waiters {
            waiter.tell(Err(error.clone()));
        }
    }

    /// Ends everything with those who have gone, all of it at the same time: whoever hears of one end, on the thread that
    /// brings it about, holds up no other.
    pub(crate) fn lose(&self, gone: impl Fn(Member) -> bool + Copy, error: impl Fn(Member) -> TransferError) {
        let making = lock(&self.cliques).pending(gone).into_iter().map(|key| {
            let member = key.members().iter().copied().find(|member| gone(*member)).unwrap_or(self.here());
            (Lost::Making(key), error(member))
        });
        let mut lost: Vec<_> = making.collect();
        // All that there are: one that is just being made is not in the cache yet, or not any more.
        for connection in lock(&self.connections).iter().filter(|connection| gone(connection.peer)) {
            lost.push((Lost::Connection(Arc::clone(connection)), error(connection.peer)));
        }
        with_all(&lost, |(what, error)| match what {
            Lost::Making(key) => self.clique_failed(*key, None, error),
            Lost::Connection(connection) => connection.end(error.clone()),
        });
    }

    pub(crate) fn connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        tracing::debug!(peer = %connection.peer, %error, "connection over");
        if !connection.is_gone() && !matches!(error, TransferError::Closed) {
            self.meters.aborted(error);
        }
        lock(&self.cliques).forget(connection);
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
    }

    /// The best way to a peer has failed although it may live: for a time, others are tried first.
    pub(crate) fn take_detour(&self, peer: Member, how: &str) {
        if self.config.transport == Choice::Auto && self.membership().has(peer) {
            tracing::debug!(%peer, how, "other ways come first for a time");
            self.detours.add(peer, clock::monotonic());
        }
    }

    /// A number for a lane that takes the place of another. Those of the first lanes are below all of these.
    pub(crate) fn next_lane(&self) -> u16 {
        const FIRST: usize = 1000;
        (FIRST + self.lanes.fetch_add(1, Ordering::Relaxed) % (usize::from(u16::MAX) - FIRST)) as u16
    }

    pub(crate) fn lane_lost(self: &Arc<Self>, connection: &Arc<Connection>, lane: &Arc<Lane>, how: &str) {
        dial::mend(self, connection, lane.control, how);
    }

    /// A launch has to be over by then, whether it has its connections or not.
    pub(crate) fn expect(&self, launch: &Arc<Launch>, deadline: Instant) {
        lock(&self.expected).push((deadline, Arc::downgrade(launch)));
        self.look_at(deadline);
    }

    /// Has the keeper look after launches with these limits.
    pub(crate) fn watch(&self, limits: &Limits) {
        let soon = clock::monotonic() + limits.stall / LOOKS;
        self.look_at(limits.deadline.map_or(soon, |deadline| deadline.min(soon)));
    }

    pub(crate) fn look_at(&self, wanted: Instant) {
        let mut planned = lock(&self.keeper.0);
        if planned.is_none_or(|planned| wanted < planned) {
            *planned = Some(wanted);
            self.keeper.1.notify_one();
        }
    }

    /// Looks after limits until the engine ends.
    pub(crate) fn keep(&self) {
        let mut planned = lock(&self.keeper.0);
        while !self.closed.load(Ordering::Acquire) {
            let now = clock::monotonic();
            match *planned {
                None => planned = self.keeper.1.wait(planned).unwrap_or_else(PoisonError::into_inner),
                Some(at) if at > now => {
                    planned = self
                        .keeper
                        .1
                        .wait_timeout(planned, at - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                Some(_) => {
                    *planned = None;
                    drop(planned);
                    let next = self.look_after(now);
                    planned = lock(&self.keeper.0);
                    *planned = match (*planned, next) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    };
                }
            }
        }
    }

    pub(crate) fn look_after(&self, now: Instant) -> Option<Instant> {
        let connections = lock(&self.connections).clone();
        let mut next: Option<Instant> = None;
        let mut late = Vec::new();
        lock(&self.expected).retain(|(deadline, launch)| {
            let Some(launch) = launch.upgrade().filter(|launch| launch.waits()) else { return false };
            if *deadline <= now {
                late.push(launch);
                return false;
            }
            next = Some(next.map_or(*deadline, |next| next.min(*deadline)));
            true
        });
        for launch in late {
            launch.is_late(self.here().task);
        }
        for connection in connections {
            connection.end_if_gone();
            let silent = connection.silent();
            let mut patience: Option<Duration> = None;
            for part in connection.parts() {
                match part.overdue(now, silent) {
                    Err(error) => give_up(&part, error),
                    Ok(None) => {}
                    Ok(Some(at)) => {
                        next = Some(next.map_or(at, |next| next.min(at)));
                        let stall = part.limits.stall;
                        patience = Some(patience.map_or(stall, |least| least.min(stall)));
                    }
                }
            }
            if let Some(patience) = patience {
                if silent >= patience / LOOKS {
                    connection.ping();
                }
                let again = now + patience / LOOKS;
                next = next.map(|next| next.min(again));
            }
        }
        next
    }
}

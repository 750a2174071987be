//! The state that the threads of an engine share: tables, and condition variables by which threads wait for changes
//! of the tables.
//!
//! Other files of this folder find, make and end connections. Begin at [`EngineShared`].

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use muster_cliques::Nccl;
use muster_clock as clock;
use muster_fabric::Fabric;

use super::clique_cache::CliqueCache;
use super::config::EngineConfig;
use super::handshake_limits::HandshakeLimits;
use super::local_launches::LocalLaunches;
use super::path_backoff::PathBackoff;
use super::thread_pool::ThreadPool;
use crate::base::counters::{ByteCounters, FailureCounters};
use crate::base::launch_metrics::LaunchMetrics;
use crate::base::membership::{DeviceId, EngineAddress, MemberId, Membership, PeerTask};
use crate::base::sync::lock;
use crate::io::threads::IoThreads;
use crate::io::wire::{Listener, WireWrappers};
use crate::launch::outcome::Launch;
use crate::launch::peer_launch::LaunchLimits;
use crate::protocol::link::{GroupId, LaunchNumbers};
use crate::protocol::proof::TokenKey;
use crate::session::connection::Connection;

/// How often a waiting launch's peer is checked and pinged within the shortest limit, so that silence is
/// detected within a fraction of that limit.
pub const LOOKS: u32 = 32;

/// The most threads that dial: one for each connection that an engine keeps by default, so that peers that do
/// not answer delay no others.
pub const DIALLERS_MAX: usize = 1024;

/// The state that the threads of an engine share.
pub struct EngineShared {
    this: Weak<Self>,
    pub(super) config: EngineConfig,
    pub(super) address: EngineAddress,
    /// The wrappers of its wires.
    pub(super) wrapping: WireWrappers,
    /// The fabric over which it reads memory of peers, if it is to.
    pub(super) fabric: Option<Fabric>,
    /// NCCL, if bytes between GPUs may move through it.
    pub(super) nccl: Option<&'static Nccl>,
    /// A word that holds this incarnation: a process that can read it can read this process's memory.
    pub(super) probe: Box<AtomicU64>,
    pub(super) membership: RwLock<Membership>,
    pub(super) changed: (Mutex<()>, Condvar),
    pub(super) cliques: Mutex<CliqueCache>,
    pub(super) connections: Mutex<Vec<Arc<Connection>>>,
    /// Notified when a connection is added to `connections`.
    pub(super) connected: Condvar,
    pub(super) io: Arc<IoThreads>,
    pub(super) counts: Arc<FailureCounters>,
    pub(super) launch_metrics: Arc<LaunchMetrics>,
    pub(super) backoff: PathBackoff,
    pub(super) closed: AtomicBool,
    /// The key that is derived from the cluster token, if there is one.
    pub(super) key: Option<TokenKey>,
    /// The concurrent handshakes of diallers.
    pub(super) handshakes: HandshakeLimits,
    /// The threads that dial.
    pub(super) diallers: ThreadPool,
    /// The listeners, which are stopped when the engine ends to wake their threads.
    pub(super) listeners: Mutex<Vec<Arc<dyn Listener>>>,
    pub(super) watchdog: (Mutex<Option<Instant>>, Condvar),
    pub(super) lanes: AtomicUsize,
    pub(super) local_launches: LocalLaunches,
    pub(super) numbers: Mutex<HashMap<MemberId, LaunchNumbers>>,
    /// The bytes moved with each task, over all incarnations and connections. They are counted here as they
    /// move, because a connection may end at any moment.
    pub(super) moved: Mutex<BTreeMap<PeerTask, Arc<ByteCounters>>>,
    /// The launches with a deadline that may still wait for their connections.
    pub(super) expected: Mutex<Vec<(Instant, Weak<Launch>)>>,
}

impl EngineShared {
    /// Creates the shared state of a new engine.
    pub(super) fn new(
        config: EngineConfig,
        address: EngineAddress,
        wrapping: WireWrappers,
        (fabric, nccl): (Option<Fabric>, Option<&'static Nccl>),
        io: Arc<IoThreads>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            address,
            wrapping,
            fabric,
            nccl,
            probe: Box::new(AtomicU64::new(config.here.incarnation.get())),
            membership: RwLock::default(),
            changed: (Mutex::new(()), Condvar::new()),
            cliques: Mutex::default(),
            connections: Mutex::default(),
            connected: Condvar::new(),
            io,
            counts: Arc::default(),
            launch_metrics: Arc::new(LaunchMetrics::new(config.here.task)),
            backoff: PathBackoff::default(),
            closed: AtomicBool::new(false),
            key: config.token.as_deref().map(TokenKey::new),
            handshakes: HandshakeLimits::default(),
            diallers: ThreadPool::new("muster-dial", DIALLERS_MAX),
            listeners: Mutex::default(),
            watchdog: (Mutex::new(None), Condvar::new()),
            lanes: AtomicUsize::new(0),
            local_launches: LocalLaunches::default(),
            numbers: Mutex::default(),
            moved: Mutex::default(),
            expected: Mutex::default(),
            config,
        })
    }

    /// Returns a weak reference, for threads that may outlive the engine.
    pub(super) fn weak(&self) -> Weak<Self> {
        self.this.clone()
    }

    /// Returns the task and incarnation of the engine.
    pub(super) const fn here(&self) -> MemberId {
        self.config.here
    }

    /// Returns whether a device is of this task.
    pub(super) fn has_device(&self, device: DeviceId) -> bool {
        self.config.devices.binary_search(&device).is_ok()
    }

    /// Returns the numbers of launches with an incarnation of a peer.
    pub(super) fn launch_numbers(&self, peer: MemberId) -> LaunchNumbers {
        lock(&self.numbers).entry(peer).or_default().clone()
    }

    /// Returns the counters of bytes moved with a task.
    pub(super) fn byte_counters(&self, peer: PeerTask) -> Arc<ByteCounters> {
        Arc::clone(lock(&self.moved).entry(peer).or_default())
    }

    /// Announces that no launch will come for a number that was taken, on every connection with the peer.
    pub(super) fn withdraw_launch_number(&self, peer: MemberId, at: GroupId) {
        let connections: Vec<_> =
            lock(&self.connections).iter().filter(|connection| connection.peer == peer).cloned().collect();
        for connection in connections {
            connection.withdraw_launch_number(
                at,
                "the other side's launch of the same number failed before it began",
            );
        }
    }

    /// Returns the current membership.
    pub(super) fn membership(&self) -> Membership {
        self.with_membership(Membership::clone)
    }

    /// Calls `read` with the current membership, which does not change meanwhile.
    pub(super) fn with_membership<T>(&self, read: impl FnOnce(&Membership) -> T) -> T {
        read(&self.membership.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Blocks until `ask` returns a value for the membership; none if `time` passes or the engine ends
    /// before.
    pub(super) fn wait_for_membership<R>(
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

    /// Waits between two attempts to reach a peer: until `time` has passed, the engine ends, or the peer leaves the
    /// membership.
    pub(super) fn wait_before_retry(&self, peer: MemberId, time: Duration) {
        self.wait_for_membership(time, |membership| (!membership.has(peer)).then_some(()));
    }

    /// Blocks until there is such a connection; none if `time` passes before.
    pub(super) fn wait_for_connection(
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

    /// Returns the number of a reconnected lane. All of them are above those of first lanes.
    pub(super) fn next_lane_number(&self) -> u16 {
        const FIRST: usize = 1000;
        (FIRST + self.lanes.fetch_add(1, Ordering::Relaxed) % (usize::from(u16::MAX) - FIRST)) as u16
    }

    /// Makes the watchdog fail a launch at its deadline if it still waits for its connections.
    pub(super) fn schedule_deadline_check(&self, launch: &Arc<Launch>, deadline: Instant) {
        lock(&self.expected).push((deadline, Arc::downgrade(launch)));
        self.schedule_check(deadline);
    }

    /// Makes the watchdog check launches with these limits.
    pub(super) fn schedule_limit_check(&self, limits: &LaunchLimits) {
        let soon = clock::monotonic() + limits.stall / LOOKS;
        self.schedule_check(limits.deadline.map_or(soon, |deadline| deadline.min(soon)));
    }

    /// Makes the watchdog check at that moment at the latest.
    pub(super) fn schedule_check(&self, wanted: Instant) {
        let mut planned = lock(&self.watchdog.0);
        if planned.is_none_or(|planned| wanted < planned) {
            *planned = Some(wanted);
            self.watchdog.1.notify_one();
        }
    }
}

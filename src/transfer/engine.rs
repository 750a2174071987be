//! The engine: what a program calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::cliques::{CliqueKey, Cliques, Found, Settled, Waiter};
use super::connection::{Connection, Counters, Kept};
use super::detours::Detours;
use super::dialling;
use super::error::{PrepareError, TransferError, TransferKey};
use super::event::Event;
use super::identity::{Address, DeviceId, Member, Membership, TaskId};
use super::launch::{Launch, Limits, Stream, Transfer, Work, give_up};
use super::layout::Layout;
use super::link::definition::{Definition, ENTRIES_MAX, Entry, Source};
use super::link::{GroupId, Numbers};
use super::meeting;
use super::memory::{Arena, Buffer, Region, Span};
use super::meters::{Meters, Stage};
use super::prepared::{Options, Prepared, Share, Spec};
use super::sync::lock;
use super::transport::TransportKind;
use super::transport::copying::Copiers;
use super::transport::lane::Lane;
use super::transport::reactor::Reactor;
use super::transport::wire::{self, Certificates, Faults, Identity, Listener};
use crate::clock;

/// Which transports may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// The best that both sides can: shared memory, another process's memory, a Unix socket, TCP. Chosen again where one
    /// fails.
    #[default]
    Auto,
    /// On this host, arenas as shared memory; other memory by a Unix socket.
    Shm,
    /// On this host, all memory through the kernel.
    Pvm,
    /// On this host, a Unix socket.
    Unix,
    /// TCP, even on this host.
    Tcp,
    /// Between engines of one process, as over TCP but without listening on anything: for tests, and for programs that
    /// embed several engines.
    Loopback,
}

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
    /// Every engine of a cluster has the same one, or none.
    pub token: Option<Vec<u8>>,
    /// Which transports may be used.
    pub transport: Choice,
    /// TCP connections to each peer that carry chunks; one more carries control frames.
    pub lanes: usize,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Whether chunks on TCP carry checksums.
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
    /// What goes wrong on its wires on purpose. For tests: nobody else sets it.
    pub faults: Option<Faults>,
}

impl Config {
    /// The defaults for a task: TCP on any port of the loopback interface, all transports, checksums.
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
            faults: None,
        }
    }
}

/// What is counted beside the bytes of connections.
#[derive(Debug, Default)]
pub struct Counts {
    /// Frames and hellos of another life.
    pub fenced: AtomicU64,
    /// Chunks that came damaged.
    pub damaged: AtomicU64,
    /// Lanes that were lost.
    pub lanes_lost: AtomicU64,
    /// Lanes that were made anew.
    pub lanes_made: AtomicU64,
    /// Fetches that became pushes.
    pub fallbacks: AtomicU64,
}

/// The inside of an engine.
pub struct Core {
    pub(super) config: Config,
    pub(super) address: Address,
    /// What TLS connections are made of, if there are some.
    pub(super) identity: Option<Identity>,
    /// A word that holds this life's incarnation: whoever reads it there can read this process's memory.
    pub(super) probe: Box<AtomicU64>,
    membership: RwLock<Membership>,
    changed: (Mutex<()>, Condvar),
    pub(super) cliques: Mutex<Cliques>,
    pub(super) connections: Mutex<Vec<Arc<Connection>>>,
    reactors: Vec<Arc<Reactor>>,
    pub(super) copiers: Arc<Copiers>,
    pub(super) counts: Counts,
    pub(super) meters: Arc<Meters>,
    pub(super) detours: Detours,
    pub(super) closed: AtomicBool,
    pub(super) greeting: AtomicUsize,
    /// Stopped when the engine ends, to wake those who accept.
    pub(super) listeners: Mutex<Vec<Arc<dyn Listener>>>,
    keeper: (Mutex<Option<Instant>>, Condvar),
    lanes: AtomicUsize,
    numbers: Mutex<HashMap<Member, Numbers>>,
    /// Bytes moved with each task, whichever life of it and connection. Connections end at any moment: what they moved is
    /// counted here as they move it.
    moved: Mutex<BTreeMap<TaskId, Arc<Counters>>>,
    /// Launches with a deadline that may still wait for their connections.
    expected: Mutex<Vec<(Instant, Weak<Launch>)>>,
}

impl Core {
    pub(super) const fn here(&self) -> Member {
        self.config.here
    }

    pub(super) fn reactor(&self, lane: u16) -> &Arc<Reactor> {
        &self.reactors[lane as usize % self.reactors.len()]
    }

    /// The numbers of launches with a life of a peer.
    pub(super) fn numbers(&self, peer: Member) -> Numbers {
        lock(&self.numbers).entry(peer).or_default().clone()
    }

    /// Where bytes are counted that are moved with a task.
    pub(super) fn moved(&self, task: TaskId) -> Arc<Counters> {
        Arc::clone(lock(&self.moved).entry(task).or_default())
    }

    /// Nothing is launched with a number that was taken: a peer that has launched its own is told.
    fn withdraw(&self, peer: Member, at: GroupId) {
        let connections: Vec<_> =
            lock(&self.connections).iter().filter(|connection| connection.peer == peer).cloned().collect();
        for connection in connections {
            connection.withdraw(at, "the other side's launch of the same number failed before it began");
        }
    }

    pub(super) fn membership(&self) -> Membership {
        self.membership.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until `ask` has an answer of the membership, or the time is over.
    pub(super) fn await_membership<R>(
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

    /// A connection was made: all who wait for its clique are served, in their order.
    pub(super) fn clique_ready(&self, connection: &Arc<Connection>) {
        self.serve(&Kept::first(connection));
        self.make_room();
    }

    /// Serves all who wait for a clique, whose connection is kept meanwhile.
    fn serve(&self, kept: &Kept) {
        let connection = kept.connection();
        let key = CliqueKey::new(connection.me, connection.peer);
        let replaced = loop {
            let settled = lock(&self.cliques).settle(key, connection, clock::monotonic());
            match settled {
                Settled::Waited(waiters) => {
                    waiters.into_iter().for_each(|waiter| waiter(Ok(kept.again())));
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
    pub(super) fn is_unused(&self) {
        let crowded = lock(&self.cliques).is_crowded(self.config.cliques_max, clock::monotonic());
        if crowded {
            self.make_room();
        }
    }

    /// Asks the peers of connections that nobody uses, if there are too many, whether they may end.
    pub(super) fn make_room(&self) {
        // Without the lock, which whatever comes of the question takes.
        let surplus = lock(&self.cliques).surplus(self.config.cliques_max, clock::monotonic());
        surplus.iter().for_each(Connection::ask_to_leave);
    }

    /// The peer has decided that a connection stays that this side had agreed to end.
    pub(super) fn has_stayed(&self, connection: &Arc<Connection>) {
        let mut cliques = lock(&self.cliques);
        if connection.over().is_none() {
            cliques.restore(connection, clock::monotonic());
        }
    }

    /// A connection made room for others: its peer agreed.
    pub(super) fn has_left(&self, connection: &Arc<Connection>) {
        lock(&self.cliques).evict(connection);
    }

    /// Makes a clique whose connection this side agreed to end, unless its peer decides that it stays.
    fn make_unless_it_stays(self: &Arc<Self>, old: Arc<Connection>, making: u64) {
        let (core, peer) = (Arc::clone(self), old.peer);
        let key = CliqueKey::new(self.here(), peer);
        let spawned = std::thread::Builder::new().name("muster-undecided".to_owned()).spawn(move || {
            match old.decided(clock::monotonic() + core.config.dial_timeout) {
                Ok(None) => dialling::make(&core, peer, making),
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
    pub(super) fn clique_failed(&self, key: CliqueKey, making: Option<u64>, error: &TransferError) {
        let waiters = lock(&self.cliques).give_up(key, making);
        for waiter in waiters {
            waiter(Err(error.clone()));
        }
    }

    pub(super) fn connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        tracing::debug!(peer = %connection.peer, %error, "connection over");
        lock(&self.cliques).forget(connection);
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
    }

    /// The best way to a peer has failed although it may live: for a time, others are tried first.
    pub(super) fn take_detour(&self, peer: Member, how: &str) {
        if self.config.transport == Choice::Auto && self.membership().has(peer) {
            tracing::debug!(%peer, how, "other ways come first for a time");
            self.detours.add(peer, clock::monotonic());
        }
    }

    /// A number for a lane that takes the place of another. Those of the first lanes are below all of these.
    pub(super) fn next_lane(&self) -> u16 {
        const FIRST: usize = 1000;
        (FIRST + self.lanes.fetch_add(1, Ordering::Relaxed) % (usize::from(u16::MAX) - FIRST)) as u16
    }

    pub(super) fn lane_lost(self: &Arc<Self>, connection: &Arc<Connection>, lane: &Arc<Lane>, how: &str) {
        dialling::mend(self, connection, lane.control, how);
    }

    /// A launch has to be over by then, whether it has its connections or not.
    fn expect(&self, launch: &Arc<Launch>, deadline: Instant) {
        lock(&self.expected).push((deadline, Arc::downgrade(launch)));
        self.look_at(deadline);
    }

    /// Has the keeper look after launches with these limits.
    pub(super) fn watch(&self, limits: &Limits) {
        let soon = clock::monotonic() + limits.stall / 8;
        self.look_at(limits.deadline.map_or(soon, |deadline| deadline.min(soon)));
    }

    fn look_at(&self, wanted: Instant) {
        let mut planned = lock(&self.keeper.0);
        if planned.is_none_or(|planned| wanted < planned) {
            *planned = Some(wanted);
            self.keeper.1.notify_one();
        }
    }

    /// Looks after limits until the engine ends.
    fn keep(&self) {
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

    fn look_after(&self, now: Instant) -> Option<Instant> {
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
                if silent >= patience / 4 {
                    connection.ping();
                }
                let again = now + patience / 8;
                next = next.map(|next| next.min(again));
            }
        }
        next
    }
}

/// Moves buffers between the devices of this task and those of others. Clones are the same engine; the last one to go
/// shuts it down.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("here", &self.0.core.config.here).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts an engine: its threads, and its listeners.
    ///
    /// # Errors
    /// If it cannot listen where it should, its certificates cannot be used, or the system gives no threads.
    pub fn start(mut config: Config) -> std::io::Result<Self> {
        config.lanes = config.lanes.clamp(1, 64);
        config.chunk = config.chunk.clamp(4 << 10, super::frame::CHUNK_MAX as u32);
        config.devices.sort_unstable();
        config.devices.dedup();
        let identity = config.tls.as_ref().map(Identity::new).transpose()?;
        let (address, listeners) = wire::listen(&config)?;
        let mut threads = Vec::new();
        let mut reactors = Vec::new();
        for n in 0..config.reactors.max(1) {
            let (reactor, thread) = Reactor::start(&format!("muster-io-{n}"))?;
            reactors.push(reactor);
            threads.push(thread);
        }
        let (copiers, copying) = Copiers::start(config.copiers.max(1))?;
        threads.extend(copying);
        let core = Arc::new(Core {
            address,
            identity,
            probe: Box::new(AtomicU64::new(config.here.incarnation.get())),
            membership: RwLock::default(),
            changed: (Mutex::new(()), Condvar::new()),
            cliques: Mutex::default(),
            connections: Mutex::default(),
            reactors,
            copiers,
            counts: Counts::default(),
            meters: Arc::new(Meters::new(config.here.task)),
            detours: Detours::default(),
            closed: AtomicBool::new(false),
            greeting: AtomicUsize::new(0),
            listeners: Mutex::default(),
            keeper: (Mutex::new(None), Condvar::new()),
            lanes: AtomicUsize::new(0),
            numbers: Mutex::default(),
            moved: Mutex::default(),
            expected: Mutex::default(),
            config,
        });
        threads.extend(meeting::accept(&core, listeners)?);
        let keeping = Arc::clone(&core);
        threads
            .push(std::thread::Builder::new().name("muster-keep".to_owned()).spawn(move || keeping.keep())?);
        Ok(Self(Arc::new(Handle { core, threads: Mutex::new(threads) })))
    }

    /// Where it is reached: what others have to know of it.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.0.core.address
    }

    /// Whose engine it is.
    #[must_use]
    pub fn here(&self) -> Member {
        self.0.core.here()
    }

    /// Takes the new membership. Connections with lives that are not in it fail at once, those being made among them;
    /// all others go on.
    pub fn on_membership(&self, membership: Membership) {
        let core = &self.0.core;
        {
            let _announcing = lock(&core.changed.0);
            *core.membership.write().unwrap_or_else(PoisonError::into_inner) = membership.clone();
            core.changed.1.notify_all();
        }
        let gone = |member: Member| member != core.here() && !membership.has(member);
        lock(&core.numbers).retain(|member, _| !gone(*member));
        core.detours.retain(|member| !gone(member));
        let pending = lock(&core.cliques).pending(gone);
        let error = |member: Member| TransferError::StaleIncarnation {
            member,
            current: membership.member(member.task).map(|member| member.incarnation),
        };
        for key in pending {
            let member = key.members().iter().copied().find(|member| gone(*member)).unwrap_or(core.here());
            core.clique_failed(key, None, &error(member));
        }
        // All that there are: one that is just being made is not in the cache yet, or not any more.
        let connections = lock(&core.connections).clone();
        for connection in connections.into_iter().filter(|connection| gone(connection.peer)) {
            connection.end(error(connection.peer));
        }
    }

    /// The membership that it has.
    #[must_use]
    pub fn membership(&self) -> Membership {
        self.0.core.membership()
    }

    /// Prepares transfers: finds or makes the connections, and tells the peers what will be moved. Dropping the future
    /// gives the preparation up.
    pub fn prepare(&self, specs: Vec<Spec>, options: Options) -> Preparing {
        let slot = Arc::new(Mutex::new(Arrival { result: None, waker: None }));
        let (done, changed) = (Arc::clone(&slot), Arc::new(Condvar::new()));
        let signal = Arc::clone(&changed);
        let meters = Arc::clone(&self.0.core.meters);
        let finish = move |result: Result<Prepared, PrepareError>| {
            if let Err(error) = &result {
                meters.failed(None, &error.clone().into());
            }
            let mut slot = lock(&done);
            slot.result = Some(result);
            let waker = slot.waker.take();
            drop(slot);
            signal.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        match self.request(specs) {
            Ok(request) => prepare_then(&self.0.core, request, options, finish),
            Err(error) => finish(Err(error)),
        }
        Preparing { slot, changed }
    }

    /// Transfers as soon as `dependencies` have happened; returns at once, whatever has to be prepared. It takes its place
    /// in the order of its channel now, and its deadline runs from now.
    pub fn transfer(&self, dependencies: &[Event], specs: Vec<Spec>, options: Options) -> Transfer {
        let (mut sent, mut received) = (0, 0);
        for spec in &specs {
            *(if spec.outgoing { &mut sent } else { &mut received }) += spec.span.len() as u64;
        }
        let core = &self.0.core;
        let launch = Launch::new(&core.meters, specs.len(), sent, received);
        let transfer = Transfer::new(Arc::clone(&launch), self.here().task);
        launch.begin();
        let request = match self.request(specs) {
            Ok(request) => request,
            Err(error) => {
                launch.fail_all(&error.into());
                return transfer;
            }
        };
        if let Some(peer) = request.distinct.first() {
            launch.is_with(peer.task);
        }
        let tickets: Vec<_> =
            request.distinct.iter().map(|peer| Ticket::take(core, *peer, options.channel)).collect();
        let dependencies = dependencies.to_vec();
        let waiting = Arc::clone(&launch);
        prepare_then(core, request, options, move |result| match result {
            Ok(prepared) => {
                prepared.launch_as(launch, &dependencies, tickets);
            }
            Err(error) => launch.fail_all(&error.into()),
        });
        if let Some(deadline) = options.deadline
            && waiting.waits()
        {
            core.expect(&waiting, waiting.began() + deadline);
        }
        transfer
    }

    /// Sends buffers, each from the first device of this task to its destination.
    ///
    /// # Errors
    /// If there is not one destination and one key for each buffer, or this task has no device.
    pub fn cross_host_send(
        &self,
        buffers: &[Span],
        destinations: &[DeviceId],
        keys: &[TransferKey],
    ) -> Result<Transfer, PrepareError> {
        let from = self.0.core.config.devices.first().copied().ok_or(PrepareError::Empty)?;
        even(buffers.len(), destinations.len(), keys.len())?;
        let specs = buffers.iter().zip(destinations).zip(keys);
        let specs = specs.map(|((span, to), key)| Spec::send(span.clone(), from, *to, *key)).collect();
        Ok(self.transfer(&[], specs, Options::default()))
    }

    /// Receives buffers of these layouts onto a device of this task, each from its source, into memory of `arena`.
    ///
    /// # Errors
    /// If there is not one source and one key for each layout, or the arena has no room.
    pub fn cross_host_receive(
        &self,
        arena: &Arena,
        device: DeviceId,
        layouts: &[Layout],
        sources: &[DeviceId],
        keys: &[TransferKey],
    ) -> Result<(Vec<Buffer>, Transfer), PrepareError> {
        even(layouts.len(), sources.len(), keys.len())?;
        let buffers = layouts
            .iter()
            .map(|layout| arena.allocate(usize::try_from(layout.len()).unwrap_or(usize::MAX)))
            .collect::<Result<Vec<_>, _>>()?;
        let specs = buffers.iter().zip(layouts).zip(sources.iter().zip(keys));
        let specs = specs
            .map(|((buffer, layout), (from, key))| {
                Spec::receive(buffer.span(), *from, device, *key).with_layout(layout.clone())
            })
            .collect();
        Ok((buffers, self.transfer(&[], specs, Options::default())))
    }

    /// A batch: transfers that are requested one by one and leave as one group for each peer.
    #[must_use]
    pub fn batch(&self, options: Options) -> Batch {
        Batch { engine: self.clone(), options, specs: Vec::new() }
    }

    /// Looks at what is asked for.
    fn request(&self, specs: Vec<Spec>) -> Result<Request, PrepareError> {
        let core = &self.0.core;
        if core.closed.load(Ordering::Acquire) {
            return Err(PrepareError::Closed);
        }
        let peers = check(core, &specs)?;
        let distinct = peers.iter().copied().collect();
        Ok(Request { specs, peers, distinct })
    }

    /// What is measured of launches.
    #[must_use]
    pub fn meters(&self) -> &Arc<Meters> {
        &self.0.core.meters
    }

    /// What is counted.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.0.core.counts
    }

    /// The state of each connection.
    #[must_use]
    pub fn links(&self) -> Vec<LinkState> {
        let connections = lock(&self.0.core.connections).clone();
        connections
            .into_iter()
            .map(|connection| LinkState {
                peer: connection.peer,
                kind: connection.kind,
                lanes: connection.live_lanes(),
                launched: connection.launched(),
                bytes: TransportKind::ALL.map(|kind| (kind, connection.counters.get(kind))),
            })
            .collect()
    }

    /// Bytes sent to and received from each task since the engine was started, by each transport: on all connections, those
    /// that are over among them.
    #[must_use]
    pub fn moved(&self) -> Vec<(TaskId, Traffic)> {
        let all = lock(&self.0.core.moved);
        all.iter()
            .map(|(task, counters)| (*task, TransportKind::ALL.map(|kind| (kind, counters.get(kind)))))
            .collect()
    }

    /// Cliques there are, and hits, misses and evictions of their cache.
    #[must_use]
    pub fn cliques(&self) -> (usize, u64, u64, u64) {
        let cliques = lock(&self.0.core.cliques);
        (cliques.len(), cliques.hits, cliques.misses, cliques.evictions)
    }

    /// Shuts it down: everything under way fails, its threads end. Buffers stay.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }
}

/// What is known of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// With whom.
    pub peer: Member,
    /// How its lanes are made.
    pub kind: TransportKind,
    /// Lanes that live.
    pub lanes: usize,
    /// Launches under way.
    pub launched: usize,
    /// Bytes moved.
    pub bytes: Traffic,
}

/// Bytes sent and received by each transport.
pub type Traffic = [(TransportKind, (u64, u64)); TransportKind::ALL.len()];

impl Handle {
    fn shutdown(&self) {
        let core = &self.core;
        if core.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        {
            let _announcing = lock(&core.changed.0);
            core.changed.1.notify_all();
        }
        let pending = lock(&core.cliques).pending(|_| true);
        for key in pending {
            core.clique_failed(key, None, &TransferError::Closed);
        }
        let connections = lock(&core.connections).clone();
        for connection in connections {
            connection.end(TransferError::Closed);
        }
        for reactor in &core.reactors {
            reactor.stop();
        }
        core.copiers.stop();
        {
            let _planned = lock(&core.keeper.0);
            core.keeper.1.notify_all();
        }
        meeting::stop(core);
        let me = std::thread::current().id();
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if thread.thread().id() != me {
                let _ended = thread.join();
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn even(buffers: usize, devices: usize, keys: usize) -> Result<(), PrepareError> {
    if buffers == 0 {
        return Err(PrepareError::Empty);
    }
    if buffers != devices || buffers != keys {
        return Err(PrepareError::Uneven { buffers, devices, keys });
    }
    Ok(())
}

/// Looks at a request, and says who each of its transfers is with.
fn check(core: &Core, specs: &[Spec]) -> Result<Vec<Member>, PrepareError> {
    if specs.is_empty() {
        return Err(PrepareError::Empty);
    }
    if specs.len() > ENTRIES_MAX {
        return Err(PrepareError::TooMany { given: specs.len(), bound: ENTRIES_MAX });
    }
    let here = core.here().task;
    let membership = core.membership.read().unwrap_or_else(PoisonError::into_inner);
    let mut owners: HashMap<DeviceId, TaskId> = HashMap::new();
    let mut owner = |device: DeviceId| -> Result<TaskId, PrepareError> {
        if core.config.devices.binary_search(&device).is_ok() {
            return Ok(here);
        }
        if let Some(known) = owners.get(&device) {
            return Ok(*known);
        }
        let task = membership
            .owner(device)
            .filter(|task| *task != here)
            .ok_or(PrepareError::UnknownDevice(device))?;
        owners.insert(device, task);
        Ok(task)
    };
    let mut peers = Vec::with_capacity(specs.len());
    let mut seen = HashSet::new();
    let mut written: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    let mut read: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    for spec in specs {
        let (near, far) = if spec.outgoing { (spec.from, spec.to) } else { (spec.to, spec.from) };
        let (near_owner, far_owner) = (owner(near)?, owner(far)?);
        if near_owner != here {
            return Err(PrepareError::NotAddressable { device: near, owner: near_owner, here });
        }
        if far_owner == here {
            return Err(PrepareError::SameTask(spec.from, spec.to));
        }
        let (layout, buffer) = (spec.layout.len(), spec.span.len() as u64);
        if layout != buffer {
            return Err(PrepareError::WrongSize { key: spec.key, layout, buffer });
        }
        if !seen.insert((spec.key, spec.from, spec.to)) {
            let (key, source_device, destination) = (spec.key, spec.from, spec.to);
            return Err(PrepareError::DuplicateKey { key, source_device, destination });
        }
        if !spec.span.is_empty() {
            let range =
                (spec.span.buffer().id(), spec.span.start(), spec.span.start() + spec.span.len(), spec.key);
            if spec.outgoing { read.push(range) } else { written.push(range) }
        }
        peers.push(membership.member(far_owner).ok_or(PrepareError::UnknownDevice(far))?);
    }
    overlap(written, read)?;
    Ok(peers)
}

/// Whether any range that is written shares bytes with another one.
fn overlap(
    mut written: Vec<(usize, usize, usize, TransferKey)>,
    read: Vec<(usize, usize, usize, TransferKey)>,
) -> Result<(), PrepareError> {
    written.sort_unstable();
    for pair in written.windows(2) {
        let ((buffer, _, end, _), (other, start, until, key)) = (pair[0], pair[1]);
        if buffer == other && start < end {
            return Err(PrepareError::Overlap { key, start, end: until });
        }
    }
    for (buffer, start, end, key) in read {
        // Of the written ranges, which do not overlap, only the last that begins before the end can reach into it.
        let at = written.partition_point(|range| (range.0, range.1) < (buffer, end));
        if let Some(&(other, _, until, _)) = at.checked_sub(1).and_then(|at| written.get(at))
            && other == buffer
            && until > start
        {
            return Err(PrepareError::Overlap { key, start, end });
        }
    }
    Ok(())
}

/// A place in the order of a channel with a peer, for a launch whose connection may not be there yet. Dropped unused, it
/// tells the peer that nothing comes.
pub(super) struct Ticket {
    core: Arc<Core>,
    numbers: Numbers,
    peer: Member,
    at: Option<GroupId>,
}

impl Ticket {
    fn take(core: &Arc<Core>, peer: Member, channel: u32) -> Self {
        let numbers = core.numbers(peer);
        let at = Some(numbers.take(channel));
        Self { core: Arc::clone(core), numbers, peer, at }
    }

    /// With whom.
    pub(super) const fn peer(&self) -> Member {
        self.peer
    }

    /// The number, for a launch that is made now.
    pub(super) fn used(mut self) -> Option<GroupId> {
        self.at.take()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // First, so that either a launch of the peer finds it so when it comes, or is here to be found.
            self.numbers.close(at);
            self.core.withdraw(self.peer, at);
        }
    }
}

/// Transfers that were asked for, and are in order.
struct Request {
    specs: Vec<Spec>,
    /// Whom each of them is with.
    peers: Vec<Member>,
    /// Whom any of them is with.
    distinct: BTreeSet<Member>,
}

/// Finds or makes the connections that a request needs, and defines it.
fn prepare_then(
    core: &Arc<Core>,
    request: Request,
    options: Options,
    then: impl FnOnce(Result<Prepared, PrepareError>) + Send + 'static,
) {
    let Request { specs, peers, distinct } = request;
    let (defining, asked) = (Arc::clone(core), clock::monotonic());
    gather(
        Arc::clone(core),
        distinct.into_iter().collect(),
        HashMap::new(),
        Box::new(move |found| {
            let prepared = found.map(|connections| define(&defining, &specs, &peers, options, &connections));
            if prepared.is_ok() {
                let took = clock::monotonic().saturating_duration_since(asked);
                defining.meters.observe_time(Stage::Prepare, took);
            }
            then(prepared);
        }),
    );
}

type Connections = HashMap<Member, Kept>;

/// Finds or makes the connections to all of `peers`, one after the other, then calls `then`.
fn gather(
    core: Arc<Core>,
    mut peers: Vec<Member>,
    mut found: Connections,
    then: Box<dyn FnOnce(Result<Connections, PrepareError>) + Send>,
) {
    let Some(member) = peers.pop() else { return then(Ok(found)) };
    let key = CliqueKey::new(core.here(), member);
    let next = Arc::clone(&core);
    let waiter: Waiter = Box::new(move |result| match result {
        Ok(connection) => {
            found.insert(member, connection);
            gather(next, peers, found, then);
        }
        Err(error) => then(Err(PrepareError::Clique { member, error })),
    });
    let how = lock(&core.cliques).find(key, clock::monotonic(), waiter);
    match how {
        Found::Ready(connection, waiter) => waiter(Ok(connection)),
        Found::Pending => {}
        Found::Make(making, None) => dialling::make(&core, member, making),
        Found::Make(making, Some(undecided)) => core.make_unless_it_stays(undecided, making),
    }
}

/// Makes the definitions of a request whose connections are there.
fn define(
    core: &Arc<Core>,
    specs: &[Spec],
    peers: &[Member],
    options: Options,
    connections: &Connections,
) -> Prepared {
    let mut by_peer: BTreeMap<Member, Vec<(Entry, u32, Span)>> = BTreeMap::new();
    let mut regions: BTreeMap<Member, BTreeMap<u32, Arc<Region>>> = BTreeMap::new();
    for (number, (spec, &member)) in specs.iter().zip(peers).enumerate() {
        let region = spec.span.buffer().region();
        let source = match core.config.transport {
            _ if !spec.outgoing || spec.span.is_empty() => Source::None,
            Choice::Unix | Choice::Tcp | Choice::Loopback => Source::None,
            Choice::Auto | Choice::Shm if region.shared().is_some() => {
                regions.entry(member).or_default().insert(region.id, Arc::clone(region));
                Source::Region(region.id, spec.span.offset() as u64)
            }
            Choice::Shm => Source::None,
            Choice::Auto | Choice::Pvm => Source::Address(spec.span.piece().number()),
        };
        let entry = Entry {
            key: spec.key,
            from: spec.from,
            to: spec.to,
            bytes: spec.span.len() as u64,
            fingerprint: spec.layout.fingerprint(),
            outgoing: spec.outgoing,
            source,
        };
        by_peer.entry(member).or_default().push((entry, number as u32, spec.span.clone()));
    }
    let mut shares = Vec::with_capacity(by_peer.len());
    for (member, mut list) in by_peer {
        list.sort_by_key(|(entry, ..)| entry.order());
        let stream = |outgoing| {
            Stream::new(
                list.iter()
                    .filter(|(entry, ..)| entry.outgoing == outgoing)
                    .map(|(_, number, span)| (*number, span.clone())),
            )
        };
        let work = Arc::new(Work { out: stream(true), inbound: stream(false) });
        let definition = Definition::new(list.iter().map(|(entry, ..)| *entry).collect());
        let connection = connections[&member].connection();
        let regions: Vec<_> = regions.remove(&member).unwrap_or_default().into_values().collect();
        let definition = connection.define(definition, &regions);
        shares.push(Share { connection: Arc::clone(connection), definition, work });
    }
    Prepared::new(core, shares, options, specs.len())
}

struct Arrival {
    result: Option<Result<Prepared, PrepareError>>,
    waker: Option<std::task::Waker>,
}

/// A preparation under way.
#[must_use = "nothing is launched by preparing it"]
pub struct Preparing {
    slot: Arc<Mutex<Arrival>>,
    changed: Arc<Condvar>,
}

impl Preparing {
    /// Waits for it on this thread.
    ///
    /// # Errors
    /// If the request is wrong, or a peer cannot be reached.
    pub fn wait(self) -> Result<Prepared, PrepareError> {
        let mut slot = lock(&self.slot);
        loop {
            if let Some(result) = slot.result.take() {
                return result;
            }
            slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Future for Preparing {
    type Output = Result<Prepared, PrepareError>;

    fn poll(self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.slot);
        if let Some(result) = slot.result.take() {
            return Poll::Ready(result);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Transfers that are requested one by one, and leave together.
#[derive(Debug)]
pub struct Batch {
    engine: Engine,
    options: Options,
    specs: Vec<Spec>,
}

impl Batch {
    /// Adds a transfer; its number in the batch.
    pub fn add(&mut self, spec: Spec) -> usize {
        self.specs.push(spec);
        self.specs.len() - 1
    }

    /// Sends them off.
    pub fn launch(self, dependencies: &[Event]) -> Transfer {
        self.engine.transfer(dependencies, self.specs, self.options)
    }
}

//! A connection: the link to one incarnation of one peer, over its lanes.
//!
//! It performs what the [`Link`] decides, and tells the link what lanes and fetching threads report. The link is
//! behind one lock, held for table look-ups only: no system call and no copy happens under it. It does not know how
//! connections are found and made; it knows its engine by [`SessionHost`] only. Begin at [`Connection::launch`].
//!
//! A launch leaves at once while few launches are under way ([`LAUNCHES_AT_ONCE`]), or if its class is latency.
//! Otherwise its frame leaves by the reactor with whatever else is queued by then, and frames that arrived with one
//! system call are answered with one. A lone message is sent soon; among many, a system call each is most of their
//! cost. No timer delays anything.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::ring_session::RingSession;
use super::spin_wait::SpinWait;
use crate::base::counts::{Counters, EngineCounts};
use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::sync::{AtomicUsize, lock};
use crate::base::transport::TransportKind;
use crate::io::fetch::PeerMemory;
use crate::io::lane::{Lane, LaneHost};
use crate::io::ring::{RingInbox, RingOutbox};
use crate::io::threads::IoThreads;
use crate::io::wire::WireCapabilities;
use crate::launch::peer_launch::PeerLaunch;
use crate::launch::session_handle::{Carrier, SessionHandle};
use crate::memory::{MemoryRegion, RegionListener};
use crate::protocol::link::definition::Definition;
use crate::protocol::link::{Class, GroupId, LAUNCHES_MAX, Launching, Link, Numbers, Terms};

/// While more launches are under way, what a launch says leaves together with what others say, in one call of the system;
/// until then, and where it is urgent, it leaves at once.
const LAUNCHES_AT_ONCE: usize = 4;

/// While no more launches are under way, and for no more bytes of one, whether the peer has what was sent may be heard a
/// little later if no launch waits for it: until then it takes room.
const LAUNCHES_UNHEARD: usize = 64;
const BYTES_UNHEARD: u64 = 64 << 10;

/// The engine of a connection, as the connection sees it.
pub trait SessionHost: Send + Sync {
    /// Says that a connection became unused: it may be one of too many.
    fn connection_is_unused(&self);

    /// Says that the peer uses the connection that this side asked to end: another one may make room.
    fn make_room(&self);

    /// Says that the connection stays that this side had agreed to end.
    fn connection_stays(&self, connection: &Arc<Connection>);

    /// Says that the connection made room for others: its peer agreed.
    fn connection_left(&self, connection: &Arc<Connection>);

    /// Says that a lane was lost. The engine makes it anew, or finds out that the peer is dead.
    fn mend(&self, connection: &Arc<Connection>, control: bool, how: &str);

    /// Says that the best way to a peer has failed although the peer may live.
    fn back_off(&self, peer: Member, how: &str);

    /// Has the engine look after its connections at that moment.
    fn look_at(&self, wanted: Instant);

    /// Says that the connection is over.
    fn connection_over(&self, connection: &Arc<Connection>, error: &TransferError);
}

/// The link to one life of one peer.
pub struct Connection {
    /// This side.
    pub me: Member,
    /// The other side.
    pub peer: Member,
    /// Tells this connection from others between the same two lives.
    pub nonce: u64,
    /// Whether this side dialled.
    pub dialled: bool,
    /// What its lanes are made of.
    pub kind: TransportKind,
    /// Whether receivers fetch from the memory of senders.
    pub fetches: bool,
    /// Whether chunks carry checksums.
    pub checks: bool,
    pub(super) capabilities: WireCapabilities,
    this: Weak<Self>,
    host: Weak<dyn SessionHost>,
    pub(super) io: Arc<IoThreads>,
    pub(super) counts: Arc<EngineCounts>,
    pub(super) link: Mutex<Link<Arc<PeerLaunch>>>,
    pub(super) numbers: Numbers,
    pub(super) lanes: RwLock<Vec<Arc<Lane>>>,
    /// Lanes that the peer had lost before they were here. They do not come any more.
    pub(super) lost_lanes: Mutex<HashSet<u16>>,
    /// The last control frame that was heard when a frame last came damaged.
    pub(super) last_damage: Mutex<Option<u32>>,
    pub(super) over: OnceLock<TransferError>,
    /// How its peer went, and when: the connection ends when what the peer said last has been taken.
    pub(super) peer_gone: OnceLock<(String, Instant)>,
    /// Whether small launches bring their bytes along; not where all is to go through the kernel.
    pub(super) inlines: bool,
    pub(super) pid: Option<i32>,
    /// Regions that the peer was told of.
    pub(super) offered: Mutex<HashMap<u32, Weak<MemoryRegion>>>,
    /// Regions that the peer told of; none where one could not be mapped.
    pub(super) shared: Mutex<HashMap<u32, Option<Arc<PeerMemory>>>>,
    /// Where control frames come in once the peer has switched to it.
    pub(super) inbox: Option<RingInbox>,
    /// Where control frames go once this side has switched to it.
    pub(super) outbox: OnceLock<RingOutbox>,
    /// A region whose descriptor comes by the socket, and which the ring has told of already: the ring waits for it.
    pub(super) awaited: Mutex<Option<u32>>,
    pub(super) last_heard: AtomicU64,
    /// How many launches wait to hear that the peer has what they sent.
    pub(super) send_waiters: AtomicUsize,
    pub(super) spin_wait: SpinWait,
    /// Tells of decisions about the end of a connection that this side has agreed to.
    pub(super) decided: Condvar,
    pub(super) started: Instant,
    /// Bytes moved.
    pub counters: Counters,
    /// Bytes moved with its peer's task, on this and all other connections.
    pub(super) moved: Arc<Counters>,
}

/// Keeps a connection from ending to make room: a request is about to prepare something on it.
pub struct ConnectionLease(Arc<Connection>);

impl ConnectionLease {
    /// Keeps it; not if this side has agreed to its end.
    pub fn acquire(connection: &Arc<Connection>) -> Option<Self> {
        let kept = lock(&connection.link).keep();
        kept.then(|| Self(Arc::clone(connection)))
    }

    /// Keeps it once more.
    pub fn renew(&self) -> Self {
        let _kept = lock(&self.0.link).keep();
        Self(Arc::clone(&self.0))
    }

    /// Takes the lease that a new connection begins with, until all requests that wait for it have theirs. Called once.
    pub fn adopt(connection: &Arc<Connection>) -> Self {
        Self(Arc::clone(connection))
    }

    /// Returns the connection.
    pub const fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for ConnectionLease {
    fn drop(&mut self) {
        lock(&self.0.link).release();
    }
}

impl RegionListener for Connection {
    /// Called by the thread that drops the region last, which none does under a lock of the connection.
    fn region_gone(self: Arc<Self>, id: u32) {
        let offered = lock(&self.offered).remove(&id);
        if offered.is_some() {
            lock(&self.link).unshare(id);
            self.flush(0);
        }
    }
}

/// What a connection is made of.
pub struct ConnectionSettings {
    /// Its engine.
    pub host: Weak<dyn SessionHost>,
    /// The threads that move its bytes.
    pub io: Arc<IoThreads>,
    /// What the engine counts.
    pub counts: Arc<EngineCounts>,
    /// The numbers of launches with the peer.
    pub numbers: Numbers,
    /// Bytes moved with the peer's task.
    pub moved: Arc<Counters>,
    /// Whether small launches bring their bytes along.
    pub inlines: bool,
    /// How long a thread that waits looks before it sleeps.
    pub spin: Duration,
    /// This side.
    pub me: Member,
    /// The other side.
    pub peer: Member,
    /// Tells it from others.
    pub nonce: u64,
    /// Whether this side dialled.
    pub dialled: bool,
    /// How its lanes are made.
    pub kind: TransportKind,
    /// What its lanes are like.
    pub capabilities: WireCapabilities,
    /// The terms of the link.
    pub terms: Terms,
    /// Whether chunks carry checksums.
    pub checks: bool,
    /// The peer's process, if it is on this host and its memory can be read.
    pub pid: Option<i32>,
}

impl Connection {
    /// Makes a connection without lanes.
    pub fn new(settings: ConnectionSettings) -> Arc<Self> {
        let ConnectionSettings { host, io, counts, numbers, moved, inlines, spin, .. } = settings;
        let ConnectionSettings { me, peer, nonce, dialled, kind, capabilities, terms, checks, pid, .. } =
            settings;
        let mut link = Link::new(me, peer, terms, numbers.clone());
        // Until it is among the cliques: see `ConnectionLease::adopt`.
        link.keep();
        Arc::new_cyclic(|this| Self {
            me,
            peer,
            nonce,
            dialled,
            kind,
            capabilities,
            fetches: terms.fetch,
            checks,
            this: this.clone(),
            host,
            io,
            counts,
            link: Mutex::new(link),
            numbers,
            lanes: RwLock::default(),
            lost_lanes: Mutex::default(),
            last_damage: Mutex::default(),
            over: OnceLock::new(),
            peer_gone: OnceLock::new(),
            inlines,
            pid,
            offered: Mutex::default(),
            shared: Mutex::default(),
            inbox: if capabilities.shares_memory { RingInbox::new().ok() } else { None },
            outbox: OnceLock::new(),
            awaited: Mutex::default(),
            last_heard: AtomicU64::new(0),
            send_waiters: AtomicUsize::new(0),
            spin_wait: SpinWait::new(spin),
            decided: Condvar::new(),
            started: clock::monotonic(),
            counters: Counters::default(),
            moved,
        })
    }

    /// Returns what launches know of it.
    pub fn carrier(&self) -> Carrier {
        let session: Weak<dyn SessionHandle> = self.this.clone();
        Carrier { session, peer: self.peer, fetches: self.fetches }
    }

    /// Returns what lanes know of it.
    pub fn lane_host(&self) -> Weak<dyn LaneHost> {
        self.this.clone()
    }

    /// Returns itself as what it is known by elsewhere.
    pub(super) fn weak(&self) -> Weak<Self> {
        self.this.clone()
    }

    /// Returns its engine, if there still is one.
    pub(super) fn host(&self) -> Option<Arc<dyn SessionHost>> {
        self.host.upgrade()
    }

    /// Tells its engine something about it.
    pub(super) fn tell_host(&self, tell: impl FnOnce(&dyn SessionHost, &Arc<Self>)) {
        if let (Some(host), Some(this)) = (self.host(), self.this.upgrade()) {
            tell(&*host, &this);
        }
    }

    pub(super) fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns why it is over, if it is.
    pub fn over(&self) -> Option<&TransferError> {
        self.over.get()
    }

    /// Returns how many lanes live.
    pub fn live_lanes(&self) -> usize {
        self.lanes().iter().filter(|lane| !lane.is_over()).count()
    }

    /// Returns whether control frames can be sent.
    pub fn has_control_lane(&self) -> bool {
        self.lanes().iter().any(|lane| lane.control && !lane.is_over())
    }

    /// Says that bytes of the peer came.
    pub(super) fn note_heard(&self) {
        let now = self.started.elapsed().as_micros();
        self.last_heard.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns for how long nothing has come.
    pub fn silent(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_micros(self.last_heard.load(Ordering::Relaxed)))
    }

    /// Returns the number of the last control frame that was heard.
    pub fn control_heard(&self) -> u32 {
        lock(&self.link).heard()
    }

    /// Returns how many launches are under way.
    pub fn launched(&self) -> usize {
        lock(&self.link).launched()
    }

    /// Returns whether nothing is prepared on it, or about to be, on either side, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        lock(&self.link).is_unused()
    }

    /// Returns whether its peer was asked whether it may end, and has not answered.
    pub fn is_asked(&self) -> bool {
        lock(&self.link).is_asked()
    }

    /// Asks the peer whether it may end, if it is unused.
    pub fn ask_to_leave(&self) {
        lock(&self.link).ask_to_leave();
        self.flush(0);
    }

    /// Waits until the peer has decided whether a connection stays that this side has agreed to end. None if it is over.
    ///
    /// # Errors
    /// If the peer says nothing until then.
    pub fn await_decision(
        self: &Arc<Self>,
        until: Instant,
    ) -> Result<Option<ConnectionLease>, TransferError> {
        let mut link = lock(&self.link);
        loop {
            if self.over.get().is_some() || link.is_gone() {
                return Ok(None);
            }
            if link.keep() {
                return Ok(Some(ConnectionLease(Arc::clone(self))));
            }
            let left = until.saturating_duration_since(clock::monotonic());
            if left.is_zero() {
                let why = "it asked whether their connection may end, and has said nothing since".to_owned();
                return Err(TransferError::Transport { transport: self.kind, member: self.peer, why });
            }
            link = self.decided.wait_timeout(link, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the error of a connection that was unused and that both sides have given up.
    pub(super) fn made_room_error(&self) -> TransferError {
        let why = "it was dropped to make room: nobody used it".to_owned();
        TransferError::Transport { transport: self.kind, member: self.peer, why }
    }

    /// Returns whether both sides have given it up, to make room for others.
    pub fn is_gone(&self) -> bool {
        lock(&self.link).is_gone()
    }

    /// Returns the launches under way.
    pub fn launches(&self) -> Vec<Arc<PeerLaunch>> {
        lock(&self.link).tokens()
    }

    /// Asks whether the peer lives.
    pub fn ping(&self) {
        lock(&self.link).ping();
        self.flush(0);
    }

    /// Makes a definition known to the peer, with the memory that it is fetched from.
    pub fn define(&self, definition: Definition, regions: &[Arc<MemoryRegion>]) -> u32 {
        let mut offered = lock(&self.offered);
        let mut link = lock(&self.link);
        for region in regions {
            if region.shared().is_some() && !offered.contains_key(&region.id) {
                offered.insert(region.id, Arc::downgrade(region));
                link.share(region.id, region.len() as u64);
                let listener: Weak<dyn RegionListener> = self.this.clone();
                region.when_gone(listener);
            }
        }
        let number = link.define(definition);
        drop(link);
        drop(offered);
        self.flush(0);
        number
    }

    /// Forgets a definition.
    pub fn undefine(&self, number: u32) {
        lock(&self.link).undefine(number);
        self.perform();
    }

    /// Takes a number for the next launch on a channel.
    pub fn take_number(&self, channel: u32) -> GroupId {
        self.numbers.take(channel)
    }

    /// Says that nothing is launched with a number that was taken, for this reason.
    pub fn withdraw(&self, at: GroupId, why: &str) {
        lock(&self.link).withdraw(at, why);
        self.flush(0);
    }

    /// Launches, with a number that was taken for it. With `ready`, its buffers are defined.
    pub fn launch(
        &self,
        launch: &Arc<PeerLaunch>,
        definition: u32,
        at: GroupId,
        class: Class,
        ready: bool,
    ) -> Result<(), TransferError> {
        let total = launch.lists.outbound.total();
        let mut link = lock(&self.link);
        if let Some(error) = self.over.get() {
            self.numbers.close(at);
            return Err(error.clone());
        }
        // If it was given up a moment ago, its bytes are not read any more.
        let guard = launch.access();
        let ready = ready && guard.is_some();
        let inlines = ready && self.inlines && link.inlines(total);
        let inline = guard.as_ref().filter(|_| inlines).map(|guard| {
            let mut bytes = Vec::with_capacity(total as usize);
            guard.bytes().copy_out(0, total, &mut bytes);
            bytes
        });
        if inline.is_some() {
            let by = self.inline_transport(self.outbox.get().is_some());
            launch.set_transport(by);
            self.count(by, false, total);
        }
        let token = Arc::clone(launch);
        let launching = Launching { token, definition, at, class, source: ready, destination: ready, inline };
        if !link.launch(launching) {
            drop(link);
            self.flush(0);
            let bound = LAUNCHES_MAX;
            return Err(TransferError::Overloaded { member: self.peer, bound });
        }
        // Under the lock: whatever the link says of the launch comes after it knows its group.
        launch.set_group(at);
        let launched = link.launched();
        drop(link);
        drop(guard);
        let crowded = launched > LAUNCHES_AT_ONCE && class != Class::Latency;
        if launched > LAUNCHES_UNHEARD || total > BYTES_UNHEARD {
            launch.wait_for_send();
        }
        if crowded && self.outbox.get().is_none() {
            self.perform_deferred();
        } else {
            self.poll_inline(|| self.perform());
        }
        Ok(())
    }

    /// Ends the connection: every launch under way fails with this.
    pub fn close(&self, error: TransferError) {
        let launches = {
            let mut link = lock(&self.link);
            // First: a thread that sees that it is over may use what the peer is reading.
            if let Some(inbox) = &self.inbox {
                inbox.revoke();
            }
            if self.over.set(error.clone()).is_err() {
                return;
            }
            link.drain()
        };
        self.decided.notify_all();
        let lanes = std::mem::take(&mut *self.lanes.write().unwrap_or_else(PoisonError::into_inner));
        for lane in &lanes {
            lane.close();
        }
        for launch in launches {
            launch.fail(error.clone());
            launch.mark_peer_quiet();
        }
        lock(&self.shared).clear();
        self.tell_host(|host, connection| host.connection_over(connection, &error));
    }
}

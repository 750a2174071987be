//! A connection: the link to one incarnation of one peer, over its lanes.
//!
//! It performs the outputs of the [`Link`], and passes the reports of lanes and fetching threads to it. The
//! link is behind one lock, held for table look-ups only: no system call and no copy happens under it. It
//! neither discovers peers nor dials; it knows its engine by [`SessionHost`] only. Begin at
//! [`Connection::launch`].
//!
//! A launch is sent at once while few launches are in flight ([`LAUNCHES_AT_ONCE`]), or if its class is
//! latency. Otherwise the reactor sends its frame together with all others that are queued by then, and
//! frames that arrived with one system call are answered with one. A lone message leaves without delay; among
//! many messages, a system call each is most of their cost. No timer delays anything.

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

/// The number of launches in flight above which the reactor sends a launch, together with other frames in one
/// system call, on a connection without a ring. Below it, in the latency class, and with a ring, the
/// launching thread sends at once.
const LAUNCHES_AT_ONCE: usize = 4;

/// The number of launches in flight, and the bytes of one, above which a launch registers for the peer's
/// acknowledgement although no program waits for it. Below both, the acknowledgement may be read a little
/// later, and the launch occupies memory until then.
const LAUNCHES_UNHEARD: usize = 64;
const BYTES_UNHEARD: u64 = 64 << 10;

/// The engine of a connection, as the connection sees it.
pub trait SessionHost: Send + Sync {
    /// Reports that a connection became unused, so that the engine may end it if there are too many.
    fn connection_is_unused(&self);

    /// Reports that the peer refused to end the connection: the engine may ask another one.
    fn make_room(&self);

    /// Reports that a connection stays, although this side had agreed to its end.
    fn connection_stays(&self, connection: &Arc<Connection>);

    /// Reports that the connection ended to make room for others, with the peer's agreement.
    fn connection_left(&self, connection: &Arc<Connection>);

    /// Reports that a lane was lost. The engine dials it again, or detects that the peer is dead.
    fn mend(&self, connection: &Arc<Connection>, control: bool, how: &str);

    /// Reports that the best transport to a peer has failed although the peer may be alive.
    fn back_off(&self, peer: Member, how: &str);

    /// Schedules a check of the connections at `wanted`.
    fn look_at(&self, wanted: Instant);

    /// Reports that the connection is over.
    fn connection_over(&self, connection: &Arc<Connection>, error: &TransferError);
}

/// The connection to one incarnation of one peer.
pub struct Connection {
    /// This side.
    pub me: Member,
    /// The other side.
    pub peer: Member,
    /// The number that distinguishes this connection from others between the same two incarnations.
    pub nonce: u64,
    /// Whether this side dialled.
    pub dialled: bool,
    /// The transport of its lanes.
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
    /// The lanes that the peer lost before this side had them; they are refused when they arrive.
    pub(super) lost_lanes: Mutex<HashSet<u16>>,
    /// The number of the last control frame received when a frame last arrived damaged.
    pub(super) last_damage: Mutex<Option<u32>>,
    pub(super) over: OnceLock<TransferError>,
    /// How the peer went, and when. The connection ends once the peer's last frames are processed.
    pub(super) peer_gone: OnceLock<(String, Instant)>,
    /// Whether small launches carry their bytes in the launch frame; not if all memory is to be read through
    /// the kernel.
    pub(super) inlines: bool,
    pub(super) pid: Option<i32>,
    /// The regions that this side has announced to the peer.
    pub(super) offered: Mutex<HashMap<u32, Weak<MemoryRegion>>>,
    /// The regions that the peer has announced; none for a region that could not be mapped.
    pub(super) shared: Mutex<HashMap<u32, Option<Arc<PeerMemory>>>>,
    /// The ring from which this side reads control frames once the peer has switched to it.
    pub(super) inbox: Option<RingInbox>,
    /// The ring to which this side writes control frames once it has switched to it.
    pub(super) outbox: OnceLock<RingOutbox>,
    /// A region that was announced in the ring before its descriptor arrived on the socket. The ring is not
    /// read until the descriptor is here.
    pub(super) awaited: Mutex<Option<u32>>,
    pub(super) last_heard: AtomicU64,
    /// The number of launches that wait for the acknowledgement of sent bytes.
    pub(super) send_waiters: AtomicUsize,
    pub(super) spin_wait: SpinWait,
    /// Notified when the end of a connection that this side has agreed to is decided.
    pub(super) decided: Condvar,
    pub(super) started: Instant,
    /// The bytes moved on this connection.
    pub counters: Counters,
    /// The bytes moved with the peer's task, on this and all other connections.
    pub(super) moved: Arc<Counters>,
}

/// A lease on a connection, which prevents its end while a request is about to prepare something on it.
pub struct ConnectionLease(Arc<Connection>);

impl ConnectionLease {
    /// Acquires a lease; none if this side has agreed to the end of the connection.
    pub fn acquire(connection: &Arc<Connection>) -> Option<Self> {
        let kept = lock(&connection.link).keep();
        kept.then(|| Self(Arc::clone(connection)))
    }

    /// Acquires a further lease on the same connection.
    pub fn renew(&self) -> Self {
        let _kept = lock(&self.0.link).keep();
        Self(Arc::clone(&self.0))
    }

    /// Takes over the lease with which a new connection begins, held until every request that waits for the
    /// connection has its own. Called once.
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
    /// Runs on the thread that drops the region last; no thread drops a region while it holds a lock of the
    /// connection.
    fn region_gone(self: Arc<Self>, id: u32) {
        let offered = lock(&self.offered).remove(&id);
        if offered.is_some() {
            lock(&self.link).unshare(id);
            self.flush(0);
        }
    }
}

/// The parameters of a new connection.
pub struct ConnectionSettings {
    /// The engine.
    pub host: Weak<dyn SessionHost>,
    /// The threads that move its bytes.
    pub io: Arc<IoThreads>,
    /// The counters of the engine.
    pub counts: Arc<EngineCounts>,
    /// The numbers of launches with the peer.
    pub numbers: Numbers,
    /// The bytes moved with the peer's task.
    pub moved: Arc<Counters>,
    /// Whether small launches carry their bytes in the launch frame.
    pub inlines: bool,
    /// How long a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// This side.
    pub me: Member,
    /// The other side.
    pub peer: Member,
    /// The number that distinguishes it from others.
    pub nonce: u64,
    /// Whether this side dialled.
    pub dialled: bool,
    /// The transport of its lanes.
    pub kind: TransportKind,
    /// The capabilities of its lanes.
    pub capabilities: WireCapabilities,
    /// The terms of the link.
    pub terms: Terms,
    /// Whether chunks carry checksums.
    pub checks: bool,
    /// The peer's process, if it is on this host and its memory can be read.
    pub pid: Option<i32>,
}

impl Connection {
    /// Creates a connection without lanes.
    pub fn new(settings: ConnectionSettings) -> Arc<Self> {
        let ConnectionSettings { host, io, counts, numbers, moved, inlines, spin, .. } = settings;
        let ConnectionSettings { me, peer, nonce, dialled, kind, capabilities, terms, checks, pid, .. } =
            settings;
        let mut link = Link::new(me, peer, terms, numbers.clone());
        // The lease with which the connection begins, until the cliques have it: see
        // `ConnectionLease::adopt`.
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

    /// Returns the handle by which launches refer to the connection.
    pub fn carrier(&self) -> Carrier {
        let session: Weak<dyn SessionHandle> = self.this.clone();
        Carrier { session, peer: self.peer, fetches: self.fetches }
    }

    /// Returns the handle by which lanes refer to the connection.
    pub fn lane_host(&self) -> Weak<dyn LaneHost> {
        self.this.clone()
    }

    /// Returns a weak reference to the connection.
    pub(super) fn weak(&self) -> Weak<Self> {
        self.this.clone()
    }

    /// Returns the engine, or none if it is gone.
    pub(super) fn host(&self) -> Option<Arc<dyn SessionHost>> {
        self.host.upgrade()
    }

    /// Calls `tell` with the engine and this connection, unless either is gone.
    pub(super) fn tell_host(&self, tell: impl FnOnce(&dyn SessionHost, &Arc<Self>)) {
        if let (Some(host), Some(this)) = (self.host(), self.this.upgrade()) {
            tell(&*host, &this);
        }
    }

    pub(super) fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the error with which the connection ended, or none while it lives.
    pub fn over(&self) -> Option<&TransferError> {
        self.over.get()
    }

    /// Returns the number of live lanes.
    pub fn live_lanes(&self) -> usize {
        self.lanes().iter().filter(|lane| !lane.is_over()).count()
    }

    /// Returns whether there is a live lane for control frames.
    pub fn has_control_lane(&self) -> bool {
        self.lanes().iter().any(|lane| lane.control && !lane.is_over())
    }

    /// Records that bytes of the peer arrived.
    pub(super) fn note_heard(&self) {
        let now = self.started.elapsed().as_micros();
        self.last_heard.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns how long no bytes of the peer have arrived.
    pub fn silent(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_micros(self.last_heard.load(Ordering::Relaxed)))
    }

    /// Returns the number of the last control frame received.
    pub fn control_heard(&self) -> u32 {
        lock(&self.link).heard()
    }

    /// Returns the number of launches in flight.
    pub fn launched(&self) -> usize {
        lock(&self.link).launched()
    }

    /// Returns whether nothing is prepared on the connection, or about to be, on either side, as far as this
    /// side knows.
    pub fn is_unused(&self) -> bool {
        lock(&self.link).is_unused()
    }

    /// Returns whether this side has asked the peer to end the connection, and has no answer yet.
    pub fn is_asked(&self) -> bool {
        lock(&self.link).is_asked()
    }

    /// Asks the peer whether the connection may end, if it is unused.
    pub fn ask_to_leave(&self) {
        lock(&self.link).ask_to_leave();
        self.flush(0);
    }

    /// Waits until the peer has decided whether a connection stays that this side has agreed to end. Returns
    /// a lease if it stays, or none if it is over.
    ///
    /// # Errors
    /// Returns [`TransferError::Transport`] if the peer has not decided by `until`.
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

    /// Returns the error of an unused connection that both sides have agreed to end.
    pub(super) fn made_room_error(&self) -> TransferError {
        let why = "it was dropped to make room: nobody used it".to_owned();
        TransferError::Transport { transport: self.kind, member: self.peer, why }
    }

    /// Returns whether both sides have agreed to end the connection, to make room for others.
    pub fn is_gone(&self) -> bool {
        lock(&self.link).is_gone()
    }

    /// Returns the launches in flight.
    pub fn launches(&self) -> Vec<Arc<PeerLaunch>> {
        lock(&self.link).tokens()
    }

    /// Sends a ping, to find out whether the peer is alive.
    pub fn ping(&self) {
        lock(&self.link).ping();
        self.flush(0);
    }

    /// Sends a definition to the peer, with the regions that it may fetch from. Returns the number of the
    /// definition.
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

    /// Withdraws a definition.
    pub fn undefine(&self, number: u32) {
        lock(&self.link).undefine(number);
        self.perform();
    }

    /// Takes the number of the next launch on a channel.
    pub fn take_number(&self, channel: u32) -> GroupId {
        self.numbers.take(channel)
    }

    /// Announces that no launch will come for a number that was taken, and why.
    pub fn withdraw(&self, at: GroupId, why: &str) {
        lock(&self.link).withdraw(at, why);
        self.flush(0);
    }

    /// Launches with a number that was taken for it. `ready` says whether its buffers are defined.
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
        // A launch that was cancelled a moment ago gives no guard, and its bytes must not be read.
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
        // The lock is still held, so the launch knows its group before the link reports anything about it.
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

    /// Ends the connection: every launch in flight fails with this error.
    pub fn close(&self, error: TransferError) {
        let launches = {
            let mut link = lock(&self.link);
            // This comes first: once another thread sees that the connection is over, it may reuse buffers
            // that the peer is reading.
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

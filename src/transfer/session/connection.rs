//! A connection: the link to one life of one peer, over its lanes.
//!
//! It performs what the [`Link`] decides, and tells the link what the lanes and the copying threads report. The link is
//! behind one lock, held for table look-ups only: no system call and no copy happens under it.
//!
//! | file | what it has |
//! | --- | --- |
//! | `connection.rs` | what a connection is, what the engine asks of it, and its end |
//! | `connection/lanes.rs` | what lanes ask and tell, and what becomes of a connection that loses one |
//! | `connection/ring.rs` | control frames by shared memory, and threads that read them for themselves |
//! | `connection/spinning.rs` | how long such a thread looks before it sleeps |
//! | `connection/performing.rs` | what is done because the link says so, and how what there is to say leaves |

use crate::base::counts::Counters;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::sync::lock;
use crate::base::transport::Choice;
use crate::base::transport::TransportKind;
use crate::engine::shared::Core;
use crate::io::lane::Lane;
use crate::io::ring::{Inbox, Outbox};
use crate::io::wire::Nature;
use crate::launch::peer_launch::{Part, give_up};
use crate::memory::raw::{Mapping, Piece};
use crate::memory::{Listener, Region};
use crate::protocol::link::definition::{Definition, Source};
use crate::protocol::link::{Class, GroupId, Launching, Link, Numbers, Terms};
use muster_clock as clock;

use crate::session::spin_wait::Spinning;

/// While more launches are under way, what a launch says leaves together with what others say, in one call of the system;
/// until then, and where it is urgent, it leaves at once.
const LAUNCHES_AT_ONCE: usize = 4;

/// While no more launches are under way, and for no more bytes of one, whether the peer has what was sent may be heard a
/// little later if nobody waits for it: until then it takes room.
const LAUNCHES_UNHEARD: usize = 64;
const BYTES_UNHEARD: u64 = 64 << 10;

/// Memory of a peer, mapped to be read.
pub struct Shared(Mapping);

impl Shared {
    /// `len` bytes at `offset + from`, if they are there.
    pub fn piece(&self, offset: u64, from: usize, len: usize) -> Option<Piece<'_>> {
        self.0.piece(usize::try_from(offset).ok()?.checked_add(from)?, len)
    }

    /// Maps what a peer sent, if it can never fault whoever reads it.
    pub(super) fn of(file: &OwnedFd, len: u64) -> Option<Self> {
        Mapping::sealed(file.as_fd(), usize::try_from(len).ok()?, false).map(Self)
    }
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
    /// How its lanes are made.
    pub kind: TransportKind,
    /// Whether receivers fetch from the memory of senders.
    pub fetches: bool,
    pub(super) nature: Nature,
    pub(super) core: Weak<Core>,
    pub(super) link: Mutex<Link<Arc<Part>>>,
    pub(super) numbers: Numbers,
    pub(super) lanes: RwLock<Vec<Arc<Lane>>>,
    /// Lanes that the peer had lost before they were here. They do not come any more.
    pub(super) lost: Mutex<HashSet<u16>>,
    /// The last control frame that was heard when a frame last came damaged.
    pub(super) garbled: Mutex<Option<u32>>,
    pub(super) over: OnceLock<TransferError>,
    /// How its peer went, and when: the connection ends when its last words have been heard.
    pub(super) gone: OnceLock<(String, Instant)>,
    pub(super) checks: bool,
    /// Whether small launches bring their bytes along; not where all is to go through the kernel.
    pub(super) inlines: bool,
    pub(super) pid: Option<i32>,
    /// Regions that the peer was told of.
    pub(super) offered: Mutex<HashMap<u32, Weak<Region>>>,
    /// Regions that the peer told of; none where one could not be mapped.
    pub(super) shared: Mutex<HashMap<u32, Option<Arc<Shared>>>>,
    /// Where control frames come in once the peer has switched to it.
    pub(super) inbox: Option<Inbox>,
    /// Where control frames go once this side has switched to it.
    pub(super) outbox: OnceLock<Outbox>,
    /// A region whose descriptor comes by the socket, and which the ring has told of already: the ring waits for it.
    pub(super) awaited: Mutex<Option<u32>>,
    pub(super) last_heard: AtomicU64,
    /// How many parts there are of which somebody waits to hear that the peer has what they sent.
    pub(super) heeded: AtomicUsize,
    pub(super) spinning: Spinning,
    /// Tells of decisions about the end of a connection that this side has agreed to.
    pub(super) decided: Condvar,
    pub(super) started: Instant,
    /// Bytes moved.
    pub counters: Counters,
    /// Bytes moved with its peer's task, on this and all other connections.
    pub(super) moved: Arc<Counters>,
}

/// A connection that does not end to make room while this is there: somebody is about to prepare something on it.
pub struct Kept(Arc<Connection>);

impl Kept {
    /// Keeps it; not if this side has agreed to its end.
    pub fn new(connection: &Arc<Connection>) -> Option<Self> {
        let kept = lock(&connection.link).keep();
        kept.then(|| Self(Arc::clone(connection)))
    }

    /// Once more: it is kept already.
    pub fn again(&self) -> Self {
        let _kept = lock(&self.0.link).keep();
        Self(Arc::clone(&self.0))
    }

    /// Of a new connection: it is kept until all who wait for it have it. Called once.
    pub fn first(connection: &Arc<Connection>) -> Self {
        Self(Arc::clone(connection))
    }

    /// The connection.
    pub const fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.0.link).release();
    }
}

impl Listener for Connection {
    /// Called by whoever lets go of the region last, which nobody does under a lock of the connection.
    fn region_gone(self: Arc<Self>, id: u32) {
        let offered = lock(&self.offered).remove(&id);
        if offered.is_some() {
            lock(&self.link).unshare(id);
            self.kick(0);
        }
    }
}

/// What a connection is made of.
pub struct Making {
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
    pub nature: Nature,
    /// The terms of the link.
    pub terms: Terms,
    /// Whether chunks carry checksums.
    pub checks: bool,
    /// The peer's process, if it is on this host and its memory can be read.
    pub pid: Option<i32>,
}

impl Connection {
    /// A connection without lanes.
    pub fn new(core: &Arc<Core>, making: Making) -> Arc<Self> {
        let Making { me, peer, nonce, dialled, kind, nature, terms, checks, pid } = making;
        let numbers = core.numbers(peer);
        let mut link = Link::new(me, peer, terms, numbers.clone());
        // Until it is among the cliques: see `Kept::first`.
        link.keep();
        Arc::new(Self {
            me,
            peer,
            nonce,
            dialled,
            kind,
            nature,
            fetches: terms.fetch,
            core: Arc::downgrade(core),
            link: Mutex::new(link),
            numbers,
            lanes: RwLock::default(),
            lost: Mutex::default(),
            garbled: Mutex::default(),
            over: OnceLock::new(),
            gone: OnceLock::new(),
            checks,
            inlines: core.config.transport != Choice::Pvm,
            pid,
            offered: Mutex::default(),
            shared: Mutex::default(),
            inbox: if nature.shares { Inbox::new().ok() } else { None },
            outbox: OnceLock::new(),
            awaited: Mutex::default(),
            last_heard: AtomicU64::new(0),
            heeded: AtomicUsize::new(0),
            spinning: Spinning::new(core.config.spin),
            decided: Condvar::new(),
            started: clock::monotonic(),
            counters: Counters::default(),
            moved: core.moved(peer.task),
        })
    }

    pub(super) fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why it is over, if it is.
    pub fn over(&self) -> Option<&TransferError> {
        self.over.get()
    }

    /// How many lanes live.
    pub fn live_lanes(&self) -> usize {
        self.lanes().iter().filter(|lane| !lane.is_over()).count()
    }

    /// Whether control frames can be sent.
    pub fn has_control_lane(&self) -> bool {
        self.lanes().iter().any(|lane| lane.control && !lane.is_over())
    }

    /// Whether chunks carry checksums.
    pub const fn checks(&self) -> bool {
        self.checks
    }

    /// The peer's process, if its memory can be read.
    pub const fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Something came of the peer.
    pub fn heard(&self) {
        let now = self.started.elapsed().as_micros();
        self.last_heard.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// For how long nothing has come.
    pub fn silent(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_micros(self.last_heard.load(Ordering::Relaxed)))
    }

    /// The last control frame that was heard.
    pub fn control_heard(&self) -> u32 {
        lock(&self.link).heard()
    }

    /// Launches under way.
    pub fn launched(&self) -> usize {
        lock(&self.link).launched()
    }

    /// Whether nobody has prepared anything on it, or is about to, on either side, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        lock(&self.link).is_unused()
    }

    /// Whether its peer was asked whether it may end, and has not answered.
    pub fn is_asked(&self) -> bool {
        lock(&self.link).is_asked()
    }

    /// Asks the peer whether it may end, if nobody uses it.
    pub fn ask_to_leave(self: &Arc<Self>) {
        lock(&self.link).ask_to_leave();
        self.kick(0);
    }

    /// Waits until the peer has decided whether a connection stays that this side has agreed to end. None if it is over.
    ///
    /// # Errors
    /// If the peer says nothing until then.
    pub fn decided(self: &Arc<Self>, until: Instant) -> Result<Option<Kept>, TransferError> {
        let mut link = lock(&self.link);
        loop {
            if self.over.get().is_some() || link.is_gone() {
                return Ok(None);
            }
            if link.keep() {
                return Ok(Some(Kept(Arc::clone(self))));
            }
            let left = until.saturating_duration_since(clock::monotonic());
            if left.is_zero() {
                let why = "it asked whether their connection may end, and has said nothing since".to_owned();
                return Err(TransferError::Transport { transport: self.kind, member: self.peer, why });
            }
            link = self.decided.wait_timeout(link, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nobody uses it on either side, and both have let go of it.
    pub(super) fn has_made_room(&self) -> TransferError {
        let why = "it was dropped to make room: nobody used it".to_owned();
        TransferError::Transport { transport: self.kind, member: self.peer, why }
    }

    /// Both sides have let go of it, to make room for others.
    pub fn is_gone(&self) -> bool {
        lock(&self.link).is_gone()
    }

    /// The parts under way.
    pub fn parts(&self) -> Vec<Arc<Part>> {
        lock(&self.link).tokens()
    }

    /// Asks whether the peer lives.
    pub fn ping(self: &Arc<Self>) {
        lock(&self.link).ping();
        self.kick(0);
    }

    /// Makes a definition known to the peer, with the memory that it is fetched from.
    pub fn define(self: &Arc<Self>, definition: Definition, regions: &[Arc<Region>]) -> u32 {
        let mut offered = lock(&self.offered);
        let mut link = lock(&self.link);
        for region in regions {
            if region.shared().is_some() && !offered.contains_key(&region.id) {
                offered.insert(region.id, Arc::downgrade(region));
                link.share(region.id, region.len() as u64);
                let listener: Arc<dyn Listener> = self.clone();
                region.when_gone(Arc::downgrade(&listener));
            }
        }
        let number = link.define(definition);
        drop(link);
        drop(offered);
        self.kick(0);
        number
    }

    /// Forgets a definition.
    pub fn undefine(self: &Arc<Self>, number: u32) {
        lock(&self.link).undefine(number);
        self.settle();
    }

    /// Memory of the peer.
    pub fn shared(&self, source: Source) -> Option<Arc<Shared>> {
        match source {
            Source::Region(id, _) => lock(&self.shared).get(&id).cloned().flatten(),
            _ => None,
        }
    }

    /// A number for the next launch on a channel.
    pub fn number(&self, channel: u32) -> GroupId {
        self.numbers.take(channel)
    }

    /// Nothing is launched with a number that was taken, for this reason.
    pub fn withdraw(self: &Arc<Self>, at: GroupId, why: &str) {
        lock(&self.link).withdraw(at, why);
        self.kick(0);
    }

    /// Launches a part, with a number that was taken for it. With `ready`, its buffers are defined.
    pub fn launch(
        self: &Arc<Self>,
        part: &Arc<Part>,
        definition: u32,
        at: GroupId,
        class: Class,
        ready: bool,
    ) -> Result<(), TransferError> {
        let total = part.work.out.total();
        let mut link = lock(&self.link);
        if let Some(error) = self.over.get() {
            self.numbers.close(at);
            return Err(error.clone());
        }
        // Given up a moment ago, its bytes are not read any more.
        let visit = part.visit();
        let ready = ready && visit.is_some();
        let inline = (ready && self.inlines && link.inlines(total)).then(|| {
            let mut bytes = Vec::with_capacity(total as usize);
            part.work.out.copy_out(0, total, &mut bytes);
            bytes
        });
        if inline.is_some() {
            let by = self.brings_by(self.outbox.get().is_some());
            part.moves_by(by);
            self.count(by, false, total);
        }
        let token = Arc::clone(part);
        let launching = Launching { token, definition, at, class, source: ready, destination: ready, inline };
        if !link.launch(launching) {
            drop(link);
            self.kick(0);
            let bound = crate::protocol::link::LAUNCHES_MAX;
            return Err(TransferError::Overloaded { member: self.peer, bound });
        }
        // Under the lock: whatever the link says of the part comes after it knows its place.
        part.is_at(at);
        let launched = link.launched();
        drop(link);
        drop(visit);
        let crowded = launched > LAUNCHES_AT_ONCE && class != Class::Latency;
        if launched > LAUNCHES_UNHEARD || total > BYTES_UNHEARD {
            part.heed();
        }
        if crowded && self.outbox.get().is_none() {
            self.settle_elsewhere();
        } else {
            self.converse(|| self.settle());
        }
        Ok(())
    }

    /// The buffers of a part are defined.
    pub fn ready(self: &Arc<Self>, at: GroupId) {
        lock(&self.link).ready(at, true, true);
        self.settle();
    }

    /// What a part receives was fetched.
    pub fn fetched(self: &Arc<Self>, at: GroupId) {
        lock(&self.link).received(at);
        self.settle();
    }

    /// Whether the memory of the peer can be read, and it will be known whether that was in time.
    pub fn can_fetch(&self) -> bool {
        self.outbox.get().is_some()
    }

    /// Whether all that was read of the peer's memory before this is called counts. A side that ends a connection says so
    /// first and then uses its memory for other things, however long the other one goes on reading: neither waits for the
    /// other, and nothing that was read too late counts.
    pub fn fetch_counts(&self) -> bool {
        self.outbox.get().is_some_and(Outbox::is_held) && self.over.get().is_none()
    }

    /// What was fetched does not count: the connection ends, on one side or the other.
    pub fn fetch_is_late(&self, part: &Arc<Part>) {
        let how = "its memory was let go of while it was read".to_owned();
        give_up(part, TransferError::PeerDead { member: self.peer, how });
    }

    /// It cannot be fetched.
    pub fn fetch_failed(
        self: &Arc<Self>,
        part: &Arc<Part>,
        kind: TransportKind,
        error: Errno,
        nothing_yet: bool,
    ) {
        let Some(at) = part.at() else { return };
        if nothing_yet && error != Errno::SRCH {
            lock(&self.link).push_instead(at);
            if let Some(core) = self.core.upgrade() {
                core.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            }
            self.settle();
        } else {
            let why = error.to_string();
            give_up(part, TransferError::Transport { transport: kind, member: self.peer, why });
        }
    }

    /// Gives a part up at the peer. Whether it was under way.
    pub fn stop(self: &Arc<Self>, at: GroupId, why: &str) -> bool {
        let stopped = self.over.get().is_none() && lock(&self.link).stop(at, why);
        if stopped {
            self.wake_held();
        }
        stopped
    }

    /// Nothing can land in a part any more.
    pub fn quiesced(self: &Arc<Self>, at: GroupId) {
        // Let go of without the lock: its memory may go with it.
        let over = lock(&self.link).quiesced(at);
        drop(over);
        self.kick(0);
    }

    /// Ends the connection: every part under way fails with this.
    pub fn end(self: &Arc<Self>, error: TransferError) {
        let parts = {
            let mut link = lock(&self.link);
            // First: whoever sees that it is over may use what the peer is reading.
            if let Some(inbox) = &self.inbox {
                inbox.let_go();
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
        for part in parts {
            part.fail(error.clone());
            part.peer_is_quiet();
        }
        lock(&self.shared).clear();
        if let Some(core) = self.core.upgrade() {
            core.connection_over(self, &error);
        }
    }
}

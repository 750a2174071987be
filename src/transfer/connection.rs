//! A connection: the link to one life of one peer, over its lanes.
//!
//! It performs what the [`Link`] decides, and tells the link what the lanes and the copying threads report. The link is
//! behind one lock, held for table look-ups only: no system call and no copy happens under it.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::engine::Choice;
use super::error::TransferError;
use super::frame::{Header, Kind};
use super::identity::Member;
use super::inside::Core;
use super::launch::{Part, Stay, give_up};
use super::link::definition::{Definition, Source};
use super::link::{
    Difference, Frame, GroupId, Landing, Launching, Link, Numbers, Output, Push, Terms, Violation,
};
use super::memory::raw::{Mapping, Piece};
use super::memory::{Listener, Region};
use super::sync::lock;
use super::transport::TransportKind;
use super::transport::lane::{Lane, LaneError};
use super::transport::ring::{Given, Inbox, Outbox, Reader};
use super::transport::wire::{Nature, Wire, WireError};
use crate::clock;

/// The most regions that a peer may share.
const REGIONS_MAX: usize = 4096;
/// Launches that send no more than this are sent by whoever launches them; others by the reactors.
const SEND_AT_ONCE: u64 = 64 << 10;

/// While more launches are under way, what a launch says leaves together with what others say, in one call of the system;
/// until then it leaves at once.
const LAUNCHES_AT_ONCE: usize = 4;

/// What is to be said to frames that came together: all of it leaves in as few calls of the system as it fits into.
#[derive(Default)]
pub struct Answers {
    /// Bytes that are to be sent now.
    sends: u64,
    /// Whether nobody uses the connection.
    unused: bool,
    /// Parts that are in place, of which the peer hears first.
    landed: Vec<Stay>,
}

/// Memory of a peer, mapped to be read.
pub struct Shared(Mapping);

impl Shared {
    /// `len` bytes at `offset + from`, if they are there.
    pub fn piece(&self, offset: u64, from: usize, len: usize) -> Option<Piece<'_>> {
        self.0.piece(usize::try_from(offset).ok()?.checked_add(from)?, len)
    }

    /// Maps what a peer sent, if it can never fault whoever reads it.
    fn of(file: &OwnedFd, len: u64) -> Option<Self> {
        Mapping::sealed(file.as_fd(), usize::try_from(len).ok()?, false).map(Self)
    }
}

/// Bytes by transport, sent and received.
#[derive(Debug, Default)]
pub struct Counters([[AtomicU64; 2]; TransportKind::ALL.len()]);

impl Counters {
    fn add(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.0[kind as usize][usize::from(received)].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sent and received by this transport.
    pub fn get(&self, kind: TransportKind) -> (u64, u64) {
        let [sent, received] = &self.0[kind as usize];
        (sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed))
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
    nature: Nature,
    core: Weak<Core>,
    link: Mutex<Link<Arc<Part>>>,
    numbers: Numbers,
    lanes: RwLock<Vec<Arc<Lane>>>,
    /// Lanes that the peer had lost before they were here. They do not come any more.
    lost: Mutex<HashSet<u16>>,
    /// The last control frame that was heard when a frame last came damaged.
    garbled: Mutex<Option<u32>>,
    over: OnceLock<TransferError>,
    checks: bool,
    /// Whether small launches bring their bytes along; not where all is to go through the kernel.
    inlines: bool,
    pid: Option<i32>,
    /// Regions that the peer was told of.
    offered: Mutex<HashMap<u32, Weak<Region>>>,
    /// Regions that the peer told of; none where one could not be mapped.
    shared: Mutex<HashMap<u32, Option<Arc<Shared>>>>,
    /// Where control frames come in once the peer has switched to it.
    inbox: Option<Inbox>,
    /// Where control frames go once this side has switched to it.
    outbox: OnceLock<Outbox>,
    /// A region whose descriptor comes by the socket, and which the ring has told of already: the ring waits for it.
    awaited: Mutex<Option<u32>>,
    last_heard: AtomicU64,
    /// Tells of decisions about the end of a connection that this side has agreed to.
    decided: Condvar,
    started: Instant,
    /// Bytes moved.
    pub counters: Counters,
    /// Bytes moved with its peer's task, on this and all other connections.
    moved: Arc<Counters>,
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
            checks,
            inlines: core.config.transport != Choice::Pvm,
            pid,
            offered: Mutex::default(),
            shared: Mutex::default(),
            inbox: if nature.shares { Inbox::new().ok() } else { None },
            outbox: OnceLock::new(),
            awaited: Mutex::default(),
            last_heard: AtomicU64::new(0),
            decided: Condvar::new(),
            started: clock::monotonic(),
            counters: Counters::default(),
            moved: core.moved(peer.task),
        })
    }

    fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lanes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes a lane in. The control lane of a connection that had one before says how far the peer has heard.
    pub fn add_lane(self: &Arc<Self>, core: &Core, lane: &Arc<Lane>, peer_heard: u32) -> std::io::Result<()> {
        if lane.control {
            // What the one before it still takes would be lost: from here on it takes nothing.
            for before in self.lanes().iter().filter(|before| before.control) {
                before.close();
                before.stop_sending();
            }
            lock(&self.link).control_again(peer_heard);
        }
        {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            if lock(&self.lost).contains(&lane.id) {
                // The peer was told already that nothing comes from it.
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
            lanes.push(Arc::clone(lane));
        }
        self.heard();
        if lane.control && self.inbox.is_some() {
            // Before anything is read: what is said after the switch to the peer's ring has no descriptors with it.
            core.reactor(lane.id).add_bell(self)?;
            lock(&self.link).offer_ring();
        }
        if let Err(error) = core.reactor(lane.id).add(lane) {
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(error);
        }
        if let Some(error) = self.over.get() {
            // Whoever ended it has let go of its lanes, perhaps before this one was among them.
            tracing::debug!(%error, "a lane came to a connection that is over");
            lane.close();
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        self.kick(0);
        Ok(())
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
    fn has_made_room(&self) -> TransferError {
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

    // What the lanes ask and tell.

    /// The next control frame; one that carries a descriptor only if it would be the first of its call.
    pub fn next_control(&self, first: bool) -> Option<Frame> {
        let frame = lock(&self.link).next_control(first)?;
        if frame.header.kind == Kind::Switch {
            // What was said behind it waited for the socket. Nobody else comes to put it into the ring.
            self.fill_ring();
        }
        Some(frame)
    }

    /// Puts into the ring what waits for it, as far as there is room.
    fn fill_ring(&self) {
        let Some(outbox) = self.outbox.get() else { return };
        outbox.write(|room| {
            let (frame, more) = lock(&self.link).next_for_ring(room);
            match frame {
                Some(frame) => Given::Frame(frame.header.encode(), frame.payload),
                None if more => Given::TooLong,
                None => Given::Nothing,
            }
        });
    }

    /// The next chunk for a lane. The control lane carries chunks only where there is no other, and after what waits to be
    /// said.
    pub fn next_chunk(&self, lane: &Lane) -> Option<Push<Arc<Part>>> {
        if lane.control && self.lanes().iter().any(|lane| !lane.control && !lane.is_over()) {
            return None;
        }
        let mut link = lock(&self.link);
        // Said before the chunk could be sent, it goes before it: behind it on the same lane, the `Go` that the chunk is
        // held for would never be read.
        if lane.control && link.has_control() {
            return None;
        }
        link.next_chunk(lane.id)
    }

    /// Whether control frames wait for the lane that carries them.
    pub fn has_control(&self) -> bool {
        lock(&self.link).has_control()
    }

    /// Whether a frame is from this peer's life to this life.
    pub fn is_between(&self, header: &Header) -> bool {
        let ours =
            header.source == self.peer.incarnation.get() && header.destination == self.me.incarnation.get();
        if !ours && let Some(core) = self.core.upgrade() {
            core.counts.fenced.fetch_add(1, Ordering::Relaxed);
        }
        ours
    }

    /// A chunk is about to come.
    pub fn begin_landing(&self, header: &Header) -> Landing<Arc<Part>> {
        lock(&self.link).begin_landing(header)
    }

    /// A chunk will not come.
    pub fn let_fall(&self, header: &Header) {
        lock(&self.link).let_fall(header);
    }

    /// A chunk is there, whole or damaged.
    pub fn chunk_came(
        self: &Arc<Self>,
        kind: TransportKind,
        header: &Header,
        part: &Arc<Part>,
        start: u64,
        intact: bool,
    ) {
        let mut link = lock(&self.link);
        if intact {
            let counts = link.landed(header);
            drop(link);
            // The peer hears first that all is here: whoever waits for it on this side may end the process at once.
            self.settle();
            if counts {
                part.moves_by(kind);
                self.count(kind, true, u64::from(header.len));
                part.arrived(start, u64::from(header.len));
            }
        } else {
            link.damaged(header);
            drop(link);
            if let Some(core) = self.core.upgrade() {
                core.counts.damaged.fetch_add(1, Ordering::Relaxed);
            }
            self.settle();
        }
    }

    fn count(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.counters.add(kind, received, bytes);
        self.moved.add(kind, received, bytes);
    }

    /// Bytes left on a lane.
    pub fn count_sent(&self, kind: TransportKind, bytes: u64) {
        self.count(kind, false, bytes);
    }

    /// Bytes were fetched.
    pub fn count_received(&self, kind: TransportKind, bytes: u64) {
        self.count(kind, true, bytes);
    }

    /// A control frame came by a lane, perhaps with descriptors. What is to be said to it waits for
    /// [`answer`](Self::answer).
    pub fn control_frame(
        self: &Arc<Self>,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        answers: &mut Answers,
    ) -> Result<(), Violation> {
        match header.kind {
            Kind::Region | Kind::Descriptor => {
                let shared = descriptors.first().and_then(|file| Shared::of(file, header.sequence));
                let mut all = lock(&self.shared);
                if all.len() >= REGIONS_MAX {
                    return Err(Violation("too much memory is shared"));
                }
                all.insert(header.index, shared.map(Arc::new));
                drop(all);
                if lock(&self.awaited).take_if(|awaited| *awaited == header.index).is_some() {
                    self.serve_ring()?;
                }
            }
            Kind::Ring => {
                // Who has no ring of its own could not say that there is room in the other one.
                if self.inbox.is_some()
                    && let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(descriptors)
                    && let Some(outbox) = Outbox::of(&file, bell)
                    && self.outbox.set(outbox).is_ok()
                {
                    lock(&self.link).switch();
                }
            }
            _ => {}
        }
        lock(&self.link).receive(header, payload)?;
        self.perform_all(answers);
        Ok(())
    }

    /// Its bell, if it has one.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.inbox.as_ref().map(Inbox::bell)
    }

    /// The bell rang: there is something to read, or room to write.
    pub fn bell_rang(self: &Arc<Self>) {
        self.kick(0);
        if let Err(violation) = self.serve_ring() {
            self.ring_is_broken(&violation);
        }
    }

    fn ring_is_broken(self: &Arc<Self>, violation: &Violation) {
        let (transport, why) = (TransportKind::Shm, violation.to_string());
        self.end(TransferError::Transport { transport, member: self.peer, why });
    }

    /// Takes the frames that are in the ring, unless somebody does so now.
    fn serve_ring(self: &Arc<Self>) -> Result<(), Violation> {
        let Some(inbox) = &self.inbox else { return Ok(()) };
        loop {
            let Some(reader) = inbox.read() else { return Ok(()) };
            self.drain_ring(&reader)?;
            reader.leave();
            drop(reader);
            // Whoever wrote while this thread had not quite left has rung the bell for nothing.
            if inbox.is_empty() || lock(&self.awaited).is_some() {
                return Ok(());
            }
        }
    }

    fn drain_ring(self: &Arc<Self>, reader: &Reader<'_>) -> Result<(), Violation> {
        let mut answers = Answers::default();
        let drained = self.take_from_ring(reader, &mut answers);
        self.answer(answers);
        drained?;
        if reader.writer_waits()
            && let Some(outbox) = self.outbox.get()
        {
            outbox.ring();
        }
        Ok(())
    }

    fn take_from_ring(self: &Arc<Self>, reader: &Reader<'_>, answers: &mut Answers) -> Result<(), Violation> {
        while lock(&self.awaited).is_none()
            && let Some((bytes, payload)) = reader.next()?
        {
            self.heard();
            let header = Header::decode(&bytes).map_err(|_| Violation("what is in its ring is no frame"))?;
            if !self.is_between(&header) {
                return Err(Violation("a frame of another incarnation is in its ring"));
            }
            if header.kind == Kind::Region {
                // Both under the lock of the regions: either the descriptor is here, or its coming is awaited.
                let all = lock(&self.shared);
                if !all.contains_key(&header.index) {
                    *lock(&self.awaited) = Some(header.index);
                }
            }
            lock(&self.link).receive(&header, payload)?;
            self.perform_all(answers);
        }
        Ok(())
    }

    /// Reads the ring on this thread until `done`, if nobody else reads it: what is waited for comes without a change of
    /// threads. Whether it is done.
    pub fn follow(self: &Arc<Self>, until: Option<Instant>, done: impl Fn() -> bool) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(50);
        let Some(inbox) = &self.inbox else { return false };
        let Some(reader) = inbox.read() else { return false };
        let mut is_done = done();
        while !is_done && self.over.get().is_none() {
            if let Err(violation) = self.drain_ring(&reader) {
                self.ring_is_broken(&violation);
            }
            if lock(&self.awaited).is_some() {
                break;
            }
            is_done = done();
            if is_done {
                break;
            }
            reader.prepare();
            is_done = done();
            let left = until.map_or(LOOK_AGAIN, |until| until.saturating_duration_since(clock::monotonic()));
            if is_done || left.is_zero() {
                break;
            }
            reader.wait(left.min(LOOK_AGAIN));
        }
        reader.leave();
        drop(reader);
        if !inbox.is_empty() {
            self.bell_rang();
        }
        is_done
    }

    /// Something that a thread may wait for has happened elsewhere.
    pub fn wake_follower(&self) {
        if let Some(inbox) = &self.inbox {
            inbox.wake();
        }
    }

    /// Sends the beginning of a control frame with the descriptors that go with it.
    pub fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: Kind,
        region: u32,
    ) -> Result<usize, WireError> {
        let region = lock(&self.offered).get(&region).and_then(Weak::upgrade);
        let descriptors: Vec<BorrowedFd<'_>> = match (kind, &self.inbox, &region) {
            (Kind::Ring, Some(inbox), _) => inbox.descriptors().to_vec(),
            (Kind::Region | Kind::Descriptor, _, Some(region)) => region.shared().into_iter().collect(),
            _ => Vec::new(),
        };
        wire.send_with(bytes, &descriptors)
    }

    /// A lane is over. The connection is, when it was the last or the one for control and cannot be made anew.
    pub fn lane_over(self: &Arc<Self>, lane: &Arc<Lane>, error: &LaneError) {
        let asked = {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            lanes.retain(|other| !Arc::ptr_eq(other, lane));
            lane.is_ended_for_peer()
        };
        if self.over.get().is_some() {
            return;
        }
        let how = format!("lane {} of {}: {error}", lane.id, lane.kind);
        let Some(core) = self.core.upgrade() else { return };
        let garbled = matches!(error, LaneError::Frame(_));
        if garbled {
            core.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        // What came damaged where no checksum of a chunk tells is sent again on another lane, once.
        let again = garbled && self.nature.breaks && self.is_garbled_first();
        if garbled && !again || matches!(error, LaneError::Violation(_) | LaneError::Fenced) {
            self.end(TransferError::Transport { transport: lane.kind, member: self.peer, why: how });
            return;
        }
        // Both have let go of it, and the peer closes it. If this side is the one to mend it, the peer may not have heard.
        let mends = lane.control && self.dialled && self.nature.breaks;
        if !mends && lock(&self.link).is_gone() {
            if lane.control {
                self.end(self.has_made_room());
            }
            return;
        }
        core.counts.lanes_lost.fetch_add(1, Ordering::Relaxed);
        if !self.nature.breaks {
            // What the peer said before it ended may still be in the ring.
            if let Err(violation) = self.serve_ring() {
                tracing::debug!(peer = %self.peer, %violation, "the last words of a peer");
            }
            // A peer that drops what nobody uses has not lost its way here.
            if !lock(&self.link).is_unused() {
                core.take_detour(self.peer, &how);
            }
            self.end(TransferError::PeerDead { member: self.peer, how });
            return;
        }
        {
            let mut link = lock(&self.link);
            if asked {
                link.lane_closed(lane.id);
            }
            link.lane_lost(lane.id);
        }
        self.kick(0);
        core.lane_lost(self, lane, &how);
    }

    /// A frame came damaged. Whether it is the first since the peer was last heard in order.
    fn is_garbled_first(&self) -> bool {
        let heard = lock(&self.link).heard();
        lock(&self.garbled).replace(heard) != Some(heard)
    }

    // What the engine asks.

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
        class: super::link::Class,
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
            part.moves_by(self.inline_kind());
            self.count(self.inline_kind(), false, total);
        }
        let token = Arc::clone(part);
        let launching = Launching { token, definition, at, class, source: ready, destination: ready, inline };
        if !link.launch(launching) {
            drop(link);
            self.kick(0);
            let bound = super::link::LAUNCHES_MAX;
            return Err(TransferError::Overloaded { member: self.peer, bound });
        }
        // Under the lock: whatever the link says of the part comes after it knows its place.
        part.is_at(at);
        let crowded = link.launched() > LAUNCHES_AT_ONCE;
        drop(link);
        drop(visit);
        if crowded && self.outbox.get().is_none() {
            self.settle_elsewhere();
        } else {
            self.settle();
        }
        Ok(())
    }

    /// As [`settle`](Self::settle), but what there is to say leaves by the reactor, with whatever else there is by then.
    fn settle_elsewhere(self: &Arc<Self>) {
        let mut answers = Answers::default();
        self.perform_all(&mut answers);
        if !answers.landed.is_empty() {
            return self.answer(answers);
        }
        let chunks = lock(&self.link).has_chunks();
        for lane in self.lanes() {
            if lane.control || chunks {
                self.pump_elsewhere(&lane);
            }
        }
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

    /// Has the lanes look at what they are in the middle of.
    pub fn hurry(&self) {
        for lane in self.lanes() {
            self.pump_elsewhere(&lane);
        }
    }

    /// Has the lanes go on that wait to learn where a chunk belongs.
    fn wake_held(&self) {
        for lane in self.lanes() {
            if lane.is_held() {
                self.pump_elsewhere(&lane);
            }
        }
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

    /// Does what the link asks for, and sends what there is.
    fn settle(self: &Arc<Self>) {
        let mut answers = Answers::default();
        self.perform_all(&mut answers);
        self.answer(answers);
    }

    /// Does what the link asks for, until it asks for nothing.
    fn perform_all(self: &Arc<Self>, answers: &mut Answers) {
        loop {
            let outputs = {
                let mut link = lock(&self.link);
                answers.unused = link.is_unused();
                link.outputs()
            };
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                self.perform(output, answers);
            }
        }
    }

    /// Says what there is to say to frames that came together, and tells of what they brought.
    pub fn answer(self: &Arc<Self>, answers: Answers) {
        let Answers { sends, unused, landed } = answers;
        self.kick(sends);
        self.tell_of(landed);
        if unused && let Some(core) = self.core.upgrade() {
            core.is_unused();
        }
    }

    /// The peer has heard that these parts are here: whoever waits for one on this side may end the process at once.
    fn tell_of(&self, landed: Vec<Stay>) {
        for stay in landed {
            let part = stay.part();
            part.arrived(0, part.work.inbound.total());
        }
    }

    fn perform(self: &Arc<Self>, output: Output<Arc<Part>>, answers: &mut Answers) {
        match output {
            Output::Matched(part) => {
                part.match_found();
                self.wake_held();
                answers.sends += part.work.out.total();
            }
            Output::Inline(part, bytes) => self.put(&part, &bytes, answers),
            Output::Fetch(part, definition) => {
                if let Some(core) = self.core.upgrade() {
                    core.copiers.fetch(self, &part, &definition);
                }
            }
            Output::Sent(part, fetched) => {
                if fetched && let Some(span) = part.work.out.spans.first() {
                    let arena = span.buffer().region().shared().is_some();
                    let kind = if arena { TransportKind::Shm } else { TransportKind::Pvm };
                    part.moves_by(kind);
                    self.count(kind, false, part.work.out.total());
                }
                part.sent();
            }
            Output::StoppedByPeer(part, why) => {
                part.peer_is_quiet();
                part.fail(TransferError::Cancelled { by: self.peer.task, reason: why });
                self.wake_held();
            }
            Output::StopConfirmed(part) => part.peer_is_quiet(),
            Output::Differ(part, difference) => {
                let (channel, sequence) = part.at().unwrap_or_default();
                part.peer_is_quiet();
                part.fail(match difference {
                    Difference::Layout { key, here, there } => {
                        TransferError::LayoutMismatch { key, here, there }
                    }
                    Difference::Order { here, there } => {
                        TransferError::OrderMismatch { channel, sequence, here, there }
                    }
                });
            }
            Output::Damaged(part, chunk) => {
                give_up(&part, TransferError::Integrity { chunk, member: self.peer });
            }
            Output::CloseLane(id) => {
                // Its reactor says when nothing comes from it any more: this may be the very lane. Under the lock, so
                // that a lane that is just ending is told before it is out of the list, or not found.
                let lanes = self.lanes.read().unwrap_or_else(PoisonError::into_inner);
                let found = lanes.iter().find(|lane| lane.id == id).map(|lane| lane.end_for_peer());
                if found.is_none() {
                    lock(&self.lost).insert(id);
                }
                drop(lanes);
                if found.is_none() {
                    lock(&self.link).lane_closed(id);
                }
            }
            Output::Unregion(id) => {
                lock(&self.shared).remove(&id);
            }
            Output::Switched => {
                if let Some(inbox) = &self.inbox {
                    // Opening rings the bell: the reactor reads what is there already.
                    inbox.open();
                }
            }
            Output::Refused => {
                if let Some(core) = self.core.upgrade() {
                    core.make_room();
                }
            }
            Output::Left => {
                self.decided.notify_all();
                if let Some(core) = self.core.upgrade() {
                    core.has_left(self);
                }
            }
            Output::Stays => {
                self.decided.notify_all();
                if let Some(core) = self.core.upgrade() {
                    core.has_stayed(self);
                }
            }
            Output::Ended => {
                self.kick(0);
                self.end(self.has_made_room());
            }
            // Let go of outside of the lock: its memory may go with it.
            Output::Over(_) => {}
        }
    }

    /// Puts what came with a launch in place.
    fn put(self: &Arc<Self>, part: &Arc<Part>, bytes: &[u8], answers: &mut Answers) {
        let Some(stay) = part.stay() else { return };
        part.work.inbound.copy_in(0, bytes);
        part.moves_by(self.inline_kind());
        self.count(self.inline_kind(), true, bytes.len() as u64);
        if let Some(at) = part.at() {
            lock(&self.link).received(at);
        }
        answers.landed.push(stay);
    }

    /// What carries the bytes that come with a launch.
    fn inline_kind(&self) -> TransportKind {
        if self.outbox.get().is_some() { TransportKind::Shm } else { self.kind }
    }

    /// Sends what there is: control at once, on this thread; chunks on this thread only if they are few.
    fn kick(self: &Arc<Self>, sends: u64) {
        let (ring, control, chunks) = {
            let link = lock(&self.link);
            (link.has_for_ring(), link.has_control(), link.has_chunks())
        };
        if ring {
            self.fill_ring();
        }
        let control = control || ring && lock(&self.link).has_control();
        if !control && !chunks {
            return;
        }
        let lanes = self.lanes();
        let bulk = lanes.iter().any(|lane| !lane.control);
        for lane in &lanes {
            if lane.control && (control || !bulk) {
                if chunks && !bulk && sends > SEND_AT_ONCE {
                    self.pump_elsewhere(lane);
                } else if lane.pump_output().is_err() {
                    lane.close();
                }
            } else if !lane.control && chunks {
                self.pump_elsewhere(lane);
            }
        }
    }

    fn pump_elsewhere(&self, lane: &Arc<Lane>) {
        if let Some(core) = self.core.upgrade() {
            core.reactor(lane.id).pump(lane);
        }
    }
}

//! A connection to one incarnation of one peer: a link, and the lanes that carry its frames.
//!
//! This file has the connection's state and its end. `api_for_engine.rs`, `lanes.rs` and
//! `api_for_launches_and_fetches.rs` are the interfaces of the connection to the engine, to lanes, and to launches
//! and fetches. `link_outputs.rs` performs the outputs of the [`LinkSide`]. One lock protects the link. No system
//! call is made under this lock. The only bytes of transfers that are copied under it are the few that travel inside
//! a `Go`. A connection neither discovers peers nor dials. It calls its engine only through [`SessionHost`]. Begin at
//! [`Connection`].

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::spin_wait::SpinWait;
use crate::base::counters::{ByteCounters, FailureCounters};
use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::base::sync::{AtomicUsize, lock};
use crate::base::transport::TransportKind;
use crate::io::clique::{CliqueExchange, CliqueHost};
use crate::io::fabric_reads::FabricReads;
use crate::io::lane::{Lane, LaneHost};
use crate::io::peer_memory::PeerMemory;
use crate::io::ring::{RingInbox, RingOutbox};
use crate::io::threads::IoThreads;
use crate::io::wire::WireCapabilities;
use crate::launch::peer_launch::PeerLaunch;
use crate::launch::session_handle::{LaunchSession, SessionHandle};
use crate::memory::MemoryRegion;
use crate::protocol::link::{LaunchNumbers, LinkSide, LinkTerms};
use muster_cliques::{CliqueOptions, Nccl};

/// The engine of a connection, as the connection sees it.
pub trait SessionHost: Send + Sync {
    /// Reports that a connection became unused, so that the engine may end it if there are too many.
    fn notify_connection_unused(&self);

    /// Reports that the peer refused to end the connection: the engine may ask another one.
    fn on_leave_refused(&self);

    /// Reports that a connection stays, although this side had agreed to its end.
    fn notify_peer_kept_connection(&self, connection: &Arc<Connection>);

    /// Reports that the connection ended to make room for others, with the peer's agreement.
    fn notify_connection_left(&self, connection: &Arc<Connection>);

    /// Reports that a lane was lost. The engine dials it again, or detects that the peer is dead.
    fn reconnect_lane(&self, connection: &Arc<Connection>, control: bool, how: &str);

    /// Reports that a peer of another job ended the connection. The engine ends it, with the reason that the membership
    /// gives in a moment if the two jobs may not exchange transfers any more.
    fn notify_other_job_ended_connection(&self, connection: &Arc<Connection>, how: &str);

    /// Reports that the best transport to a peer has failed although the peer may be alive.
    fn back_off_transport(&self, peer: MemberId, how: &str);

    /// Schedules a check of the connections at `wanted`.
    fn schedule_connection_check(&self, wanted: Instant);

    /// Reports that the connection is over.
    fn notify_connection_over(&self, connection: &Arc<Connection>, error: &TransferError);
}

/// The connection to one incarnation of one peer.
pub struct Connection {
    /// This side.
    pub me: MemberId,
    /// The other side.
    pub peer: MemberId,
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
    pub(super) counts: Arc<FailureCounters>,
    pub(super) link: Mutex<LinkSide<Arc<PeerLaunch>>>,
    pub(super) numbers: LaunchNumbers,
    pub(super) lanes: RwLock<Vec<Arc<Lane>>>,
    /// The lanes that the peer lost before this side had them; they are refused when they arrive.
    pub(super) lost_lanes: Mutex<HashSet<u16>>,
    /// The number of the last control frame received when a frame last arrived damaged.
    pub(super) last_damage: Mutex<Option<u32>>,
    pub(super) over: OnceLock<TransferError>,
    /// How the peer went, and when. The connection ends once the peer's last frames are processed.
    pub(super) peer_gone: OnceLock<(String, Instant)>,
    /// Whether the engine was asked why a peer of another job is gone.
    pub(super) is_loss_told: AtomicBool,
    /// Whether small launches carry their bytes in the launch frame; not if all memory is to be read through
    /// the kernel.
    pub(super) inlines: bool,
    pub(super) pid: Option<i32>,
    /// The reads over a fabric, if both sides agreed to them.
    pub(super) fabric: Option<FabricReads>,
    /// The exchange between GPUs through a clique, if both sides agreed to it.
    pub(super) exchange: Option<Arc<CliqueExchange>>,
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
    pub counters: ByteCounters,
    /// The bytes moved with the peer's task, on this and all other connections.
    pub(super) moved: Arc<ByteCounters>,
}

/// The parameters of a new connection.
pub struct NewConnectionParts {
    /// The engine.
    pub host: Weak<dyn SessionHost>,
    /// The threads that move its bytes.
    pub io: Arc<IoThreads>,
    /// The counters of the engine.
    pub counts: Arc<FailureCounters>,
    /// The numbers of launches with the peer.
    pub numbers: LaunchNumbers,
    /// The bytes moved with the peer's task.
    pub moved: Arc<ByteCounters>,
    /// Whether small launches carry their bytes in the launch frame.
    pub inlines: bool,
    /// How long a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// This side.
    pub me: MemberId,
    /// The other side.
    pub peer: MemberId,
    /// The number that distinguishes it from others.
    pub nonce: u64,
    /// Whether this side dialled.
    pub dialled: bool,
    /// The transport of its lanes.
    pub kind: TransportKind,
    /// The capabilities of its lanes.
    pub capabilities: WireCapabilities,
    /// The terms of the link.
    pub terms: LinkTerms,
    /// Whether chunks carry checksums.
    pub checks: bool,
    /// The peer's process, if it is on this host and its memory can be read.
    pub pid: Option<i32>,
    /// The reads over a fabric, if both sides agreed to them.
    pub fabric: Option<FabricReads>,
    /// NCCL and the limits of cliques, if both sides agreed to them.
    pub nccl: Option<(&'static Nccl, CliqueOptions)>,
}

impl Connection {
    /// Creates a connection without lanes.
    pub fn new(settings: NewConnectionParts) -> Arc<Self> {
        let NewConnectionParts { host, io, counts, numbers, moved, inlines, spin, fabric, nccl, .. } =
            settings;
        let NewConnectionParts { me, peer, nonce, dialled, kind, capabilities, terms, checks, pid, .. } =
            settings;
        let mut link = LinkSide::new(me, peer, terms, numbers.clone());
        if let Some(announcement) = fabric.as_ref().and_then(|reads| reads.announcement().ok()) {
            link.announce_fabric_address(announcement);
        }
        // The lease with which the connection begins, until the cliques have it: see
        // `ConnectionLease::take_initial_lease`.
        link.try_lease();
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
            is_loss_told: AtomicBool::new(false),
            inlines,
            pid,
            fabric,
            exchange: nccl.map(|(nccl, options)| {
                let host: Weak<dyn CliqueHost> = this.clone();
                CliqueExchange::new(host, nccl, options, me, peer)
            }),
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
            counters: ByteCounters::default(),
            moved,
        })
    }

    /// Returns the handle by which launches refer to the connection.
    pub fn launch_session(&self) -> LaunchSession {
        let session: Weak<dyn SessionHandle> = self.this.clone();
        LaunchSession { session: Some(session), peer: self.peer, fetches: self.fetches }
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

    /// Returns the lane with this number, unless it is over.
    pub(super) fn lane(&self, id: u16) -> Option<Arc<Lane>> {
        let lanes = self.lanes.read().unwrap_or_else(PoisonError::into_inner);
        lanes.iter().find(|lane| lane.id == id).cloned()
    }

    /// Returns the error with which the connection ended, or none while it lives.
    pub fn end_error(&self) -> Option<&TransferError> {
        self.over.get()
    }

    /// Returns the number of live lanes.
    pub fn live_lane_count(&self) -> usize {
        self.lanes().iter().filter(|lane| !lane.is_over()).count()
    }

    /// Returns whether there is a live lane for control frames.
    pub fn has_control_lane(&self) -> bool {
        self.lanes().iter().any(|lane| lane.control && !lane.is_over())
    }

    /// Records that bytes of the peer arrived.
    pub(super) fn record_peer_activity(&self) {
        let now = self.started.elapsed().as_micros();
        self.last_heard.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns how long no bytes of the peer have arrived.
    pub fn peer_silence(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_micros(self.last_heard.load(Ordering::Relaxed)))
    }

    /// Counts bytes that moved.
    pub(super) fn count_bytes(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.counters.add(kind, received, bytes);
        self.moved.add(kind, received, bytes);
    }

    /// Returns the transport that carries inline bytes, by a ring or not.
    pub(super) const fn inline_transport(&self, ring: bool) -> TransportKind {
        if ring { TransportKind::Shm } else { self.kind }
    }

    /// Returns the number of the last control frame received.
    pub fn last_received_control_number(&self) -> u32 {
        lock(&self.link).last_received_control_number()
    }

    /// Returns the number of launches in flight.
    pub fn in_flight_count(&self) -> usize {
        lock(&self.link).in_flight_count()
    }

    /// Returns whether nothing is prepared on the connection, or about to be, on either side, as far as this
    /// side knows.
    pub fn is_unused(&self) -> bool {
        lock(&self.link).is_unused()
    }

    /// Returns whether this side has asked the peer to end the connection, and has no answer yet.
    pub fn has_requested_leave(&self) -> bool {
        lock(&self.link).has_requested_leave()
    }

    /// Returns whether both sides have agreed to end the connection, to make room for others.
    pub fn has_left(&self) -> bool {
        lock(&self.link).has_left()
    }

    /// Returns the launches in flight.
    pub fn in_flight_launches(&self) -> Vec<Arc<PeerLaunch>> {
        lock(&self.link).in_flight_tokens()
    }

    /// Returns the error of an unused connection that both sides have agreed to end.
    pub(super) fn eviction_error(&self) -> TransferError {
        let why = "it was dropped to make room: nobody used it".to_owned();
        TransferError::Transport { transport: self.kind, member: self.peer, why }
    }

    /// Ends the connection: every launch in flight fails with this error.
    pub fn close(&self, error: TransferError) {
        // Before the connection is over, for the reason below; and without the lock of the link, because the ends of reads are
        // told on this thread.
        let is_unread = self.fabric.as_ref().is_none_or(FabricReads::end);
        self.exchange.iter().for_each(|exchange| exchange.end());
        let launches = {
            let mut link = lock(&self.link);
            // This comes first: once another thread sees that the connection is over, it may reuse buffers
            // that the peer is reading.
            if let Some(inbox) = &self.inbox {
                inbox.mark_sources_invalid();
            }
            if self.over.set(error.clone()).is_err() {
                return;
            }
            link.take_launches()
        };
        self.decided.notify_all();
        let lanes = std::mem::take(&mut *self.lanes.write().unwrap_or_else(PoisonError::into_inner));
        for lane in &lanes {
            lane.close_if_open();
        }
        for launch in launches {
            launch.fail_locally(error.clone());
            if is_unread {
                launch.mark_peer_quiescent();
            } else {
                // Its buffers must never be free again.
                std::mem::forget(Arc::clone(&launch));
            }
        }
        // Dropped without the lock: the driver unmaps the memory of a GPU.
        let shared = std::mem::take(&mut *lock(&self.shared));
        drop(shared);
        self.tell_host(|host, connection| host.notify_connection_over(connection, &error));
    }
}

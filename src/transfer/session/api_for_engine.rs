//! The functions of a connection that its engine calls to take a lease, to define and launch transfers, and to
//! request the end of the connection.
//!
//! A lease prevents the end of the connection while a request prepares transfers on it. `connection.rs` has the
//! state. Begin at [`Connection::launch`].
//!
//! The launching thread sends the frame of a launch at once if few launches are in flight ([`LAUNCHES_AT_ONCE`]), if
//! the priority of the launch is `latency`, or if there is a ring. Otherwise the reactor sends this frame, together
//! with all other frames that are queued by then. So a single message is sent without delay, and many messages share
//! system calls, which would otherwise be most of their cost. Frames that arrived with one system call are also
//! answered with one system call. No timer delays a frame.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use muster_clock as clock;

use super::connection::Connection;
use super::ring_session::RingSession;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::fabric_reads::FabricReads;
use crate::launch::peer_launch::PeerLaunch;
use crate::memory::{MemoryRegion, RegionUnmapListener};
use crate::protocol::link::launch_definition::LaunchDefinition;
use crate::protocol::link::{GroupId, LAUNCHES_MAX, LaunchParameters, PriorityClass};

/// The number of launches in flight above which the reactor sends a launch, together with other frames in one
/// system call, on a connection without a ring. Below it, in the latency class, and with a ring, the
/// launching thread sends at once.
const LAUNCHES_AT_ONCE: usize = 4;

/// The number of launches in flight, and the bytes of one, above which a launch registers for the peer's
/// acknowledgement although no program waits for it. Below both, the acknowledgement may be read a little
/// later, and the launch occupies memory until then.
const LAUNCHES_UNHEARD: usize = 64;
const BYTES_UNHEARD: u64 = 64 << 10;

/// The most regions that this side offers to be read over the fabric: the bytes of others are pushed.
const FABRIC_REGIONS_MAX: usize = 2048;

/// A lease on a connection, which prevents its end while a request is about to prepare something on it.
pub struct ConnectionLease(Arc<Connection>);

impl ConnectionLease {
    /// Acquires a lease; none if this side has agreed to the end of the connection.
    pub fn acquire(connection: &Arc<Connection>) -> Option<Self> {
        let kept = lock(&connection.link).try_lease();
        kept.then(|| Self(Arc::clone(connection)))
    }

    /// Acquires a further lease on the same connection.
    pub fn duplicate(&self) -> Self {
        let _kept = lock(&self.0.link).try_lease();
        Self(Arc::clone(&self.0))
    }

    /// Takes over the lease with which a new connection begins, held until every request that waits for the
    /// connection has its own. Called once.
    pub fn take_initial_lease(connection: &Arc<Connection>) -> Self {
        Self(Arc::clone(connection))
    }

    /// Returns the connection.
    pub const fn connection(&self) -> &Arc<Connection> {
        &self.0
    }
}

impl Drop for ConnectionLease {
    fn drop(&mut self) {
        lock(&self.0.link).release_lease();
    }
}

impl RegionUnmapListener for Connection {
    /// Runs on the thread that drops the region last; no thread drops a region while it holds a lock of the
    /// connection.
    fn on_region_unmapped(self: Arc<Self>, id: u32) {
        let offered = lock(&self.offered).remove(&id);
        if offered.is_some() {
            lock(&self.link).unshare_region(id);
            self.flush_queued_output(0);
        }
    }
}

impl Connection {
    /// Asks the peer whether the connection may end, if it is unused.
    pub fn request_leave(&self) {
        lock(&self.link).request_leave();
        self.flush_queued_output(0);
    }

    /// Waits until the peer has decided whether a connection stays that this side has agreed to end. Returns
    /// a lease if it stays, or none if it is over.
    ///
    /// # Errors
    /// Returns [`TransferError::Transport`] if the peer has not decided by `until`.
    pub fn wait_for_leave_decision(
        self: &Arc<Self>,
        until: Instant,
    ) -> Result<Option<ConnectionLease>, TransferError> {
        let mut link = lock(&self.link);
        loop {
            if self.over.get().is_some() || link.has_left() {
                return Ok(None);
            }
            if link.try_lease() {
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

    /// Returns whether both sides have agreed to reads over a fabric.
    pub const fn may_read_over_fabric(&self) -> bool {
        self.fabric.is_some()
    }

    /// Returns whether memory of the peer is read over a fabric now.
    pub fn reads_over_fabric(&self) -> bool {
        self.fabric.as_ref().is_some_and(FabricReads::is_usable)
    }

    /// Returns when the first of the reads over the fabric that are under way is overdue.
    pub fn first_limit_of_fabric_reads(&self) -> Option<Instant> {
        self.fabric.as_ref()?.first_limit()
    }

    /// Ends the connection because a read over the fabric has not ended in time.
    pub fn end_for_overdue_fabric_read(&self) {
        let why = "the fabric has not ended a read of the peer's memory in time".to_owned();
        self.close(TransferError::Transport { transport: TransportKind::Fabric, member: self.peer, why });
    }

    /// Returns the number of the GPU with a region's memory, if its bytes move through a clique; the peer may name it from now on.
    pub fn gpu_of_clique(&self, region: &MemoryRegion) -> Option<u32> {
        let gpu = region.device()?.gpu();
        self.exchange.as_ref().filter(|exchange| exchange.is_usable())?.use_gpu(gpu);
        Some(gpu.ordinal())
    }

    /// Returns whether bytes between GPUs move through a clique now.
    pub fn moves_by_clique(&self) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| exchange.is_usable())
    }

    /// Returns when the first of the batches of the clique that are under way is overdue.
    pub fn first_limit_of_batches(&self) -> Option<Instant> {
        self.exchange.as_ref()?.first_limit()
    }

    /// Ends the clique because a batch has not ended in time.
    pub fn fail_clique_for_overdue_batch(&self) {
        self.exchange.iter().for_each(|exchange| exchange.fail_for_overdue_batch());
    }

    /// Registers a region into which bytes are to be read over the fabric, if that needs it. The first call for a region takes long: it
    /// locks its pages. The bytes of an unregistered region are pushed.
    pub fn register_for_reads(&self, region: &MemoryRegion) {
        let _else_pushed = self.fabric.as_ref().is_some_and(|reads| reads.can_read_into(region));
        let _into_gpu = self.gpu_of_clique(region);
    }

    /// Returns whether the peer may read a region over the fabric. The first call for a region takes long: it locks its pages.
    pub fn can_offer_over_fabric(&self, region: &MemoryRegion) -> bool {
        let Some(reads) = &self.fabric else { return false };
        let has_room = || {
            let offered = lock(&self.offered);
            offered.len() < FABRIC_REGIONS_MAX || offered.contains_key(&region.id)
        };
        has_room() && region.registered_with(reads.fabric()).is_some()
    }

    /// Sends a definition to the peer, with the regions that it may fetch from. Returns the number of the
    /// definition.
    pub fn send_definition(&self, definition: LaunchDefinition, regions: &[Arc<MemoryRegion>]) -> u32 {
        let mut offered = lock(&self.offered);
        let mut link = lock(&self.link);
        for region in regions {
            if !offered.contains_key(&region.id) {
                // The peer asks for a push of what it does not know.
                if self.fabric.is_some() && offered.len() >= FABRIC_REGIONS_MAX {
                    continue;
                }
                // A registered region is not registered again, so this takes no time.
                match self.fabric.as_ref().map(|reads| region.registered_with(reads.fabric())) {
                    Some(None) => continue,
                    Some(Some(memory)) => {
                        let first = memory.remote();
                        link.share_fabric_region(region.id, region.len() as u64, first.key, first.address);
                    }
                    None if region.shared_file().is_some() => {
                        link.share_region(region.id, region.len() as u64, region.device().is_some());
                    }
                    None => continue,
                }
                offered.insert(region.id, Arc::downgrade(region));
                let listener: Weak<dyn RegionUnmapListener> = self.weak();
                region.add_unmap_listener(listener);
            }
        }
        let number = link.send_definition(definition);
        drop(link);
        drop(offered);
        self.flush_queued_output(0);
        number
    }

    /// Withdraws a definition.
    pub fn withdraw_definition(&self, number: u32) {
        lock(&self.link).withdraw_definition(number);
        self.process_outputs_and_flush();
    }

    /// Takes the number of the next launch on a channel.
    pub fn take_launch_number(&self, channel: u32) -> GroupId {
        self.numbers.take_next(channel)
    }

    /// Announces that no launch will come for a number that was taken, and why.
    pub fn withdraw_launch_number(&self, at: GroupId, why: &str) {
        lock(&self.link).withdraw_launch_number(at, why);
        self.flush_queued_output(0);
    }

    /// Launches with a number that was taken for it. `ready` says whether its buffers are defined.
    pub fn launch(
        &self,
        launch: &Arc<PeerLaunch>,
        definition: u32,
        at: GroupId,
        class: PriorityClass,
        ready: bool,
    ) -> Result<(), TransferError> {
        let total = launch.lists.outbound.total();
        let mut link = lock(&self.link);
        if let Some(error) = self.over.get() {
            self.numbers.retire(at);
            return Err(error.clone());
        }
        // A launch that was cancelled a moment ago gives no guard, and its bytes must not be read.
        let guard = launch.access();
        let ready = ready && guard.is_some();
        let is_on_host = launch.lists.outbound.gpu().is_none();
        let inlines = ready && self.inlines && is_on_host && link.should_inline(total);
        let inline = guard.as_ref().filter(|_| inlines).map(|guard| {
            let mut bytes = Vec::with_capacity(total as usize);
            guard.bytes().copy_out(0, total, &mut bytes);
            bytes
        });
        if inline.is_some() {
            let by = self.inline_transport(self.outbox.get().is_some());
            launch.set_transport(by);
            self.count_bytes(by, false, total);
        }
        let token = Arc::clone(launch);
        let launching =
            LaunchParameters { token, definition, at, class, source: ready, destination: ready, inline };
        if !link.launch(launching) {
            drop(link);
            self.flush_queued_output(0);
            let bound = LAUNCHES_MAX;
            return Err(TransferError::Overloaded { member: self.peer, bound });
        }
        // The lock is still held, so the launch knows its group before the link reports anything about it.
        launch.set_group_id(at);
        let launched = link.in_flight_count();
        drop(link);
        drop(guard);
        let crowded = launched > LAUNCHES_AT_ONCE && class != PriorityClass::Latency;
        if launched > LAUNCHES_UNHEARD || total > BYTES_UNHEARD {
            launch.register_send_waiter();
        }
        if crowded && self.outbox.get().is_none() {
            self.process_outputs_without_flush();
        } else {
            self.run_as_ring_reader(|| self.process_outputs_and_flush());
        }
        Ok(())
    }

    /// Sends a ping, to find out whether the peer is alive.
    pub fn ping(&self) {
        lock(&self.link).ping();
        self.flush_queued_output(0);
    }
}

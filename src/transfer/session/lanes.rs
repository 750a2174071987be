//! The interface of a connection to its lanes, and the consequences of a lost lane.
//!
//! [`crate::io::lane`] moves the bytes. Begin at [`Connection::add_lane`].
//!
//! - On the control lane, no chunk is sent before a control frame that was queued earlier. Otherwise the receiver of
//!   the chunk could wait for a `Go` that is behind the chunk on the same lane. On another lane, a chunk may arrive
//!   before the `Go` of its group. This lane then stops reading until the `Go` arrives, because a chunk that it
//!   dropped would never be sent again.
//! - A damaged chunk is requested again, but a damaged header or control frame ends its lane, and the lost contents
//!   are sent again on another lane. If two such frames arrive damaged, on any lanes of the connection, and no
//!   control frame arrives in order between them, the connection ends. On a wire that cannot break while the peer
//!   lives, the connection ends at the first damaged header or control frame.
//! - Bytes are counted for the peer's task as they move, because a connection may end before its counters are read.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use super::connection::Connection;
use super::link_outputs::SEND_AT_ONCE;
use super::ring_session::RingSession;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::gpu_copies::CopyFailure;
use crate::io::lane::{Lane, LaneError, LaneHost, PendingReplies};
use crate::io::peer_memory::PeerMemory;
use crate::io::reactor::DoorbellHost;
use crate::io::ring::{RingInbox, RingOutbox};
use crate::io::staging::StagingPools;
use crate::io::wire::{Wire, WireError};
use crate::launch::peer_launch::{PeerLaunch, fail_and_tell_peer};
use crate::protocol::frame::{FrameKind, Header, flag};
use crate::protocol::link::{ChunkDestination, ControlFrame, OutgoingChunk, ProtocolViolation};

/// The most regions that a peer may announce.
const REGIONS_MAX: usize = 4096;
/// The most regions of GPUs of a peer that are kept, each with a descriptor. The bytes of further ones go through host memory.
const DEVICE_REGIONS_MAX: usize = 64;

impl Connection {
    /// Adds a lane. For a control lane that replaces another, `peer_heard` is the last control frame that the
    /// peer has received.
    pub fn add_lane(&self, lane: &Arc<Lane>, peer_heard: u32) -> std::io::Result<()> {
        if lane.control {
            // Frames that the previous control lane still took would be lost, so it stops sending first.
            for before in self.lanes().iter().filter(|before| before.control) {
                before.close_if_open();
                before.wait_until_send_idle();
            }
            lock(&self.link).resend_control_after(peer_heard);
        }
        {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            if lock(&self.lost_lanes).contains(&lane.id) {
                // The peer knows already that nothing arrives from this lane.
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
            lanes.push(Arc::clone(lane));
        }
        self.record_peer_activity();
        if lane.control
            && let Some(bell) = self.inbox.as_ref().map(RingInbox::doorbell)
        {
            // The ring is offered before anything is read: after the switch to the peer's ring, frames carry
            // no descriptors.
            let host: Weak<dyn DoorbellHost> = self.weak();
            self.io.reactor_of_lane(lane.id).add_doorbell(bell, host)?;
            lock(&self.link).offer_ring();
        }
        if let Err(error) = self.io.reactor_of_lane(lane.id).add(lane) {
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(error);
        }
        if let Some(error) = self.over.get() {
            // `close` closed the lanes of the connection, perhaps before this one was among them.
            tracing::debug!(%error, "a lane came to a connection that is over");
            lane.close_if_open();
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        self.flush_queued_output(0);
        Ok(())
    }

    /// Records whether the fabric works, and tells the peer if it does.
    fn on_fabric_probed(&self, works: bool) {
        self.fabric.iter().for_each(|reads| reads.record_proof(works));
        if works {
            lock(&self.link).announce_fabric_ready();
            self.flush_queued_output(0);
        }
    }

    /// Records a damaged frame. Returns whether it is the first since a control frame last arrived in order.
    fn record_damaged_frame(&self) -> bool {
        let heard = lock(&self.link).last_received_control_number();
        lock(&self.last_damage).replace(heard) != Some(heard)
    }
}

impl LaneHost for Connection {
    fn record_frame_received(&self) {
        self.record_peer_activity();
    }

    fn send_pending_replies(&self, replies: PendingReplies) {
        self.send_replies(replies);
    }

    fn next_control_frame(&self, first: bool) -> Option<ControlFrame> {
        let frame = lock(&self.link).next_control_frame(first)?;
        if frame.header.kind == FrameKind::Switch {
            // The frames behind the switch waited for the socket, and no later event would put them into the
            // ring.
            self.write_frames_to_ring();
        }
        Some(frame)
    }

    fn next_chunk(
        &self,
        lane: u16,
        control: bool,
        may_stage: bool,
    ) -> Option<OutgoingChunk<Arc<PeerLaunch>>> {
        if control && self.lanes().iter().any(|lane| !lane.control && !lane.is_over()) {
            return None;
        }
        let mut link = lock(&self.link);
        // A queued control frame goes before the chunk: behind the chunk on the same lane, the `Go` that the
        // chunk is held for would never be read.
        if control && link.has_control_frames_for_socket() {
            return None;
        }
        link.next_chunk_of(lane, |launch| may_stage || launch.lists.outbound.gpu().is_none())
    }

    fn has_queued_control_frames(&self) -> bool {
        lock(&self.link).has_control_frames_for_socket()
    }

    fn incarnations_match(&self, header: &Header) -> bool {
        let ours =
            header.source == self.peer.incarnation.get() && header.destination == self.me.incarnation.get();
        if !ours {
            self.counts.fenced.fetch_add(1, Ordering::Relaxed);
        }
        ours
    }

    fn begin_chunk_receive(&self, header: &Header) -> ChunkDestination<Arc<PeerLaunch>> {
        lock(&self.link).begin_chunk_receive(header)
    }

    fn abandon_chunk_receive(&self, header: &Header) {
        lock(&self.link).abandon_chunk_receive(header);
    }

    fn end_chunk_receive(
        &self,
        kind: TransportKind,
        header: &Header,
        launch: &Arc<PeerLaunch>,
        start: u64,
        intact: bool,
    ) {
        let mut link = lock(&self.link);
        if intact {
            let counts = link.finish_chunk_receive(header);
            drop(link);
            // The peer learns first that all bytes have arrived, because the program on this side may exit at
            // once.
            self.process_outputs_and_flush();
            if counts {
                launch.set_transport(kind);
                self.count_bytes(kind, true, u64::from(header.len));
                launch.record_arrived_bytes(start, u64::from(header.len));
            }
        } else {
            link.on_chunk_damaged(header);
            drop(link);
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
            self.process_outputs_and_flush();
        }
    }

    fn count_sent(&self, kind: TransportKind, bytes: u64) {
        self.count_bytes(kind, false, bytes);
    }

    fn process_control_frame(
        &self,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        replies: &mut PendingReplies,
    ) -> Result<(), ProtocolViolation> {
        match header.kind {
            FrameKind::Region | FrameKind::Descriptor => {
                let shared = descriptors.into_iter().next().and_then(|descriptor| {
                    PeerMemory::from_descriptor(descriptor, header.sequence, header.has(flag::DEVICE))
                });
                let mut all = lock(&self.shared);
                if all.len() >= REGIONS_MAX {
                    return Err(ProtocolViolation("too much memory is shared"));
                }
                let held = all.values().flatten().filter(|region| region.is_device()).count();
                let is_kept = |region: &PeerMemory| !region.is_device() || held < DEVICE_REGIONS_MAX;
                let before = all.insert(header.index, shared.filter(is_kept).map(Arc::new));
                drop(all);
                // Dropped without the lock: the driver unmaps the memory of a GPU.
                drop(before);
                if lock(&self.awaited).take_if(|awaited| *awaited == header.index).is_some() {
                    self.serve_ring()?;
                }
            }
            FrameKind::FabricAddress => {
                if let Some(reads) = &self.fabric {
                    let this = self.weak();
                    let then =
                        move |works| this.upgrade().iter().for_each(|this| this.on_fabric_probed(works));
                    reads.connect(&payload, self.dialled, self.peer.incarnation.get(), then);
                }
            }
            FrameKind::FabricReady => self.fabric.iter().for_each(|reads| reads.record_proof(true)),
            FrameKind::FabricRegion => {
                let memory = PeerMemory::from_fabric_announcement(&payload, header.sequence)
                    .ok_or(ProtocolViolation("memory was announced without its key"))?;
                let mut all = lock(&self.shared);
                if all.len() >= REGIONS_MAX {
                    return Err(ProtocolViolation("too much memory is shared"));
                }
                let before =
                    all.insert(header.index, Some(Arc::new(memory)).filter(|_| self.fabric.is_some()));
                drop(all);
                // Dropped without the lock, as above.
                drop(before);
            }
            FrameKind::Ring => {
                // A side without a ring of its own could not tell the peer that its ring has room again.
                if self.inbox.is_some()
                    && let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(descriptors)
                    && let Some(outbox) = RingOutbox::map_peer_inbox(&file, bell)
                    && self.outbox.set(outbox).is_ok()
                {
                    lock(&self.link).switch_to_ring();
                }
            }
            _ => {}
        }
        lock(&self.link).receive_control_frame(header, payload)?;
        self.perform_all_outputs(replies);
        if header.kind == FrameKind::Clique { self.process_clique_messages() } else { Ok(()) }
    }

    fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: FrameKind,
        region: u32,
    ) -> Result<usize, WireError> {
        let region = lock(&self.offered).get(&region).and_then(Weak::upgrade);
        let descriptors: Vec<BorrowedFd<'_>> = match (kind, &self.inbox, &region) {
            (FrameKind::Ring, Some(inbox), _) => inbox.descriptors().collect(),
            (FrameKind::Region | FrameKind::Descriptor, _, Some(region)) => {
                region.shared_file().into_iter().collect()
            }
            _ => Vec::new(),
        };
        wire.send_with_descriptors(bytes, &descriptors)
    }

    fn staging(&self) -> &StagingPools {
        &self.io.staging
    }

    fn request_pump(&self, lane: u16) {
        if let Some(lane) = self.lane(lane) {
            self.pump_on_reactor(&lane);
        }
    }

    fn send_staged(&self, lane: u16, launch: &PeerLaunch) {
        let Some(lane) = self.lane(lane) else { return };
        let is_small =
            launch.lists.outbound.total() <= SEND_AT_ONCE && !lock(&self.link).has_chunks_to_send();
        // The reactor ends a lane that fails.
        if !is_small || lane.pump_output().is_err() {
            self.pump_on_reactor(&lane);
        }
    }

    fn on_copy_failed(&self, launch: &Arc<PeerLaunch>, (gpu, error): CopyFailure) {
        fail_and_tell_peer(launch, TransferError::Gpu { task: self.me.peer_task(), gpu, error });
    }

    fn on_lane_over(&self, lane: &Arc<Lane>, error: &LaneError) {
        let asked = {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            lanes.retain(|other| !Arc::ptr_eq(other, lane));
            lane.is_lost_by_peer()
        };
        if self.over.get().is_some() {
            return;
        }
        let how = format!("lane {} of {}: {error}", lane.id, lane.kind);
        let damaged = matches!(error, LaneError::Frame(_));
        if damaged {
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        // Frames that no chunk checksum covers are sent again on another lane, once.
        let again = damaged && self.capabilities.is_breakable && self.record_damaged_frame();
        if damaged && !again || matches!(error, LaneError::Violation(_) | LaneError::Fenced) {
            self.close(TransferError::Transport { transport: lane.kind, member: self.peer, why: how });
            return;
        }
        // Both sides have agreed to end the connection, and the peer closes it. If this side is the one that
        // reconnects the control lane, the peer may not have received the decision, so this side reconnects.
        let mends = lane.control && self.dialled && self.capabilities.is_breakable;
        if !mends && lock(&self.link).has_left() {
            if lane.control {
                self.close(self.eviction_error());
            }
            return;
        }
        self.counts.lanes_lost.fetch_add(1, Ordering::Relaxed);
        if !self.capabilities.is_breakable {
            self.on_peer_gone(how);
            return;
        }
        {
            let mut link = lock(&self.link);
            if asked {
                link.report_received_chunks(lane.id);
            }
            link.query_received_chunks(lane.id);
        }
        self.flush_queued_output(0);
        self.tell_host(|host, connection| host.reconnect_lane(connection, lane.control, &how));
    }
}

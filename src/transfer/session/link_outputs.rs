//! Performs the outputs of a connection's link, and sends queued frames and chunks.
//!
//! The link makes all decisions. When all bytes of a group have arrived, the peer is told before any waiter in this
//! process, because the waiting program may exit at once. Begin at `perform_output`.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::connection::Connection;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::fetch_host::FetchHost;
use crate::io::lane::{Lane, LaneHost, PendingReplies};
use crate::io::ring::{FrameToWrite, RingInbox};
use crate::io::staging::copy_from_slot;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch, fail_and_tell_peer};
use crate::memory::ReadView;
use crate::protocol::link::{ControlFrame, DefinitionMismatch, LinkOutput, ProtocolViolation};

/// The most bytes of a launch that the thread sends which has them ready; the reactors send larger ones.
pub(super) const SEND_AT_ONCE: u64 = 64 << 10;

impl Connection {
    /// Performs the outputs of the link, and sends queued frames and chunks.
    pub(super) fn process_outputs_and_flush(&self) {
        let mut replies = PendingReplies::default();
        self.perform_all_outputs(&mut replies);
        self.send_replies(replies);
    }

    /// Performs the outputs of the link; the reactor sends the frames, together with all others that are
    /// queued by then.
    pub(super) fn process_outputs_without_flush(&self) {
        let mut replies = PendingReplies::default();
        self.perform_all_outputs(&mut replies);
        if !replies.landed.is_empty() {
            return self.send_replies(replies);
        }
        let chunks = lock(&self.link).has_chunks_to_send();
        for lane in self.lanes() {
            if lane.control || chunks {
                self.pump_on_reactor(&lane);
            }
        }
    }

    /// Performs the outputs of the link until there are none.
    pub(super) fn perform_all_outputs(&self, replies: &mut PendingReplies) {
        replies.due = true;
        loop {
            let outputs = {
                let mut link = lock(&self.link);
                replies.unused = link.is_unused();
                link.take_outputs()
            };
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                self.perform_output(output, replies);
            }
        }
    }

    /// Sends the replies to frames that arrived together, and completes the launches whose bytes came with
    /// them.
    pub(super) fn send_replies(&self, replies: PendingReplies) {
        let PendingReplies { due, sends, unused, landed } = replies;
        if !due {
            return;
        }
        self.flush_queued_output(sends);
        self.complete_received_launches(landed);
        if unused && let Some(host) = self.host() {
            host.notify_connection_unused();
        }
    }

    /// Completes launches whose arrival was announced to the peer before, because the program may exit at
    /// once.
    fn complete_received_launches(&self, landed: Vec<OwnedAccessGuard>) {
        for guard in landed {
            let launch = guard.launch();
            launch.record_arrived_bytes(0, launch.lists.inbound.total());
        }
    }

    /// Processes the messages of the peer about cliques that have arrived.
    pub(super) fn process_clique_messages(&self) -> Result<(), ProtocolViolation> {
        // The link refuses the frames where there is none.
        let Some(exchange) = &self.exchange else { return Ok(()) };
        let next = || lock(&self.link).take_clique_message();
        exchange.process_messages(self, &next, &|| lock(&self.link).has_clique_messages())
    }

    fn perform_output(&self, output: LinkOutput<Arc<PeerLaunch>>, replies: &mut PendingReplies) {
        match output {
            LinkOutput::Matched(launch) => {
                launch.mark_matched();
                self.wake_waiting_lanes();
                replies.sends += launch.lists.outbound.total();
            }
            LinkOutput::Inline(launch, bytes) => self.copy_inline_payload(&launch, &bytes, replies),
            LinkOutput::Fetch(launch, definition) => {
                if let Some(this) = self.weak().upgrade() {
                    let host: Arc<dyn FetchHost> = this;
                    self.io.fetchers.fetch_or_enqueue(host, &launch, &definition);
                }
            }
            LinkOutput::Progress(launch, bytes) => launch.add_progress(bytes),
            LinkOutput::Sent(launch, fetched) => {
                if fetched
                    && let Some(span) = launch.lists.outbound.spans.iter().find(|span| !span.is_empty())
                {
                    let region = span.buffer().region();
                    let kind = match (region.device(), region.shared_file()) {
                        (Some(_), _) if self.exchange.is_some() => TransportKind::Nccl,
                        _ if self.fabric.is_some() => TransportKind::Fabric,
                        (Some(_), _) => TransportKind::Gpu,
                        (None, Some(_)) => TransportKind::Shm,
                        (None, None) => TransportKind::Pvm,
                    };
                    launch.set_transport(kind);
                    self.count_bytes(kind, false, launch.lists.outbound.total());
                }
                launch.complete_sends();
            }
            LinkOutput::StoppedByPeer(launch, why) => {
                launch.mark_peer_quiescent();
                launch.fail_locally(TransferError::Cancelled { by: self.peer.peer_task(), reason: why });
                self.wake_waiting_lanes();
            }
            LinkOutput::StopConfirmed(launch) => launch.mark_peer_quiescent(),
            LinkOutput::Differ(launch, difference) => fail_mismatched_launch(&launch, difference),
            LinkOutput::Damaged(launch, chunk) => {
                fail_and_tell_peer(&launch, TransferError::Integrity { chunk, member: self.peer });
            }
            LinkOutput::CloseLane(id) => self.close_lane_lost_by_peer(id),
            LinkOutput::Unregion(id) => {
                // Dropped without the lock: the driver unmaps the memory of a GPU.
                let gone = lock(&self.shared).remove(&id);
                drop(gone);
            }
            LinkOutput::Switched => {
                if let Some(inbox) = &self.inbox {
                    // Opening rings the bell, so that the reactor reads the frames that are in the ring
                    // already.
                    inbox.open_for_reading();
                }
            }
            LinkOutput::Refused => {
                if let Some(host) = self.host() {
                    host.on_leave_refused();
                }
            }
            LinkOutput::Left => {
                self.decided.notify_all();
                self.tell_host(|host, connection| host.notify_connection_left(connection));
            }
            LinkOutput::Stays => {
                self.decided.notify_all();
                self.tell_host(|host, connection| host.notify_peer_kept_connection(connection));
            }
            LinkOutput::Ended => {
                self.flush_queued_output(0);
                self.close(self.eviction_error());
            }
            // The launch is dropped without the lock, because dropping it may drop memory.
            LinkOutput::Over(_) => {}
        }
    }

    /// Closes a lane that the peer has lost, and tells the link when nothing arrives from it any more.
    fn close_lane_lost_by_peer(&self, id: u16) {
        // The reactor of the lane reports when nothing arrives from it any more, because this may be a call
        // from that very lane. The lock decides between this thread and a lane that is just ending: it is
        // either marked before it leaves the list, or not found.
        let lanes = self.lanes.read().unwrap_or_else(PoisonError::into_inner);
        let found = lanes.iter().find(|lane| lane.id == id).map(|lane| lane.close_lost_by_peer());
        if found.is_none() {
            lock(&self.lost_lanes).insert(id);
        }
        drop(lanes);
        if found.is_none() {
            lock(&self.link).report_received_chunks(id);
        }
    }

    /// Copies the bytes that came with a launch frame into place.
    fn copy_inline_payload(&self, launch: &Arc<PeerLaunch>, bytes: &[u8], replies: &mut PendingReplies) {
        if launch.lists.inbound.gpu().is_some() {
            return self.stage_inline_payload(Arc::clone(launch), bytes.into());
        }
        let Some(guard) = launch.access_owned() else { return };
        guard.bytes().copy_in(0, bytes);
        let by = self.inline_transport(self.inbox.as_ref().is_some_and(RingInbox::is_open_for_reading));
        launch.set_transport(by);
        self.count_bytes(by, true, bytes.len() as u64);
        if let Some(at) = launch.group_id() {
            lock(&self.link).announce_received(at);
        }
        replies.landed.push(guard);
    }

    /// Copies the bytes that came with a launch frame to a slot, and from there to the GPUs of their destination.
    fn stage_inline_payload(&self, launch: Arc<PeerLaunch>, bytes: Arc<[u8]>) {
        let Some(gpu) = launch.lists.inbound.gpu() else { return };
        let (weak, again, kept) = (self.weak(), Arc::clone(&launch), Arc::clone(&bytes));
        let try_again = Box::new(move || {
            if let Some(this) = weak.upgrade() {
                this.stage_inline_payload(again, kept);
            }
        });
        let mut slot = match self.io.staging.receiving.take_or_wait(gpu, bytes.len(), Some(try_again)) {
            Ok(Some(slot)) => slot,
            Ok(None) => return,
            Err(error) => return self.on_copy_failed(&launch, (gpu.ordinal(), error)),
        };
        let Some(guard) = launch.access_owned() else { return };
        slot.write_view(0, bytes.len()).copy_from(&ReadView::of_slice(&bytes));
        let by = self.inline_transport(self.inbox.as_ref().is_some_and(RingInbox::is_open_for_reading));
        let weak = self.weak();
        copy_from_slot((slot, guard), (0, bytes.len()), move |(slot, guard), outcome| {
            drop(slot);
            let Some(this) = weak.upgrade() else { return };
            let launch = guard.launch();
            if let Err(failure) = outcome {
                return this.on_copy_failed(launch, failure);
            }
            if !launch.group_id().is_some_and(|at| lock(&this.link).announce_received(at)) {
                return;
            }
            this.process_outputs_and_flush();
            launch.set_transport(by);
            this.count_bytes(by, true, launch.lists.inbound.total());
            launch.record_arrived_bytes(0, launch.lists.inbound.total());
        });
    }

    /// Sends queued frames and chunks: control frames at once on this thread, chunks on this thread only if
    /// they are few.
    pub(super) fn flush_queued_output(&self, sends: u64) {
        let (ring, control, chunks) = {
            let link = lock(&self.link);
            (
                link.has_control_frames_for_ring(),
                link.has_control_frames_for_socket(),
                link.has_chunks_to_send(),
            )
        };
        if ring {
            self.write_frames_to_ring();
        }
        let control = control || ring && lock(&self.link).has_control_frames_for_socket();
        if !control && !chunks {
            return;
        }
        let lanes = self.lanes();
        let bulk = lanes.iter().any(|lane| !lane.control);
        for lane in &lanes {
            if lane.control && (control || !bulk) {
                // If sending fails, the reactor ends the lane, because it first reads the frames that have
                // arrived.
                if chunks && !bulk && sends > SEND_AT_ONCE || lane.pump_output().is_err() {
                    self.pump_on_reactor(lane);
                }
            } else if !lane.control && chunks {
                self.pump_on_reactor(lane);
            }
        }
    }

    /// Writes queued frames into the ring, as many as fit.
    pub(super) fn write_frames_to_ring(&self) {
        let Some(outbox) = self.outbox.get() else { return };
        outbox.write_frames(|room| {
            let mut link = lock(&self.link);
            let (frame, more) = link.next_control_frame_for_ring(room);
            match frame {
                Some(ControlFrame { header, payload }) => {
                    FrameToWrite::Frame(header.encode(), payload, link.waiters_to_wake(&header))
                }
                None if more => FrameToWrite::TooLong,
                None => FrameToWrite::Nothing,
            }
        });
    }

    /// Blocks until all queued frames have left, or `until` has passed, so that the peer learns all that this
    /// side knows.
    pub fn flush_until(&self, until: Instant) {
        const BETWEEN: Duration = Duration::from_micros(100);
        let is_queued = || {
            let link = lock(&self.link);
            let waits = link.has_control_frames_for_ring() || link.has_control_frames_for_socket();
            drop(link);
            waits || self.lanes().iter().any(|lane| lane.control && lane.is_sending())
        };
        while self.over.get().is_none() && is_queued() && clock::monotonic() < until {
            self.flush_queued_output(0);
            std::thread::park_timeout(BETWEEN);
        }
    }

    /// Makes the lane's reactor send on the lane.
    pub(super) fn pump_on_reactor(&self, lane: &Arc<Lane>) {
        self.io.reactor_of_lane(lane.id).request_pump(lane);
    }

    /// Wakes the lanes that hold a chunk until its destination is known.
    pub(super) fn wake_waiting_lanes(&self) {
        for lane in self.lanes() {
            if lane.input_needs_pump() {
                self.pump_on_reactor(&lane);
            }
        }
    }
}

/// Fails a launch for which the peer launched another list.
fn fail_mismatched_launch(launch: &Arc<PeerLaunch>, difference: DefinitionMismatch) {
    let (channel, sequence) = launch.group_id().unwrap_or_default();
    launch.mark_peer_quiescent();
    launch.fail_locally(match difference {
        DefinitionMismatch::Layout { key, here, there } => TransferError::LayoutMismatch { key, here, there },
        DefinitionMismatch::Order { here, there } => {
            TransferError::OrderMismatch { channel, sequence, here, there }
        }
    });
}

//! The control frames of a connection in shared memory: the connection reads them from one ring and writes them to
//! another.
//!
//! [`crate::io::ring`] has the ring itself. `ring_session.rs` decides when threads read it and when they sleep. Begin
//! at [`RingSession::drain_ring`], which this file implements.
//!
//! - A thread that waits for a transfer polls the ring itself, so an arrival needs no thread switch. A launching
//!   thread becomes the reader of the ring, queues its own frames, and then reads the frames that have arrived
//!   (`run_as_ring_reader`). So if the peer answers at once, no reactor is woken for the answer.
//! - A frame wakes a sleeping thread only if a launch waits for the frame (`WaitersToWake`). The acknowledgement of
//!   sent bytes wakes a thread if a launch waits for a send. The `Go` of a side that only fetches wakes no thread:
//!   this side sends another frame when it has fetched, and until then its peer has nothing to do. A wake-up costs
//!   more than all other work for a small message.
//! - No frame is missed. When a launch begins to wait for a send, it first registers (`add_send_waiter`), and only
//!   then the ring is read. In addition, a waiting thread reads the ring every 50 ms.
//! - A side offers its ring before it reads any frame of the peer. If it first switched to the peer's ring, it could
//!   no longer send the descriptors of its own ring, and the peer would never have a ring to write to. When a side
//!   switches, it at once moves the frames that are still queued to the ring, because no later event would do that.
//! - When the peer's process ends, its last frames are processed before the connection ends (`take_last_frames`). So
//!   a peer that exits after the last transfer does not fail that transfer. The thread that reads the ring processes
//!   these frames. If no thread reads it, the thread that detects the peer's end does so.

use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_clock as clock;

use super::connection::Connection;
use super::ring_session::RingSession;
use super::spin_wait::SpinWait;
use crate::base::error::TransferError;
use crate::base::sync::{AtomicUsize, lock};
use crate::base::transport::TransportKind;
use crate::io::lane::{LaneHost, PendingReplies};
use crate::io::reactor::DoorbellHost;
use crate::io::ring::{RingInbox, RingReader, SharedRingMemory};
use crate::protocol::frame::{FrameKind, Header};
use crate::protocol::link::ProtocolViolation;

/// How long the thread that reads the ring may take to take the last frames of a peer that has gone.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Connection {
    /// Says that the peer has gone. Its last frames are taken first: by the thread that reads the ring now, else by this
    /// one.
    pub(super) fn on_peer_gone(&self, how: String) {
        let now = clock::monotonic();
        let _first = self.peer_gone.set((how, now));
        if !self.end_after_last_frames()
            && let Some(host) = self.host()
        {
            host.schedule_connection_check(now + LAST_FRAMES);
        }
    }

    fn close_for_violation(&self, violation: &ProtocolViolation) {
        let (transport, why) = (TransportKind::Shm, violation.to_string());
        self.close(TransferError::Transport { transport, member: self.peer, why });
    }

    /// Ends the connection if its peer went at least `since` ago.
    fn end_if_gone_for(&self, since: Duration) {
        let Some((how, at)) = self.peer_gone.get() else { return };
        if self.over.get().is_some() || clock::monotonic().saturating_duration_since(*at) < since {
            return;
        }
        // The peer dropped an unused connection on purpose: the transport works.
        if !lock(&self.link).is_unused()
            && let Some(host) = self.host()
        {
            host.back_off_transport(self.peer, how);
        }
        if self.peer.job.is_own() {
            self.close(TransferError::PeerDead { member: self.peer, how: how.clone() });
        } else if !self.is_loss_told.swap(true, Ordering::AcqRel) {
            self.tell_host(|host, connection| host.notify_other_job_ended_connection(connection, how));
        }
    }

    /// Ends the connection if its peer has gone and the thread that processes its last frames takes too long:
    /// that thread may be blocked elsewhere.
    pub fn end_if_gone_too_long(&self) {
        self.end_if_gone_for(LAST_FRAMES);
    }

    fn process_ring_frames(
        &self,
        reader: &RingReader<'_>,
        most: usize,
        replies: &mut PendingReplies,
    ) -> Result<(), ProtocolViolation> {
        let mut taken = 0;
        while taken < most
            && lock(&self.awaited).is_none()
            && let Some((bytes, payload)) = reader.next_frame()?
        {
            taken += 1;
            self.record_frame_received();
            let header =
                Header::decode(&bytes).map_err(|_| ProtocolViolation("what is in its ring is no frame"))?;
            if !self.incarnations_match(&header) {
                return Err(ProtocolViolation("a frame of another incarnation is in its ring"));
            }
            if header.kind == FrameKind::Region {
                // The lock on the regions makes the check and the mark one step: either the descriptor is
                // here, or its arrival finds the mark.
                let all = lock(&self.shared);
                if !all.contains_key(&header.index) {
                    *lock(&self.awaited) = Some(header.index);
                }
            }
            lock(&self.link).receive_control_frame(&header, payload)?;
            self.perform_all_outputs(replies);
            if header.kind == FrameKind::Clique {
                self.process_clique_messages()?;
            }
        }
        Ok(())
    }
}

impl RingSession for Connection {
    type Memory = SharedRingMemory;

    fn inbox(&self) -> Option<&RingInbox> {
        self.inbox.as_ref()
    }

    fn drain_ring(&self, reader: &RingReader<'_>, most: usize) -> Result<(), ProtocolViolation> {
        let mut replies = PendingReplies::default();
        let drained = self.process_ring_frames(reader, most, &mut replies);
        self.send_replies(replies);
        drained?;
        if reader.take_writer_waiting_flag()
            && let Some(outbox) = self.outbox.get()
        {
            outbox.ring_doorbell();
        }
        Ok(())
    }

    fn end_for_violation(&self, violation: &ProtocolViolation) {
        self.close_for_violation(violation);
    }

    fn awaits_region(&self) -> bool {
        lock(&self.awaited).is_some()
    }

    fn send_waiters(&self) -> &AtomicUsize {
        &self.send_waiters
    }

    fn spin_wait(&self) -> &SpinWait {
        &self.spin_wait
    }

    fn report_ended_copies(&self) {
        muster_gpu::report_ended_copies();
    }

    fn is_over(&self) -> bool {
        self.over.get().is_some()
    }

    fn is_peer_gone(&self) -> bool {
        self.peer_gone.get().is_some()
    }

    fn end_with_gone_peer(&self) {
        self.end_if_gone_for(Duration::ZERO);
    }
}

impl DoorbellHost for Connection {
    fn on_doorbell_rung(&self) {
        self.flush_queued_output(0);
        if let Err(violation) = self.serve_ring() {
            self.close_for_violation(&violation);
        }
    }
}

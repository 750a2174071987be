//! The control frames of a connection in shared memory: the ring that it reads, and the ring that it writes.
//!
//! The ring itself is in [`crate::io::ring`]; when threads poll it and sleep is in `ring_session.rs`. Begin at
//! [`RingSession::drain`] here.
//!
//! - A thread that waits for a transfer polls the ring itself, so an arrival needs no thread switch. The
//!   launching thread polls the ring until its own frames are queued (`poll_inline`): the peer may answer
//!   before that, and the answer would wake a reactor to do the work of this thread.
//! - A frame wakes a sleeping thread only if a launch waits for it (`Urgency`): the acknowledgement of sent
//!   bytes if a launch waits for a send, and nothing for a peer that launched only to fetch. Waking costs
//!   more than the rest of a small message. A launch that begins to wait for a send registers first and then
//!   reads the ring (`add_send_waiter`), and a waiting thread reads the ring every 50 ms in any case, so no
//!   frame is missed.
//! - A side offers its ring before it reads any frame of the peer. After the switch to the peer's ring the
//!   offer would travel without its descriptors, and the peer would never have a ring to write. Frames that
//!   are queued behind the switch go into the ring together with it, because no later event would put them
//!   there.
//! - When the peer goes, its last frames are processed before the connection ends (`take_last_frames`), so
//!   that a peer that receives the last transfer and exits does not fail it. The thread that reads the ring
//!   does so; if none reads it, the thread that detects the peer's end does.

use std::time::Duration;

use muster_clock as clock;

use super::connection::Connection;
use super::ring_session::RingSession;
use super::spin_wait::SpinWait;
use crate::base::error::TransferError;
use crate::base::sync::{AtomicUsize, lock};
use crate::base::transport::TransportKind;
use crate::io::lane::{LaneHost, Replies};
use crate::io::reactor::BellHost;
use crate::io::ring::{NextFrame, Reader, RingInbox, SharedRingMemory};
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::{Frame, Violation};

/// How long the thread that reads the ring may take to take the last frames of a peer that has gone.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Connection {
    /// Writes queued frames into the ring, as many as fit.
    pub(super) fn fill_ring(&self) {
        let Some(outbox) = self.outbox.get() else { return };
        outbox.write(|room| {
            let mut link = lock(&self.link);
            let (frame, more) = link.next_for_ring(room);
            match frame {
                Some(Frame { header, payload }) => {
                    NextFrame::Frame(header.encode(), payload, link.urgency(&header))
                }
                None if more => NextFrame::TooLong,
                None => NextFrame::Nothing,
            }
        });
    }

    /// Says that the peer has gone. What it said before is taken first: by the thread that reads the ring now, else by this
    /// one.
    pub(super) fn peer_has_gone(&self, how: String) {
        let now = clock::monotonic();
        let _first = self.peer_gone.set((how, now));
        if !self.end_after_last_frames()
            && let Some(host) = self.host()
        {
            host.look_at(now + LAST_FRAMES);
        }
    }

    fn ring_is_broken(&self, violation: &Violation) {
        let (transport, why) = (TransportKind::Shm, violation.to_string());
        self.close(TransferError::Transport { transport, member: self.peer, why });
    }

    /// Ends the connection if its peer went at least `since` ago.
    fn end_with_gone(&self, since: Duration) {
        let Some((how, at)) = self.peer_gone.get() else { return };
        if self.over.get().is_some() || clock::monotonic().saturating_duration_since(*at) < since {
            return;
        }
        // The peer dropped an unused connection on purpose: the transport works.
        if !lock(&self.link).is_unused()
            && let Some(host) = self.host()
        {
            host.back_off(self.peer, how);
        }
        self.close(TransferError::PeerDead { member: self.peer, how: how.clone() });
    }

    /// Ends the connection if its peer has gone and the thread that processes its last frames takes too long:
    /// that thread may be blocked elsewhere.
    pub fn end_if_gone(&self) {
        self.end_with_gone(LAST_FRAMES);
    }

    fn take_from_ring(
        &self,
        reader: &Reader<'_>,
        most: usize,
        replies: &mut Replies,
    ) -> Result<(), Violation> {
        let mut taken = 0;
        while taken < most
            && lock(&self.awaited).is_none()
            && let Some((bytes, payload)) = reader.next()?
        {
            taken += 1;
            self.mark_heard();
            let header = Header::decode(&bytes).map_err(|_| Violation("what is in its ring is no frame"))?;
            if !self.is_between(&header) {
                return Err(Violation("a frame of another incarnation is in its ring"));
            }
            if header.kind == Kind::Region {
                // The lock on the regions makes the check and the mark one step: either the descriptor is
                // here, or its arrival finds the mark.
                let all = lock(&self.shared);
                if !all.contains_key(&header.index) {
                    *lock(&self.awaited) = Some(header.index);
                }
            }
            lock(&self.link).receive(&header, payload)?;
            self.perform_all(replies);
        }
        Ok(())
    }
}

impl RingSession for Connection {
    type Memory = SharedRingMemory;

    fn inbox(&self) -> Option<&RingInbox> {
        self.inbox.as_ref()
    }

    fn drain(&self, reader: &Reader<'_>, most: usize) -> Result<(), Violation> {
        let mut replies = Replies::default();
        let drained = self.take_from_ring(reader, most, &mut replies);
        self.send_replies(replies);
        drained?;
        if reader.writer_waits()
            && let Some(outbox) = self.outbox.get()
        {
            outbox.ring();
        }
        Ok(())
    }

    fn on_violation(&self, violation: &Violation) {
        self.ring_is_broken(violation);
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

    fn is_over(&self) -> bool {
        self.over.get().is_some()
    }

    fn is_peer_gone(&self) -> bool {
        self.peer_gone.get().is_some()
    }

    fn end_with_gone_peer(&self) {
        self.end_with_gone(Duration::ZERO);
    }
}

impl BellHost for Connection {
    fn bell_rang(&self) {
        self.flush(0);
        if let Err(violation) = self.serve_ring() {
            self.ring_is_broken(&violation);
        }
    }
}

//! The control frames of a connection in shared memory: the ring that it reads, and the ring that it writes.
//!
//! The ring itself is in [`crate::io::ring`]. Begin at `poll_ring_until`.
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

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::connection::Connection;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::lane::{LaneHost, Replies};
use crate::io::reactor::BellHost;
use crate::io::ring::{FRAMES_MAX, NextFrame, Reader, RingInbox};
use crate::launch::session_handle::{POLL_INTERVAL, SessionHandle};
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::{Frame, Violation};

/// The most frames that a launching thread processes after it has queued its own.
const ANSWERS_MAX: usize = 16;
/// The most frames that a reading thread processes before it checks its other conditions.
const TURN: usize = 256;
/// How long the thread that reads the ring may take to process the last frames of a peer that has gone.
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

    fn ring_is_broken(&self, violation: &Violation) {
        let (transport, why) = (TransportKind::Shm, violation.to_string());
        self.close(TransferError::Transport { transport, member: self.peer, why });
    }

    /// Processes the frames in the ring, unless another thread reads it now.
    pub(super) fn serve_ring(&self) -> Result<(), Violation> {
        let Some(reader) = self.inbox.as_ref().and_then(RingInbox::read) else { return Ok(()) };
        let drained = self.drain_ring(&reader, TURN);
        self.release_ring(reader);
        drained
    }

    /// Leaves the ring to the reactor, and rings its bell for frames that have arrived since this thread read
    /// last, because the writer did not. A peer that writes without pause thus does not hold this thread.
    fn release_ring(&self, reader: Reader<'_>) {
        let inbox = reader.release();
        if !inbox.is_empty() && lock(&self.awaited).is_none() {
            inbox.ring();
        }
        // This thread releases the ring and then checks `peer_gone`; the thread that detects the peer's end
        // sets `peer_gone` and then tries to read the ring. At least one of the two processes the last
        // frames.
        fence(Ordering::SeqCst);
        if self.peer_gone.get().is_some() {
            self.take_last_frames();
        }
    }

    /// Records that the peer has gone. Its earlier frames are processed first: by the thread that reads the
    /// ring now, else by this one.
    pub(super) fn peer_has_gone(&self, how: String) {
        let now = clock::monotonic();
        let _first = self.peer_gone.set((how, now));
        fence(Ordering::SeqCst);
        if !self.take_last_frames()
            && let Some(host) = self.host()
        {
            self.wake_poller();
            host.look_at(now + LAST_FRAMES);
        }
    }

    /// Processes the last frames of a peer that has gone, and ends the connection. Returns false if another
    /// thread reads the ring now.
    fn take_last_frames(&self) -> bool {
        if let Some(inbox) = self.inbox.as_ref().filter(|inbox| inbox.is_open()) {
            let Some(reader) = inbox.read() else { return false };
            // The bound holds for a hostile peer: no honest one writes more after its end.
            if let Err(violation) = self.drain_ring(&reader, FRAMES_MAX) {
                tracing::debug!(peer = %self.peer, %violation, "the last frames of a peer");
            }
            reader.release();
        }
        self.end_with_gone(Duration::ZERO);
        true
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

    /// Calls `with`, whose frames the peer may answer at once. This thread holds the ring meanwhile and reads
    /// the answers afterwards, so that they wake no other thread.
    pub(super) fn poll_inline<R>(&self, with: impl FnOnce() -> R) -> R {
        let reader = self.inbox.as_ref().and_then(RingInbox::read);
        if let Some(reader) = &reader {
            reader.stay_awake();
        }
        let said = with();
        if let Some(reader) = reader {
            let drained = self.drain_ring(&reader, ANSWERS_MAX);
            self.release_ring(reader);
            if let Err(violation) = drained {
                self.ring_is_broken(&violation);
            }
        }
        said
    }

    /// Processes at most `most` frames.
    fn drain_ring(&self, reader: &Reader<'_>, most: usize) -> Result<(), Violation> {
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

    /// Polls the ring on this thread until `done`, unless another thread reads it, so that an arrival needs
    /// no thread switch. With `soon` it spins before it sleeps, because a small transfer may complete sooner
    /// than the thread would wake up. Returns whether it is done.
    pub(super) fn poll_ring_until(
        &self,
        until: Option<Instant>,
        soon: bool,
        done: &dyn Fn() -> bool,
    ) -> bool {
        let Some(reader) = self.inbox.as_ref().and_then(RingInbox::read) else { return false };
        let has_waiters = || self.send_waiters.load(Ordering::SeqCst) > 0;
        reader.stay_awake();
        let is_over = || self.over.get().is_some() || self.peer_gone.get().is_some();
        let mut is_done = done();
        while !is_done && !is_over() {
            if let Err(violation) = self.drain_ring(&reader, TURN) {
                self.ring_is_broken(&violation);
            }
            if lock(&self.awaited).is_some() {
                break;
            }
            is_done = done();
            if is_done {
                break;
            }
            let left =
                until.map_or(POLL_INTERVAL, |until| until.saturating_duration_since(clock::monotonic()));
            if left.is_zero() {
                break;
            }
            if reader.has_more()
                || soon && self.spin_wait.until(left, || reader.has_more() || is_over() || done())
            {
                continue;
            }
            let senders = has_waiters();
            let sleep = reader.prepare_sleep(senders);
            is_done = done();
            if is_done {
                break;
            }
            if senders == has_waiters() && !is_over() {
                sleep.wait(left.min(POLL_INTERVAL));
            }
        }
        self.release_ring(reader);
        is_done
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

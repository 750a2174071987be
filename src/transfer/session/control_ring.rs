//! A connection's control frames through shared memory: the ring that it reads, and the one that it writes.
//!
//! The ring itself is in [`crate::io::ring`]. Begin at `poll_ring_until`.
//!
//! - A thread that waits for a transfer polls the ring itself, so an arrival needs no change of threads. The
//!   launching thread polls the ring until its own frames are queued (`poll_inline`): the peer may answer before
//!   that, and the answer would wake a reactor for what this thread is about to do.
//! - A frame wakes a sleeping thread only for what some launch waits for (`Urgency`): the arrival of sent bytes if
//!   a launch waits for a send, and nothing for a peer that launched only to fetch. Waking costs more than the rest
//!   of a small message. A launch that begins to wait for a send registers first and then reads the ring
//!   (`add_send_waiter`), and a waiting thread reads the ring every 50 ms in any case, so nothing is missed.
//! - A ring is offered before any frame of the peer is read. Behind the switch to the peer's ring the offer would
//!   travel without its descriptors, and the peer would never have a ring. Frames that are queued behind the switch
//!   go into the ring together with it, because no later event would put them there.
//! - When the peer goes, its last frames are processed before the connection ends (`take_last_frames`): a peer that
//!   takes the last transfer and exits has not failed it. The reading thread does so, else the thread that detects
//!   the peer's end.

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

/// A thread that launches takes no more of what the peer says meanwhile.
const ANSWERS_MAX: usize = 16;
/// A thread that reads takes no more frames before it looks at other things.
const TURN: usize = 256;
/// How long the thread that reads the ring may take to take the last frames of a peer that has gone.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Connection {
    /// Puts into the ring what waits for it, as far as there is room.
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

    /// Takes the frames that are in the ring, unless another thread does so now.
    pub(super) fn serve_ring(&self) -> Result<(), Violation> {
        let Some(reader) = self.inbox.as_ref().and_then(RingInbox::read) else { return Ok(()) };
        let drained = self.drain_ring(&reader, TURN);
        self.release_ring(reader);
        drained
    }

    /// Leaves the ring to the reactor, with what has come since this thread looked: the writer has not rung for it. A peer
    /// that writes more and more keeps this thread from nothing else.
    fn release_ring(&self, reader: Reader<'_>) {
        let inbox = reader.release();
        if !inbox.is_empty() && lock(&self.awaited).is_none() {
            inbox.ring();
        }
        // This thread leaves before it looks; the one that learns of the peer's end says so before it tries to read. One of
        // the two does what is to be done.
        fence(Ordering::SeqCst);
        if self.peer_gone.get().is_some() {
            self.take_last_frames();
        }
    }

    /// Says that the peer has gone. What it said before is taken first: by the thread that reads the ring now, else by this
    /// one.
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

    /// Ends the connection with a peer that has gone, once its last frames have been taken. Not if another thread takes
    /// them now.
    fn take_last_frames(&self) -> bool {
        if let Some(inbox) = self.inbox.as_ref().filter(|inbox| inbox.is_open()) {
            let Some(reader) = inbox.read() else { return false };
            // No honest peer goes on writing.
            if let Err(violation) = self.drain_ring(&reader, FRAMES_MAX) {
                tracing::debug!(peer = %self.peer, %violation, "the last frames of a peer");
            }
            reader.release();
        }
        self.end_with_gone(Duration::ZERO);
        true
    }

    /// Ends the connection if its peer went so long ago.
    fn end_with_gone(&self, since: Duration) {
        let Some((how, at)) = self.peer_gone.get() else { return };
        if self.over.get().is_some() || clock::monotonic().saturating_duration_since(*at) < since {
            return;
        }
        // A peer that drops an unused connection can still be reached that way.
        if !lock(&self.link).is_unused()
            && let Some(host) = self.host()
        {
            host.back_off(self.peer, how);
        }
        self.close(TransferError::PeerDead { member: self.peer, how: how.clone() });
    }

    /// Ends the connection if its peer has gone, and the thread that takes its last frames takes too long: it may wait for
    /// something else.
    pub fn end_if_gone(&self) {
        self.end_with_gone(LAST_FRAMES);
    }

    /// Does something that the peer may answer at once. This thread polls the ring until that is done, so that the answer
    /// wakes no thread.
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

    /// Takes so many frames at most.
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
                // Both under the lock of the regions: either the descriptor is here, or its coming is awaited.
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

    /// Polls the ring on this thread until `done`, if no other thread reads it: what it waits for comes without a change of
    /// threads. What is small may be here `soon`: sooner than this thread could be woken. Returns whether it is done.
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

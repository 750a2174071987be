//! Decides when a thread of a session reads the session's ring, when it sleeps, and when another thread becomes the
//! reader.
//!
//! The session interprets the frames. Begin at [`RingSession::poll_ring_until`].

use std::sync::atomic::Ordering;
use std::time::Instant;

use muster_clock as clock;

use super::spin_wait::SpinWait;
use crate::base::sync::{AtomicUsize, fence, fence_after_read_modify_write};
use crate::io::ring::{FRAMES_MAX, RingInbox, RingMemory, RingReader};
use crate::launch::session_handle::POLL_INTERVAL;
use crate::protocol::link::ProtocolViolation;

/// A thread that launches takes no more of what the peer says meanwhile.
const ANSWERS_MAX: usize = 16;
/// A thread that reads takes no more frames before it looks at other things.
const TURN: usize = 256;

/// A session whose control frames come by a ring.
///
/// One thread at a time reads: one that waits for an outcome, one that launches, or the reactor. A thread that leaves looks
/// once more, since the peer did not wake the reactor for what came while that thread was awake. `tests/models/ring.rs` goes
/// through the interleavings.
pub trait RingSession {
    /// The memory of its ring.
    type Memory: RingMemory;

    /// Returns the ring that it reads, if there is one.
    fn inbox(&self) -> Option<&RingInbox<Self::Memory>>;

    /// Takes so many frames at most, and does what they ask for.
    ///
    /// # Errors
    /// If what is in the ring makes no sense.
    fn drain_ring(&self, reader: &RingReader<'_, Self::Memory>, most: usize)
    -> Result<(), ProtocolViolation>;

    /// Ends the session, because what is in the ring makes no sense.
    fn end_for_violation(&self, violation: &ProtocolViolation);

    /// Returns whether nothing is read until the memory has come that the last frame told of.
    fn awaits_region(&self) -> bool;

    /// Returns how many launches wait to hear that the peer has what was sent.
    fn send_waiters(&self) -> &AtomicUsize;

    /// Returns how long threads spin before they sleep.
    fn spin_wait(&self) -> &SpinWait;

    /// Returns whether the session is over.
    fn is_over(&self) -> bool;

    /// Returns whether the peer has gone.
    fn is_peer_gone(&self) -> bool;

    /// Ends the session because its peer has gone. Its last frames have been taken.
    fn end_with_gone_peer(&self);

    /// Counts a launch that waits to hear that the peer has what was sent: that wakes this side's threads from now on.
    fn count_send_waiter(&self) {
        self.send_waiters().fetch_add(1, Ordering::SeqCst);
        // Before it is seen how the reader sleeps: it has said so before it looks at the count again.
        fence_after_read_modify_write();
        if let Some(inbox) = self.inbox() {
            inbox.announce_send_waiter();
        }
    }

    /// Takes the frames that are in the ring, unless another thread does so now.
    ///
    /// # Errors
    /// If what is in the ring makes no sense.
    fn serve_ring(&self) -> Result<(), ProtocolViolation> {
        let Some(reader) = self.inbox().and_then(RingInbox::try_lock_reader) else { return Ok(()) };
        let drained = self.drain_ring(&reader, TURN);
        self.return_ring_to_reactor(reader);
        drained
    }

    /// Leaves the ring to the reactor, with what has come since this thread looked: the writer has not rung for it. A peer
    /// that writes more and more keeps this thread from nothing else.
    fn return_ring_to_reactor(&self, reader: RingReader<'_, Self::Memory>) {
        let inbox = reader.return_to_reactor();
        if !inbox.is_empty() && !self.awaits_region() {
            inbox.ring_doorbell();
        }
        // This thread has left, and passed a fence, before it looks; the one that learns of the peer's end says so before it
        // tries to read. One of the two does what is to be done.
        if self.is_peer_gone() {
            self.take_last_frames();
        }
    }

    /// Ends the session, whose peer has gone, once its last frames have been taken. Returns whether that was done by now:
    /// else another thread takes them.
    fn end_after_last_frames(&self) -> bool {
        // The caller has said that the peer is gone.
        fence(Ordering::SeqCst);
        let taken = self.take_last_frames();
        if !taken && let Some(inbox) = self.inbox() {
            inbox.wake_sleeper();
        }
        taken
    }

    /// Takes the last frames of a peer that has gone, and ends the session. Not if another thread takes them now.
    fn take_last_frames(&self) -> bool {
        if let Some(inbox) = self.inbox().filter(|inbox| inbox.is_open_for_reading()) {
            let Some(reader) = inbox.try_lock_reader() else { return false };
            // No honest peer goes on writing.
            if let Err(violation) = self.drain_ring(&reader, FRAMES_MAX) {
                tracing::debug!(%violation, "the last frames of a peer");
            }
            reader.return_to_reactor();
        }
        self.end_with_gone_peer();
        true
    }

    /// Does something that the peer may answer at once. This thread polls the ring until that is done, so that the answer
    /// wakes no thread.
    fn run_as_ring_reader<R>(&self, with: impl FnOnce() -> R) -> R {
        let reader = self.inbox().and_then(RingInbox::try_lock_reader);
        if let Some(reader) = &reader {
            reader.announce_awake();
        }
        let said = with();
        if let Some(reader) = reader {
            let drained = self.drain_ring(&reader, ANSWERS_MAX);
            self.return_ring_to_reactor(reader);
            if let Err(violation) = drained {
                self.end_for_violation(&violation);
            }
        }
        said
    }

    /// Polls the ring on this thread until `done`, if no other thread reads it: what it waits for comes without a change of
    /// threads. What is small may be here `soon`: sooner than this thread could be woken. Returns whether it is done.
    fn poll_ring_until(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool {
        let Some(reader) = self.inbox().and_then(RingInbox::try_lock_reader) else { return false };
        let has_waiters = || self.send_waiters().load(Ordering::SeqCst) > 0;
        reader.announce_awake();
        let is_over = || self.is_over() || self.is_peer_gone();
        let mut is_done = done();
        while !is_done && !is_over() {
            if let Err(violation) = self.drain_ring(&reader, TURN) {
                self.end_for_violation(&violation);
            }
            if self.awaits_region() {
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
                || soon && self.spin_wait().spin_until(left, || reader.has_more() || is_over() || done())
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
        self.return_ring_to_reactor(reader);
        is_done
    }
}

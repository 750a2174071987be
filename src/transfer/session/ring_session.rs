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

/// The number of frames that a thread takes in one turn when it has launched, or leaves the ring.
const ANSWERS_MAX: usize = 16;
/// The number of frames that a thread takes in one turn.
const TURN: usize = 256;
/// The number of turns of a thread that leaves the ring: it then leaves the rest to the reactor.
const LAST_TURNS: usize = if cfg!(all(test, loom)) { 1 } else { 4 };

/// A session whose control frames come by a ring.
///
/// One thread at a time reads the ring: a thread that waits for an outcome, a thread that launches, or the reactor. While
/// another thread reads, the peer does not wake the reactor. So a thread that leaves the ring looks once more.
/// `tests/models/ring.rs` explores the interleavings.
pub trait RingSession {
    /// The memory of its ring.
    type Memory: RingMemory;

    /// Returns the ring that it reads, if there is one.
    fn inbox(&self) -> Option<&RingInbox<Self::Memory>>;

    /// Takes at most `most` frames from the ring and handles them.
    ///
    /// # Errors
    /// If what is in the ring makes no sense.
    fn drain_ring(&self, reader: &RingReader<'_, Self::Memory>, most: usize)
    -> Result<(), ProtocolViolation>;

    /// Ends the session, because what is in the ring makes no sense.
    fn end_for_violation(&self, violation: &ProtocolViolation);

    /// Returns whether the last frame named a region whose descriptor has not arrived. Until then nothing is read.
    fn awaits_region(&self) -> bool;

    /// Returns how many launches wait for the acknowledgement of sent bytes.
    fn send_waiters(&self) -> &AtomicUsize;

    /// Returns how long threads spin before they sleep.
    fn spin_wait(&self) -> &SpinWait;

    /// Reports copies of GPUs that have ended, which may complete a launch.
    fn report_ended_copies(&self) {}

    /// Returns whether the session is over.
    fn is_over(&self) -> bool;

    /// Returns whether the peer has gone.
    fn is_peer_gone(&self) -> bool;

    /// Ends the session because its peer has gone. Its last frames have been taken.
    fn end_with_gone_peer(&self);

    /// Counts a launch that waits for the acknowledgement of sent bytes. From now on, such acknowledgements wake a thread.
    fn count_send_waiter(&self) {
        self.send_waiters().fetch_add(1, Ordering::SeqCst);
        // The count is raised before this thread looks how the reader sleeps. The reader says how it sleeps before it looks at
        // the count again. So one of the two sees the other.
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
        self.leave_ring(reader, drained)
    }

    /// Leaves the ring to the reactor. The writer has not rung for a frame that arrived since this thread last looked, so
    /// this thread takes such frames itself, up to [`LAST_TURNS`] times; that costs less than to wake the reactor. After
    /// that, it wakes the reactor: a peer that writes more and more keeps this thread from nothing else. After a violation
    /// it takes nothing.
    ///
    /// # Errors
    /// The violation in `drained`, the result of the last look, or in a frame that is taken here.
    fn leave_ring(
        &self,
        reader: RingReader<'_, Self::Memory>,
        mut drained: Result<(), ProtocolViolation>,
    ) -> Result<(), ProtocolViolation> {
        let mut inbox = reader.return_to_reactor();
        let mut turns = 0;
        while drained.is_ok() && !inbox.is_empty() && !self.awaits_region() {
            if turns == LAST_TURNS {
                inbox.ring_doorbell();
                break;
            }
            turns += 1;
            // If another thread reads the ring now, that thread looks again when it leaves.
            let Some(reader) = inbox.try_lock_reader() else { break };
            drained = self.drain_ring(&reader, ANSWERS_MAX);
            inbox = reader.return_to_reactor();
        }
        // This thread has left, and has passed a fence, before it asks. The thread that detects the peer's end marks it before
        // it tries to read. So at least one of the two takes the last frames.
        if drained.is_ok() && self.is_peer_gone() {
            self.take_last_frames();
        }
        drained
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

    /// Calls `with`, which sends something that the peer may answer at once. This thread is the reader of the ring meanwhile, so
    /// the answer wakes no thread.
    fn run_as_ring_reader<R>(&self, with: impl FnOnce() -> R) -> R {
        let reader = self.inbox().and_then(RingInbox::try_lock_reader);
        if let Some(reader) = &reader {
            reader.announce_awake();
        }
        let said = with();
        if let Some(reader) = reader {
            let drained = self.drain_ring(&reader, ANSWERS_MAX);
            if let Err(violation) = self.leave_ring(reader, drained) {
                self.end_for_violation(&violation);
            }
        }
        said
    }

    /// Reads the ring on this thread until `done` or `until`, if no other thread reads it: so an arrival needs no thread switch.
    /// If the arrival is expected `soon`, sooner than the kernel could wake a thread, this thread spins before it sleeps.
    /// Returns whether `done` holds.
    fn poll_ring_until(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool {
        let Some(reader) = self.inbox().and_then(RingInbox::try_lock_reader) else { return false };
        let has_waiters = || self.send_waiters().load(Ordering::SeqCst) > 0;
        reader.announce_awake();
        let is_over = || self.is_over() || self.is_peer_gone();
        let mut is_done = done();
        let mut drained = Ok(());
        while !is_done && !is_over() {
            drained = self.drain_ring(&reader, TURN);
            if drained.is_err() || self.awaits_region() {
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
            let is_ready = || {
                self.report_ended_copies();
                reader.has_more() || is_over() || done()
            };
            if reader.has_more() || soon && self.spin_wait().spin_until(left, is_ready) {
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
        if let Err(violation) = self.leave_ring(reader, drained) {
            self.end_for_violation(&violation);
            return done();
        }
        is_done
    }
}

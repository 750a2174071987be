//! A connection's control frames by shared memory: the ring that it reads, and the one that it writes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::ring::{FRAMES_MAX, Given, Inbox, Reader};
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::{Frame, Violation};
use crate::session::connection::Connection;
use crate::session::perform::Answers;
use muster_clock as clock;

/// A thread that waits looks again after so long, at what the peer did not wake it for and at its own time.
pub const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// A thread that launches takes no more of what the peer says meanwhile,
const ANSWERS_MAX: usize = 16;
/// and one that reads takes no more before it looks up.
const TURN: usize = 256;
/// How long whoever reads the ring may take to hear the last words of a peer that has gone.
const LAST_WORDS: Duration = Duration::from_millis(100);

impl Connection {
    /// Puts into the ring what waits for it, as far as there is room.
    pub(crate) fn fill_ring(&self) {
        let Some(outbox) = self.outbox.get() else { return };
        outbox.write(|room| {
            let mut link = lock(&self.link);
            let (frame, more) = link.next_for_ring(room);
            match frame {
                Some(Frame { header, payload }) => {
                    Given::Frame(header.encode(), payload, link.urgency(&header))
                }
                None if more => Given::TooLong,
                None => Given::Nothing,
            }
        });
    }

    /// Its bell, if it has one.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.inbox.as_ref().map(Inbox::bell)
    }

    /// The bell rang: there is something to read, or room to write.
    pub fn bell_rang(self: &Arc<Self>) {
        self.kick(0);
        if let Err(violation) = self.serve_ring() {
            self.ring_is_broken(&violation);
        }
    }

    fn ring_is_broken(self: &Arc<Self>, violation: &Violation) {
        let (transport, why) = (TransportKind::Shm, violation.to_string());
        self.end(TransferError::Transport { transport, member: self.peer, why });
    }

    /// Takes the frames that are in the ring, unless somebody does so now.
    pub(crate) fn serve_ring(self: &Arc<Self>) -> Result<(), Violation> {
        let Some(reader) = self.inbox.as_ref().and_then(Inbox::read) else { return Ok(()) };
        let drained = self.drain_ring(&reader, TURN);
        self.leave(reader);
        drained
    }

    /// Leaves the ring to the reactor, with what has come since this thread looked: whoever wrote then has rung the bell
    /// for nothing. One who says more and more keeps nobody from others.
    fn leave(self: &Arc<Self>, reader: Reader<'_>) {
        let inbox = reader.leave();
        if !inbox.is_empty() && lock(&self.awaited).is_none() {
            inbox.ring();
        }
        // This thread first leaves and then looks; who tells of the peer's end first says so and then tries to read. One of
        // the two does what is to be done.
        fence(Ordering::SeqCst);
        if self.gone.get().is_some() {
            self.hear_last_words();
        }
    }

    /// The peer has gone. What it said before is heard first: by who reads the ring now, else by this thread.
    pub(crate) fn peer_has_gone(self: &Arc<Self>, how: String) {
        let now = clock::monotonic();
        let _first = self.gone.set((how, now));
        fence(Ordering::SeqCst);
        if !self.hear_last_words()
            && let Some(core) = self.core.upgrade()
        {
            self.wake_follower();
            core.look_at(now + LAST_WORDS);
        }
    }

    /// Ends the connection with a peer that has gone, once what it said last has been heard. Not if somebody else reads that
    /// now.
    fn hear_last_words(self: &Arc<Self>) -> bool {
        if let Some(inbox) = self.inbox.as_ref().filter(|inbox| inbox.is_open()) {
            let Some(reader) = inbox.read() else { return false };
            // Nobody goes on writing, unless they mean no good.
            if let Err(violation) = self.drain_ring(&reader, FRAMES_MAX) {
                tracing::debug!(peer = %self.peer, %violation, "the last words of a peer");
            }
            reader.leave();
        }
        self.end_with_gone(Duration::ZERO);
        true
    }

    /// Ends the connection if its peer went so long ago.
    fn end_with_gone(self: &Arc<Self>, since: Duration) {
        let Some((how, at)) = self.gone.get() else { return };
        if self.over.get().is_some() || clock::monotonic().saturating_duration_since(*at) < since {
            return;
        }
        // A peer that drops what nobody uses has not lost its way here.
        if !lock(&self.link).is_unused()
            && let Some(core) = self.core.upgrade()
        {
            core.take_detour(self.peer, how);
        }
        self.end(TransferError::PeerDead { member: self.peer, how: how.clone() });
    }

    /// Ends the connection if its peer has gone, and whoever reads its last words takes too long: they may wait for something
    /// else.
    pub fn end_if_gone(self: &Arc<Self>) {
        self.end_with_gone(LAST_WORDS);
    }

    /// Does something that the peer may answer at once: what it answers until that is done is taken on this thread, and
    /// wakes nobody.
    pub(crate) fn converse<R>(self: &Arc<Self>, with: impl FnOnce() -> R) -> R {
        let reader = self.inbox.as_ref().and_then(Inbox::read);
        if let Some(reader) = &reader {
            reader.stay();
        }
        let said = with();
        if let Some(reader) = reader {
            let drained = self.drain_ring(&reader, ANSWERS_MAX);
            self.leave(reader);
            if let Err(violation) = drained {
                self.ring_is_broken(&violation);
            }
        }
        said
    }

    /// Somebody waits to hear that the peer has what was sent.
    pub fn heed(&self) {
        self.heeded.fetch_add(1, Ordering::SeqCst);
        if let Some(inbox) = &self.inbox {
            inbox.heed();
        }
    }

    /// One less does.
    pub fn heed_no_more(&self) {
        self.heeded.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes so many frames at most.
    fn drain_ring(self: &Arc<Self>, reader: &Reader<'_>, most: usize) -> Result<(), Violation> {
        let mut answers = Answers::default();
        let drained = self.take_from_ring(reader, most, &mut answers);
        self.answer(answers);
        drained?;
        if reader.writer_waits()
            && let Some(outbox) = self.outbox.get()
        {
            outbox.ring();
        }
        Ok(())
    }

    fn take_from_ring(
        self: &Arc<Self>,
        reader: &Reader<'_>,
        most: usize,
        answers: &mut Answers,
    ) -> Result<(), Violation> {
        let mut taken = 0;
        while taken < most
            && lock(&self.awaited).is_none()
            && let Some((bytes, payload)) = reader.next()?
        {
            taken += 1;
            self.heard();
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
            self.perform_all(answers);
        }
        Ok(())
    }

    /// Reads the ring on this thread until `done`, if nobody else reads it: what is waited for comes without a change of
    /// threads. What is small may be here `soon`: sooner than this thread could be woken. Whether it is done.
    pub fn follow(self: &Arc<Self>, until: Option<Instant>, soon: bool, done: impl Fn() -> bool) -> bool {
        let Some(reader) = self.inbox.as_ref().and_then(Inbox::read) else { return false };
        let heeded = || self.heeded.load(Ordering::SeqCst) > 0;
        reader.stay();
        let is_over = || self.over.get().is_some() || self.gone.get().is_some();
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
            let left = until.map_or(LOOK_AGAIN, |until| until.saturating_duration_since(clock::monotonic()));
            if left.is_zero() {
                break;
            }
            if reader.has_more()
                || soon && self.spinning.until(left, || reader.has_more() || is_over() || done())
            {
                continue;
            }
            let senders = heeded();
            let prepared = reader.prepare(senders);
            is_done = done();
            if is_done {
                break;
            }
            if senders == heeded() && !is_over() {
                prepared.wait(left.min(LOOK_AGAIN));
            }
        }
        self.leave(reader);
        is_done
    }

    /// Something that a thread may wait for has happened elsewhere.
    pub fn wake_follower(&self) {
        if let Some(inbox) = &self.inbox {
            inbox.wake();
        }
    }
}

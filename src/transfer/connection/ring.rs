//! A connection's control frames by shared memory: the ring that it reads, and the one that it writes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Answers, Connection};
use crate::clock;
use crate::transfer::error::TransferError;
use crate::transfer::frame::{Header, Kind};
use crate::transfer::link::{Frame, Violation};
use crate::transfer::sync::lock;
use crate::transfer::transport::TransportKind;
use crate::transfer::transport::ring::{Given, Inbox, Reader};

/// A thread that waits looks again after so long, at what the peer did not wake it for and at its own time.
pub const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// A thread that launches takes no more of what the peer says meanwhile.
const ANSWERS_MAX: usize = 64;

impl Connection {
    /// Puts into the ring what waits for it, as far as there is room.
    pub(super) fn fill_ring(&self) {
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
    pub(super) fn serve_ring(self: &Arc<Self>) -> Result<(), Violation> {
        let Some(inbox) = &self.inbox else { return Ok(()) };
        loop {
            let Some(reader) = inbox.read() else { return Ok(()) };
            self.drain_ring(&reader, usize::MAX)?;
            // Whoever wrote while this thread had not quite left has rung the bell for nothing.
            if reader.leave().is_empty() || lock(&self.awaited).is_some() {
                return Ok(());
            }
        }
    }

    /// Does something that the peer may answer at once: what it answers until that is done is taken on this thread, and
    /// wakes nobody.
    pub(super) fn converse<R>(self: &Arc<Self>, with: impl FnOnce() -> R) -> R {
        let reader = self.inbox.as_ref().and_then(Inbox::read);
        if let Some(reader) = &reader {
            reader.stay();
        }
        let said = with();
        if let Some(reader) = reader {
            let drained = self.drain_ring(&reader, ANSWERS_MAX);
            let inbox = reader.leave();
            match drained {
                Err(violation) => self.ring_is_broken(&violation),
                // Whoever says more and more does not keep this thread.
                Ok(()) if !inbox.is_empty() => inbox.ring(),
                Ok(()) => {}
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
        let mut is_done = done();
        while !is_done && self.over.get().is_none() {
            if let Err(violation) = self.drain_ring(&reader, usize::MAX) {
                self.ring_is_broken(&violation);
            }
            if lock(&self.awaited).is_some() {
                break;
            }
            is_done = done();
            if is_done {
                break;
            }
            if soon && self.spinning.until(|| reader.has_more() || self.over.get().is_some() || done()) {
                continue;
            }
            let senders = heeded();
            let prepared = reader.prepare(senders);
            is_done = done();
            let left = until.map_or(LOOK_AGAIN, |until| until.saturating_duration_since(clock::monotonic()));
            if is_done || left.is_zero() {
                break;
            }
            if senders == heeded() {
                prepared.wait(left.min(LOOK_AGAIN));
            }
        }
        if !reader.leave().is_empty() {
            self.bell_rang();
        }
        is_done
    }

    /// Something that a thread may wait for has happened elsewhere.
    pub fn wake_follower(&self) {
        if let Some(inbox) = &self.inbox {
            inbox.wake();
        }
    }
}

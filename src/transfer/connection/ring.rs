//! A connection's control frames by shared memory: the ring that it reads, and the one that it writes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Answers, Connection};
use crate::clock;
use crate::transfer::error::TransferError;
use crate::transfer::frame::{Header, Kind};
use crate::transfer::link::Violation;
use crate::transfer::sync::lock;
use crate::transfer::transport::TransportKind;
use crate::transfer::transport::ring::{Given, Inbox, Reader};

impl Connection {
    /// Puts into the ring what waits for it, as far as there is room.
    pub(super) fn fill_ring(&self) {
        let Some(outbox) = self.outbox.get() else { return };
        outbox.write(|room| {
            let (frame, more) = lock(&self.link).next_for_ring(room);
            match frame {
                Some(frame) => Given::Frame(frame.header.encode(), frame.payload),
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
            self.drain_ring(&reader)?;
            reader.leave();
            drop(reader);
            // Whoever wrote while this thread had not quite left has rung the bell for nothing.
            if inbox.is_empty() || lock(&self.awaited).is_some() {
                return Ok(());
            }
        }
    }

    fn drain_ring(self: &Arc<Self>, reader: &Reader<'_>) -> Result<(), Violation> {
        let mut answers = Answers::default();
        let drained = self.take_from_ring(reader, &mut answers);
        self.answer(answers);
        drained?;
        if reader.writer_waits()
            && let Some(outbox) = self.outbox.get()
        {
            outbox.ring();
        }
        Ok(())
    }

    fn take_from_ring(self: &Arc<Self>, reader: &Reader<'_>, answers: &mut Answers) -> Result<(), Violation> {
        while lock(&self.awaited).is_none()
            && let Some((bytes, payload)) = reader.next()?
        {
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
    /// threads. Whether it is done.
    pub fn follow(self: &Arc<Self>, until: Option<Instant>, done: impl Fn() -> bool) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(50);
        let Some(inbox) = &self.inbox else { return false };
        let Some(reader) = inbox.read() else { return false };
        let mut is_done = done();
        while !is_done && self.over.get().is_none() {
            if let Err(violation) = self.drain_ring(&reader) {
                self.ring_is_broken(&violation);
            }
            if lock(&self.awaited).is_some() {
                break;
            }
            is_done = done();
            if is_done {
                break;
            }
            reader.prepare();
            is_done = done();
            let left = until.map_or(LOOK_AGAIN, |until| until.saturating_duration_since(clock::monotonic()));
            if is_done || left.is_zero() {
                break;
            }
            reader.wait(left.min(LOOK_AGAIN));
        }
        reader.leave();
        drop(reader);
        if !inbox.is_empty() {
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

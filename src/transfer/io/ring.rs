//! A ring in shared memory for control frames between two processes of one host. The ring needs no system call while
//! both processes are awake.
//!
//! Each side owns an *inbox*: shared memory that the other side writes, with a ring of frames, two counters and three
//! words. The reader of an inbox is a reactor, a thread that waits for a transfer, or a thread that launches one.
//! Before a reader sleeps on an empty ring, it writes into one word of the memory (bytes 128..132) that it sleeps,
//! and how the writer wakes it. A reactor is woken by its bell (an eventfd), a waiting thread by a futex on that
//! word. If no waiting thread needs a frame, the frame wakes no thread; the next poll of the ring finds it.
//! `session/ring_session.rs` decides which thread reads.
//!
//! Begin at [`RingInbox`] and [`RingOutbox`].
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | the number of bytes ever written |
//! | 64..72 | the number of bytes ever read |
//! | 128..132 | whether and how the reader sleeps |
//! | 192..196 | whether the writer waits for room |
//! | 256..260 | whether the owner of the inbox has revoked its source buffers: later copies of them are invalid |
//! | 4096.. | the frames, each a header and its payload, in multiples of 64 bytes |
//!
//! The reader does not trust the contents of the memory: it checks the counters, and copies a frame before it
//! interprets it.

mod memory;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};

use memory::{CAPACITY, FRAMES, SharedWord};
pub use memory::{RingMemory, SharedRingMemory};

use crate::base::sync::{AtomicBool, Mutex, MutexGuard, fence, fence_after_read_modify_write};
use crate::memory::Mapping;
use crate::protocol::frame::HEADER;
use crate::protocol::link::{ProtocolViolation, WaitersToWake};

/// No more frames fit.
pub const FRAMES_MAX: usize = CAPACITY / HEADER;

/// The reader is awake, or will check the ring before it sleeps.
const AWAKE: u32 = 0;
/// The reader's reactor waits for the bell.
const BELL: u32 = 1;
/// A thread waits on the word, and a launch waits for the acknowledgement of sent bytes.
const WORD: u32 = 2;
/// A thread waits on the word, and no launch waits for an acknowledgement.
const PATIENT: u32 = 3;

/// The half that this side reads.
pub struct RingInbox<M = SharedRingMemory> {
    shared: M,
    reading: Mutex<()>,
    open: AtomicBool,
}

/// The half that the other side reads.
pub struct RingOutbox<M = SharedRingMemory> {
    shared: M,
    writing: Mutex<()>,
}

/// A frame as it was in the ring: its header and its payload.
type RawFrame = ([u8; HEADER], Vec<u8>);

/// The next frame to write.
pub enum FrameToWrite {
    /// A frame.
    Frame([u8; HEADER], Vec<u8>, WaitersToWake),
    /// No frame.
    Nothing,
    /// A frame for which the ring has no room now.
    TooLong,
}

/// The permission to read the inbox, for one thread at a time.
pub struct RingReader<'a, M: RingMemory = SharedRingMemory> {
    inbox: &'a RingInbox<M>,
    /// The lock; none once it is released.
    reading: Option<MutexGuard<'a, ()>>,
}

/// A thread that is about to wait, and has said how.
pub struct RingSleep<'a, M: RingMemory = SharedRingMemory>(&'a RingInbox<M>, u32);

impl RingInbox {
    /// Creates an empty inbox. Nothing is read before [`open_for_reading`](Self::open_for_reading).
    pub fn new() -> rustix::io::Result<Self> {
        let file = rustix::fs::memfd_create("muster-inbox", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, (FRAMES + CAPACITY) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Mapping::map_file(file.as_fd(), FRAMES + CAPACITY, true)?;
        memory.prefault(true);
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self::with_memory(SharedRingMemory { memory, bell, file: Some(file) }))
    }

    /// Returns the descriptors for the other side: the memory, and the bell.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.shared.file.iter().map(OwnedFd::as_fd).chain([self.doorbell()])
    }

    /// Returns the bell, which rings when there is something to read, or room to write.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl<M: RingMemory> RingInbox<M> {
    /// Creates an inbox over memory of zeros.
    pub(crate) fn with_memory(shared: M) -> Self {
        shared.reader_sleep_word().store(BELL, Ordering::SeqCst);
        Self { shared, reading: Mutex::new(()), open: AtomicBool::new(false) }
    }

    /// Opens the inbox for reading.
    pub fn open_for_reading(&self) {
        self.open.store(true, Ordering::SeqCst);
        self.ring_doorbell();
    }

    /// Rings the bell, so that the reactor checks the ring.
    pub fn ring_doorbell(&self) {
        self.shared.ring();
    }

    /// Returns whether the inbox is open.
    pub fn is_open_for_reading(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Returns the permission to read, if the inbox is open and no other thread reads it.
    pub fn try_lock_reader(&self) -> Option<RingReader<'_, M>> {
        if !self.is_open_for_reading() {
            return None;
        }
        let reading = match self.reading.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(RingReader { inbox: self, reading: Some(reading) })
    }

    /// Returns whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.shared.bytes_written().load(Ordering::SeqCst) == self.shared.bytes_read().load(Ordering::SeqCst)
    }

    /// Marks the shared memory of this side as invalid: it may be reused from here on.
    pub fn mark_sources_invalid(&self) {
        self.shared.memory_revoked_word().store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Wakes a thread that waits on the word.
    pub fn wake_sleeper(&self) {
        let word = self.shared.reader_sleep_word();
        // In this order: a patient sleeper may become impatient meanwhile, and not the other way round.
        if word.compare_and_set(PATIENT, AWAKE) || word.compare_and_set(WORD, AWAKE) {
            self.shared.wake();
        }
    }

    /// Announces that a launch waits for the acknowledgement of sent bytes. The caller has counted it before.
    pub fn announce_send_waiter(&self) {
        let patient = self.shared.reader_sleep_word().compare_and_set(PATIENT, WORD);
        // It may be here already, written when no launch waited: the writer looks how the reader sleeps after it has written.
        fence_after_read_modify_write();
        // The acknowledgement may be in the ring already, written before a launch waited.
        if patient && !self.is_empty() {
            self.wake_sleeper();
        }
    }
}

impl<'a, M: RingMemory> RingReader<'a, M> {
    /// Returns the next frame, copied out of the ring, or none.
    pub fn next_frame(&self) -> Result<Option<RawFrame>, ProtocolViolation> {
        let memory = &self.inbox.shared;
        let (bytes_written, bytes_read) = (memory.bytes_written(), memory.bytes_read());
        let (end, at) = (bytes_written.load(Ordering::Acquire), bytes_read.load(Ordering::Relaxed));
        let there = end.wrapping_sub(at);
        if there == 0 {
            return Ok(None);
        }
        if there > M::CAPACITY as u64 || there < HEADER as u64 || !there.is_multiple_of(HEADER as u64) {
            return Err(ProtocolViolation("the counters of its ring make no sense"));
        }
        let mut header = [0; HEADER];
        copy_from_ring(memory, at, &mut header);
        let len = crate::protocol::frame::read_u32_at(&header, 48) as usize;
        let whole = HEADER + len.next_multiple_of(HEADER);
        if whole as u64 > there {
            return Err(ProtocolViolation("a frame of its ring is longer than what it wrote"));
        }
        let mut payload = vec![0; len];
        copy_from_ring(memory, at.wrapping_add(HEADER as u64), &mut payload);
        bytes_read.store(at.wrapping_add(whole as u64), Ordering::Release);
        Ok(Some((header, payload)))
    }

    /// Returns whether there is something to read.
    pub fn has_more(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Returns, once, whether the writer waits for room.
    pub fn take_writer_waiting_flag(&self) -> bool {
        fence(Ordering::SeqCst);
        let word = self.inbox.shared.writer_waiting_word();
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::SeqCst) != 0
    }

    /// Leaves the ring to the reactor. Frames may have arrived meanwhile: check [`RingInbox::is_empty`].
    pub fn return_to_reactor(mut self) -> &'a RingInbox<M> {
        self.unlock();
        self.inbox
    }

    /// Releases the lock. Returns whether this thread held it.
    fn unlock(&mut self) -> bool {
        let Some(reading) = self.reading.take() else { return false };
        self.inbox.shared.reader_sleep_word().swap(BELL, Ordering::SeqCst);
        drop(reading);
        // A reactor whose bell has rung finds the leave free, or this thread finds what it rang for.
        fence_after_read_modify_write();
        true
    }

    /// Announces that this thread checks the ring before it leaves or sleeps, so that the writer wakes no
    /// thread.
    pub fn announce_awake(&self) {
        self.inbox.shared.reader_sleep_word().swap(AWAKE, Ordering::SeqCst);
    }

    /// Announces that this thread will wait on the word, and whether a launch waits for the acknowledgement
    /// of sent bytes. The caller then checks again whether that has changed or its own condition holds, and
    /// calls [`RingSleep::wait`].
    pub fn prepare_sleep(&self, senders: bool) -> RingSleep<'a, M> {
        let how = if senders { WORD } else { PATIENT };
        self.inbox.shared.reader_sleep_word().swap(how, Ordering::SeqCst);
        // The other fences are where a writer has written, where a send waiter is counted, and before `wake`.
        fence_after_read_modify_write();
        RingSleep(self.inbox, how)
    }
}

impl<M: RingMemory> Drop for RingReader<'_, M> {
    /// Leaves the ring to the reactor, also if the reader panicked.
    fn drop(&mut self) {
        if self.unlock() {
            self.inbox.ring_doorbell();
        }
    }
}

impl<M: RingMemory> RingSleep<'_, M> {
    /// Sleeps until a frame arrives, a thread wakes it, or `time` passes.
    pub fn wait(self, time: Duration) {
        if self.0.is_empty() {
            self.0.shared.wait(self.1, time);
        }
        self.0.shared.reader_sleep_word().swap(AWAKE, Ordering::SeqCst);
    }
}

impl RingOutbox {
    /// Maps the inbox of the other side; none if its size or its seals are wrong.
    pub fn map_peer_inbox(file: &OwnedFd, bell: OwnedFd) -> Option<Self> {
        let memory = Mapping::map_sealed_file(file.as_fd(), FRAMES + CAPACITY, true)?;
        memory.prefault(true);
        Some(Self::with_memory(SharedRingMemory { memory, bell, file: None }))
    }
}

impl<M: RingMemory> RingOutbox<M> {
    /// Creates an outbox over the memory of an inbox.
    pub(crate) fn with_memory(shared: M) -> Self {
        Self { shared, writing: Mutex::new(()) }
    }

    /// Writes frames until `next` has none, or one does not fit: then the reader rings this side's bell once
    /// there is room. `next` is given the bytes of payload that fit.
    pub fn write_frames(&self, mut next: impl FnMut(usize) -> FrameToWrite) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes_written, bytes_read) = (self.shared.bytes_written(), self.shared.bytes_read());
        let mut end = bytes_written.load(Ordering::Relaxed);
        let begun = end;
        let mut urgency = WaitersToWake::Lazy;
        let writer_waiting_word = self.shared.writer_waiting_word();
        loop {
            let used = end.wrapping_sub(bytes_read.load(Ordering::Acquire)).min(M::CAPACITY as u64) as usize;
            let room = M::CAPACITY - used;
            let given = if room < HEADER { FrameToWrite::TooLong } else { next(room - HEADER) };
            match given {
                FrameToWrite::Frame(header, payload, urgent) => {
                    urgency = urgency.max(urgent);
                    copy_to_ring(&self.shared, end, &header);
                    copy_to_ring(&self.shared, end.wrapping_add(HEADER as u64), &payload);
                    end = end.wrapping_add((HEADER + payload.len().next_multiple_of(HEADER)) as u64);
                    bytes_written.store(end, Ordering::Release);
                }
                FrameToWrite::Nothing => break,
                // The flag is set first, then it tries once more, in case the reader made room before it
                // could see the flag.
                FrameToWrite::TooLong if writer_waiting_word.swap(1, Ordering::SeqCst) == 0 => {
                    fence_after_read_modify_write()
                }
                FrameToWrite::TooLong => {
                    urgency = WaitersToWake::Everyone;
                    break;
                }
            }
        }
        // Even without a new frame the reader may have to wake up, to make room.
        if end == begun && urgency == WaitersToWake::Lazy {
            return;
        }
        fence(Ordering::SeqCst);
        let reader_sleep_word = self.shared.reader_sleep_word();
        match reader_sleep_word.load(Ordering::Relaxed) {
            AWAKE => return,
            WORD if urgency < WaitersToWake::SendWaiters => return,
            PATIENT if urgency < WaitersToWake::Everyone => return,
            _ => {}
        }
        match reader_sleep_word.swap(AWAKE, Ordering::SeqCst) {
            BELL => self.shared.ring(),
            WORD | PATIENT => self.shared.wake(),
            _ => {}
        }
    }

    /// Returns whether all bytes that were read from the other side's memory before this call are valid.
    pub fn peer_sources_are_valid(&self) -> bool {
        fence(Ordering::SeqCst);
        self.shared.memory_revoked_word().load(Ordering::SeqCst) == 0
    }

    /// Tells the other side that its ring has room again.
    pub fn ring_doorbell(&self) {
        self.shared.ring();
    }
}

fn copy_from_ring<M: RingMemory>(memory: &M, at: u64, into: &mut [u8]) {
    let (start, first) = split_at_ring_end::<M>(at, into.len());
    let (head, tail) = into.split_at_mut(first);
    memory.copy_out(start, head);
    memory.copy_out(0, tail);
}

fn copy_to_ring<M: RingMemory>(memory: &M, at: u64, bytes: &[u8]) {
    let (start, first) = split_at_ring_end::<M>(at, bytes.len());
    let (head, tail) = bytes.split_at(first);
    memory.copy_in(start, head);
    memory.copy_in(0, tail);
}

/// Returns the offset of byte `at` in the ring, and how many of `len` bytes lie before the ring's end; the
/// others are at its begin.
fn split_at_ring_end<M: RingMemory>(at: u64, len: usize) -> (usize, usize) {
    let start = (at % M::CAPACITY as u64) as usize;
    (start, len.min(M::CAPACITY - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox_and_outbox() -> (RingInbox, RingOutbox) {
        let inbox = RingInbox::new().unwrap();
        let descriptors: Vec<_> = inbox.descriptors().collect();
        let [file, bell] = descriptors[..] else { panic!("a file and a bell") };
        let outbox = RingOutbox::map_peer_inbox(
            &file.try_clone_to_owned().unwrap(),
            bell.try_clone_to_owned().unwrap(),
        )
        .unwrap();
        inbox.open_for_reading();
        (inbox, outbox)
    }

    fn numbered_frame(number: u64, len: usize) -> ([u8; HEADER], Vec<u8>) {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[48..52].copy_from_slice(&(len as u32).to_le_bytes());
        (header, vec![number as u8; len])
    }

    #[test]
    fn frames_of_every_length_come_through_in_order_and_a_full_ring_makes_the_writer_wait() {
        let (inbox, outbox) = inbox_and_outbox();
        const COUNT: u64 = 20_000;
        let (mut sent, mut got) = (0, 0);
        while got < COUNT {
            let len = |number: u64| (number * 37 % 5000) as usize;
            outbox.write_frames(|room| {
                if sent == COUNT {
                    return FrameToWrite::Nothing;
                }
                if len(sent) > room {
                    return FrameToWrite::TooLong;
                }
                sent += 1;
                let (header, payload) = numbered_frame(sent - 1, len(sent - 1));
                FrameToWrite::Frame(header, payload, WaitersToWake::Everyone)
            });
            let reader = inbox.try_lock_reader().unwrap();
            while let Some(read) = reader.next_frame().unwrap() {
                assert_eq!(read, numbered_frame(got, len(got)));
                got += 1;
            }
            assert!(got == COUNT || reader.take_writer_waiting_flag());
            assert_eq!(got, sent);
            reader.return_to_reactor();
        }
    }

    #[test]
    fn a_thread_that_waits_for_the_word_is_woken_by_the_writer() {
        let (inbox, outbox) = inbox_and_outbox();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..1000 {
                    write_one_frame(&outbox, number, WaitersToWake::Everyone);
                }
            });
            let reader = inbox.try_lock_reader().unwrap();
            let mut got = 0;
            while got < 1000 {
                while let Some(read) = reader.next_frame().unwrap() {
                    assert_eq!(read, numbered_frame(got, 8));
                    got += 1;
                }
                if got < 1000 {
                    reader.prepare_sleep(true).wait(Duration::from_secs(20));
                }
            }
        });
    }

    fn write_one_frame(outbox: &RingOutbox, number: u64, urgency: WaitersToWake) {
        let mut once = Some(numbered_frame(number, 8));
        outbox.write_frames(|_| {
            once.take()
                .map_or(FrameToWrite::Nothing, |(header, bytes)| FrameToWrite::Frame(header, bytes, urgency))
        });
    }

    #[test]
    fn a_sleeper_is_woken_by_what_its_waiters_wait_for_and_the_reactor_by_everything() {
        use WaitersToWake::{Everyone, Lazy, SendWaiters};
        for (senders, urgency, wakes) in [
            (false, Lazy, false),
            (false, SendWaiters, false),
            (false, Everyone, true),
            (true, Lazy, false),
            (true, SendWaiters, true),
            (true, Everyone, true),
        ] {
            let (inbox, outbox) = inbox_and_outbox();
            let how = || inbox.shared.reader_sleep_word().load(Ordering::SeqCst);
            let reader = inbox.try_lock_reader().unwrap();
            let _sleep = reader.prepare_sleep(senders);
            let before = how();
            write_one_frame(&outbox, 1, urgency);
            assert_eq!(how(), if wakes { AWAKE } else { before }, "{senders} {urgency:?}");
            // A launch that begins to wait for an acknowledgement finds one that arrived before.
            inbox.announce_send_waiter();
            assert_eq!(how(), if wakes || !senders { AWAKE } else { before }, "{senders} {urgency:?}");
            assert!(reader.return_to_reactor().shared.reader_sleep_word().load(Ordering::SeqCst) == BELL);
            write_one_frame(&outbox, 2, urgency);
            assert_eq!(how(), AWAKE, "{urgency:?}");
        }
    }

    #[test]
    fn a_full_ring_wakes_every_sleeper() {
        let (inbox, outbox) = inbox_and_outbox();
        let reader = inbox.try_lock_reader().unwrap();
        let _sleep = reader.prepare_sleep(false);
        let how = || inbox.shared.reader_sleep_word().load(Ordering::SeqCst);
        // One by one, until there is room for one more frame only, and the next one is longer.
        for number in 1..(CAPACITY / 128) as u64 {
            write_one_frame(&outbox, number, WaitersToWake::Lazy);
        }
        assert_eq!(how(), PATIENT);
        outbox.write_frames(|_| FrameToWrite::TooLong);
        assert_eq!(how(), AWAKE);
    }

    /// One thread writes frames that may wait, and then either one that may not, or one for which a launch
    /// begins to wait at that moment. No thread is woken by a timeout.
    #[test]
    fn no_wake_up_is_lost_between_a_sleeper_a_writer_and_a_new_send_waiter() {
        use std::sync::atomic::AtomicUsize;
        const ROUNDS: u64 = 20_000;
        let (inbox, outbox) = inbox_and_outbox();
        let waiters = AtomicUsize::new(0);
        let (next, rounds) = std::sync::mpsc::sync_channel::<u64>(0);
        std::thread::scope(|scope| {
            let (inbox, outbox, waiters) = (&inbox, &outbox, &waiters);
            scope.spawn(move || {
                for round in rounds {
                    let mut dice = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    let mut roll = |sides: u64| {
                        dice = dice.rotate_left(17).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                        dice % sides
                    };
                    for _ in 0..roll(3) {
                        write_one_frame(
                            outbox,
                            u64::MAX,
                            [WaitersToWake::Lazy, WaitersToWake::SendWaiters][roll(2) as usize],
                        );
                    }
                    if roll(2) == 0 {
                        write_one_frame(outbox, round, WaitersToWake::Everyone);
                        continue;
                    }
                    let note = || {
                        waiters.fetch_add(1, Ordering::SeqCst);
                        inbox.announce_send_waiter();
                    };
                    if roll(2) == 0 {
                        std::thread::scope(|scope| {
                            scope.spawn(note);
                            write_one_frame(outbox, round, WaitersToWake::SendWaiters);
                        });
                    } else {
                        write_one_frame(outbox, round, WaitersToWake::SendWaiters);
                        note();
                    }
                }
            });
            let reader = inbox.try_lock_reader().unwrap();
            for round in 0..ROUNDS {
                next.send(round).unwrap();
                let mut here = false;
                while !here {
                    while let Some(read) = reader.next_frame().unwrap() {
                        here |= read == numbered_frame(round, 8);
                    }
                    let senders = waiters.load(Ordering::SeqCst) > 0;
                    let sleep = reader.prepare_sleep(senders);
                    if !here && senders == (waiters.load(Ordering::SeqCst) > 0) {
                        let began = muster_clock::monotonic();
                        sleep.wait(Duration::from_secs(60));
                        assert!(
                            began.elapsed() < Duration::from_secs(30),
                            "it was not woken in round {round}"
                        );
                    }
                }
                waiters.store(0, Ordering::SeqCst);
            }
            drop(next);
        });
    }

    #[test]
    fn a_reader_of_the_peers_memory_sees_that_it_was_revoked() {
        let (inbox, outbox) = inbox_and_outbox();
        assert!(outbox.peer_sources_are_valid());
        inbox.mark_sources_invalid();
        assert!(!outbox.peer_sources_are_valid());
    }

    #[test]
    fn counters_that_make_no_sense_are_a_violation() {
        let (inbox, _outbox) = inbox_and_outbox();
        for bytes_written in [1, HEADER as u64 - 1, CAPACITY as u64 + 64, u64::MAX] {
            inbox.shared.bytes_written().store(bytes_written, Ordering::SeqCst);
            assert!(inbox.try_lock_reader().unwrap().next_frame().is_err(), "{bytes_written}");
        }
    }
}

//! Models of the ring of control frames, and of the threads of a session that read it.
//!
//! Begin at `ModelMemory`, the memory of a ring under loom.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::thread;

use super::explore_interleavings;
use crate::base::error::TransferError;
use crate::base::launch_metrics::LaunchMetrics;
use crate::base::membership::{Incarnation, MemberId, TaskId};
use crate::base::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, OnceLock, lock};
use crate::io::ring::{FrameToWrite, RingInbox, RingMemory, RingOutbox, RingReader};
use crate::launch::outcome::{AwaitedLaunchState, Launch, LaunchPart};
use crate::launch::session_handle::SessionHandle;
use crate::protocol::frame::HEADER;
use crate::protocol::link::{GroupId, ProtocolViolation, WaitersToWake};
use crate::session::ring_session::RingSession;
use crate::session::spin_wait::SpinWait;

/// Slots of the ring, of 64 bytes each.
const SLOTS: usize = 3;

/// A bell, or a sleep at a word: what wakes a thread by the system.
#[derive(Default)]
struct WakeSignal {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl WakeSignal {
    fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_all();
    }

    /// Returns whether it has rung since it was asked last.
    fn has_rung(&self) -> bool {
        std::mem::take(&mut *lock(&self.rung))
    }

    /// Waits until it has rung.
    fn wait(&self) {
        let mut rung = lock(&self.rung);
        while !std::mem::take(&mut *rung) {
            rung = self.changed.wait(rung).unwrap();
        }
    }
}

/// The memory of a ring. A slot holds the number of a frame and the length of its payload, or a payload.
#[derive(Default)]
struct ModelRingWords {
    written: AtomicU64,
    read: AtomicU64,
    sleep: AtomicU32,
    waiting: AtomicU32,
    revoked: AtomicU32,
    slots: [AtomicU64; SLOTS],
    /// The threads that sleep at the word `sleep`.
    asleep: Mutex<()>,
    woken: Condvar,
    bell: WakeSignal,
}

#[derive(Clone, Default)]
struct ModelMemory(Arc<ModelRingWords>);

impl RingMemory for ModelMemory {
    type Word = AtomicU32;
    type Counter = AtomicU64;
    const CAPACITY: usize = SLOTS * HEADER;

    fn bytes_written(&self) -> &AtomicU64 {
        &self.0.written
    }

    fn bytes_read(&self) -> &AtomicU64 {
        &self.0.read
    }

    fn reader_sleep_word(&self) -> &AtomicU32 {
        &self.0.sleep
    }

    fn writer_waiting_word(&self) -> &AtomicU32 {
        &self.0.waiting
    }

    fn memory_revoked_word(&self) -> &AtomicU32 {
        &self.0.revoked
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) {
        for (slot, into) in self.0.slots[at / HEADER..].iter().zip(into.chunks_mut(HEADER)) {
            let value = slot.load(Ordering::Relaxed);
            into.fill(0);
            into[..4].copy_from_slice(&(value as u32).to_le_bytes());
            into[48..52].copy_from_slice(&((value >> 32) as u32).to_le_bytes());
        }
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        for (slot, bytes) in self.0.slots[at / HEADER..].iter().zip(bytes.chunks(HEADER)) {
            let word = |at: usize| u64::from(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
            slot.store(word(0) | word(48) << 32, Ordering::Relaxed);
        }
    }

    fn wait(&self, how: u32, _: Duration) {
        let asleep = lock(&self.0.asleep);
        if self.0.sleep.load(Ordering::SeqCst) == how {
            drop(self.0.woken.wait(asleep));
        }
    }

    fn wake(&self) {
        let _asleep = lock(&self.0.asleep);
        self.0.woken.notify_all();
    }

    fn ring(&self) {
        self.0.bell.ring();
    }
}

fn numbered_frame(number: u32, len: usize) -> ([u8; HEADER], Vec<u8>) {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&number.to_le_bytes());
    header[48..52].copy_from_slice(&(len as u32).to_le_bytes());
    let mut payload = vec![0; len];
    if len > 0 {
        payload[..4].copy_from_slice(&(number + 100).to_le_bytes());
    }
    (header, payload)
}

fn frame_number(header: &[u8; HEADER]) -> u32 {
    u32::from_le_bytes([header[0], header[1], header[2], header[3]])
}

/// A peer that writes one frame.
fn write_one_frame(outbox: &RingOutbox<ModelMemory>, number: u32, urgency: WaitersToWake) {
    let mut once = Some(numbered_frame(number, 0));
    outbox.write_frames(|_| {
        once.take()
            .map_or(FrameToWrite::Nothing, |(header, bytes)| FrameToWrite::Frame(header, bytes, urgency))
    });
}

#[test]
fn frames_come_whole_and_in_order_through_a_ring_that_is_full() {
    explore_interleavings("a full ring", 4, || {
        let (memory, room) = (ModelMemory::default(), Arc::new(WakeSignal::default()));
        let inbox = RingInbox::with_memory(memory.clone());
        inbox.open_for_reading();
        let writer = thread::spawn({
            let (memory, room) = (memory.clone(), Arc::clone(&room));
            move || {
                let outbox = RingOutbox::with_memory(memory);
                let mut next = 0;
                loop {
                    outbox.write_frames(|room| {
                        let (header, payload) = match next {
                            0 | 2 => numbered_frame(next, 0),
                            1 => numbered_frame(next, HEADER),
                            _ => return FrameToWrite::Nothing,
                        };
                        if payload.len() > room {
                            return FrameToWrite::TooLong;
                        }
                        next += 1;
                        FrameToWrite::Frame(header, payload, WaitersToWake::Lazy)
                    });
                    if next == 3 {
                        return;
                    }
                    room.wait();
                }
            }
        });
        let mut got = 0;
        while got < 3 {
            memory.0.bell.wait();
            let reader = inbox.try_lock_reader().unwrap();
            while let Some((header, payload)) = reader.next_frame().unwrap() {
                assert_eq!(frame_number(&header), got);
                assert_eq!(
                    (header, payload.len()),
                    (numbered_frame(got, payload.len()).0, usize::from(got == 1) * HEADER)
                );
                assert!(payload.is_empty() || payload == numbered_frame(got, HEADER).1);
                got += 1;
            }
            if reader.take_writer_waiting_flag() {
                room.ring();
            }
            if !reader.return_to_reactor().is_empty() {
                inbox.ring_doorbell();
            }
        }
        writer.join().unwrap();
    });
}

#[test]
fn a_reader_that_used_memory_sees_that_it_was_revoked_before() {
    explore_interleavings("revoked memory", 3, || {
        let memory = ModelMemory::default();
        let (inbox, outbox) = (RingInbox::with_memory(memory.clone()), RingOutbox::with_memory(memory));
        let bytes = Arc::new(AtomicU64::new(1));
        let owner = thread::spawn({
            let bytes = Arc::clone(&bytes);
            move || {
                inbox.mark_sources_invalid();
                // It is used for other things now.
                bytes.store(2, Ordering::Relaxed);
            }
        });
        let copied = bytes.load(Ordering::Relaxed);
        assert!(
            copied == 1 || !outbox.peer_sources_are_valid(),
            "bytes count that are no longer those that were sent"
        );
        owner.join().unwrap();
    });
}

/// A session: each frame that it takes completes the transfer of that number.
struct ModelRingSession {
    inbox: RingInbox<ModelMemory>,
    memory: ModelMemory,
    send_waiters: AtomicUsize,
    spin_wait: SpinWait,
    launch: OnceLock<Arc<Launch>>,
    part: std::sync::OnceLock<Arc<ModelLaunchPart>>,
    taken: AtomicUsize,
    is_over: OnceLock<()>,
    is_peer_gone: OnceLock<()>,
    /// Its reactor ends.
    is_stopped: AtomicBool,
}

impl ModelRingSession {
    fn new(spins: bool) -> Arc<Self> {
        let memory = ModelMemory::default();
        let inbox = RingInbox::with_memory(memory.clone());
        inbox.open_for_reading();
        Arc::new(Self {
            inbox,
            memory,
            send_waiters: AtomicUsize::new(0),
            // A look, and it sleeps.
            spin_wait: SpinWait::new(Duration::from_nanos(u64::from(spins))),
            launch: OnceLock::new(),
            part: std::sync::OnceLock::new(),
            taken: AtomicUsize::new(0),
            is_over: OnceLock::new(),
            is_peer_gone: OnceLock::new(),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Makes a launch of so many transfers, which sends or receives.
    fn launch(self: &Arc<Self>, count: usize, sends: bool) -> Arc<Launch> {
        let (sent, received) = if sends { (1, 0) } else { (0, 1) };
        let launch = Launch::new(&Arc::new(LaunchMetrics::new(TaskId(0))), count, sent, received);
        launch.start_clock();
        let part = Arc::new(ModelLaunchPart {
            session: Arc::downgrade(self),
            launch: Arc::downgrade(&launch),
            is_counted: AtomicBool::new(false),
        });
        let weak: Weak<ModelLaunchPart> = Arc::downgrade(&part);
        let weak: Weak<dyn LaunchPart> = weak;
        launch.attach_parts(vec![weak]);
        let _once = self.part.set(part);
        let _once = self.launch.set(Arc::clone(&launch));
        launch
    }

    fn outbox(&self) -> RingOutbox<ModelMemory> {
        RingOutbox::with_memory(self.memory.clone())
    }

    /// Runs the loop of the reactor's thread.
    fn reactor(self: &Arc<Self>) -> thread::JoinHandle<()> {
        let this = Arc::clone(self);
        thread::spawn(move || {
            loop {
                this.memory.0.bell.wait();
                if this.is_stopped.load(Ordering::SeqCst) {
                    return;
                }
                this.serve_ring().unwrap();
            }
        })
    }

    fn stop(&self, reactor: thread::JoinHandle<()>) {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.memory.ring();
        reactor.join().unwrap();
    }
}

impl RingSession for ModelRingSession {
    type Memory = ModelMemory;

    fn inbox(&self) -> Option<&RingInbox<ModelMemory>> {
        Some(&self.inbox)
    }

    fn drain_ring(&self, reader: &RingReader<'_, ModelMemory>, most: usize) -> Result<(), ProtocolViolation> {
        for _ in 0..most {
            let Some((header, _)) = reader.next_frame()? else { break };
            self.taken.fetch_add(1, Ordering::Relaxed);
            if let Some(launch) = self.launch.get() {
                launch.record_transfer_outcome(frame_number(&header), true);
            }
        }
        Ok(())
    }

    fn end_for_violation(&self, violation: &ProtocolViolation) {
        panic!("{violation}");
    }

    fn awaits_region(&self) -> bool {
        false
    }

    fn send_waiters(&self) -> &AtomicUsize {
        &self.send_waiters
    }

    fn spin_wait(&self) -> &SpinWait {
        &self.spin_wait
    }

    fn is_over(&self) -> bool {
        self.is_over.get().is_some()
    }

    fn is_peer_gone(&self) -> bool {
        self.is_peer_gone.get().is_some()
    }

    fn end_with_gone_peer(&self) {
        if self.is_over.set(()).is_ok()
            && let Some(launch) = self.launch.get()
        {
            launch.fail_all(&TransferError::Closed);
        }
    }
}

impl SessionHandle for ModelRingSession {
    fn add_send_waiter(&self) {
        self.count_send_waiter();
    }

    fn remove_send_waiter(&self) {
        self.send_waiters.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_lanes(&self) {}

    fn wake_poller(&self) {
        self.inbox.wake_sleeper();
    }

    fn poll_ring_on_this_thread(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool {
        self.poll_ring_until(until, soon, done)
    }

    fn announce_group_ready(&self, _: GroupId) {}

    fn stop_group_of_launch(&self, _: GroupId, _: &str) -> bool {
        false
    }

    fn announce_quiescence(&self, _: GroupId) {}

    fn end_session(&self, _: TransferError) {}
}

struct ModelLaunchPart {
    session: Weak<ModelRingSession>,
    launch: Weak<Launch>,
    is_counted: AtomicBool,
}

impl LaunchPart for ModelLaunchPart {
    fn peer(&self) -> MemberId {
        MemberId::of_own_job(TaskId(1), Incarnation::new(1).unwrap())
    }

    fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        let session: Arc<dyn SessionHandle> = self.session.upgrade()?;
        Some(session)
    }

    fn register_send_waiter(&self) {
        if let Some(session) = self.session.upgrade()
            && !self.is_counted.swap(true, Ordering::SeqCst)
        {
            session.add_send_waiter();
        }
    }

    fn is_settled(&self) -> bool {
        self.launch.upgrade().is_none_or(|launch| launch.pending_count() == 0)
    }

    fn is_proven_quiescent(&self) -> bool {
        false
    }

    fn fail_and_tell_peer(self: Arc<Self>, _: TransferError) {}
}

/// A thread waits for what the peer writes, and a reactor reads what no such thread does.
fn check_that_waiter_hears_peer(
    name: &str,
    preemptions: usize,
    spins: bool,
    urgency: WaitersToWake,
    before: u32,
) {
    explore_interleavings(name, preemptions, move || {
        let session = ModelRingSession::new(spins);
        let launch = session.launch(before as usize + 1, urgency == WaitersToWake::SendWaiters);
        let reactor = session.reactor();
        let peer = thread::spawn({
            let outbox = session.outbox();
            move || {
                // First a frame that nothing waits for, then the frame that the waiter waits for.
                for number in 0..before {
                    write_one_frame(&outbox, number, WaitersToWake::Lazy);
                }
                write_one_frame(&outbox, before, urgency);
            }
        });
        let whole = launch.block_until(AwaitedLaunchState::All, None, Launch::overall_outcome);
        assert!(whole.is_some_and(|whole| whole.is_ok()));
        peer.join().unwrap();
        session.stop(reactor);
    });
}

#[test]
fn a_thread_that_waits_for_what_it_receives_hears_the_peer() {
    check_that_waiter_hears_peer("a waiter for what comes", 3, false, WaitersToWake::Everyone, 0);
}

#[test]
fn a_thread_that_spins_before_it_sleeps_hears_the_peer() {
    check_that_waiter_hears_peer("a waiter that spins", 3, true, WaitersToWake::Everyone, 0);
}

#[test]
fn a_thread_that_waits_for_what_it_sends_hears_the_peer() {
    check_that_waiter_hears_peer("a waiter for what is sent", 3, false, WaitersToWake::SendWaiters, 0);
}

#[test]
fn frames_that_wake_nothing_are_taken_with_the_next_that_does() {
    check_that_waiter_hears_peer("a lazy frame before", 3, false, WaitersToWake::Everyone, 1);
}

/// The thread that reads the ring waits for what comes; another begins to wait for what is sent, which the peer has
/// acknowledged before, meanwhile or after. The acknowledgement wakes the reader for its sake.
#[test]
fn a_new_send_waiter_wakes_a_reader_that_was_patient() {
    explore_interleavings("a new send waiter", 4, || {
        let session = ModelRingSession::new(false);
        let memory = session.memory.clone();
        let peer = thread::spawn({
            let outbox = session.outbox();
            move || write_one_frame(&outbox, 0, WaitersToWake::SendWaiters)
        });
        let waiter = thread::spawn({
            let session = Arc::clone(&session);
            move || session.count_send_waiter()
        });
        // The reader: nothing but that frame comes, and nothing but the send waiter makes it matter.
        let done = || session.taken.load(Ordering::Relaxed) > 0;
        assert!(session.poll_ring_until(None, false, &done));
        peer.join().unwrap();
        waiter.join().unwrap();
        assert_eq!(memory.0.read.load(Ordering::SeqCst), HEADER as u64);
    });
}

#[test]
fn a_poller_hears_of_what_happens_elsewhere() {
    explore_interleavings("an outcome from elsewhere", 3, || {
        let session = ModelRingSession::new(false);
        let launch = session.launch(1, false);
        let lane = thread::spawn({
            let launch = Arc::clone(&launch);
            move || launch.record_transfer_outcome(0, true)
        });
        assert!(launch.block_until(AwaitedLaunchState::All, None, Launch::overall_outcome).is_some());
        lane.join().unwrap();
    });
}

#[test]
fn what_comes_while_a_thread_leaves_the_ring_is_found_by_the_reactor() {
    explore_interleavings("a thread that leaves", 3, || {
        let session = ModelRingSession::new(false);
        let launching = thread::spawn({
            let session = Arc::clone(&session);
            move || session.run_as_ring_reader(|| ())
        });
        let peer = thread::spawn({
            let outbox = session.outbox();
            move || write_one_frame(&outbox, 0, WaitersToWake::Lazy)
        });
        // The reactor: once while the others are at work, and then for as long as the frame is there.
        if session.memory.0.bell.has_rung() {
            session.serve_ring().unwrap();
        }
        launching.join().unwrap();
        peer.join().unwrap();
        while session.taken.load(Ordering::Relaxed) == 0 {
            session.memory.0.bell.wait();
            session.serve_ring().unwrap();
        }
    });
}

#[test]
fn a_session_whose_peer_has_gone_ends_after_its_last_frames() {
    explore_interleavings("a peer that has gone", 4, || {
        let session = ModelRingSession::new(false);
        let launch = session.launch(2, false);
        let end = thread::spawn({
            let (session, outbox) = (Arc::clone(&session), session.outbox());
            move || {
                write_one_frame(&outbox, 0, WaitersToWake::Lazy);
                let _first = session.is_peer_gone.set(());
                session.end_after_last_frames();
            }
        });
        // Not woken by a clock: by the end.
        assert!(
            launch
                .block_until(AwaitedLaunchState::All, None, Launch::overall_outcome)
                .is_some_and(|whole| whole.is_err())
        );
        end.join().unwrap();
        assert_eq!(launch.outcome(0), Some(Ok(())), "what it said before its end counts");
    });
}

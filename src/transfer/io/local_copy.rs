//! Copies between buffers of this task: the bytes of a launch that both its sends and its receives name.
//!
//! There is no peer, so nothing is negotiated: the copy begins when the launch is ready. Its outbound and its inbound stream have
//! equal lengths, and each byte is copied to the same offset of the other stream. Begin at [`LocalCopy::start`].
//!
//! | bytes of the launch | who copies |
//! | --- | --- |
//! | all in host memory | the fetching threads; the launching thread, if they are few |
//! | all in memory of GPUs that the receiving GPU can access | the receiving GPU, directly |
//! | others | a GPU and a fetching thread, all bytes through page-locked slots (`staging.rs`) |
//!
//! A GPU accesses memory of its own, and that of another GPU that it can map: an arena's. Steps and chunks hold a guard, as those of
//! every transfer do: a launch that was cancelled is at rest when the last one has ended.
#![allow(unsafe_code, reason = "copies between memory that a guard keeps")]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use muster_gpu::{Gpu, is_reporting_thread};

use super::device_runs::{CHUNKS_IN_FLIGHT, ChunkPace, DeviceRuns, DeviceSource};
use super::fetch::{AT_ONCE, FetchThreadPool, STEP};
use super::gpu_copies::CopyFailure;
use super::staging::{StagedBytes, StagingPool, StagingSlot, copy_from_slot, copy_to_slot};
use super::threads::IoThreads;
use crate::base::counters::ByteCounters;
use crate::base::error::TransferError;
use crate::base::membership::PeerTask;
use crate::base::transport::TransportKind;
use crate::launch::launch_spans::{BytesPiece, LaunchBytes};
use crate::launch::peer_launch::{PeerLaunch, fail_and_tell_peer};

/// The bytes of a chunk that passes through a slot.
const STAGED_CHUNK: u64 = 4 << 20;

/// How the bytes are copied.
enum CopyPath {
    /// By the fetching threads.
    Host,
    /// By GPUs, directly.
    Direct(DeviceRuns, ChunkPace),
    /// Through slots, which this GPU page-locks.
    Staged(Gpu),
}

/// The copy of the bytes of one launch.
pub struct LocalCopy {
    launch: Arc<PeerLaunch>,
    here: PeerTask,
    counters: Arc<ByteCounters>,
    resources: CopyResources,
    path: CopyPath,
    total: u64,
    /// The offset at which the next step or chunk begins.
    next: AtomicU64,
    copied: AtomicU64,
    has_failed: AtomicBool,
    /// The number of chunks that are in slots, or for which a slot is being taken.
    staged: AtomicUsize,
    /// Whether the pool calls this copy when a slot was given back.
    awaits_slot: Arc<AtomicBool>,
}

/// The engine's resources that copies use. They are weak references, because queue and pool hold copies that wait.
struct CopyResources {
    threads: Weak<FetchThreadPool>,
    slots: Weak<StagingPool>,
}

impl LocalCopy {
    /// Copies the bytes of a launch whose memory is reserved, and resolves its transfers; nothing, if it has failed. It waits for no
    /// other copy.
    pub fn start(io: &IoThreads, launch: &Arc<PeerLaunch>, here: PeerTask, counters: Arc<ByteCounters>) {
        if launch.is_closing() {
            return;
        }
        launch.mark_matched();
        if launch.lists.inbound.total() == 0 {
            return launch.complete_sends();
        }
        let (threads, slots) = (Arc::downgrade(&io.fetchers), Arc::downgrade(&io.staging.local));
        let (launch, resources) = (Arc::clone(launch), CopyResources { threads, slots });
        let begin = move || Self::begin(launch, here, counters, resources);
        // The thread that reports copies must not copy itself, nor wait while the driver maps memory.
        if is_reporting_thread() { io.fetchers.run_soon(Box::new(begin)) } else { begin() }
    }

    fn begin(launch: Arc<PeerLaunch>, here: PeerTask, counters: Arc<ByteCounters>, resources: CopyResources) {
        let (path, total) = (copy_path(&launch), launch.lists.inbound.total());
        let copy = Arc::new(Self {
            launch,
            here,
            counters,
            resources,
            path,
            total,
            next: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            staged: AtomicUsize::new(0),
            awaits_slot: Arc::default(),
        });
        match &copy.path {
            CopyPath::Host if total <= AT_ONCE => copy.copy_on_this_thread(),
            CopyPath::Host => {
                let threads = copy.resources.threads.upgrade().map_or(0, |threads| threads.len()) as u64;
                for _ in 0..threads.min(total.div_ceil(STEP)) {
                    copy.run_soon(|copy| copy.copy_on_this_thread());
                }
            }
            CopyPath::Direct(..) => (0..CHUNKS_IN_FLIGHT).for_each(|_| copy.copy_next_chunk()),
            CopyPath::Staged(_) => copy.run_soon(Self::stage_chunks),
        }
    }

    /// Calls `work` on a fetching thread. Once the engine has ended, the launch has failed, and nothing is called.
    fn run_soon(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let copy = Arc::clone(self);
        if let Some(threads) = self.resources.threads.upgrade() {
            threads.run_soon(Box::new(move || work(&copy)));
        }
    }

    /// Takes the next bytes, `most` at most: their offset and length. None if there are none left, or some have failed.
    fn take_next(&self, most: u64) -> Option<(u64, u64)> {
        if self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        let start = self.next.fetch_add(most, Ordering::Relaxed);
        (start < self.total).then(|| (start, most.min(self.total - start)))
    }

    /// Copies steps between host memory until there are none left.
    fn copy_on_this_thread(&self) {
        while let Some((start, len)) = self.take_next(STEP) {
            let Some(guard) = self.launch.access() else { return };
            copy_host_bytes(guard.bytes(), start, len);
            self.record_copied(start, len);
        }
    }

    /// Asks the GPUs for the next chunk, if there is one.
    fn copy_next_chunk(self: &Arc<Self>) {
        let CopyPath::Direct(runs, pace) = &self.path else { return };
        let Some((start, len)) = self.take_next(pace.next_len()) else { return };
        let Some(guard) = self.launch.access_owned() else { return };
        let copy = Arc::clone(self);
        // SAFETY: the guard reserves the bytes, and only this copy uses those of the launch. The runs keep the memory mapped.
        unsafe {
            runs.copies(start, len).start((guard, copy), move |(guard, copy), outcome| {
                let is_copied = copy.finish_chunk(start, len, outcome);
                drop(guard);
                if is_copied {
                    copy.copy_next_chunk();
                }
            });
        }
    }

    /// Copies as many chunks through slots as may be under way. If all slots are taken, it is called again when one was given back.
    fn stage_chunks(self: &Arc<Self>) {
        let may_begin = |staged: usize| (staged < CHUNKS_IN_FLIGHT).then_some(staged + 1);
        while self.staged.fetch_update(Ordering::AcqRel, Ordering::Acquire, may_begin).is_ok() {
            if !self.stage_next_chunk() {
                self.staged.fetch_sub(1, Ordering::AcqRel);
                return;
            }
        }
    }

    /// Begins to copy the next chunk through a slot, if there are both.
    fn stage_next_chunk(self: &Arc<Self>) -> bool {
        let is_over = self.next.load(Ordering::Relaxed) >= self.total || self.launch.is_closing();
        let slot = if is_over { None } else { self.take_slot() };
        let Some(slot) = slot else { return false };
        let Some((start, len)) = self.take_next(STAGED_CHUNK) else { return false };
        let Some(guard) = self.launch.access_owned() else { return false };
        let copy = Arc::clone(self);
        copy_to_slot((slot, guard), (start, len as usize), move |staged, outcome| match outcome {
            Ok(()) if copy.launch.is_closing() => drop(staged),
            Ok(()) if is_reporting_thread() => {
                copy.run_soon(move |copy| copy.copy_chunk_from_slot(staged, start, len));
            }
            Ok(()) => copy.copy_chunk_from_slot(staged, start, len),
            Err(failure) => {
                drop(staged);
                copy.fail(failure);
            }
        });
        true
    }

    /// Takes a slot; none if all are taken, or the GPU refuses the memory, which fails the launch.
    fn take_slot(self: &Arc<Self>) -> Option<StagingSlot> {
        let CopyPath::Staged(gpu) = &self.path else { return None };
        let pool = self.resources.slots.upgrade()?;
        let (len, copy) = (STAGED_CHUNK.min(self.total) as usize, Arc::clone(self));
        let taken =
            pool.take_with_one_waiter(gpu, len, &self.awaits_slot, move || copy.run_soon(Self::stage_chunks));
        taken.unwrap_or_else(|error| {
            self.fail((gpu.ordinal(), error));
            None
        })
    }

    fn copy_chunk_from_slot(self: &Arc<Self>, staged: StagedBytes, start: u64, len: u64) {
        let copy = Arc::clone(self);
        copy_from_slot(staged, (start, len as usize), move |staged, outcome| {
            let is_copied = copy.finish_chunk(start, len, outcome);
            drop(staged);
            copy.staged.fetch_sub(1, Ordering::AcqRel);
            if is_copied {
                copy.run_soon(Self::stage_chunks);
            }
        });
    }

    /// Records the end of a chunk, under its guard. Returns whether the copy goes on.
    fn finish_chunk(&self, start: u64, len: u64, outcome: Result<(), CopyFailure>) -> bool {
        if let Err(failure) = outcome {
            self.fail(failure);
            return false;
        }
        // A launch that was cancelled meanwhile resolves as cancelled, also if this chunk was its last one.
        if self.launch.is_closing() {
            return false;
        }
        let copied = self.record_copied(start, len);
        if let CopyPath::Direct(_, pace) = &self.path {
            pace.record_copied(copied);
        }
        true
    }

    /// Records that bytes are in place. Returns how many are.
    fn record_copied(&self, start: u64, len: u64) -> u64 {
        let launch = &self.launch;
        launch.set_transport(TransportKind::Local);
        self.counters.add(TransportKind::Local, false, len);
        self.counters.add(TransportKind::Local, true, len);
        // As sent; `record_arrived_bytes` adds them as received.
        launch.add_progress(len);
        let copied = self.copied.fetch_add(len, Ordering::AcqRel) + len;
        // Before the receives: a waiter that learns that the bytes have arrived may write those that were sent.
        if copied == self.total {
            launch.complete_sends();
        }
        launch.record_arrived_bytes(start, len);
        copied
    }

    fn fail(&self, (gpu, error): CopyFailure) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            fail_and_tell_peer(&self.launch, TransferError::Gpu { task: self.here, gpu, error });
        }
    }
}

/// Chooses how to copy the bytes of a launch.
fn copy_path(launch: &PeerLaunch) -> CopyPath {
    let lists = &launch.lists;
    match lists.inbound.gpu().or(lists.outbound.gpu()) {
        None => CopyPath::Host,
        Some(gpu) => match device_runs(launch) {
            Some(runs) => CopyPath::Direct(runs, ChunkPace::begin()),
            None => CopyPath::Staged(gpu.clone()),
        },
    }
}

/// Returns the bytes of a launch, if GPUs can copy all of them directly.
fn device_runs(launch: &PeerLaunch) -> Option<DeviceRuns> {
    let mut runs = DeviceRuns::default();
    let spans = launch.lists.outbound.spans.iter().zip(&launch.lists.inbound.spans);
    for (from, to) in spans.filter(|(_, to)| !to.is_empty()) {
        let destination = to.device_memory()?;
        let source = DeviceSource::of_span(from, destination.gpu())?;
        runs.push((destination, to.region_offset() as u64), source, to.len() as u64);
    }
    Some(runs)
}

/// Copies the bytes `start..start + len` of the outbound stream to those of the inbound stream. Both are in host memory.
fn copy_host_bytes(bytes: LaunchBytes<'_>, start: u64, len: u64) {
    let mut at = start;
    let mut sources = Vec::new();
    bytes.for_each_inbound_piece(start, len, |piece| {
        let BytesPiece::Host(mut target) = piece else { return };
        sources.clear();
        bytes.append_outbound_views(at, target.len() as u64, usize::MAX, &mut sources);
        at += target.len() as u64;
        for source in &sources {
            target.copy_from(source);
            target.advance(source.len());
        }
    });
}

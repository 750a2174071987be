//! Copies between buffers of this task: the bytes of a launch that both its sends and its receives name.
//!
//! There is no peer, so nothing is negotiated: the copy begins when the launch is ready. Its outbound and its inbound stream have
//! equal lengths, and each byte is copied to the same offset of the other stream. Begin at [`LocalCopy::start`].
//!
//! | memory | who copies |
//! | --- | --- |
//! | host to host | the fetching threads |
//! | GPU to GPU, if the receiving GPU can access the other one | the receiving GPU, directly |
//! | all others | a GPU and a fetching thread, through a page-locked slot (`staging.rs`) |
//!
//! As of every transfer, a step or chunk holds a guard: a launch that was cancelled is at rest when the last one has ended.
#![allow(unsafe_code, reason = "copies between memory that a guard keeps")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use muster_gpu::{Gpu, is_reporting_thread};

use super::device_runs::{CHUNKS_IN_FLIGHT, ChunkPace, DeviceRuns};
use super::fetch::{AT_ONCE, FetchThreadPool, STEP};
use super::gpu_copies::CopyFailure;
use super::staging::{StagedBytes, StagingPool, copy_from_slot, copy_to_slot};
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
    /// Weak, because the queue of the threads has copies that wait.
    threads: Weak<FetchThreadPool>,
    staging: Arc<StagingPool>,
    path: CopyPath,
    total: u64,
    /// The offset at which the next step or chunk begins.
    next: AtomicU64,
    copied: AtomicU64,
    has_failed: AtomicBool,
}

impl LocalCopy {
    /// Copies the bytes of a launch whose memory is reserved, and resolves its transfers. It does not block.
    pub fn start(io: &IoThreads, launch: &Arc<PeerLaunch>, here: PeerTask, counters: Arc<ByteCounters>) {
        launch.mark_matched();
        if launch.lists.inbound.total() == 0 {
            return launch.complete_sends();
        }
        // The driver may wait while it maps the memory of one GPU for another.
        if launch.lists.has_bytes_of_gpus() && is_reporting_thread() {
            let (threads, staging) = (Arc::downgrade(&io.fetchers), Arc::clone(&io.staging.sending));
            let launch = Arc::clone(launch);
            let begin = move || Self::begin(threads, staging, launch, here, counters);
            return io.fetchers.run_soon(Box::new(begin));
        }
        let (threads, staging) = (Arc::downgrade(&io.fetchers), Arc::clone(&io.staging.sending));
        Self::begin(threads, staging, Arc::clone(launch), here, counters);
    }

    fn begin(
        threads: Weak<FetchThreadPool>,
        staging: Arc<StagingPool>,
        launch: Arc<PeerLaunch>,
        here: PeerTask,
        counters: Arc<ByteCounters>,
    ) {
        let (path, total) = (copy_path(&launch), launch.lists.inbound.total());
        let (next, copied, has_failed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let copy = Self { launch, here, counters, threads, staging, path, total, next, copied, has_failed };
        let copy = Arc::new(copy);
        match &copy.path {
            CopyPath::Host if total <= AT_ONCE => copy.copy_on_this_thread(),
            CopyPath::Host => {
                let threads = copy.threads.upgrade().map_or(1, |threads| threads.len()) as u64;
                for _ in 0..threads.min(total.div_ceil(STEP)) {
                    copy.run_soon(|copy| copy.copy_on_this_thread());
                }
            }
            CopyPath::Direct(..) => (0..CHUNKS_IN_FLIGHT).for_each(|_| copy.copy_next_chunk()),
            CopyPath::Staged(_) => {
                (0..CHUNKS_IN_FLIGHT).for_each(|_| copy.run_soon(Self::copy_next_chunk_through_slot));
            }
        }
    }

    /// Calls `work` on a fetching thread. If the engine has ended, the launch has failed.
    fn run_soon(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let copy = Arc::clone(self);
        if let Some(threads) = self.threads.upgrade() {
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

    /// Copies the next chunk through a slot, if there is one. If all slots are taken, it does so when one is given back.
    fn copy_next_chunk_through_slot(self: &Arc<Self>) {
        let CopyPath::Staged(gpu) = &self.path else { return };
        let is_over = || self.next.load(Ordering::Relaxed) >= self.total || self.launch.is_closing();
        if is_over() {
            return;
        }
        let waiting = Arc::clone(self);
        let waiter = Box::new(move || waiting.run_soon(Self::copy_next_chunk_through_slot));
        let len = STAGED_CHUNK.min(self.total);
        let slot = match self.staging.take_or_wait(gpu, len as usize, Some(waiter)) {
            Ok(Some(slot)) => slot,
            Ok(None) => return,
            Err(error) => return self.fail((gpu.ordinal(), error)),
        };
        let Some((start, len)) = self.take_next(STAGED_CHUNK) else { return };
        let Some(guard) = self.launch.access_owned() else { return };
        let copy = Arc::clone(self);
        copy_to_slot((slot, guard), (start, len as usize), move |staged, outcome| match outcome {
            Ok(()) if is_reporting_thread() => {
                copy.run_soon(move |copy| copy.copy_chunk_from_slot(staged, start, len));
            }
            Ok(()) => copy.copy_chunk_from_slot(staged, start, len),
            Err(failure) => {
                drop(staged);
                copy.fail(failure);
            }
        });
    }

    fn copy_chunk_from_slot(self: &Arc<Self>, staged: StagedBytes, start: u64, len: u64) {
        let copy = Arc::clone(self);
        copy_from_slot(staged, (start, len as usize), move |staged, outcome| {
            let is_copied = copy.finish_chunk(start, len, outcome);
            drop(staged);
            if is_copied {
                copy.run_soon(Self::copy_next_chunk_through_slot);
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
        launch.record_arrived_bytes(start, len);
        if copied == self.total {
            launch.complete_sends();
        }
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
        let (source, destination) = (from.device_memory()?, to.device_memory()?);
        let offset = from.region_offset() as u64;
        let source = if source.gpu() == destination.gpu() {
            (source.address() + offset, None)
        } else {
            let mapping = from.buffer().region().mapped_for(destination.gpu())?;
            (mapping.base() + offset, Some(mapping))
        };
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

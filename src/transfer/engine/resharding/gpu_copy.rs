//! Copies the runs of a step between memory of GPUs: blocks of rows, of which the GPU copies each in one call.
//!
//! A copy has a few requests at a time, of bounded size: when it is given up, it is at rest once these have ended. `step_copier.rs`
//! bounds the copies that a GPU has at a time. Begin at [`GpuRunsCopy::start`].
#![allow(unsafe_code, reason = "copies between shards that a plan has claimed")]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use muster_gpu::{DeviceMemory, Gpu, GpuCopy, GpuError, GpuRows};

use crate::base::sync::lock;
use crate::io::device_runs::DeviceSource;
use crate::io::gpu_copies::CopyFailure;
use crate::memory::{BufferClaim, Span};
use crate::plan::{RowBlocks, RunCopies};

/// The most bytes of a block.
const BLOCK_BYTES: usize = 16 << 20;
/// The most rows of a block: as many calls, if the driver refuses to copy them in one.
const BLOCK_ROWS: usize = 1 << 16;
/// The most bytes, blocks and rows of a request.
const REQUEST_BYTES: usize = 64 << 20;
const REQUEST_BLOCKS: usize = 256;
const REQUEST_ROWS: usize = 1 << 16;
/// The requests that a copy has at a time.
const REQUESTS_IN_FLIGHT: usize = 2;

/// How a copy ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyOutcome {
    /// All bytes are in place.
    Copied,
    /// The GPU with this number failed.
    Failed(u32, GpuError),
    /// The plan was given up before.
    GivenUp,
}

/// The memory of a copy. It is kept until the GPU uses it no more.
pub struct MemoryInUse {
    /// The claims of all shards of the plans.
    _claims: Arc<Vec<BufferClaim>>,
    /// The spans between which bytes are copied. They keep staging memory allocated.
    spans: [Span; 2],
}

impl MemoryInUse {
    /// Keeps the spans, the source first, and the claims of the shards among them.
    pub fn new(claims: &Arc<Vec<BufferClaim>>, spans: [Span; 2]) -> Self {
        Self { _claims: Arc::clone(claims), spans }
    }
}

/// The shared state of all copies of the plans.
#[derive(Debug, Default)]
pub struct CopyControl {
    /// Whether no GPU is to begin anything any more.
    pub is_given_up: AtomicBool,
    /// The requests that GPUs have ended.
    pub ended_requests: AtomicU64,
}

type EndListener = Box<dyn FnOnce(CopyOutcome) + Send>;

/// A copy in progress.
pub struct GpuRunsCopy {
    gpu: Gpu,
    /// The first addresses of both spans.
    from: u64,
    to: u64,
    /// Keeps memory of another GPU accessible.
    _source: DeviceSource,
    blocks: RowBlocks,
    blocks_each: usize,
    /// The number of the first block of the next request.
    next: AtomicUsize,
    /// The chains of requests that have not ended.
    chains: AtomicUsize,
    failure: OnceLock<CopyFailure>,
    control: Arc<CopyControl>,
    end: Mutex<Option<(MemoryInUse, EndListener)>>,
}

impl GpuRunsCopy {
    /// Begins to copy runs from the first span to the second one, both in memory of GPUs, and calls `then` at the end, on this thread
    /// or on that of the GPU.
    pub fn start(
        runs: &RunCopies,
        memory: MemoryInUse,
        control: &Arc<CopyControl>,
        then: impl FnOnce(CopyOutcome) + Send + 'static,
    ) {
        let [from, to] = &memory.spans;
        let refused = |gpu, name| {
            let error = GpuError { call: "copy", code: 0, name };
            CopyOutcome::Failed(gpu, error)
        };
        let Some(gpu) = to.device_memory().map(DeviceMemory::gpu).cloned() else {
            return then(refused(0, "the destination is in host memory".to_owned()));
        };
        // `local_step.rs` has found that it can.
        let Some(source) = DeviceSource::of_span(from, &gpu) else {
            return then(refused(gpu.ordinal(), "it cannot access the source".to_owned()));
        };
        let ends = runs.ends();
        if ends[0] > from.len() || ends[1] > to.len() {
            // A plan checks its regions, so only a defect comes here.
            let why =
                format!("runs reach to {ends:?}, beyond spans of {} and {} bytes", from.len(), to.len());
            return then(refused(gpu.ordinal(), why));
        }
        let blocks = runs.row_blocks(BLOCK_BYTES, BLOCK_ROWS);
        let copy = Arc::new(Self {
            from: source.base + source.offset,
            to: to.address(),
            gpu,
            _source: source,
            blocks_each: (REQUEST_BYTES / blocks.block_bytes())
                .min(REQUEST_ROWS / blocks.block_rows())
                .clamp(1, REQUEST_BLOCKS),
            blocks,
            next: AtomicUsize::new(0),
            chains: AtomicUsize::new(REQUESTS_IN_FLIGHT),
            failure: OnceLock::new(),
            control: Arc::clone(control),
            end: Mutex::new(Some((memory, Box::new(then)))),
        });
        (0..REQUESTS_IN_FLIGHT).for_each(|_| copy.request_next_blocks());
    }

    /// Asks the GPU for the next blocks, and at their end for those that follow.
    fn request_next_blocks(self: &Arc<Self>) {
        if self.failure.get().is_some() || self.control.is_given_up.load(Ordering::Acquire) {
            return self.end_chain();
        }
        let first = self.next.fetch_add(self.blocks_each, Ordering::Relaxed);
        let last = first.saturating_add(self.blocks_each).min(self.blocks.count());
        if first >= last {
            return self.end_chain();
        }
        let rows: Vec<GpuRows> = (first..last).map(|number| self.rows_of_block(number)).collect();
        let copy = Arc::clone(self);
        // SAFETY: `end` keeps both memories, which the plan has claimed, until the last chain has ended. No two steps write the same
        // bytes, and none reads bytes before the step that writes them is done.
        let asked = unsafe {
            self.gpu.copy_rows(&rows, move |outcome| {
                copy.control.ended_requests.fetch_add(1, Ordering::AcqRel);
                match outcome {
                    Ok(()) => copy.request_next_blocks(),
                    Err(error) => copy.fail_chain(error),
                }
            })
        };
        if let Err(error) = asked {
            self.fail_chain(error);
        }
    }

    fn rows_of_block(&self, number: usize) -> GpuRows {
        let block = self.blocks.block(number);
        let (from, to) = (self.from + block.at[0] as u64, self.to + block.at[1] as u64);
        GpuRows { first: GpuCopy { from, to, len: block.len }, count: block.count, pitches: block.pitches }
    }

    fn fail_chain(&self, error: GpuError) {
        let _first = self.failure.set((self.gpu.ordinal(), error));
        self.end_chain();
    }

    fn end_chain(&self) {
        if self.chains.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some((memory, then)) = lock(&self.end).take() else { return };
        drop(memory);
        then(match self.failure.get() {
            Some((gpu, error)) => CopyOutcome::Failed(*gpu, error.clone()),
            None if self.next.load(Ordering::Relaxed) >= self.blocks.count() => CopyOutcome::Copied,
            None => CopyOutcome::GivenUp,
        });
    }
}

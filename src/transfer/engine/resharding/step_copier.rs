//! The copies of a resharding within this task, and the events by which its steps go on.
//!
//! Between host memory, the calling thread copies before the call returns. Between memory of GPUs, a GPU copies, and a [`StepEvent`]
//! tells the end. Begin at [`StepCopier::copy`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use muster_clock as clock;

use super::gpu_copy::{CopyControl, CopyOutcome, GpuRunsCopy, MemoryInUse};
use super::host_copy::copy_runs_on_host;
use crate::base::buffer_definition::{BufferDefinitionEvent, BufferDefinitionPromise};
use crate::base::error::TransferError;
use crate::memory::{BufferClaim, Span};
use crate::plan::RunCopies;

/// The stage of a step at the end of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepStage {
    /// The bytes to be sent are packed.
    Packed,
    /// The bytes are in the destination: the step is done.
    InPlace,
}

/// An event of a step. `at` is its index among the tasks.
pub enum StepEvent {
    /// Its transfer ended.
    Transferred { at: usize, outcome: Result<(), TransferError> },
    /// A copy by a GPU ended.
    Copied { at: usize, stage: StepStage, gpu: u32, outcome: CopyOutcome },
}

/// The most copies that a GPU has at a time. Others wait, so that a plan that is given up soon comes to rest, and transfers of others
/// find the GPU's streams short.
const COPIES_AT_A_TIME: usize = 4;

/// A copy by a GPU that waits for others.
struct WaitingCopy {
    at: usize,
    stage: StepStage,
    runs: RunCopies,
    spans: [Span; 2],
    promise: BufferDefinitionPromise,
}

/// The copies of one GPU.
#[derive(Default)]
struct CopiesOfGpu {
    in_flight: usize,
    waiting: VecDeque<WaitingCopy>,
}

/// Copies the bytes of steps within this task.
pub struct StepCopier {
    /// The claims of all shards. Copies by GPUs keep them, too.
    claims: Arc<Vec<BufferClaim>>,
    control: Arc<CopyControl>,
    sender: Sender<StepEvent>,
    /// By the number of the GPU. Those that have ended are in flight until their event was taken.
    by_gpu: BTreeMap<u32, CopiesOfGpu>,
}

impl StepCopier {
    /// Creates one that tells the ends of copies to `sender`.
    pub fn new(claims: Vec<BufferClaim>, sender: Sender<StepEvent>) -> Self {
        Self { claims: Arc::new(claims), control: Arc::default(), sender, by_gpu: BTreeMap::new() }
    }

    /// Copies runs of the step `at` between two spans in memory of one kind: both on the host, or both of GPUs that can access each
    /// other. Returns nothing if all bytes are in place. If a GPU copies, it returns an event that completes at the end, and `stage` is
    /// what the end means for the step.
    pub fn copy(
        &mut self,
        at: usize,
        stage: StepStage,
        runs: &RunCopies,
        spans: [Span; 2],
    ) -> Option<BufferDefinitionEvent> {
        let gpu =
            spans.iter().rev().find_map(|span| span.device_memory()).map(|memory| memory.gpu().ordinal());
        let Some(gpu) = gpu else {
            copy_runs_on_host(runs, &spans[0], &spans[1]);
            return None;
        };
        let (promise, copied) = BufferDefinitionEvent::new();
        let copy = WaitingCopy { at, stage, runs: runs.clone(), spans, promise };
        self.by_gpu.entry(gpu).or_default().waiting.push_back(copy);
        self.start_waiting(gpu);
        Some(copied)
    }

    /// Starts as many copies of a GPU as it may have.
    fn start_waiting(&mut self, gpu: u32) {
        let Some(copies) = self.by_gpu.get_mut(&gpu) else { return };
        while copies.in_flight < COPIES_AT_A_TIME
            && let Some(WaitingCopy { at, stage, runs, spans, promise }) = copies.waiting.pop_front()
        {
            copies.in_flight += 1;
            let sender = self.sender.clone();
            let memory = MemoryInUse::new(&self.claims, spans);
            GpuRunsCopy::start(&runs, memory, &self.control, move |outcome| {
                let defined = match &outcome {
                    CopyOutcome::Copied => Ok(()),
                    CopyOutcome::Failed(gpu, error) => Err(format!("GPU {gpu}: {error}")),
                    CopyOutcome::GivenUp => Err("the plan was given up".to_owned()),
                };
                // The executor is told first, so that it knows the failure itself, and not only that a launch waits in vain. A plan
                // that has ended without this copy has no receiver any more.
                let _sent = sender.send(StepEvent::Copied { at, stage, gpu, outcome });
                match defined {
                    Ok(()) => promise.complete(),
                    Err(why) => promise.fail(why),
                }
            });
        }
    }

    /// Notes that the end of a copy was taken from the events, and starts the next one.
    pub fn note_end(&mut self, gpu: u32) {
        if let Some(copies) = self.by_gpu.get_mut(&gpu) {
            copies.in_flight -= 1;
        }
        self.start_waiting(gpu);
    }

    /// Returns the GPUs that copy.
    pub fn busy_gpus(&self) -> Vec<u32> {
        self.by_gpu.iter().filter(|(_, copies)| copies.in_flight > 0).map(|(gpu, _)| *gpu).collect()
    }

    /// Returns whether GPUs copy. None has copies that wait then.
    pub fn is_busy(&self) -> bool {
        self.by_gpu.values().any(|copies| copies.in_flight > 0)
    }

    /// Returns a number that grows while GPUs make progress.
    pub fn progress(&self) -> u64 {
        self.control.ended_requests.load(Ordering::Acquire)
    }

    /// Has GPUs begin nothing any more.
    pub fn give_up(&mut self) {
        self.control.is_given_up.store(true, Ordering::Release);
        // Promises that are dropped fail their events.
        self.by_gpu.values_mut().for_each(|copies| copies.waiting.clear());
    }

    /// Takes events until no GPU copies. Returns whether that is so before the limit.
    pub fn wait_until_idle(&mut self, events: &Receiver<StepEvent>, until: Instant) -> bool {
        while self.is_busy() {
            match events.recv_timeout(until.saturating_duration_since(clock::monotonic())) {
                Ok(StepEvent::Copied { gpu, .. }) => self.note_end(gpu),
                Ok(StepEvent::Transferred { .. }) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Gives the shards up while GPUs may still use them: until they do not, neither programs nor transfers can.
    pub fn abandon_shards(&self) {
        self.claims.iter().for_each(BufferClaim::abandon);
    }
}

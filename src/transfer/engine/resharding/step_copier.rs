//! The copies of a resharding within this task, and the events by which its steps go on.
//!
//! Between host memory, the calling thread copies before the call returns. Between memory of GPUs, a GPU copies, and a [`StepEvent`]
//! tells the end. Begin at [`StepCopier::copy`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use muster_clock as clock;

use super::gpu_copy::{CopyEnd, GpuRunsCopy, MemoryInUse};
use super::host_copy::copy_runs_on_host;
use crate::base::buffer_definition::BufferDefinitionEvent;
use crate::base::error::TransferError;
use crate::memory::{BufferClaim, Span};
use crate::plan::RunCopies;

/// What a copy of a step has reached at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepStage {
    /// The bytes to be sent are packed.
    Packed,
    /// The bytes are in the destination: the step is done.
    InPlace,
}

/// What happened to a step. `at` is its index among the tasks.
pub enum StepEvent {
    /// Its transfer ended.
    Transferred { at: usize, outcome: Result<(), TransferError> },
    /// A copy by a GPU ended.
    Copied { at: usize, stage: StepStage, end: CopyEnd },
}

/// Has the bytes of steps copied within this task.
pub struct StepCopier {
    /// The claims of all shards. Copies by GPUs keep them, too.
    claims: Arc<Vec<BufferClaim>>,
    /// Whether GPUs are to begin nothing any more.
    given_up: Arc<AtomicBool>,
    sender: Sender<StepEvent>,
    /// The number of copies by GPUs whose end has not been taken from the events.
    in_flight: usize,
}

impl StepCopier {
    /// Creates one that tells the ends of copies to `sender`.
    pub fn new(claims: Vec<BufferClaim>, sender: Sender<StepEvent>) -> Self {
        Self { claims: Arc::new(claims), given_up: Arc::default(), sender, in_flight: 0 }
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
        if spans.iter().all(|span| span.device_memory().is_none()) {
            copy_runs_on_host(runs, &spans[0], &spans[1]);
            return None;
        }
        let (promise, copied) = BufferDefinitionEvent::new();
        let sender = self.sender.clone();
        let memory = MemoryInUse::new(&self.claims, spans);
        GpuRunsCopy::start(runs, memory, &self.given_up, move |end| {
            let outcome = match &end {
                CopyEnd::Copied => Ok(()),
                CopyEnd::Failed(gpu, error) => Err(format!("GPU {gpu}: {error}")),
                CopyEnd::GivenUp => Err("the plan was given up".to_owned()),
            };
            // The executor is told first, so that it knows the failure itself, and not only that a launch waits in vain. A plan that
            // has ended without this copy has no receiver any more.
            let _sent = sender.send(StepEvent::Copied { at, stage, end });
            match outcome {
                Ok(()) => promise.complete(),
                Err(why) => promise.fail(why),
            }
        });
        self.in_flight += 1;
        Some(copied)
    }

    /// Returns whether GPUs copy.
    pub const fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Notes that the end of a copy was taken from the events.
    pub const fn note_end(&mut self) {
        self.in_flight -= 1;
    }

    /// Has GPUs begin nothing any more.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Takes events until no GPU copies. Returns whether that is so before the limit.
    pub fn wait_until_idle(&mut self, events: &Receiver<StepEvent>, until: Instant) -> bool {
        while self.is_busy() {
            match events.recv_timeout(until.saturating_duration_since(clock::monotonic())) {
                Ok(StepEvent::Copied { .. }) => self.note_end(),
                Ok(StepEvent::Transferred { .. }) => {}
                Err(_) => return false,
            }
        }
        true
    }
}

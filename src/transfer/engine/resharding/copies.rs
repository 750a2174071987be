//! The copies of a resharding within this task: between shards, and between a shard and staging memory.
//!
//! Between host memory, the calling thread copies before the call returns. Between memory of GPUs, a GPU copies, and the executor is
//! told of the end. Begin at [`ReshardExecutor::copy_runs`].

use super::executor::{ReshardExecutor, StepEvent, StepStage};
use super::gpu_copy::{CopyEnd, GpuRunsCopy, KeptMemory};
use super::host_copy::copy_runs_on_host;
use super::local_step::PackedBytes;
use crate::base::buffer_definition::{BufferDefinitionEvent, BufferDefinitionPromise};
use crate::memory::Span;
use crate::plan::RunCopies;

/// What a copy was when the call returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyStart {
    /// All bytes are in place.
    Done,
    /// A GPU copies: an event of the step tells the end.
    UnderWay,
}

impl ReshardExecutor<'_> {
    /// Packs the bytes that a step sends, if they need it. Returns the event of their end, if a GPU packs them.
    pub(super) fn pack(&mut self, at: usize) -> Option<BufferDefinitionEvent> {
        let sent = self.tasks[at].sent.take()?;
        let event = self.pack_into(at, &sent);
        self.tasks[at].sent = Some(sent);
        event
    }

    fn pack_into(&mut self, at: usize, sent: &PackedBytes) -> Option<BufferDefinitionEvent> {
        let task = &self.tasks[at];
        let shard = self.arrays[task.array].shards.shard_of(&task.step.source)?;
        let (promise, event) = BufferDefinitionEvent::new();
        let spans = [shard.full_span(), sent.span.clone()];
        let start = self.copy_runs(at, StepStage::Packed, sent.runs.as_ref()?, spans, Some(promise));
        (start == CopyStart::UnderWay).then_some(event)
    }

    /// Unpacks the bytes that a step has received, if they need it.
    pub(super) fn unpack(&mut self, at: usize) -> CopyStart {
        let task = &mut self.tasks[at];
        let runs = task.received.as_mut().and_then(|received| received.runs.take());
        let shard = self.arrays[task.array].shards.shard_of(&task.step.destination);
        let (Some(runs), Some(received), Some(shard)) = (runs, &task.received, shard) else {
            return CopyStart::Done;
        };
        let spans = [received.span.clone(), shard.full_span()];
        self.copy_runs(at, StepStage::InPlace, &runs, spans, None)
    }

    /// Copies the bytes of a step from shard to shard.
    pub(super) fn copy_between_shards(&mut self, at: usize) -> CopyStart {
        let task = &mut self.tasks[at];
        let shards = self.arrays[task.array].shards;
        let ends = (shards.shard_of(&task.step.source), shards.shard_of(&task.step.destination));
        let (Some(runs), (Some(from), Some(to))) = (task.runs.take(), ends) else { return CopyStart::Done };
        self.copy_runs(at, StepStage::InPlace, &runs, [from.full_span(), to.full_span()], None)
    }

    /// Copies runs between two spans in memory of one kind: both on the host, or both of GPUs that can access each other. If a GPU
    /// copies, `stage` is what the end means for the step, and `promise` is completed at the end.
    fn copy_runs(
        &mut self,
        at: usize,
        stage: StepStage,
        runs: &RunCopies,
        spans: [Span; 2],
        promise: Option<BufferDefinitionPromise>,
    ) -> CopyStart {
        if spans.iter().all(|span| span.device_memory().is_none()) {
            copy_runs_on_host(runs, &spans[0], &spans[1]);
            return CopyStart::Done;
        }
        let sender = self.sender.clone();
        let kept = KeptMemory::new(&self.claims, spans);
        GpuRunsCopy::start(runs, kept, &self.given_up, move |end| {
            let defined = match &end {
                CopyEnd::Copied => Ok(()),
                CopyEnd::Failed(gpu, error) => Err(format!("GPU {gpu}: {error}")),
                CopyEnd::GivenUp => Err("the plan was given up".to_owned()),
            };
            // The executor is told first, so that it knows the failure itself, and not only that a launch waits in vain. A plan that
            // has come to rest without this copy has no receiver any more.
            let _sent = sender.send(StepEvent::Copied { at, stage, end });
            match (promise, defined) {
                (Some(promise), Ok(())) => promise.complete(),
                (Some(promise), Err(why)) => promise.fail(why),
                (None, _) => {}
            }
        });
        self.copying += 1;
        CopyStart::UnderWay
    }
}

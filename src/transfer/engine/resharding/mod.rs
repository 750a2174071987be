//! Executes plans on engines. Each task executes its own part, and the tasks send each other no messages about the
//! plan.
//!
//! Several arrays are resharded together. The steps of all arrays between two tasks are one launch, except steps that
//! pass received bytes on (`groups.rs`). A launch that would exceed the bound on transfers becomes several. Some
//! bytes reach a task through another task, which receives them first. The launches that pass such bytes on are also
//! requested at the start. They depend on events that complete when the bytes arrive, so no thread has to start them.
//! Begin at [`TransferEngine::execute_plans`].
//!
//! - The first launch with a peer also has one transfer without bytes for each array, and one that marks the end of
//!   the arrays (`ReshardExecutor::handshake_specs`). The layout of an array's transfer is that of the array's plan,
//!   and its key is the same on both sides. If the two sides have different plans, the keys of their steps differ,
//!   but the keys of these transfers do not. So the error can name the array that differs.
//! - Each peer has launches of its own. A step starts as soon as the steps on which it depends are done, in whatever
//!   order these finish. So a peer that is late or cannot be reached delays only the steps that depend on it.
//! - A contiguous region is sent from its own memory, and received into its own memory. Every other region is packed
//!   into staging memory before it is sent, and unpacked from staging memory after it has arrived. Each region has
//!   its own range of staging memory, so no step waits for memory of another step.
//! - Regions in memory of a GPU are packed and unpacked by that GPU, in staging memory of its own, while the calling thread goes on: a
//!   launch depends on the events of what it sends. A copy between shards that neither one GPU nor the host can do alone is a transfer
//!   within this task.
//! - If a plan fails, the call returns within one stall limit. For the first three quarters of this time, the call
//!   waits until the peers confirm that nothing is in flight. After that, it ends the connections to the peers that
//!   have not confirmed, and waits only for threads and GPUs of this task. So the caller gets its buffers back within a known
//!   time, even if a peer is stopped, and no byte can arrive in these buffers any more. If a thread or a GPU of this task
//!   needs more than the stall limit, the error is [`ReshardError::Unproven`], and nothing can use the shards until it has ended.

mod executor;
mod gpu_copy;
mod groups;
mod host_copy;
mod inputs;
mod local_step;
mod outcome;
mod step_copier;

use std::sync::mpsc::channel;

use muster_clock as clock;

use executor::ReshardExecutor;
pub use inputs::{ReshardArray, ShardBuffers};
use local_step::{StepRole, claim_shard_buffers, local_steps};
pub use outcome::{ReshardError, ReshardStats};
use step_copier::StepCopier;

use super::handle::TransferEngine;
use super::prepared_transfers::LaunchOptions;
use crate::memory::Arena;
use crate::plan::Plan;

impl TransferEngine {
    /// Executes this task's part of a plan: [`execute_plans`](Self::execute_plans) of one array.
    ///
    /// # Errors
    /// As of `execute_plans`.
    pub fn execute_plan(
        &self,
        plan: &Plan,
        shards: &ShardBuffers,
        staging: &[&Arena],
        options: LaunchOptions,
    ) -> Result<ReshardStats, ReshardError> {
        self.execute_plans(&[ReshardArray { plan, shards }], staging, options)
    }

    /// Executes this task's part of the plans of some arrays, all at once, and blocks until it is done. Every task of
    /// the plans must call it, with the same plans in the same order. The shards belong to the plans until it
    /// returns.
    ///
    /// A shard is in host memory or in that of a GPU, whatever the shards of other devices and tasks are in. Regions that are not
    /// contiguous pass through staging memory of the same kind, which is allocated from one of the arenas `staging` and freed: an
    /// arena for host memory, and one for each GPU, as far as there are such shards. Each needs at most as many bytes as the shards in
    /// that memory send and receive. Work that the program has given to streams, and that uses the shards, has ended before the call.
    ///
    /// Use a channel of its own ([`LaunchOptions::channel`]), so that its groups do not interleave with other
    /// launches.
    ///
    /// It takes at most the shortest timeout of the plans, or [`LaunchOptions::deadline`] if that is shorter. If it fails, it then
    /// takes at most [`LaunchOptions::stall`] until nothing is in flight any more. The connection with a peer that
    /// does not confirm that in time is ended, with all other launches on it.
    ///
    /// # Errors
    /// Returns an error if a shard does not match its plan, a transfer fails, or the time is over. All other
    /// transfers are then cancelled, with proof.
    pub fn execute_plans(
        &self,
        arrays: &[ReshardArray<'_>],
        staging: &[&Arena],
        options: LaunchOptions,
    ) -> Result<ReshardStats, ReshardError> {
        let began = clock::monotonic();
        let here = self.here().task;
        let claims = claim_shard_buffers(arrays, here)?;
        let tasks = local_steps(arrays, staging, here)?;
        let timeouts = arrays.iter().filter_map(|array| array.plan.timeout());
        let limit = timeouts.chain(options.deadline).min();
        let (sender, events) = channel();
        let mut run = ReshardExecutor {
            engine: self,
            arrays,
            tasks,
            transfers: Vec::new(),
            copier: StepCopier::new(claims, sender.clone()),
            open: 0,
            limit: limit.map(|limit| (limit, began + limit)),
            options,
            sender,
            events,
        };
        run.execute().map_err(|error| run.cancel_all_and_wait(error))?;
        let mut moved = ReshardStats {
            elapsed: clock::monotonic().saturating_duration_since(began),
            ..ReshardStats::default()
        };
        for task in &run.tasks {
            match task.role {
                StepRole::Copy => moved.copied += task.step.bytes,
                StepRole::Send(_) => moved.sent += task.step.bytes,
                StepRole::Receive(_) => moved.received += task.step.bytes,
            }
        }
        Ok(moved)
    }
}

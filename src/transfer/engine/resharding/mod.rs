//! Executes plans on engines: each task does its part without messages to the others about the plan.
//!
//! All steps between two tasks that depend on nothing leave as one group. A step that passes on received
//! bytes is a group of its own. It is launched at once, in the order of the plan, and held back by an event
//! that the arrival itself completes, so no thread takes part in it. Both sides derive the same groups from
//! the same plan.
//!
//! - A handshake comes before the groups: a transfer without bytes that has the plan's layout
//!   (`plan_handshake`). Keys differ between plans, so only a transfer whose key is the same on both sides
//!   can detect that two tasks execute different plans.
//! - Each peer is a request of its own, and the steps that follow a step start when it is done, in any order.
//!   A peer that is late or cannot be reached delays only the steps that depend on it.
//! - A contiguous region is sent from, and received into, its own memory. Others are packed into (or unpacked
//!   from) staging memory of their own, so no step waits for another's memory.
//! - A failed plan waits one stall limit at most: three quarters of it for the peers to confirm that nothing
//!   is in flight; then their connections end, and only threads of this task have to finish. So the caller is
//!   free in a known time, with proof, even if a peer is stopped.

mod copy;
mod outcome;
mod run;
mod task;

use std::sync::mpsc::channel;

use muster_clock as clock;

pub use outcome::{Moved, ReshardError, ShardBuffers};
use run::ReshardRun;
use task::{StepRole, check, divide};

use super::handle::Engine;
use super::prepared::LaunchOptions;
use crate::base::layout::LayoutFingerprint;
use crate::memory::Arena;
use crate::plan::Plan;

impl Engine {
    /// Executes this task's part of a plan, and blocks until it is done. Every task of the plan must call it.
    /// The shards belong to the plan until it returns. Staging memory is allocated from `staging` and freed.
    ///
    /// Use a channel of its own ([`LaunchOptions::channel`]), so that its groups do not interleave with other
    /// launches.
    ///
    /// It takes at most the plan's timeout, or [`LaunchOptions::deadline`] if that is shorter. If it fails, it then
    /// takes at most [`LaunchOptions::stall`] until nothing is in flight any more. The connection with a peer that
    /// does not confirm that in time is ended, with all other launches on it.
    ///
    /// # Errors
    /// Returns an error if a shard does not match the plan, a transfer fails, or the time is over. All other
    /// transfers are then cancelled, with proof.
    pub fn carry_out(
        &self,
        plan: &Plan,
        shards: &ShardBuffers,
        staging: &Arena,
        options: LaunchOptions,
    ) -> Result<Moved, ReshardError> {
        let began = clock::monotonic();
        let here = self.here().task;
        let _claims = check(plan, shards, here)?;
        let tasks = divide(plan, shards, staging, here)?;
        let limit = plan.timeout().into_iter().chain(options.deadline).min();
        let (sender, outcomes) = channel();
        let mut run = ReshardRun {
            engine: self,
            shards,
            tasks,
            transfers: Vec::new(),
            open: 0,
            limit: limit.map(|limit| (limit, began + limit)),
            options,
            layout: layout_of(plan),
            sender,
            outcomes,
        };
        run.go().map_err(|error| run.give_up(error))?;
        let mut moved =
            Moved { elapsed: clock::monotonic().saturating_duration_since(began), ..Moved::default() };
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

/// Returns the fingerprint that both sides compare for each transfer: the first 64 bits of the plan's.
fn layout_of(plan: &Plan) -> LayoutFingerprint {
    let whole = u128::from_be_bytes(plan.layout().0);
    LayoutFingerprint((whole >> 64) as u64)
}

//! A plan carried out by engines: each task does its part and needs no message from the others about the plan.
//!
//! All steps between two tasks that depend on nothing leave as one group. A step that passes on received bytes is a
//! group of its own, launched at once in the order of the plan and held back by an event that the arrival itself
//! completes, so no thread takes part in it. Both sides derive the same groups from the same plan.
//!
//! - Before the groups comes a handshake, a transfer without bytes that has the plan's layout (`plan_handshake`).
//!   Keys differ with the plan, so only a transfer whose key is the same on both sides can tell that two tasks
//!   carry out different plans.
//! - Each peer is a request of its own, and the steps that follow a step start when it is done, in any order. A
//!   peer that cannot be reached or comes late holds back only what depends on it.
//! - A contiguous region is sent from, and received into, its place. Others are packed into (or unpacked out of)
//!   staging memory of their own, so no step waits for another's memory.
//! - A failed plan waits one stall limit at most: three quarters of it for the peers to confirm that nothing is
//!   under way; then their connections end, and only threads of this task have to let go. So the caller is free in
//!   a known time, with proof, even if a peer is stopped.

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
    /// Carries out this task's part of a plan, and waits for it: every task of the plan does the same. The shards belong
    /// to the plan until it returns. Staging memory is taken from `staging` and given back.
    ///
    /// A channel of its own ([`LaunchOptions::channel`]) keeps the order of its groups apart from other launches.
    ///
    /// It takes no longer than the plan's time, or [`LaunchOptions::deadline`] if that is shorter; and, if it fails, once
    /// [`LaunchOptions::stall`] until what was under way has come to rest. The connection with a peer that does not say so in
    /// that time is ended, and with it whatever else is under way on it.
    ///
    /// # Errors
    /// If a shard does not fit the plan, a transfer fails, or the time is over. Whatever else was under way is given up
    /// then, with proof.
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

/// Returns what both sides compare of each transfer: the beginning of the plan's own.
fn layout_of(plan: &Plan) -> LayoutFingerprint {
    let whole = u128::from_be_bytes(plan.layout().0);
    LayoutFingerprint((whole >> 64) as u64)
}

//! A resharding in progress: launches this task's steps, each step group as one launch, and copies bytes between
//! shards and staging memory. If a step fails, it cancels the others.
//!
//! `plan` computes the plans, `groups.rs` forms the step groups, and the caller allocates the shards. Begin at
//! [`ReshardExecutor::execute`].

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::copy::copy_runs;
use super::groups::{StepGroup, step_groups};
use super::inputs::ReshardArray;
use super::local_step::{LocalStep, StepRole};
use super::outcome::ReshardError;
use crate::base::buffer_definition::BufferDefinitionEvent;
use crate::base::error::TransferError;
use crate::base::key::TransferKey;
use crate::base::layout::{BufferLayout, LayoutFingerprint};
use crate::base::membership::{MemberId, Membership, TaskId};
use crate::engine::handle::TransferEngine;
use crate::engine::prepared_transfers::{LaunchOptions, TransferSpec};
use crate::launch::transfer::{QuiescenceFuture, TransferHandle};
use crate::memory::Buffer;
use crate::plan::{Plan, Step};
use crate::protocol::link::launch_definition::ENTRIES_MAX;

/// The outcome of the step with index `at` among the tasks.
pub struct FinishedTransfer {
    at: usize,
    outcome: Result<(), TransferError>,
}

/// A resharding in progress.
pub struct ReshardExecutor<'a> {
    pub(super) engine: &'a TransferEngine,
    pub(super) arrays: &'a [ReshardArray<'a>],
    pub(super) tasks: Vec<LocalStep>,
    pub(super) transfers: Vec<TransferHandle>,
    /// The number of transfers without an outcome.
    pub(super) open: usize,
    /// The time limit, and when it passes.
    pub(super) limit: Option<(Duration, Instant)>,
    pub(super) options: LaunchOptions,
    pub(super) sender: Sender<FinishedTransfer>,
    pub(super) outcomes: Receiver<FinishedTransfer>,
}

impl ReshardExecutor<'_> {
    /// Executes the plans, and blocks until they are done.
    pub fn execute(&mut self) -> Result<(), ReshardError> {
        let membership = self.engine.membership();
        let mut greeted = BTreeSet::new();
        // Each launch has one peer, so that one that cannot be reached delays no other.
        for StepGroup { peer, steps } in step_groups(self.arrays, &self.tasks) {
            let handshakes = if greeted.insert(peer) {
                self.handshake_specs(&membership, peer, steps[0])
            } else {
                Vec::new()
            };
            steps.iter().for_each(|at| self.pack_step_into_staging(*at));
            self.launch_steps_with_peer(handshakes, &steps);
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].role == StepRole::Copy && self.tasks[at].step.after.is_none() {
                self.copy(at);
            }
        }
        while self.open > 0 {
            let FinishedTransfer { at, outcome } = self.wait_for_next_outcome()?;
            self.open -= 1;
            match outcome {
                Ok(()) => {}
                Err(TransferError::Deadline { .. }) => return Err(self.timeout_error()),
                Err(error) => {
                    let LocalStep { array, step, .. } = &self.tasks[at];
                    let array = self.array_with_mismatched_layout(&error).unwrap_or(*array);
                    return Err(ReshardError::Transfer { array, step: step.index, error });
                }
            }
            self.tasks[at].done = true;
            self.unpack_step_from_staging(at);
            std::mem::take(&mut self.tasks[at].copies).into_iter().for_each(|copy| self.copy(copy));
        }
        Ok(())
    }

    /// Waits for the next outcome of a transfer.
    fn wait_for_next_outcome(&self) -> Result<FinishedTransfer, ReshardError> {
        let outcome = match self.limit {
            // The channel never closes, because the run has the sending end too.
            None => self.outcomes.recv().ok(),
            Some((_, until)) => {
                self.outcomes.recv_timeout(until.saturating_duration_since(clock::monotonic())).ok()
            }
        };
        outcome.ok_or_else(|| self.timeout_error())
    }

    fn timeout_error(&self) -> ReshardError {
        let crossing = || self.tasks.iter().filter_map(|task| Some((task.done, task.role.peer()?)));
        let open = || crossing().filter(|(done, _)| !done);
        let with: BTreeSet<_> = open().map(|(_, peer)| peer).collect();
        ReshardError::Timeout {
            limit: self.limit.map_or(Duration::MAX, |(limit, _)| limit),
            open: open().count(),
            steps: crossing().count(),
            with: with.into_iter().collect(),
        }
    }

    /// Cancels all transfers in flight, and waits until they have ended.
    pub fn cancel_all_and_wait(&mut self, error: ReshardError) -> ReshardError {
        let began = clock::monotonic();
        let why = match &error {
            ReshardError::Transfer { error, .. } if original_reason(error).contains(GAVE_UP) => {
                original_reason(error)
            }
            error => format!("task {} {GAVE_UP}: {error}", self.engine.here().task),
        };
        let proofs: Vec<QuiescenceFuture> =
            self.transfers.iter().map(|transfer| transfer.cancel(&why)).collect();
        let rested = |share: u32| {
            let until = began + self.options.stall / 4 * share;
            // They share one limit, so the order of the waits does not matter.
            proofs.iter().all(|proof| proof.wait_for(until.saturating_duration_since(clock::monotonic())))
        };
        // Most of the time is for the peers to confirm. Without their connections, only threads of this task
        // have to finish.
        if rested(3) {
            return error;
        }
        let why = format!(
            "it did not say within {:?} that what was given up has come to rest there",
            self.options.stall / 4 * 3
        );
        let with: BTreeSet<MemberId> =
            self.transfers.iter().flat_map(|transfer| transfer.disconnect_unquiesced_peers(&why)).collect();
        tracing::warn!(?with, why, "the connections with these were ended");
        if rested(4) {
            return error;
        }
        ReshardError::Unproven { error: Box::new(error), with: with.into_iter().collect() }
    }

    /// Returns the handshakes with a peer, with which the step `at` is: transfers without bytes that have the layouts
    /// of the plans, and one that marks their end.
    fn handshake_specs(&self, membership: &Membership, peer: TaskId, at: usize) -> Vec<TransferSpec> {
        let here = self.engine.here().task;
        let Step { source, destination, .. } = &self.tasks[at].step;
        // Another plan may have other devices, so the handshake is between the first devices of both tasks.
        let device = |task: TaskId| {
            let known = membership.peers.get(&task).and_then(|peer| peer.devices.iter().min());
            known.copied().unwrap_or(if source.task == task { source.device } else { destination.device })
        };
        let (from, to) = (device(here.min(peer)), device(here.max(peer)));
        let span = Buffer::foreign(Vec::new()).full_span();
        let layouts = self.arrays.iter().map(|array| plan_layout_fingerprint(array.plan));
        let layouts = layouts.chain([LayoutFingerprint::hash_of_parts(&[b"end"])]);
        let spec = |(number, layout): (u64, LayoutFingerprint)| {
            let (span, key) = (span.clone(), TransferKey(HANDSHAKE.wrapping_add(number)));
            let spec = if here < peer {
                TransferSpec::send(span, from, to, key)
            } else {
                TransferSpec::receive(span, from, to, key)
            };
            spec.with_layout(BufferLayout::part_of_array(0, layout))
        };
        (0..).zip(layouts).map(spec).collect()
    }

    /// Returns the array whose handshake failed, because the other side has another array in its place.
    fn array_with_mismatched_layout(&self, error: &TransferError) -> Option<usize> {
        let TransferError::LayoutMismatch { key, .. } = error else { return None };
        let number = usize::try_from(key.0.wrapping_sub(HANDSHAKE)).ok();
        number.filter(|number| *number < self.arrays.len())
    }

    /// Launches handshakes and steps with one peer as one, or as few as the bound of a launch allows.
    fn launch_steps_with_peer(&mut self, handshakes: Vec<TransferSpec>, steps: &[usize]) {
        let held: Vec<_> = steps.iter().filter_map(|at| self.tasks[*at].arrival.take()).collect();
        let moves = steps.iter().filter_map(|at| {
            let LocalStep { array, step, key, role, span, .. } = &self.tasks[*at];
            let (from, to, span) = (step.source.device, step.destination.device, span.clone()?);
            let layout = BufferLayout::part_of_array(
                span.len() as u64,
                plan_layout_fingerprint(self.arrays[*array].plan),
            );
            let spec = match role {
                StepRole::Send(_) => TransferSpec::send(span, from, to, *key),
                _ => TransferSpec::receive(span, from, to, *key),
            };
            Some((Some(*at), spec.with_layout(layout)))
        });
        let mut specs: Vec<_> = handshakes.into_iter().map(|spec| (None, spec)).chain(moves).collect();
        while !specs.is_empty() {
            let rest = specs.split_off(specs.len().min(ENTRIES_MAX));
            self.start_transfers(&held, specs);
            specs = rest;
        }
    }

    /// Requests transfers, each with the index of its step unless it is a handshake. Nobody waits for a handshake: if
    /// it fails, so do the steps of its launch.
    fn start_transfers(&mut self, held: &[BufferDefinitionEvent], specs: Vec<(Option<usize>, TransferSpec)>) {
        let left = self.limit.map(|(_, until)| until.saturating_duration_since(clock::monotonic()));
        let options = LaunchOptions { deadline: left, ..self.options };
        let (steps, specs): (Vec<_>, Vec<_>) = specs.into_iter().unzip();
        let transfer = self.engine.transfer(held, specs, options);
        for (number, at) in steps.into_iter().enumerate() {
            let Some(at) = at else { continue };
            let definers = std::mem::take(&mut self.tasks[at].definers);
            let sender = self.sender.clone();
            self.open += 1;
            // This runs on the thread that resolves the transfer, so a step that passes bytes on waits for no
            // other thread.
            transfer.add_outcome_callback(number, move |outcome| {
                for definer in definers {
                    match &outcome {
                        Ok(()) => definer.complete(),
                        Err(error) => definer.fail(original_reason(error)),
                    }
                }
                // A plan that was cancelled has no receiver any more.
                let _sent = sender.send(FinishedTransfer { at, outcome });
            });
        }
        self.transfers.push(transfer);
    }

    fn copy(&self, at: usize) {
        let LocalStep { array, step, runs, .. } = &self.tasks[at];
        let shards = self.arrays[*array].shards;
        if let (Some(runs), Some(from), Some(to)) =
            (runs, shards.shard_of(&step.source), shards.shard_of(&step.destination))
        {
            copy_runs(runs, &from.full_span(), &to.full_span());
        }
    }

    fn pack_step_into_staging(&self, at: usize) {
        let LocalStep { array, step, role: StepRole::Send(_), runs: Some(runs), span: Some(staging), .. } =
            &self.tasks[at]
        else {
            return;
        };
        if let Some(from) = self.arrays[*array].shards.shard_of(&step.source) {
            copy_runs(runs, &from.full_span(), staging);
        }
    }

    fn unpack_step_from_staging(&self, at: usize) {
        let LocalStep {
            array, step, role: StepRole::Receive(_), runs: Some(runs), span: Some(staging), ..
        } = &self.tasks[at]
        else {
            return;
        };
        if let Some(to) = self.arrays[*array].shards.shard_of(&step.destination) {
            copy_runs(runs, staging, &to.full_span());
        }
    }
}

/// Returns the original reason of a failure, without the tasks that passed it on.
fn original_reason(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } | TransferError::Dependency(reason) => reason.clone(),
        error => error.to_string(),
    }
}

/// The phrase by which a task reports that it cancelled a plan.
const GAVE_UP: &str = "gave the plan up";

/// The key of the handshake of the first array: "the plan" in ASCII. The others follow.
const HANDSHAKE: u64 = 0x7468_6520_706c_616e;

/// Returns the fingerprint that both sides compare for each transfer: the first 64 bits of the plan's.
fn plan_layout_fingerprint(plan: &Plan) -> LayoutFingerprint {
    let whole = u128::from_be_bytes(plan.layout_fingerprint().0);
    LayoutFingerprint((whole >> 64) as u64)
}

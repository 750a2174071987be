//! A resharding in progress: launches this task's steps, each step group as one launch, and has bytes copied between
//! shards and staging memory (`step_copier.rs`). If a step fails, it cancels the others.
//!
//! `plan` computes the plans, `groups.rs` forms the step groups, and the caller allocates the shards. Begin at
//! [`ReshardExecutor::execute`].

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::gpu_copy::CopyOutcome;
use super::groups::{StepGroup, step_groups};
use super::inputs::ReshardArray;
use super::local_step::{LocalStep, PackedBytes, StepRole};
use super::outcome::ReshardError;
use super::step_copier::{StepCopier, StepEvent, StepStage};
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

/// A resharding in progress.
pub struct ReshardExecutor<'a> {
    pub(super) engine: &'a TransferEngine,
    pub(super) arrays: &'a [ReshardArray<'a>],
    pub(super) tasks: Vec<LocalStep>,
    pub(super) transfers: Vec<TransferHandle>,
    pub(super) copier: StepCopier,
    /// The number of transfers without an outcome.
    pub(super) open: usize,
    /// The time limit, and when it passes.
    pub(super) limit: Option<(Duration, Instant)>,
    pub(super) options: LaunchOptions,
    pub(super) sender: Sender<StepEvent>,
    pub(super) events: Receiver<StepEvent>,
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
            let packed = steps.iter().filter_map(|at| self.pack(*at)).collect();
            self.launch_steps_with_peer(handshakes, &steps, packed);
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].role == StepRole::Copy && self.tasks[at].step.after.is_none() {
                self.start_copy(at);
            }
        }
        while self.open > 0 || self.copier.is_busy() {
            match self.wait_for_next_event()? {
                StepEvent::Transferred { at, outcome } => {
                    self.open -= 1;
                    outcome.map_err(|error| self.transfer_error(at, error))?;
                    if self.unpack(at).is_none() {
                        self.finish_step(at);
                    }
                }
                StepEvent::Copied { at, stage, gpu, outcome } => {
                    self.copier.note_end(gpu);
                    self.check_copied(at, outcome)?;
                    if stage == StepStage::InPlace {
                        self.finish_step(at);
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins a copy within this task: from shard to shard, or as a transfer between two ranges of which each has its own memory.
    fn start_copy(&mut self, at: usize) {
        if self.tasks[at].sent.is_some() {
            let packed = self.pack(at);
            self.launch_steps_with_peer(Vec::new(), &[at], packed.into_iter().collect());
        } else if self.copy_between_shards(at).is_none() {
            self.finish_step(at);
        }
    }

    /// Packs the bytes that a step sends, if they need it. Returns the event of their end, if a GPU packs them.
    fn pack(&mut self, at: usize) -> Option<BufferDefinitionEvent> {
        let LocalStep { array, step, sent, .. } = &self.tasks[at];
        let sent = sent.as_ref()?;
        let shard = self.arrays[*array].shards.shard_of(&step.source)?;
        let spans = [shard.full_span(), sent.span.clone()];
        self.copier.copy(at, StepStage::Packed, sent.runs.as_ref()?, spans)
    }

    /// Unpacks the bytes that a step has received, if they need it. Returns the event of the end, if a GPU unpacks them.
    fn unpack(&mut self, at: usize) -> Option<BufferDefinitionEvent> {
        let LocalStep { array, step, received, .. } = &self.tasks[at];
        let received = received.as_ref()?;
        let shard = self.arrays[*array].shards.shard_of(&step.destination)?;
        let spans = [received.span.clone(), shard.full_span()];
        self.copier.copy(at, StepStage::InPlace, received.runs.as_ref()?, spans)
    }

    /// Copies the bytes of a step from shard to shard. Returns the event of the end, if a GPU copies them.
    fn copy_between_shards(&mut self, at: usize) -> Option<BufferDefinitionEvent> {
        let LocalStep { array, step, runs, .. } = &self.tasks[at];
        let shards = self.arrays[*array].shards;
        let spans =
            [shards.shard_of(&step.source)?.full_span(), shards.shard_of(&step.destination)?.full_span()];
        self.copier.copy(at, StepStage::InPlace, runs.as_ref()?, spans)
    }

    /// Notes that a step is done, and begins the copies that wait for it.
    fn finish_step(&mut self, at: usize) {
        self.tasks[at].done = true;
        std::mem::take(&mut self.tasks[at].copies).into_iter().for_each(|copy| self.start_copy(copy));
    }

    fn transfer_error(&self, at: usize, error: TransferError) -> ReshardError {
        if matches!(error, TransferError::Deadline { .. }) {
            return self.timeout_error();
        }
        let LocalStep { array, step, .. } = &self.tasks[at];
        let array = self.array_with_mismatched_layout(&error).unwrap_or(*array);
        ReshardError::Transfer { array, step: step.index, error }
    }

    fn check_copied(&self, at: usize, outcome: CopyOutcome) -> Result<(), ReshardError> {
        let CopyOutcome::Failed(gpu, error) = outcome else { return Ok(()) };
        let error = TransferError::Gpu { task: self.engine.here().peer_task(), gpu, error };
        Err(self.transfer_error(at, error))
    }

    /// Waits for the next event of a step. Transfers have stall limits of their own; for copies by GPUs, it is kept here.
    fn wait_for_next_event(&self) -> Result<StepEvent, ReshardError> {
        loop {
            let progress = self.copier.progress();
            let stalls = self.copier.is_busy().then(|| clock::monotonic() + self.options.stall);
            let until = self.limit.map(|(_, until)| until).into_iter().chain(stalls).min();
            let event = match until {
                // The channel never closes, because the run has the sending end too.
                None => self.events.recv().ok(),
                Some(until) => {
                    self.events.recv_timeout(until.saturating_duration_since(clock::monotonic())).ok()
                }
            };
            if let Some(event) = event {
                return Ok(event);
            }
            if self.limit.is_some_and(|(_, until)| until <= clock::monotonic()) {
                return Err(self.timeout_error());
            }
            if self.copier.is_busy() && self.copier.progress() == progress {
                return Err(ReshardError::GpuStalled {
                    gpus: self.copier.busy_gpus(),
                    idle: self.options.stall,
                });
            }
        }
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
            gpus: self.copier.busy_gpus(),
        }
    }

    /// Cancels all transfers and copies in flight, and waits until they have ended.
    pub fn cancel_all_and_wait(&mut self, error: ReshardError) -> ReshardError {
        let began = clock::monotonic();
        self.copier.give_up();
        let why = match &error {
            ReshardError::Transfer { error, .. } if original_reason(error).contains(GAVE_UP) => {
                original_reason(error)
            }
            error => format!("task {} {GAVE_UP}: {error}", self.engine.here().task),
        };
        let proofs: Vec<QuiescenceFuture> =
            self.transfers.iter().map(|transfer| transfer.cancel(&why)).collect();
        let mut rested = |share: u32| {
            let until = began + self.options.stall / 4 * share;
            // They share one limit, so the order of the waits does not matter.
            proofs.iter().all(|proof| proof.wait_for(until.saturating_duration_since(clock::monotonic())))
                && self.copier.wait_until_idle(&self.events, until)
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
        let here = self.engine.here();
        let ended: Vec<_> = with.iter().filter(|member| **member != here).collect();
        if !ended.is_empty() {
            tracing::warn!(with = ?ended, why, "the connections with these were ended");
        }
        if rested(4) {
            return error;
        }
        self.copier.abandon_shards();
        let gpus = self.copier.busy_gpus();
        ReshardError::Unproven { error: Box::new(error), with: with.into_iter().collect(), gpus }
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
    /// They begin once the bytes that GPUs pack are `packed`.
    fn launch_steps_with_peer(
        &mut self,
        handshakes: Vec<TransferSpec>,
        steps: &[usize],
        packed: Vec<BufferDefinitionEvent>,
    ) {
        let arrivals = steps.iter().filter_map(|at| self.tasks[*at].arrival.take());
        let held: Vec<_> = packed.into_iter().chain(arrivals).collect();
        let moves = steps.iter().flat_map(|at| {
            let LocalStep { array, step, key, role, sent, received, .. } = &self.tasks[*at];
            let (from, to) = (step.source.device, step.destination.device);
            let layout = |bytes: &PackedBytes| {
                let fingerprint = plan_layout_fingerprint(self.arrays[*array].plan);
                BufferLayout::part_of_array(bytes.span.len() as u64, fingerprint)
            };
            let send = sent.as_ref().map(|bytes| {
                let spec = TransferSpec::send(bytes.span.clone(), from, to, *key);
                // Of a copy within this task, the receive tells the end.
                (matches!(role, StepRole::Send(_)).then_some(*at), spec.with_layout(layout(bytes)))
            });
            let receive = received.as_ref().map(|bytes| {
                let spec = TransferSpec::receive(bytes.span.clone(), from, to, *key);
                (Some(*at), spec.with_layout(layout(bytes)))
            });
            send.into_iter().chain(receive)
        });
        let mut specs: Vec<_> = handshakes.into_iter().map(|spec| (None, spec)).chain(moves).collect();
        while !specs.is_empty() {
            let rest = specs.split_off(specs.len().min(ENTRIES_MAX));
            self.start_transfers(&held, specs);
            specs = rest;
        }
    }

    /// Requests transfers, each with the index of its step unless it is a handshake. The executor waits for no handshake: if
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
                let _sent = sender.send(StepEvent::Transferred { at, outcome });
            });
        }
        self.transfers.push(transfer);
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

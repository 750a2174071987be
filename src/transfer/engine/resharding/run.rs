//! A resharding in progress: launches the groups, and starts each step whose bytes have arrived.
//!
//! It makes no plan and allocates no transfer buffers. Begin at [`ReshardRun::go`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::copy::{copy_runs, dense};
use super::outcome::{ReshardError, ShardBuffers};
use super::task::{StepRole, StepTask};
use crate::base::error::TransferError;
use crate::base::event::Event;
use crate::base::identity::{Member, Membership, TaskId};
use crate::base::key::TransferKey;
use crate::base::layout::{Layout, LayoutFingerprint};
use crate::engine::handle::Engine;
use crate::engine::prepared::{LaunchOptions, Spec};
use crate::launch::transfer::{Quiesced, Transfer};
use crate::memory::Buffer;
use crate::plan::{BufferRole, Step, StepEnd};

/// The outcome of one transfer: of the step with index `at` among the tasks, or of the handshake with that
/// step's peer.
pub struct Arrived {
    at: usize,
    handshake: bool,
    outcome: Result<(), TransferError>,
}

/// A plan in progress.
pub struct ReshardRun<'a> {
    pub(super) engine: &'a Engine,
    pub(super) shards: &'a ShardBuffers,
    pub(super) tasks: Vec<StepTask>,
    pub(super) transfers: Vec<Transfer>,
    /// The number of transfers without an outcome.
    pub(super) open: usize,
    /// The time limit, and when it passes.
    pub(super) limit: Option<(Duration, Instant)>,
    pub(super) options: LaunchOptions,
    pub(super) layout: LayoutFingerprint,
    pub(super) sender: Sender<Arrived>,
    pub(super) outcomes: Receiver<Arrived>,
}

impl ReshardRun<'_> {
    /// Executes the plan, and blocks until it is done.
    pub fn go(&mut self) -> Result<(), ReshardError> {
        // For each peer: the first step with it, and the steps with it that depend on nothing.
        let mut first: BTreeMap<TaskId, (usize, Vec<usize>)> = BTreeMap::new();
        for (at, task) in self.tasks.iter().enumerate() {
            if let Some(peer) = task.role.peer() {
                let (_, independent) = first.entry(peer).or_insert_with(|| (at, Vec::new()));
                if task.step.after.is_none() {
                    independent.push(at);
                }
            }
        }
        // Each peer has a request of its own, so that one that cannot be reached delays no other.
        let membership = self.engine.membership();
        for (peer, (at, independent)) in first {
            self.plan_handshake(&membership, peer, at);
            independent.iter().for_each(|at| self.pack(*at));
            self.launch(&independent);
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].role != StepRole::Copy && self.tasks[at].step.after.is_some() {
                self.launch(&[at]);
            }
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].role == StepRole::Copy && self.tasks[at].step.after.is_none() {
                self.copy(at);
            }
        }
        while self.open > 0 {
            let Arrived { at, handshake, outcome } = self.next()?;
            self.open -= 1;
            let step = self.tasks[at].step.index;
            match outcome {
                Ok(()) => {}
                Err(TransferError::Deadline { .. }) => return Err(self.timed_out()),
                // If a handshake fails for any other reason, the steps with that peer fail too, with a better
                // error.
                Err(error) if !handshake || tells_plans_apart(&error) => {
                    return Err(ReshardError::Transfer { step, error });
                }
                Err(_) => {}
            }
            if !handshake {
                self.tasks[at].done = true;
                self.unpack(at);
                std::mem::take(&mut self.tasks[at].copies).into_iter().for_each(|copy| self.copy(copy));
            }
        }
        Ok(())
    }

    /// Waits for the next outcome of a transfer.
    fn next(&self) -> Result<Arrived, ReshardError> {
        let outcome = match self.limit {
            // The channel never closes, because the run has the sending end too.
            None => self.outcomes.recv().ok(),
            Some((_, until)) => {
                self.outcomes.recv_timeout(until.saturating_duration_since(clock::monotonic())).ok()
            }
        };
        outcome.ok_or_else(|| self.timed_out())
    }

    fn timed_out(&self) -> ReshardError {
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
    pub fn give_up(&mut self, error: ReshardError) -> ReshardError {
        let began = clock::monotonic();
        let why = match &error {
            ReshardError::Transfer { error, .. } if cause(error).contains(GAVE_UP) => cause(error),
            error => format!("task {} {GAVE_UP}: {error}", self.engine.here().task),
        };
        let proofs: Vec<Quiesced> = self.transfers.iter().map(|transfer| transfer.cancel(&why)).collect();
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
        let with: BTreeSet<Member> =
            self.transfers.iter().flat_map(|transfer| transfer.cut_off(&why)).collect();
        tracing::warn!(?with, why, "the connections with these were ended");
        if rested(4) {
            return error;
        }
        ReshardError::Unproven { error: Box::new(error), with: with.into_iter().collect() }
    }

    /// Launches the handshake with a peer: a transfer without bytes that has the plan's layout.
    fn plan_handshake(&mut self, membership: &Membership, peer: TaskId, at: usize) {
        // "the plan" in ASCII.
        const HANDSHAKE: TransferKey = TransferKey(0x7468_6520_706c_616e);
        let here = self.engine.here().task;
        let Step { source, destination, .. } = &self.tasks[at].step;
        // Another plan may have other devices, so the handshake is between the first devices of both tasks.
        let device = |task: TaskId| {
            let known = membership.peers.get(&task).and_then(|peer| peer.devices.iter().min());
            known.copied().unwrap_or(if source.task == task { source.device } else { destination.device })
        };
        let (from, to) = (device(here.min(peer)), device(here.max(peer)));
        let span = Buffer::foreign(Vec::new()).span();
        let spec = if here < peer {
            Spec::send(span, from, to, HANDSHAKE)
        } else {
            Spec::receive(span, from, to, HANDSHAKE)
        };
        self.request(&[], vec![spec], &[at], true);
    }

    /// Launches steps with one peer as one group.
    fn launch(&mut self, steps: &[usize]) {
        if steps.is_empty() {
            return;
        }
        let held: Vec<_> = steps.iter().filter_map(|at| self.tasks[*at].arrival.take()).collect();
        let specs = steps.iter().filter_map(|at| {
            let StepTask { step, role, span, .. } = &self.tasks[*at];
            let (from, to, span) = (step.source.device, step.destination.device, span.clone()?);
            Some(match role {
                StepRole::Send(_) => Spec::send(span, from, to, step.key),
                _ => Spec::receive(span, from, to, step.key),
            })
        });
        let specs = specs.collect();
        self.request(&held, specs, steps, false);
    }

    fn request(&mut self, held: &[Event], specs: Vec<Spec>, steps: &[usize], handshake: bool) {
        let specs = specs.into_iter().map(|spec| {
            let layout = Layout::part(spec.span.len() as u64, self.layout);
            spec.with_layout(layout)
        });
        let left = self.limit.map(|(_, until)| until.saturating_duration_since(clock::monotonic()));
        let options = LaunchOptions { deadline: left, ..self.options };
        let transfer = self.engine.transfer(held, specs.collect(), options);
        for (number, &at) in steps.iter().enumerate() {
            let definers = if handshake { Vec::new() } else { std::mem::take(&mut self.tasks[at].definers) };
            let sender = self.sender.clone();
            // This runs on the thread that resolves the transfer, so a step that passes bytes on waits for no
            // other thread.
            transfer.on_outcome(number, move |outcome| {
                for definer in definers {
                    match &outcome {
                        Ok(()) => definer.complete(),
                        Err(error) => definer.fail(cause(error)),
                    }
                }
                // A plan that was cancelled has no receiver any more.
                let _sent = sender.send(Arrived { at, handshake, outcome });
            });
        }
        self.open += steps.len();
        self.transfers.push(transfer);
    }

    fn buffer(&self, side: &StepEnd) -> Option<&Buffer> {
        match side.buffer {
            BufferRole::Source => self.shards.source.get(&side.device),
            BufferRole::Destination => self.shards.destination.get(&side.device),
        }
    }

    fn copy(&self, at: usize) {
        let step = &self.tasks[at].step;
        if let (Some(from), Some(to)) = (self.buffer(&step.source), self.buffer(&step.destination)) {
            copy_runs((&from.span(), &step.source.runs), (&to.span(), &step.destination.runs));
        }
    }

    fn pack(&self, at: usize) {
        let task = &self.tasks[at];
        if let (StepRole::Send(_), true) = (task.role, task.staged)
            && let (Some(from), Some(span)) = (self.buffer(&task.step.source), &task.span)
        {
            copy_runs((&from.span(), &task.step.source.runs), (span, &dense(task.step.bytes)));
        }
    }

    fn unpack(&self, at: usize) {
        let task = &self.tasks[at];
        if let (StepRole::Receive(_), true) = (task.role, task.staged)
            && let (Some(to), Some(span)) = (self.buffer(&task.step.destination), &task.span)
        {
            copy_runs((span, &dense(task.step.bytes)), (&to.span(), &task.step.destination.runs));
        }
    }
}

/// Returns the original reason of a failure, without the tasks that passed it on.
fn cause(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } | TransferError::Dependency(reason) => reason.clone(),
        error => error.to_string(),
    }
}

/// The phrase by which a task reports that it cancelled a plan.
const GAVE_UP: &str = "gave the plan up";

/// Returns whether both sides launched, with different plans.
const fn tells_plans_apart(error: &TransferError) -> bool {
    matches!(error, TransferError::LayoutMismatch { .. } | TransferError::OrderMismatch { .. })
}

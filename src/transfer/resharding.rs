//! A plan carried out by engines: each task does its part, and needs to be told nothing by the others.
//!
//! All steps between two tasks that depend on nothing leave as one group; a step that passes on what came by another is
//! a group of its own, launched at once in the order of the plan and held back until what it passes on is here. Both
//! sides derive the same groups from the same plan.
//!
//! What is one stretch of memory on a side is sent from, and received into, its place. What is not is packed into (or
//! unpacked out of) a piece of staging memory of its own, so no step ever waits for another's.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::error::{MemoryError, TransferError};
use super::event::{Definer, Event};
use super::identity::DeviceId;
use super::launch::Transfer;
use super::layout::Layout;
use super::memory::raw::Piece;
use super::memory::{Arena, Buffer, Claim, Span};
use super::plan::{BufferRole, Plan, Runs, Side, Step};
use super::prepared::{Options, Spec};
use crate::clock;

/// The shards of this task's devices, before and after.
#[derive(Debug, Clone, Default)]
pub struct ShardBuffers {
    /// The array as it is.
    pub source: BTreeMap<DeviceId, Buffer>,
    /// The array as it shall be.
    pub destination: BTreeMap<DeviceId, Buffer>,
}

/// What a task did for a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Bytes sent to other tasks.
    pub sent: u64,
    /// Bytes received of other tasks.
    pub received: u64,
    /// Bytes copied within the task.
    pub copied: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Why a plan was not carried out. No byte lands in the shards any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// A shard is missing, or has another size than the plan says.
    #[error("device {device}: its {role} shard has {found} bytes here; the plan says {wanted}")]
    Shard {
        /// Of which device.
        device: DeviceId,
        /// Before or after.
        role: &'static str,
        /// What the plan says.
        wanted: u64,
        /// What was given.
        found: u64,
    },
    /// Memory is short, or in use.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A transfer failed. All others of the plan were given up.
    #[error("step {step} of the plan: {error}")]
    Transfer {
        /// Which step.
        step: u32,
        /// Why.
        error: TransferError,
    },
    /// It was not done in the plan's time.
    #[error("the plan was not carried out within {0:?}")]
    Timeout(Duration),
}

/// What a task does in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Copy,
    Send,
    Receive,
}

/// A step, and what it needs here.
struct Task {
    step: Step,
    deed: Deed,
    /// Where its bytes leave or arrive as one stretch.
    span: Option<Span>,
    /// Whether they have to be packed or unpacked.
    staged: bool,
    /// Completes what the step's transfer waits for.
    definer: Option<Definer>,
    done: bool,
}

impl Engine {
    /// Carries out this task's part of a plan, and waits for it: every task of the plan does the same. The shards belong
    /// to the plan until it returns. Staging memory is taken from `staging` and given back.
    ///
    /// A channel of its own ([`Options::channel`]) keeps the order of its groups apart from other launches.
    ///
    /// # Errors
    /// If a shard does not fit the plan, a transfer fails, or the plan's time is over. Whatever else was under way is
    /// given up then, with proof.
    pub fn carry_out(
        &self,
        plan: &Plan,
        shards: &ShardBuffers,
        staging: &Arena,
        options: Options,
    ) -> Result<Moved, ReshardError> {
        let began = clock::monotonic();
        let here = self.here().task;
        let _claims = check(plan, shards, here)?;
        let mut tasks = Vec::new();
        for step in plan.for_task(here) {
            let deed = match (step.source.task == here, step.destination.task == here) {
                (true, true) => Deed::Copy,
                (true, false) => Deed::Send,
                _ => Deed::Receive,
            };
            let (span, staged) = match deed {
                Deed::Copy => (None, false),
                Deed::Send => place(shards, &step.source, staging)?,
                Deed::Receive => place(shards, &step.destination, staging)?,
            };
            tasks.push(Task { step, deed, span, staged, definer: None, done: false });
        }
        let until = plan.timeout().map(|time| began + time);
        let mut run = Run { engine: self, shards, tasks, transfers: Vec::new(), until, options };
        let outcome = run.go();
        if outcome.is_err() {
            // Dropped, the definers fail what was held back.
            for task in &mut run.tasks {
                task.definer = None;
            }
            let proofs: Vec<_> =
                run.transfers.iter().map(|(transfer, _)| transfer.cancel("the plan was given up")).collect();
            proofs.iter().for_each(|proof| {
                let _patience_of_the_transfers_own_limits = proof.wait_for(options.stall);
            });
        }
        outcome.map_err(|error| match (error, plan.timeout()) {
            (ReshardError::Transfer { error: TransferError::Deadline { .. }, .. }, Some(time)) => {
                ReshardError::Timeout(time)
            }
            (error, _) => error,
        })?;
        let mut moved =
            Moved { elapsed: clock::monotonic().saturating_duration_since(began), ..Moved::default() };
        for task in &run.tasks {
            match task.deed {
                Deed::Copy => moved.copied += task.step.bytes,
                Deed::Send => moved.sent += task.step.bytes,
                Deed::Receive => moved.received += task.step.bytes,
            }
        }
        Ok(moved)
    }
}

/// A plan under way. A transfer comes with the places of its steps among the tasks, in the order of its specs.
struct Run<'a> {
    engine: &'a Engine,
    shards: &'a ShardBuffers,
    tasks: Vec<Task>,
    transfers: Vec<(Transfer, Vec<usize>)>,
    until: Option<Instant>,
    options: Options,
}

impl Run<'_> {
    fn go(&mut self) -> Result<(), ReshardError> {
        let crosses = |task: &Task| task.deed != Deed::Copy;
        let first: Vec<_> = (0..self.tasks.len())
            .filter(|at| crosses(&self.tasks[*at]) && self.tasks[*at].step.after.is_none())
            .collect();
        for at in &first {
            self.pack(*at);
        }
        self.launch(first, &[]);
        for at in 0..self.tasks.len() {
            let task = &mut self.tasks[at];
            if crosses(task) && task.step.after.is_some() {
                let held = if task.deed == Deed::Send {
                    let (definer, event) = Event::new();
                    task.definer = Some(definer);
                    vec![event]
                } else {
                    Vec::new()
                };
                self.launch(vec![at], &held);
            }
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].deed == Deed::Copy && self.tasks[at].step.after.is_none() {
                self.copy(at);
                self.passed(at);
            }
        }
        // A step depends on earlier ones only, so to wait in the order of the plan waits for nobody in vain.
        let mut order: Vec<(usize, usize, usize)> = Vec::new();
        for (transfer, (_, members)) in self.transfers.iter().enumerate() {
            order.extend(members.iter().enumerate().map(|(number, at)| (*at, transfer, number)));
        }
        order.sort_unstable();
        for (at, transfer, number) in order {
            self.wait(at, transfer, number)?;
            if self.tasks[at].deed == Deed::Receive {
                self.unpack(at);
                self.passed(at);
            }
        }
        Ok(())
    }

    fn wait(&self, at: usize, transfer: usize, number: usize) -> Result<(), ReshardError> {
        let step = self.tasks[at].step.index;
        let transfer = &self.transfers[transfer].0;
        let outcome = match self.until {
            None => transfer.one(number).wait(),
            Some(until) => {
                let left = until.saturating_duration_since(clock::monotonic());
                transfer
                    .one(number)
                    .wait_for(left)
                    .unwrap_or(Err(TransferError::Deadline { moved: 0, total: self.tasks[at].step.bytes }))
            }
        };
        outcome.map_err(|error| ReshardError::Transfer { step, error })
    }

    fn launch(&mut self, members: Vec<usize>, held: &[Event]) {
        if members.is_empty() {
            return;
        }
        let specs = members
            .iter()
            .filter_map(|at| {
                let Task { step, deed, span, .. } = &self.tasks[*at];
                let span = span.clone()?;
                let layout = Layout::bytes(span.len());
                let (from, to) = (step.source.device, step.destination.device);
                let spec = if *deed == Deed::Send {
                    Spec::send(span, from, to, step.key)
                } else {
                    Spec::receive(span, from, to, step.key)
                };
                Some(spec.with_layout(layout))
            })
            .collect();
        let left = self.until.map(|until| until.saturating_duration_since(clock::monotonic()));
        let options = Options { deadline: left.or(self.options.deadline), ..self.options };
        self.transfers.push((self.engine.transfer(held, specs, options), members));
    }

    /// What depends on a step that is done can be done.
    fn passed(&mut self, at: usize) {
        let mut done = vec![at];
        while let Some(at) = done.pop() {
            self.tasks[at].done = true;
            let index = self.tasks[at].step.index;
            for next in at + 1..self.tasks.len() {
                let task = &mut self.tasks[next];
                if task.step.after != Some(index) || task.done {
                    continue;
                }
                match task.deed {
                    Deed::Copy => {
                        self.copy(next);
                        done.push(next);
                    }
                    Deed::Send => {
                        self.pack(next);
                        if let Some(definer) = self.tasks[next].definer.take() {
                            definer.complete();
                        }
                    }
                    Deed::Receive => {}
                }
            }
        }
    }

    fn buffer(&self, side: &Side) -> Option<&Buffer> {
        match side.buffer {
            BufferRole::Source => self.shards.source.get(&side.device),
            BufferRole::Destination => self.shards.destination.get(&side.device),
        }
    }

    fn copy(&self, at: usize) {
        let step = &self.tasks[at].step;
        if let (Some(from), Some(to)) = (self.buffer(&step.source), self.buffer(&step.destination)) {
            copy_runs(
                (&from.span().piece(), &step.source.runs),
                (&to.span().piece(), &step.destination.runs),
            );
        }
    }

    fn pack(&self, at: usize) {
        let task = &self.tasks[at];
        if task.deed == Deed::Send
            && task.staged
            && let (Some(from), Some(span)) = (self.buffer(&task.step.source), &task.span)
        {
            copy_runs(
                (&from.span().piece(), &task.step.source.runs),
                (&span.piece(), &dense(task.step.bytes)),
            );
        }
    }

    fn unpack(&self, at: usize) {
        let task = &self.tasks[at];
        if task.staged
            && let (Some(to), Some(span)) = (self.buffer(&task.step.destination), &task.span)
        {
            copy_runs(
                (&span.piece(), &dense(task.step.bytes)),
                (&to.span().piece(), &task.step.destination.runs),
            );
        }
    }
}

/// One stretch.
fn dense(bytes: u64) -> Runs {
    Runs { offset: 0, run_bytes: bytes, counts: Vec::new(), strides: Vec::new() }
}

/// Looks at the shards, and keeps everybody else from them.
fn check(
    plan: &Plan,
    shards: &ShardBuffers,
    here: super::identity::TaskId,
) -> Result<Vec<Claim>, ReshardError> {
    let mut claims = Vec::new();
    let mine: HashSet<DeviceId> = plan
        .placement()
        .devices
        .iter()
        .filter(|placed| placed.task == here)
        .map(|placed| placed.device)
        .collect();
    for (role, array, given) in [
        (BufferRole::Source, plan.source(), &shards.source),
        (BufferRole::Destination, plan.destination(), &shards.destination),
    ] {
        for &device in &array.sharding.mesh.devices {
            if !mine.contains(&device) {
                continue;
            }
            let wanted = plan.shard_bytes(role, device);
            let found = given.get(&device);
            if found.map(|buffer| buffer.len() as u64) != Some(wanted) {
                let found = found.map_or(0, |buffer| buffer.len() as u64);
                return Err(ReshardError::Shard { device, role: role.name(), wanted, found });
            }
            claims.extend(found.map(Buffer::claim));
        }
    }
    Ok(claims)
}

/// Where the bytes of a side leave or arrive: their own place if they are one stretch, else staging memory.
fn place(shards: &ShardBuffers, side: &Side, staging: &Arena) -> Result<(Option<Span>, bool), ReshardError> {
    let buffer = match side.buffer {
        BufferRole::Source => shards.source.get(&side.device),
        BufferRole::Destination => shards.destination.get(&side.device),
    };
    let bytes = usize::try_from(side.runs.bytes()).unwrap_or(usize::MAX);
    if side.runs.count() <= 1 {
        let start = usize::try_from(side.runs.offset).unwrap_or(usize::MAX);
        let span = buffer.map(|buffer| buffer.range(start..start.saturating_add(bytes))).transpose()?;
        return Ok((span, false));
    }
    Ok((Some(staging.allocate(bytes)?.span()), true))
}

/// Where each run begins, and how long it is.
fn stretches(runs: &Runs) -> impl Iterator<Item = (usize, usize)> + '_ {
    let run = usize::try_from(runs.run_bytes).unwrap_or(usize::MAX);
    (0..runs.count()).map(move |number| {
        let mut rest = number;
        let mut offset = runs.offset;
        for (count, stride) in runs.counts.iter().zip(&runs.strides).rev() {
            offset += rest % count * stride;
            rest /= count;
        }
        (usize::try_from(offset).unwrap_or(usize::MAX), run)
    })
}

/// Copies the bytes of some runs into others, which have as many. The plan has seen to it that they lie within their
/// buffers; a piece ends at the end of its buffer in any case.
fn copy_runs((from, from_runs): (&Piece<'_>, &Runs), (to, to_runs): (&Piece<'_>, &Runs)) {
    let (mut sources, mut targets) = (stretches(from_runs), stretches(to_runs));
    let (mut source, mut target) = ((0, 0), (0, 0));
    loop {
        if source.1 == 0 {
            let Some(next) = sources.next() else { return };
            source = next;
        }
        if target.1 == 0 {
            let Some(next) = targets.next() else { return };
            target = next;
        }
        let len = source.1.min(target.1);
        if len == 0 {
            return;
        }
        to.part(target.0, len).copy_from(&from.part(source.0, len));
        source = (source.0 + len, source.1 - len);
        target = (target.0 + len, target.1 - len);
    }
}

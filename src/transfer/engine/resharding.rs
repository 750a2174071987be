//! A plan carried out by engines: each task does its part, and needs to be told nothing by the others.
//!
//! All steps between two tasks that depend on nothing leave as one group; a step that passes on what came by another is
//! a group of its own, launched at once in the order of the plan and held back until what it passes on is here. Both
//! sides derive the same groups from the same plan; before them they give each other a word, a transfer without bytes
//! that has the plan's layout, so that those who carry out different plans hear of that and not of keys.
//!
//! What is one stretch of memory on a side is sent from, and received into, its place. What is not is packed into (or
//! unpacked out of) a piece of staging memory of its own, so no step ever waits for another's. What is passed on leaves
//! from the place where it arrived, as soon as it has: no thread has a hand in it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crate::base::error::{MemoryError, TransferError, TransferKey};
use crate::base::event::{Definer, Event};
use crate::base::identity::{DeviceId, Member, Membership, TaskId};
use crate::base::layout::{Fingerprint, Layout};
use crate::base::sync::lock;
use crate::engine::handle::Engine;
use crate::engine::prepared::{Options, Spec};
use crate::launch::transfer::{Completion, Quiesced, Transfer};
use crate::memory::raw::Piece;
use crate::memory::{Arena, Buffer, Claim, Span};
use crate::plan::{BufferRole, Plan, Runs, Side, Step};
use muster_clock as clock;

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

/// Why a plan was not carried out. But for [`Unproven`](Self::Unproven), no byte lands in the shards any more.
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
    /// A transfer failed. All others of the plan were given up. Where a task carries out another plan, it is the first
    /// step with that task.
    #[error("step {step} of the plan: {error}")]
    Transfer {
        /// Which step.
        step: u32,
        /// Why.
        error: TransferError,
    },
    /// It was not done in its time.
    #[error(
        "the plan was not carried out within {limit:?}: {open} of this task's {steps} steps with others were not done, those with {}; see whether they live and carry out the same plan",
        tasks(with)
    )]
    Timeout {
        /// Its time.
        limit: Duration,
        /// How many steps with other tasks were not done.
        open: usize,
        /// How many there are.
        steps: usize,
        /// The tasks that these steps are with.
        with: Vec<TaskId>,
    },
    /// Besides, transfers that were given up have not come to rest, although the connections with these tasks were ended.
    #[error(
        "{error}; {} may still be writing to the shards: use none of them for anything else as long as writing to it is refused because it is in use",
        members(with)
    )]
    Unproven {
        /// What happened.
        error: Box<Self>,
        /// Who was written to or read from.
        with: Vec<Member>,
    },
}

fn tasks(all: &[TaskId]) -> String {
    let named: Vec<_> = all.iter().map(|task| format!("task {task}")).collect();
    named.join(", ")
}

fn members(all: &[Member]) -> String {
    let named: Vec<_> = all.iter().map(|member| format!("transfers with {member}")).collect();
    named.join(", ")
}

/// What a task does in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Copy,
    Send(TaskId),
    Receive(TaskId),
}

impl Deed {
    /// With whom.
    const fn peer(self) -> Option<TaskId> {
        match self {
            Self::Copy => None,
            Self::Send(peer) | Self::Receive(peer) => Some(peer),
        }
    }
}

/// A step, and what it needs here.
struct Task {
    step: Step,
    deed: Deed,
    /// Where its bytes leave or arrive as one stretch.
    span: Option<Span>,
    /// Whether they have to be packed or unpacked.
    staged: bool,
    /// Says that what is passed on is here.
    here: Option<Event>,
    /// Tells whoever passes it on.
    tells: Vec<Definer>,
    /// The copies that are made when it is here, by their places among the tasks.
    copies: Vec<usize>,
    done: bool,
}

impl Engine {
    /// Carries out this task's part of a plan, and waits for it: every task of the plan does the same. The shards belong
    /// to the plan until it returns. Staging memory is taken from `staging` and given back.
    ///
    /// A channel of its own ([`Options::channel`]) keeps the order of its groups apart from other launches.
    ///
    /// It takes no longer than the plan's time, or [`Options::deadline`] if that is shorter; and, if it fails, once
    /// [`Options::stall`] until what was under way has come to rest. The connection with a peer that does not say so in that
    /// time is ended, and with it whatever else is under way on it.
    ///
    /// # Errors
    /// If a shard does not fit the plan, a transfer fails, or the time is over. Whatever else was under way is given up
    /// then, with proof.
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
        let tasks = divide(plan, shards, staging, here)?;
        let limit = plan.timeout().into_iter().chain(options.deadline).min();
        let (tell, heard) = channel();
        let mut run = Run {
            engine: self,
            shards,
            tasks,
            transfers: Vec::new(),
            open: 0,
            limit: limit.map(|limit| (limit, began + limit)),
            options,
            layout: layout_of(plan),
            tell,
            heard,
        };
        run.go().map_err(|error| run.give_up(error))?;
        let mut moved =
            Moved { elapsed: clock::monotonic().saturating_duration_since(began), ..Moved::default() };
        for task in &run.tasks {
            match task.deed {
                Deed::Copy => moved.copied += task.step.bytes,
                Deed::Send(_) => moved.sent += task.step.bytes,
                Deed::Receive(_) => moved.received += task.step.bytes,
            }
        }
        Ok(moved)
    }
}

/// The steps of this task, with their memory, and who waits for whom.
fn divide(
    plan: &Plan,
    shards: &ShardBuffers,
    staging: &Arena,
    here: TaskId,
) -> Result<Vec<Task>, ReshardError> {
    let mut tasks: Vec<Task> = Vec::new();
    for step in plan.for_task(here) {
        let deed = match (step.source.task == here, step.destination.task == here) {
            (true, true) => Deed::Copy,
            (true, false) => Deed::Send(step.destination.task),
            _ => Deed::Receive(step.source.task),
        };
        let before =
            step.after.and_then(|after| tasks.binary_search_by_key(&after, |task| task.step.index).ok());
        let mut event = None;
        let (span, staged) = match (deed, before) {
            (Deed::Copy, _) => (None, false),
            (Deed::Receive(_), _) => place(shards, &step.destination, staging)?,
            (Deed::Send(_), None) => place(shards, &step.source, staging)?,
            (Deed::Send(_), Some(before)) => {
                // It leaves from where it arrived as one stretch: nobody has to touch it between the two.
                let (definer, here) = Event::new();
                tasks[before].tells.push(definer);
                event = Some(here);
                (tasks[before].span.clone(), false)
            }
        };
        if deed == Deed::Copy
            && let Some(before) = before
        {
            let at = tasks.len();
            tasks[before].copies.push(at);
        }
        let (tells, copies) = (Vec::new(), Vec::new());
        tasks.push(Task { step, deed, span, staged, here: event, tells, copies, done: false });
    }
    Ok(tasks)
}

/// What became of a transfer: of a step's, by its place among the tasks, or of the word that a step's peer was given.
struct Heard {
    at: usize,
    word: bool,
    outcome: Result<(), TransferError>,
}

/// Looks at a transfer whenever something has happened to it, on the thread that made it happen: whoever passes on what
/// came hears of it there, and waits for no other step.
struct Watch(Mutex<Option<Watched>>);

struct Watched {
    completion: Completion,
    at: usize,
    word: bool,
    tells: Vec<Definer>,
    tell: Sender<Heard>,
}

impl Watch {
    fn look(self: &Arc<Self>) {
        let mut slot = lock(&self.0);
        let Some(watched) = slot.as_mut() else { return };
        let waker = Waker::from(Arc::clone(self));
        let polled = Pin::new(&mut watched.completion).poll(&mut Context::from_waker(&waker));
        let Poll::Ready(outcome) = polled else { return };
        // Taken out: the launch, which knows the waker, and this would keep each other.
        let watched = slot.take();
        drop(slot);
        let Some(Watched { at, word, tells, tell, .. }) = watched else { return };
        for definer in tells {
            match &outcome {
                Ok(()) => definer.complete(),
                Err(error) => definer.fail(cause(error)),
            }
        }
        // A plan that was given up listens no more.
        let _told = tell.send(Heard { at, word, outcome });
    }
}

/// Why a transfer failed, without who passed it on: it may have come a long way.
fn cause(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } | TransferError::Dependency(reason) => reason.clone(),
        error => error.to_string(),
    }
}

impl Wake for Watch {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

/// A plan under way.
struct Run<'a> {
    engine: &'a Engine,
    shards: &'a ShardBuffers,
    tasks: Vec<Task>,
    transfers: Vec<Transfer>,
    /// How many transfers have not been heard of.
    open: usize,
    /// How long it may take, and until when that is.
    limit: Option<(Duration, Instant)>,
    options: Options,
    layout: Fingerprint,
    tell: Sender<Heard>,
    heard: Receiver<Heard>,
}

impl Run<'_> {
    fn go(&mut self) -> Result<(), ReshardError> {
        // With each peer: its first step, and those that depend on nothing.
        let mut first: BTreeMap<TaskId, (usize, Vec<usize>)> = BTreeMap::new();
        for (at, task) in self.tasks.iter().enumerate() {
            if let Some(peer) = task.deed.peer() {
                let (_, independent) = first.entry(peer).or_insert_with(|| (at, Vec::new()));
                if task.step.after.is_none() {
                    independent.push(at);
                }
            }
        }
        // A request for each peer: one that cannot be reached holds back nobody else.
        let membership = self.engine.membership();
        for (peer, (at, independent)) in first {
            self.give_word(&membership, peer, at);
            independent.iter().for_each(|at| self.pack(*at));
            self.launch(&independent);
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].deed != Deed::Copy && self.tasks[at].step.after.is_some() {
                self.launch(&[at]);
            }
        }
        for at in 0..self.tasks.len() {
            if self.tasks[at].deed == Deed::Copy && self.tasks[at].step.after.is_none() {
                self.copy(at);
            }
        }
        while self.open > 0 {
            let Heard { at, word, outcome } = self.next()?;
            self.open -= 1;
            let step = self.tasks[at].step.index;
            match outcome {
                Ok(()) => {}
                Err(TransferError::Deadline { .. }) => return Err(self.timed_out()),
                // For anything else that fails a word, the steps with that peer fail too, and say more.
                Err(error) if !word || tells_plans_apart(&error) => {
                    return Err(ReshardError::Transfer { step, error });
                }
                Err(_) => {}
            }
            if !word {
                self.tasks[at].done = true;
                self.unpack(at);
                std::mem::take(&mut self.tasks[at].copies).into_iter().for_each(|copy| self.copy(copy));
            }
        }
        Ok(())
    }

    /// What became of the next transfer that is over.
    fn next(&self) -> Result<Heard, ReshardError> {
        let heard = match self.limit {
            // It never ends: the run has the other end too.
            None => self.heard.recv().ok(),
            Some((_, until)) => {
                self.heard.recv_timeout(until.saturating_duration_since(clock::monotonic())).ok()
            }
        };
        heard.ok_or_else(|| self.timed_out())
    }

    fn timed_out(&self) -> ReshardError {
        let crossing = || self.tasks.iter().filter_map(|task| Some((task.done, task.deed.peer()?)));
        let open = || crossing().filter(|(done, _)| !done);
        let with: BTreeSet<_> = open().map(|(_, peer)| peer).collect();
        ReshardError::Timeout {
            limit: self.limit.map_or(Duration::MAX, |(limit, _)| limit),
            open: open().count(),
            steps: crossing().count(),
            with: with.into_iter().collect(),
        }
    }

    /// Gives up all that is under way, and sees to it that it comes to rest.
    fn give_up(&mut self, error: ReshardError) -> ReshardError {
        let began = clock::monotonic();
        let why = match &error {
            ReshardError::Transfer { error, .. } if cause(error).contains(GAVE_UP) => cause(error),
            error => format!("task {} {GAVE_UP}: {error}", self.engine.here().task),
        };
        let proofs: Vec<Quiesced> = self.transfers.iter().map(|transfer| transfer.cancel(&why)).collect();
        let rested = |share: u32| {
            let until = began + self.options.stall / 4 * share;
            // At once, not one after the other: they have one end of time.
            proofs.iter().all(|proof| proof.wait_for(until.saturating_duration_since(clock::monotonic())))
        };
        // Most of the time is for peers to say so. Without their connections, only threads of this task have to let go.
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

    /// Tells a peer of the plan's layout, and hears of its.
    fn give_word(&mut self, membership: &Membership, peer: TaskId, at: usize) {
        // "the plan"
        const WORD: TransferKey = TransferKey(0x7468_6520_706c_616e);
        let here = self.engine.here().task;
        let Step { source, destination, .. } = &self.tasks[at].step;
        // Another plan may have other devices: the word is between the first ones of both tasks.
        let device = |task: TaskId| {
            let known = membership.peers.get(&task).and_then(|peer| peer.devices.iter().min());
            known.copied().unwrap_or(if source.task == task { source.device } else { destination.device })
        };
        let (from, to) = (device(here.min(peer)), device(here.max(peer)));
        let span = Buffer::foreign(Vec::new()).span();
        let spec =
            if here < peer { Spec::send(span, from, to, WORD) } else { Spec::receive(span, from, to, WORD) };
        self.request(&[], vec![spec], &[at], true);
    }

    /// Launches steps with one peer as one group.
    fn launch(&mut self, steps: &[usize]) {
        if steps.is_empty() {
            return;
        }
        let held: Vec<_> = steps.iter().filter_map(|at| self.tasks[*at].here.take()).collect();
        let specs = steps.iter().filter_map(|at| {
            let Task { step, deed, span, .. } = &self.tasks[*at];
            let (from, to, span) = (step.source.device, step.destination.device, span.clone()?);
            Some(match deed {
                Deed::Send(_) => Spec::send(span, from, to, step.key),
                _ => Spec::receive(span, from, to, step.key),
            })
        });
        let specs = specs.collect();
        self.request(&held, specs, steps, false);
    }

    fn request(&mut self, held: &[Event], specs: Vec<Spec>, steps: &[usize], word: bool) {
        let specs = specs.into_iter().map(|spec| {
            let layout = Layout::part(spec.span.len() as u64, self.layout);
            spec.with_layout(layout)
        });
        let left = self.limit.map(|(_, until)| until.saturating_duration_since(clock::monotonic()));
        let options = Options { deadline: left, ..self.options };
        let transfer = self.engine.transfer(held, specs.collect(), options);
        for (number, &at) in steps.iter().enumerate() {
            let tells = if word { Vec::new() } else { std::mem::take(&mut self.tasks[at].tells) };
            let completion = transfer.one(number);
            let watched = Watched { completion, at, word, tells, tell: self.tell.clone() };
            Arc::new(Watch(Mutex::new(Some(watched)))).look();
        }
        self.open += steps.len();
        self.transfers.push(transfer);
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
        if let (Deed::Send(_), true) = (task.deed, task.staged)
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
        if let (Deed::Receive(_), true) = (task.deed, task.staged)
            && let (Some(to), Some(span)) = (self.buffer(&task.step.destination), &task.span)
        {
            copy_runs(
                (&span.piece(), &dense(task.step.bytes)),
                (&to.span().piece(), &task.step.destination.runs),
            );
        }
    }
}

/// What a task says that had to.
const GAVE_UP: &str = "gave the plan up";

/// Whether both sides came, with different plans.
const fn tells_plans_apart(error: &TransferError) -> bool {
    matches!(error, TransferError::LayoutMismatch { .. } | TransferError::OrderMismatch { .. })
}

/// What both sides compare of each transfer: the beginning of the plan's own.
fn layout_of(plan: &Plan) -> Fingerprint {
    let whole = u128::from_be_bytes(plan.layout().0);
    Fingerprint((whole >> 64) as u64)
}

/// One stretch.
fn dense(bytes: u64) -> Runs {
    Runs { offset: 0, run_bytes: bytes, counts: Vec::new(), strides: Vec::new() }
}

/// Looks at the shards, and keeps everybody else from them.
fn check(plan: &Plan, shards: &ShardBuffers, here: TaskId) -> Result<Vec<Claim>, ReshardError> {
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

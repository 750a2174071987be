//! One member of this process: its communicator, its stream, its groups, and its end. Begin at [`LocalMember::step`].
#![allow(unsafe_code, reason = "asks for operations on memory that the listeners keep")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use muster_clock as clock;
use muster_gpu::{Gpu, GpuEvent, GpuStream};

use crate::error::CliqueError;
use crate::library::{CliqueId, Communicator, Nccl};
use crate::operation::CliqueOperation;
use crate::options::{CliqueEnding, CliqueOptions};
use crate::sync::lock;

/// How long the thread that ends a member sleeps between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// What a step of a member has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberProgress {
    /// Something has changed.
    Progress,
    /// Something is under way that only a later step will find ended.
    Waits,
    /// Nothing is under way.
    Idle,
    /// The member is ending, and makes no further step.
    Over,
}

/// The clique of a member, as the member calls it: from the thread of its device or that of a blocking start, without a lock.
pub trait MemberOwner: Send + Sync {
    /// Records that the member has started: all members of all processes have joined.
    fn on_member_ready(self: Arc<Self>);

    /// Records that the member's group of a batch has ended.
    fn on_group_ended(self: Arc<Self>, batch: u64);

    /// Records that the member cannot go on.
    fn on_member_failed(self: Arc<Self>, error: CliqueError);
}

/// The operations of a batch that concern one member.
pub struct Group {
    pub batch: u64,
    pub operations: Vec<CliqueOperation>,
}

/// How far the member is.
enum Phase {
    NotStarted,
    Starting,
    Ready,
    /// A group is being put on the stream.
    Launching(u64),
}

#[derive(Default)]
struct Groups {
    waiting: VecDeque<Group>,
    /// On the stream, in its order.
    on_stream: VecDeque<(u64, GpuEvent)>,
}

/// The communicator, and whether it is in use.
#[derive(Default)]
struct CommunicatorUse {
    communicator: Option<Communicator>,
    is_in_call: bool,
    is_ending: bool,
}

/// One member of this process.
pub struct LocalMember {
    nccl: &'static Nccl,
    owner: Weak<dyn MemberOwner>,
    pub gpu: Gpu,
    rank: usize,
    ranks: usize,
    id: CliqueId,
    options: CliqueOptions,
    give_up_start: Instant,
    stream: GpuStream,
    slot: Mutex<CommunicatorUse>,
    call_ended: Condvar,
    /// Only the thread of the device uses it.
    phase: Mutex<Phase>,
    groups: Mutex<Groups>,
    /// Whether a blocking start has returned.
    has_started: AtomicBool,
}

impl LocalMember {
    pub fn new(
        nccl: &'static Nccl,
        owner: &Weak<dyn MemberOwner>,
        gpu: &Gpu,
        (rank, ranks): (usize, usize),
        id: CliqueId,
        options: CliqueOptions,
    ) -> Result<Arc<Self>, CliqueError> {
        Ok(Arc::new(Self {
            nccl,
            owner: Weak::clone(owner),
            gpu: gpu.clone(),
            rank,
            ranks,
            id,
            options,
            give_up_start: clock::monotonic() + options.start_timeout,
            stream: GpuStream::new(gpu).map_err(|error| CliqueError::of_gpu(gpu, error))?,
            slot: Mutex::default(),
            call_ended: Condvar::new(),
            phase: Mutex::new(Phase::NotStarted),
            groups: Mutex::default(),
            has_started: AtomicBool::new(false),
        }))
    }

    /// Returns the rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Adds a group behind those that were added before.
    pub fn add_group(&self, group: Group) {
        lock(&self.groups).waiting.push_back(group);
    }

    /// Calls NCCL with the communicator; none once the member is ending.
    fn call<T>(&self, call: impl FnOnce(&mut Option<Communicator>) -> T) -> Option<T> {
        let mut slot = lock(&self.slot);
        if slot.is_ending {
            return None;
        }
        slot.is_in_call = true;
        let mut communicator = slot.communicator;
        drop(slot);
        let result = call(&mut communicator);
        let mut slot = lock(&self.slot);
        slot.is_in_call = false;
        self.call_ended.notify_all();
        if !slot.is_ending || !self.options.is_blocking {
            slot.communicator = communicator;
            return Some(result);
        }
        // Only a blocking call is not awaited by the end, which has taken the communicator if there was one.
        let is_late_start = !self.has_started.load(Ordering::Acquire);
        drop(slot);
        if is_late_start && let Some(started) = communicator {
            // Nothing was asked of it.
            let _is_gone = self.nccl.abort(started);
        }
        None
    }

    /// Makes one step, on the thread of the device.
    pub fn step(self: &Arc<Self>) -> MemberProgress {
        let Some(owner) = self.owner.upgrade() else { return MemberProgress::Over };
        let outcome = self.try_step(&owner);
        outcome.unwrap_or_else(|error| {
            owner.on_member_failed(error);
            MemberProgress::Over
        })
    }

    fn try_step(self: &Arc<Self>, owner: &Arc<dyn MemberOwner>) -> Result<MemberProgress, CliqueError> {
        if lock(&self.slot).is_ending {
            return Ok(MemberProgress::Over);
        }
        let mut phase = lock(&self.phase);
        match *phase {
            Phase::NotStarted => {
                self.begin_start()?;
                *phase = Phase::Starting;
                Ok(MemberProgress::Progress)
            }
            Phase::Starting if !self.is_ready()? => {
                if clock::monotonic() < self.give_up_start {
                    return Ok(MemberProgress::Waits);
                }
                let after = self.options.start_timeout;
                Err(CliqueError::StartTimedOut { members: self.ranks, after })
            }
            Phase::Starting => {
                *phase = Phase::Ready;
                drop(phase);
                Arc::clone(owner).on_member_ready();
                Ok(MemberProgress::Progress)
            }
            Phase::Launching(batch) => {
                if !self.is_ready()? {
                    return Ok(MemberProgress::Waits);
                }
                let event =
                    self.stream.record_event().map_err(|error| CliqueError::of_gpu(&self.gpu, error))?;
                lock(&self.groups).on_stream.push_back((batch, event));
                *phase = Phase::Ready;
                Ok(MemberProgress::Progress)
            }
            Phase::Ready => {
                let next = lock(&self.groups).waiting.pop_front();
                if let Some(group) = next {
                    let batch = group.batch;
                    self.launch(&group.operations)?;
                    *phase = Phase::Launching(batch);
                    return Ok(MemberProgress::Progress);
                }
                drop(phase);
                self.report_ended_groups(owner)
            }
        }
    }

    /// Reports the groups on the stream that have ended.
    fn report_ended_groups(&self, owner: &Arc<dyn MemberOwner>) -> Result<MemberProgress, CliqueError> {
        let mut outcome = MemberProgress::Idle;
        loop {
            let mut groups = lock(&self.groups);
            let Some((_, event)) = groups.on_stream.front() else { return Ok(outcome) };
            if !event.has_happened().map_err(|error| CliqueError::of_gpu(&self.gpu, error))? {
                drop(groups);
                // An operation that has failed stays on the stream.
                self.is_ready()?;
                return Ok(if outcome == MemberProgress::Idle { MemberProgress::Waits } else { outcome });
            }
            let Some((batch, _)) = groups.on_stream.pop_front() else { return Ok(outcome) };
            drop(groups);
            outcome = MemberProgress::Progress;
            Arc::clone(owner).on_group_ended(batch);
        }
    }

    /// Returns whether the communicator has started and no call is in progress; false also if the member is ending, which the next step
    /// finds.
    fn is_ready(&self) -> Result<bool, CliqueError> {
        if self.options.is_blocking && !self.has_started.load(Ordering::Acquire) {
            return Ok(false);
        }
        let state = self.call(|communicator| communicator.map_or(Ok(false), |of| self.nccl.is_ready(of)));
        Ok(state.unwrap_or(Ok(false))?)
    }

    fn begin_start(self: &Arc<Self>) -> Result<(), CliqueError> {
        if !self.options.is_blocking {
            return self.start();
        }
        let member = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("muster-nccl-start".to_owned()).spawn(move || {
            let started = member.start();
            if let (Err(error), Some(owner)) = (started, member.owner.upgrade()) {
                owner.on_member_failed(error);
            }
        });
        spawned.map(drop).map_err(CliqueError::no_thread)
    }

    fn start(&self) -> Result<(), CliqueError> {
        let _context = self.gpu.enter().map_err(|error| CliqueError::of_gpu(&self.gpu, error))?;
        let started = self.call(|communicator| {
            let (started, result) =
                self.nccl.start(&self.id, self.rank, self.ranks, self.options.is_blocking);
            *communicator = started;
            result
        });
        if let Some(result) = started {
            result?;
            self.has_started.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Puts a group on the stream, or begins to.
    fn launch(&self, operations: &[CliqueOperation]) -> Result<(), CliqueError> {
        let _context = self.gpu.enter().map_err(|error| CliqueError::of_gpu(&self.gpu, error))?;
        let launched = self.call(|communicator| {
            let Some(communicator) = *communicator else { return Ok(()) };
            self.nccl.begin_group()?;
            let added = operations.iter().try_for_each(|operation| {
                // SAFETY: the caller of `GpuClique::run` guarantees the memory until its listener is called.
                unsafe { self.nccl.add_to_group(communicator, operation, self.stream.raw()) }
            });
            // A group that was begun must be ended. If a call failed, its end launches nothing.
            let ended = self.nccl.end_group();
            added.and(ended)
        });
        Ok(launched.unwrap_or(Ok(()))?)
    }

    /// Ends the communicator, and returns when no operation of it can touch memory any more. It waits as long as that takes.
    pub fn end(&self, is_orderly: bool) {
        let limit = clock::monotonic() + self.options.end_timeout;
        let mut slot = lock(&self.slot);
        slot.is_ending = true;
        // A blocking call may wait for another member: the abort ends it. A blocking start has no communicator yet.
        while slot.is_in_call && !self.options.is_blocking {
            slot = self.call_ended.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
        let communicator = slot.communicator.take();
        drop(slot);
        if let Some(communicator) = communicator {
            if !(is_orderly && self.end_in_order(communicator, limit)) {
                self.stop_operations(communicator, limit);
            }
            // The call that was interrupted puts nothing more on the stream.
            let mut slot = lock(&self.slot);
            while slot.is_in_call {
                slot = self.call_ended.wait(slot).unwrap_or_else(PoisonError::into_inner);
            }
            drop(slot);
            self.wait_for_idle_stream();
        }
        // Events are destroyed without the lock.
        let groups = std::mem::take(&mut *lock(&self.groups));
        drop(groups);
    }

    /// Ends an unused communicator so that others notice nothing. Returns whether it has ended.
    fn end_in_order(&self, communicator: Communicator, limit: Instant) -> bool {
        let Ok(_context) = self.gpu.enter() else { return false };
        self.nccl.finalize(communicator).is_ok()
            && self.wait_until_ready(communicator, limit)
            && self.nccl.destroy(communicator).is_ok()
    }

    fn stop_operations(&self, communicator: Communicator, limit: Instant) {
        let _context = self.gpu.enter();
        if self.options.ending == CliqueEnding::RevokeThenAbort && self.nccl.revoke(communicator) {
            self.wait_until_ready(communicator, limit);
        }
        if let Err(error) = self.nccl.abort(communicator) {
            tracing::error!(gpu = self.gpu.ordinal(), %error, "a communicator cannot be aborted");
        }
    }

    fn wait_until_ready(&self, communicator: Communicator, limit: Instant) -> bool {
        loop {
            match self.nccl.is_ready(communicator) {
                Ok(true) => return true,
                Ok(false) if clock::monotonic() < limit => std::thread::sleep(PAUSE),
                _ => return false,
            }
        }
    }

    /// Waits until the stream is idle: the proof that no operation touches memory any more. A device that is lost runs nothing.
    fn wait_for_idle_stream(&self) {
        let mut reports = clock::monotonic() + self.options.end_timeout;
        loop {
            match self.stream.is_idle() {
                Ok(true) => return,
                Err(error) if error.is_sticky() => return,
                _ => std::thread::sleep(PAUSE),
            }
            if clock::monotonic() >= reports {
                reports += Duration::from_secs(60);
                let (gpu, rank) = (self.gpu.ordinal(), self.rank);
                tracing::error!(
                    gpu,
                    rank,
                    "operations of a clique do not end after its abort; their memory stays in use"
                );
            }
        }
    }
}

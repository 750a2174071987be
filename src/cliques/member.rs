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
use crate::options::{CliqueOptions, StopMethod};
use crate::sync::lock;

/// How long the thread that ends a member sleeps between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// The outcome of a step of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberProgress {
    /// Something has changed.
    Progress,
    /// Something is under way that only a later step will find ended.
    Pending,
    /// Nothing is under way.
    Idle,
    /// The member is ending, and makes no further step.
    Ended,
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

/// A call of NCCL in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallKind {
    /// It ends without other members, so the end of the member waits for it.
    Brief,
    /// It may wait for other members. The abort of the communicator ends it.
    Blocking,
}

/// The communicator, and whether it is in use.
#[derive(Default)]
struct CommunicatorUse {
    communicator: Option<Communicator>,
    call: Option<CallKind>,
    is_ending: bool,
}

/// A call of NCCL that lasts until this is dropped.
struct CommunicatorCall<'a> {
    member: &'a LocalMember,
    communicator: Option<Communicator>,
}

impl CommunicatorCall<'_> {
    /// Records that the call may wait for other members from here on, if calls block.
    fn may_block(&self) {
        if self.member.options.is_blocking {
            lock(&self.member.communicator_use).call = Some(CallKind::Blocking);
            self.member.call_changed.notify_all();
        }
    }
}

impl Drop for CommunicatorCall<'_> {
    fn drop(&mut self) {
        lock(&self.member.communicator_use).call = None;
        self.member.call_changed.notify_all();
    }
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
    start_deadline: Instant,
    stream: GpuStream,
    communicator_use: Mutex<CommunicatorUse>,
    call_changed: Condvar,
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
            start_deadline: clock::monotonic() + options.start_timeout,
            stream: GpuStream::new(gpu).map_err(|error| CliqueError::of_gpu(gpu, error))?,
            communicator_use: Mutex::default(),
            call_changed: Condvar::new(),
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

    /// Begins a call of NCCL; none once the member is ending.
    fn begin_call(&self) -> Option<CommunicatorCall<'_>> {
        let mut in_use = lock(&self.communicator_use);
        if in_use.is_ending {
            return None;
        }
        in_use.call = Some(CallKind::Brief);
        Some(CommunicatorCall { member: self, communicator: in_use.communicator })
    }

    /// Makes one step, on the thread of the device.
    pub fn step(self: &Arc<Self>) -> MemberProgress {
        let Some(owner) = self.owner.upgrade() else { return MemberProgress::Ended };
        let outcome = self.try_step(&owner);
        outcome.unwrap_or_else(|error| {
            owner.on_member_failed(error);
            MemberProgress::Ended
        })
    }

    fn try_step(self: &Arc<Self>, owner: &Arc<dyn MemberOwner>) -> Result<MemberProgress, CliqueError> {
        if lock(&self.communicator_use).is_ending {
            return Ok(MemberProgress::Ended);
        }
        let mut phase = lock(&self.phase);
        match *phase {
            Phase::NotStarted => {
                self.begin_start()?;
                *phase = Phase::Starting;
                Ok(MemberProgress::Progress)
            }
            Phase::Starting if self.is_ready()? != Some(true) => {
                if clock::monotonic() < self.start_deadline {
                    return Ok(MemberProgress::Pending);
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
                if self.is_ready()? != Some(true) {
                    return Ok(MemberProgress::Pending);
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
            let groups = lock(&self.groups);
            let Some((_, event)) = groups.on_stream.front() else { return Ok(outcome) };
            let has_happened = event.has_happened().map_err(|error| CliqueError::of_gpu(&self.gpu, error))?;
            drop(groups);
            // A group that an abort has cut short has left the stream, too; and an operation that has failed may stay on it.
            if self.is_ready()?.is_none() {
                return Ok(MemberProgress::Ended);
            }
            if !has_happened {
                return Ok(if outcome == MemberProgress::Idle { MemberProgress::Pending } else { outcome });
            }
            let ended = lock(&self.groups).on_stream.pop_front();
            let Some((batch, _)) = ended else { return Ok(outcome) };
            outcome = MemberProgress::Progress;
            Arc::clone(owner).on_group_ended(batch);
        }
    }

    /// Returns whether the communicator has started and no call is in progress; none if the member is ending.
    fn is_ready(&self) -> Result<Option<bool>, CliqueError> {
        if self.options.is_blocking && !self.has_started.load(Ordering::Acquire) {
            return Ok(Some(false));
        }
        let Some(call) = self.begin_call() else { return Ok(None) };
        let is_ready = call.communicator.map_or(Ok(false), |of| self.nccl.is_ready(of))?;
        Ok(Some(is_ready))
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
        let Some(call) = self.begin_call() else { return Ok(()) };
        call.may_block();
        let (started, result) = self.nccl.start(&self.id, self.rank, self.ranks, self.options.is_blocking);
        let mut in_use = lock(&self.communicator_use);
        // The end waits for a start that does not block, and takes its communicator. It has not waited for a blocking one.
        let is_late = in_use.is_ending && self.options.is_blocking;
        if !is_late {
            in_use.communicator = started;
        }
        drop(in_use);
        if let Some(started) = started.filter(|_| is_late) {
            // Nothing was asked of it.
            let _is_gone = self.nccl.abort(started);
            return Ok(());
        }
        result?;
        self.has_started.store(true, Ordering::Release);
        Ok(())
    }

    /// Puts a group on the stream, or begins to.
    fn launch(&self, operations: &[CliqueOperation]) -> Result<(), CliqueError> {
        let _context = self.gpu.enter().map_err(|error| CliqueError::of_gpu(&self.gpu, error))?;
        let Some(call) = self.begin_call() else { return Ok(()) };
        let Some(communicator) = call.communicator else { return Ok(()) };
        self.nccl.begin_group()?;
        let added = operations.iter().try_for_each(|operation| {
            // SAFETY: the caller of `GpuClique::run` guarantees the memory until its listener is called.
            unsafe { self.nccl.add_to_group(communicator, operation, self.stream.raw()) }
        });
        call.may_block();
        // A group that was begun must be ended. If a call failed, its end launches nothing.
        let ended = self.nccl.end_group();
        Ok(added.and(ended)?)
    }

    /// Ends the communicator, and returns when no operation of it can touch memory any more. It waits as long as that takes.
    pub fn end(&self, is_orderly: bool) {
        let mut in_use = lock(&self.communicator_use);
        in_use.is_ending = true;
        let limit = clock::monotonic() + self.options.end_timeout;
        loop {
            // An abort ends a blocking call, but only one that NCCL is in: most end by themselves, and one that has not after the limit
            // is there. A blocking start has no communicator yet, and is not awaited.
            let left = limit.saturating_duration_since(clock::monotonic());
            let wait = match in_use.call {
                Some(CallKind::Brief) => Duration::MAX,
                Some(CallKind::Blocking) if in_use.communicator.is_some() => left,
                _ => Duration::ZERO,
            };
            if wait.is_zero() {
                break;
            }
            let woken = self.call_changed.wait_timeout(in_use, wait).unwrap_or_else(PoisonError::into_inner);
            in_use = woken.0;
        }
        let communicator = in_use.communicator.take();
        drop(in_use);
        if let Some(communicator) = communicator {
            if !(is_orderly && self.end_in_order(communicator)) {
                self.stop_operations(communicator);
            }
            // The call that was interrupted puts nothing more on the stream.
            let mut in_use = lock(&self.communicator_use);
            while in_use.call.is_some() {
                in_use = self.call_changed.wait(in_use).unwrap_or_else(PoisonError::into_inner);
            }
            drop(in_use);
            self.wait_for_idle_stream();
        }
        // Events are destroyed without the lock.
        let groups = std::mem::take(&mut *lock(&self.groups));
        drop(groups);
    }

    /// Ends an unused communicator so that others notice nothing. Returns false if it must be aborted.
    fn end_in_order(&self, communicator: Communicator) -> bool {
        let Ok(_context) = self.gpu.enter() else { return false };
        if self.nccl.finalize(communicator).is_err() || !self.wait_until_ready(communicator) {
            return false;
        }
        // It is gone also if this fails.
        if let Err(error) = self.nccl.destroy(communicator) {
            tracing::error!(gpu = self.gpu.ordinal(), %error, "a communicator cannot be destroyed");
        }
        true
    }

    fn stop_operations(&self, communicator: Communicator) {
        let _context = self.gpu.enter();
        // Of a blocking call, only an abort is known to end it.
        let may_revoke = self.options.stop_method == StopMethod::RevokeThenAbort && !self.options.is_blocking;
        if may_revoke && self.nccl.revoke(communicator) {
            self.wait_until_ready(communicator);
        }
        if let Err(error) = self.nccl.abort(communicator) {
            tracing::error!(gpu = self.gpu.ordinal(), %error, "a communicator cannot be aborted");
        }
    }

    /// Waits until no call of the communicator is in progress, at most for the limit of a step of the end. Returns whether that is so.
    fn wait_until_ready(&self, communicator: Communicator) -> bool {
        let limit = clock::monotonic() + self.options.end_timeout;
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

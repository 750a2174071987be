//! The state of a clique in this process, and its batches. Begin at [`GpuClique::start`] and [`GpuClique::run`].
#![allow(unsafe_code, reason = "passes on what its callers promise of the memory")]

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use muster_gpu::Gpu;

use crate::device_thread::{DeviceThread, serve};
use crate::error::CliqueError;
use crate::key::{CliqueMember, GpuCliqueKey};
use crate::library::{CliqueId, Nccl};
use crate::member::{Group, LocalMember, MemberOwner};
use crate::operation::CliqueOperation;
use crate::options::CliqueOptions;
use crate::sync::lock;

type OutcomeListener = Box<dyn FnOnce(Result<(), CliqueError>) + Send>;

/// A batch whose groups have not all ended.
struct PendingBatch {
    groups_left: usize,
    then: OutcomeListener,
    /// Operations end with their clique only, so it lives as long.
    _clique: Arc<GpuClique>,
}

#[derive(Default)]
struct CliqueState {
    /// The members of this process that have not started.
    starting: usize,
    ready_listeners: Vec<OutcomeListener>,
    ended_listeners: Vec<OutcomeListener>,
    batches: HashMap<u64, PendingBatch>,
    next_batch: u64,
    is_ended: bool,
}

/// A clique, as the members of this process see it. Without a batch, it ends when its last owner drops it.
pub struct GpuClique {
    key: GpuCliqueKey,
    options: CliqueOptions,
    members: OnceLock<Vec<Arc<LocalMember>>>,
    /// The threads that serve the members.
    threads: OnceLock<Vec<Arc<DeviceThread>>>,
    state: Mutex<CliqueState>,
    end: OnceLock<CliqueError>,
}

impl std::fmt::Debug for GpuClique {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuClique").field("key", &self.key).field("end", &self.end).finish_non_exhaustive()
    }
}

impl GpuClique {
    /// Joins with the members of this process, each with its device, and returns at once: [`GpuClique::when_ready`] tells when all members
    /// of all processes have joined.
    ///
    /// # Errors
    /// Returns [`CliqueError::NotAMember`] or [`CliqueError::GivenTwice`], or why no stream or thread can be had.
    pub fn start(
        nccl: &'static Nccl,
        key: &GpuCliqueKey,
        id: CliqueId,
        local: &[(CliqueMember, Gpu)],
        options: CliqueOptions,
    ) -> Result<Arc<Self>, CliqueError> {
        let ranks: Option<Vec<_>> = local.iter().map(|(member, _)| key.rank_of(member)).collect();
        let ranks = ranks.filter(|ranks| !ranks.is_empty()).ok_or(CliqueError::NotAMember)?;
        let mut given = BTreeSet::new();
        if let Some((twice, _)) = local.iter().find(|(member, _)| !given.insert(*member)) {
            return Err(CliqueError::GivenTwice(*twice));
        }
        let clique = Arc::new(Self {
            key: key.clone(),
            options,
            members: OnceLock::new(),
            threads: OnceLock::new(),
            state: Mutex::new(CliqueState { starting: local.len(), ..CliqueState::default() }),
            end: OnceLock::new(),
        });
        let weak: Weak<Self> = Arc::downgrade(&clique);
        let owner: Weak<dyn MemberOwner> = weak;
        let of = key.members().len();
        let members: Vec<_> = local
            .iter()
            .zip(ranks)
            .map(|((_, gpu), rank)| LocalMember::new(nccl, &owner, gpu, (rank, of), id, options))
            .collect::<Result<_, _>>()?;
        let _once = clique.members.set(members);
        // Without a thread, the clique is dropped, which ends the members that have one.
        let threads = clique.members().iter().map(serve).collect::<Result<_, _>>();
        let _once = clique.threads.set(threads.map_err(CliqueError::no_thread)?);
        Ok(clique)
    }

    /// Returns the members of this process.
    fn members(&self) -> &[Arc<LocalMember>] {
        self.members.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the members of all processes.
    #[must_use]
    pub const fn key(&self) -> &GpuCliqueKey {
        &self.key
    }

    /// Returns why the clique ends or has ended; none while it can be used.
    #[must_use]
    pub fn end_reason(&self) -> Option<&CliqueError> {
        self.end.get()
    }

    /// Calls `then` once all members have joined, or with the reason for which they never will. At once, if that is known.
    pub fn when_ready(&self, then: impl FnOnce(Result<(), CliqueError>) + Send + 'static) {
        let mut state = lock(&self.state);
        if state.starting > 0 && self.end.get().is_none() {
            return state.ready_listeners.push(Box::new(then));
        }
        drop(state);
        then(self.outcome());
    }

    /// Calls `then` with the reason of the end once no operation of the clique can touch memory any more.
    pub fn when_ended(&self, then: impl FnOnce(Result<(), CliqueError>) + Send + 'static) {
        let mut state = lock(&self.state);
        if !state.is_ended {
            return state.ended_listeners.push(Box::new(then));
        }
        drop(state);
        then(self.outcome());
    }

    fn outcome(&self) -> Result<(), CliqueError> {
        self.end.get().cloned().map_or(Ok(()), Err)
    }

    /// Runs a batch: one group of each communicator, behind those of earlier batches. `then` is called on another thread once all its
    /// operations have ended, or with the reason of the clique's end once none can touch memory any more. If the clique has ended
    /// already, serves no further batch, or an operation names no member of this process, it is called at once. `then` must not wait.
    ///
    /// # Safety
    /// Until `then` is called, the memory stays allocated on the device of the operation's rank, nothing writes the bytes that are sent,
    /// and nothing else uses the bytes that are received.
    pub unsafe fn run(
        self: &Arc<Self>,
        operations: &[CliqueOperation],
        then: impl FnOnce(Result<(), CliqueError>) + Send + 'static,
    ) {
        let members = self.members();
        let mut groups: Vec<Vec<CliqueOperation>> = vec![Vec::new(); members.len()];
        for operation in operations {
            let place = members.iter().position(|member| member.rank() == operation.rank);
            let (Some(place), true) = (place, operation.peer < self.key.members().len()) else {
                return then(Err(CliqueError::NotAMember));
            };
            groups[place].push(*operation);
        }
        let groups_left = groups.iter().filter(|group| !group.is_empty()).count();
        let mut state = lock(&self.state);
        if self.end.get().is_some() || groups_left == 0 {
            drop(state);
            return then(self.outcome());
        }
        if !self.options.is_reused && state.next_batch > 0 {
            drop(state);
            return then(Err(serves_one_batch()));
        }
        let batch = state.next_batch;
        state.next_batch += 1;
        state
            .batches
            .insert(batch, PendingBatch { groups_left, then: Box::new(then), _clique: Arc::clone(self) });
        // Under the lock, so that all members have the batches in one order.
        for (member, operations) in members.iter().zip(groups) {
            if !operations.is_empty() {
                member.add_group(Group { batch, operations });
            }
        }
        drop(state);
        self.wake_threads();
    }

    fn wake_threads(&self) {
        self.threads.get().into_iter().flatten().for_each(|thread| thread.wake());
    }

    /// Ends the clique, with the first reason that is given: a start that waits for members, and all batches. It waits for nothing.
    /// With [`CliqueError::Ended`] and without a batch, the communicators end so that other processes notice nothing.
    pub fn end(self: &Arc<Self>, reason: CliqueError) {
        let mut state = lock(&self.state);
        if self.end.set(reason).is_err() {
            return;
        }
        let listeners = std::mem::take(&mut state.ready_listeners);
        let is_orderly = matches!(self.end.get(), Some(CliqueError::Ended(_)))
            && state.batches.is_empty()
            && state.starting == 0;
        drop(state);
        let clique = Arc::clone(self);
        end_members(self.members(), is_orderly, move || clique.on_members_ended());
        self.wake_threads();
        tell_all(listeners, &self.outcome());
    }

    fn on_members_ended(&self) {
        let mut state = lock(&self.state);
        state.is_ended = true;
        let batches = std::mem::take(&mut state.batches);
        let listeners = std::mem::take(&mut state.ended_listeners);
        drop(state);
        tell_all(batches.into_values().map(|batch| batch.then).chain(listeners), &self.outcome());
    }
}

fn serves_one_batch() -> CliqueError {
    CliqueError::Ended("a clique serves one batch".to_owned())
}

/// Calls listeners. A panic of one must not end the thread of a device, which serves others too.
fn tell_all(listeners: impl IntoIterator<Item = OutcomeListener>, outcome: &Result<(), CliqueError>) {
    for then in listeners {
        if catch_unwind(AssertUnwindSafe(|| then(outcome.clone()))).is_err() {
            tracing::error!("a listener of a clique has panicked");
        }
    }
}

impl MemberOwner for GpuClique {
    fn on_member_ready(self: Arc<Self>) {
        let mut state = lock(&self.state);
        state.starting -= 1;
        if state.starting > 0 || self.end.get().is_some() {
            return;
        }
        let listeners = std::mem::take(&mut state.ready_listeners);
        drop(state);
        tell_all(listeners, &Ok(()));
    }

    fn on_group_ended(self: Arc<Self>, batch: u64) {
        let mut state = lock(&self.state);
        // The end answers all batches: this group may have been cut short.
        if self.end.get().is_some() {
            return;
        }
        let Some(found) = state.batches.get_mut(&batch) else { return };
        found.groups_left -= 1;
        let ended = if found.groups_left == 0 { state.batches.remove(&batch) } else { None };
        let is_unused = state.batches.is_empty();
        drop(state);
        let Some(PendingBatch { then, .. }) = ended else { return };
        tell_all([then], &Ok(()));
        if is_unused && !self.options.is_reused {
            self.end(serves_one_batch());
        }
    }

    fn on_member_failed(self: Arc<Self>, error: CliqueError) {
        self.end(error);
    }
}

impl Drop for GpuClique {
    fn drop(&mut self) {
        // The threads of an end that has begun own the clique, so it has not begun.
        let reason = CliqueError::Ended("its owner has dropped it".to_owned());
        if self.end.set(reason).is_err() {
            return;
        }
        let (outcome, state) = (self.outcome(), std::mem::take(&mut *lock(&self.state)));
        let at_end = outcome.clone();
        end_members(self.members(), state.starting == 0, move || tell_all(state.ended_listeners, &at_end));
        self.wake_threads();
        tell_all(state.ready_listeners, &outcome);
    }
}

/// The members that have not ended, and what is called after the last end.
struct EndsLeft<F> {
    count: AtomicUsize,
    then: Mutex<Option<F>>,
}

impl<F: FnOnce()> EndsLeft<F> {
    /// Ends a member. One that panics has proved nothing, so nothing is called then.
    fn end_member(&self, member: &LocalMember, is_orderly: bool) {
        member.end(is_orderly);
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            let then = lock(&self.then).take();
            then.into_iter().for_each(|then| then());
        }
    }
}

/// Ends all members at the same time, each on a thread of its own, because NCCL's abort may wait for that of another member. Calls
/// `then` after the last end.
fn end_members(members: &[Arc<LocalMember>], is_orderly: bool, then: impl FnOnce() + Send + 'static) {
    if members.is_empty() {
        return then();
    }
    let left = Arc::new(EndsLeft { count: AtomicUsize::new(members.len()), then: Mutex::new(Some(then)) });
    let mut without_thread = Vec::new();
    for member in members {
        let (of_thread, left) = (Arc::clone(member), Arc::clone(&left));
        let end = move || left.end_member(&of_thread, is_orderly);
        if let Err(error) = std::thread::Builder::new().name("muster-nccl-end".to_owned()).spawn(end) {
            tracing::warn!(%error, "no thread can be started to end a member of a clique: its caller does, and waits");
            without_thread.push(member);
        }
    }
    for member in without_thread {
        left.end_member(member, is_orderly);
    }
}

//! The state of a clique in this process, and its batches. Begin at [`GpuClique::start`] and [`GpuClique::run`].
#![allow(unsafe_code, reason = "passes on what its callers promise of the memory")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    /// The members whose operations may still touch memory.
    live: AtomicUsize,
    state: Mutex<CliqueState>,
    end: OnceLock<CliqueError>,
    are_members_ending: AtomicBool,
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
    /// Returns [`CliqueError::NotAMember`], or why no stream or thread can be had.
    pub fn start(
        nccl: &'static Nccl,
        key: &GpuCliqueKey,
        id: CliqueId,
        local: &[(CliqueMember, Gpu)],
        options: CliqueOptions,
    ) -> Result<Arc<Self>, CliqueError> {
        let ranks: Option<Vec<_>> = local.iter().map(|(member, _)| key.rank_of(member)).collect();
        let ranks = ranks.filter(|ranks| !ranks.is_empty()).ok_or(CliqueError::NotAMember)?;
        let clique = Arc::new(Self {
            key: key.clone(),
            options,
            members: OnceLock::new(),
            threads: OnceLock::new(),
            live: AtomicUsize::new(local.len()),
            state: Mutex::new(CliqueState { starting: local.len(), ..CliqueState::default() }),
            end: OnceLock::new(),
            are_members_ending: AtomicBool::new(false),
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
    /// already, or an operation names no member of this process, it is called at once. `then` must not wait.
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
        drop(state);
        for then in listeners {
            then(self.outcome());
        }
        self.end_members();
    }

    /// Ends all members at the same time: NCCL's abort may wait for that of another member.
    fn end_members(self: &Arc<Self>) {
        if self.are_members_ending.swap(true, Ordering::AcqRel) {
            return;
        }
        let state = lock(&self.state);
        let is_orderly = matches!(self.end.get(), Some(CliqueError::Ended(_)))
            && state.batches.is_empty()
            && state.starting == 0;
        drop(state);
        for member in self.members() {
            let clique = Arc::clone(self);
            end_on_thread(member, is_orderly, move || clique.on_member_ended());
        }
    }

    fn on_member_ended(&self) {
        if self.live.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let mut state = lock(&self.state);
        state.is_ended = true;
        let batches = std::mem::take(&mut state.batches);
        let listeners = std::mem::take(&mut state.ended_listeners);
        drop(state);
        for then in batches.into_values().map(|batch| batch.then).chain(listeners) {
            then(self.outcome());
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
        for then in listeners {
            then(Ok(()));
        }
    }

    fn on_group_ended(self: Arc<Self>, batch: u64) {
        let mut state = lock(&self.state);
        let Some(found) = state.batches.get_mut(&batch) else { return };
        found.groups_left -= 1;
        let ended = if found.groups_left == 0 { state.batches.remove(&batch) } else { None };
        let is_unused = state.batches.is_empty();
        drop(state);
        let Some(PendingBatch { then, .. }) = ended else { return };
        then(Ok(()));
        if is_unused && !self.options.is_reused {
            self.end(CliqueError::Ended("a clique serves one batch".to_owned()));
        }
    }

    fn on_member_failed(self: Arc<Self>, error: CliqueError) {
        self.end(error);
    }
}

impl Drop for GpuClique {
    fn drop(&mut self) {
        if !self.are_members_ending.swap(true, Ordering::AcqRel) {
            let is_orderly = lock(&self.state).starting == 0;
            for member in self.members() {
                end_on_thread(member, is_orderly, || {});
            }
        }
    }
}

/// Ends a member on a thread of its own, and calls `then`.
fn end_on_thread(member: &Arc<LocalMember>, is_orderly: bool, then: impl FnOnce() + Send + 'static) {
    let member = Arc::clone(member);
    let end = move || {
        member.end(is_orderly);
        then();
    };
    if let Err(error) = std::thread::Builder::new().name("muster-nccl-end".to_owned()).spawn(end) {
        tracing::error!(%error, "no thread can be started to end a clique; its memory stays in use");
    }
}

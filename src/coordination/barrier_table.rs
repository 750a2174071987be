//! The table of a run's barriers. It holds each instance in progress, with the state of every member, and the result
//! and the counter of each barrier's last ended instance.
//!
//! The table decides nothing: `barrier_arrival.rs` has the rules of arrival, and `barrier_completion.rs` the rules of
//! completion. Registration, shutdown and device exchange are barriers of the service itself. They are separate
//! variants of [`BarrierKey`], so a client cannot name them by an id. Begin at [`BarrierTable`].
//!
//! Invariants:
//! - In an instance in progress, the state of a member is `Arrived` exactly as long as the member's call waits. If
//!   the caller hangs up, the arrival is removed.
//! - An instance in progress has at least one arrival. If the last caller hangs up, the instance is removed.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::barrier_record::{BarrierKind, REGISTRATION_BARRIER_ID};
use super::deferred_free::DeferredFree;
use super::failure::Failure;
use super::ids::{CallId, TaskId, TaskIncarnation, Timestamp};
use super::request_reply::TaskSet;
use crate::cow::CowMap;

/// The identity of a barrier within a run. The service's own barriers are separate variants, so no client can
/// reach them by choosing an id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum BarrierKey {
    /// All tasks register together.
    Registration,
    /// All tasks shut down together.
    Shutdown,
    /// All tasks exchange their devices (generation A).
    Devices,
    /// A barrier that clients name.
    Named(Arc<str>),
}

impl BarrierKey {
    pub fn kind(&self) -> BarrierKind {
        match self {
            Self::Registration => BarrierKind::Registration,
            Self::Shutdown => BarrierKind::Shutdown,
            Self::Devices => BarrierKind::Devices,
            Self::Named(_) => BarrierKind::Client,
        }
    }

    /// Returns the id by which clients know the barrier. The service's own ids are those of the C++ service.
    pub fn barrier_id_for_clients(&self, service: impl fmt::Display) -> Arc<str> {
        match self {
            Self::Registration => REGISTRATION_BARRIER_ID.into(),
            Self::Shutdown => format!("Shutdown::{service}").into(),
            Self::Devices => format!("WaitForAllTasks::{service}").into(),
            Self::Named(id) => Arc::clone(id),
        }
    }

    pub fn is_client_barrier(&self) -> bool {
        matches!(self, Self::Named(_))
    }
}

/// The tasks that take part in a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum BarrierMembers {
    /// Every task of the job; holds their number.
    All(u32),
    /// These tasks.
    Some(TaskSet),
}

impl BarrierMembers {
    pub fn len(&self) -> usize {
        match self {
            Self::All(n) => *n as usize,
            Self::Some(set) => set.ids().len(),
        }
    }

    pub fn position_of(&self, task: TaskId) -> Option<usize> {
        match self {
            Self::All(n) => usize::try_from(task.0).ok().filter(|&p| p < *n as usize),
            Self::Some(set) => set.position(task),
        }
    }

    pub fn task_at(&self, position: usize) -> TaskId {
        match self {
            Self::All(_) => TaskId(i32::try_from(position).unwrap_or(i32::MAX)),
            Self::Some(set) => set.ids()[position],
        }
    }

    fn retained_bytes(&self) -> usize {
        match self {
            Self::All(_) => 0,
            Self::Some(set) => size_of_val(set.ids()),
        }
    }
}

/// The kind of call that waits at a barrier; it decides the form of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ArrivalCallKind {
    Arrive,
    Register(TaskIncarnation),
    ShutDown,
    ExchangeDevices,
}

/// The waiting call of a member that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArrivedCall {
    pub call: CallId,
    pub purpose: ArrivalCallKind,
    pub at: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum MemberState {
    /// The instance waits for the member.
    Missing,
    /// The instance does not wait for the member: it registered after the instance began, or it was excluded.
    NotRequired,
    /// The member has arrived.
    Arrived(ArrivedCall),
}

/// One instance of a barrier, in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BarrierInstance {
    pub counter: i64,
    pub members: BarrierMembers,
    pub began: Timestamp,
    pub deadline: Timestamp,
    pub first: TaskId,
    member_states: Vec<MemberState>,
    missing: usize,
    arrived: usize,
}

impl BarrierInstance {
    pub fn new(
        counter: i64,
        members: BarrierMembers,
        began: Timestamp,
        deadline: Timestamp,
        first: TaskId,
    ) -> Self {
        let size = members.len();
        let slots = vec![MemberState::Missing; size];
        Self { counter, members, began, deadline, first, member_states: slots, missing: size, arrived: 0 }
    }

    pub fn member_state(&self, task: TaskId) -> Option<MemberState> {
        self.members.position_of(task).map(|p| self.member_states[p])
    }

    /// Sets the state of a member and returns the old one; `None` if the task is no member.
    pub fn set_member_state(&mut self, task: TaskId, slot: MemberState) -> Option<MemberState> {
        let position = self.members.position_of(task)?;
        let old = std::mem::replace(&mut self.member_states[position], slot);
        self.missing += usize::from(slot == MemberState::Missing);
        self.missing -= usize::from(old == MemberState::Missing);
        self.arrived += usize::from(matches!(slot, MemberState::Arrived(_)));
        self.arrived -= usize::from(matches!(old, MemberState::Arrived(_)));
        Some(old)
    }

    /// Returns the number of members that the instance waits for.
    pub fn missing_count(&self) -> usize {
        self.missing
    }

    /// Returns the number of members that have arrived.
    pub fn arrived_count(&self) -> usize {
        self.arrived
    }

    /// Returns the members that the instance waits for.
    pub fn missing_tasks(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.tasks_with_state(|slot| slot == MemberState::Missing)
    }

    /// Returns the members that have not arrived, whether the instance waits for them or not.
    pub fn not_arrived_tasks(&self) -> impl Iterator<Item = TaskId> + '_ {
        let absent = self.member_states.len() - self.arrived;
        self.tasks_with_state(|slot| !matches!(slot, MemberState::Arrived(_))).take(absent)
    }

    /// Returns the members that have arrived, with their calls.
    pub fn arrivals(&self) -> impl Iterator<Item = (TaskId, ArrivedCall)> + '_ {
        self.arrivals_in_range(0, self.member_states.len())
    }

    /// Returns those of [`Self::arrivals`] whose positions among the members are in `from..to`.
    pub fn arrivals_in_range(
        &self,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = (TaskId, ArrivedCall)> + '_ {
        self.member_states[from..to].iter().zip(from..).filter_map(|(slot, position)| match slot {
            MemberState::Arrived(arrival) => Some((self.members.task_at(position), *arrival)),
            _ => None,
        })
    }

    /// Returns the members that are in `tasks`, which must be ascending.
    pub fn members_among(&self, tasks: &[TaskId]) -> Vec<TaskId> {
        if tasks.len() <= self.members.len() {
            return tasks.iter().copied().filter(|id| self.members.position_of(*id).is_some()).collect();
        }
        let members = (0..self.members.len()).map(|position| self.members.task_at(position));
        members.filter(|id| tasks.binary_search(id).is_ok()).collect()
    }

    fn tasks_with_state(
        &self,
        wanted: impl Fn(MemberState) -> bool + 'static,
    ) -> impl Iterator<Item = TaskId> + '_ {
        let slots = self.member_states.iter().enumerate();
        slots.filter(move |(_, slot)| wanted(**slot)).map(|(position, _)| self.members.task_at(position))
    }
}

/// The last ended instance of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndedBarrier {
    pub counter: i64,
    pub members: BarrierMembers,
    pub result: Result<(), Arc<Failure>>,
    /// The members without which it passed and that have not arrived at a later instance since. Their
    /// counters are behind the service's.
    pub lagging: BTreeSet<TaskId>,
    /// The time at which it ended.
    at: Timestamp,
    /// A number that grows with every ended instance; the smallest one belongs to the oldest.
    sequence: u64,
}

impl EndedBarrier {
    /// Returns whether this is instance 0, it has passed, and the task, which registered at `since`, took
    /// part in it.
    pub fn is_passed_first_instance_with(&self, task: TaskId, since: Timestamp) -> bool {
        self.counter == 0
            && self.result.is_ok()
            && since < self.at
            && self.members.position_of(task).is_some()
            && !self.lagging.contains(&task)
    }

    fn retained_bytes(&self, key: &BarrierKey) -> usize {
        let id = if let BarrierKey::Named(id) = key { 2 * id.len() } else { 0 };
        let text = |e: &Failure| e.message.len() + e.cause.as_ref().map_or(0, |cause| cause.len());
        let error = self.result.as_ref().err().map_or(0, |e| size_of::<Failure>() + text(e));
        let behind = self.lagging.len() * size_of::<usize>();
        4 * size_of::<Self>() + id + self.members.retained_bytes() + error + behind
    }
}

/// The barriers of a run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BarrierTable {
    in_progress: CowMap<BarrierKey, Arc<BarrierInstance>>,
    /// The number of members of all instances in progress, added up.
    members_in_progress: usize,
    ended: CowMap<BarrierKey, EndedBarrier>,
    /// The ended barriers in the order of eviction: those with one instance before those with several (whose
    /// counters the callers continue), then the oldest first.
    eviction_order: CowMap<(bool, u64, BarrierKey), ()>,
    /// The size of `ended`, in bytes.
    weight: usize,
    next_sequence: u64,
}

impl BarrierTable {
    pub fn instance(&self, key: &BarrierKey) -> Option<&BarrierInstance> {
        self.in_progress.get(key).map(Arc::as_ref)
    }

    pub fn instance_mut(&mut self, key: &BarrierKey) -> Option<&mut BarrierInstance> {
        self.in_progress.get_mut(key).map(Arc::make_mut)
    }

    pub fn last_ended(&self, key: &BarrierKey) -> Option<&EndedBarrier> {
        self.ended.get(key)
    }

    /// Returns the ended barriers whose names begin with `start`, in the order of their names.
    pub fn ended_with_name_start(&self, start: &str) -> Vec<(&BarrierKey, &EndedBarrier)> {
        let first = BarrierKey::Named(Arc::from(start));
        let begins = |key: &BarrierKey| matches!(key, BarrierKey::Named(id) if id.starts_with(start));
        self.ended.range_from(Bound::Included(&first)).take_while(|(key, _)| begins(key)).collect()
    }

    pub fn in_progress(&self) -> impl Iterator<Item = (&BarrierKey, &BarrierInstance)> {
        self.in_progress.iter().map(|(key, instance)| (key, instance.as_ref()))
    }

    pub fn in_progress_count(&self) -> usize {
        self.in_progress.len()
    }

    pub fn insert_instance(&mut self, key: BarrierKey, instance: BarrierInstance) {
        self.members_in_progress += instance.members.len();
        self.in_progress.insert(key, Arc::new(instance));
    }

    /// Removes an instance as if it had never begun.
    pub fn remove_instance(&mut self, key: &BarrierKey) -> Option<Arc<BarrierInstance>> {
        let instance = self.in_progress.remove(key)?;
        self.members_in_progress -= instance.members.len();
        Some(instance)
    }

    /// Returns the size of the retained results, in bytes.
    pub fn retained_result_bytes(&self) -> usize {
        self.weight
    }

    /// Returns the number of members of all instances in progress, added up.
    pub fn member_count_in_progress(&self) -> usize {
        self.members_in_progress
    }

    /// Keeps the result of an instance that ended at `at`, and evicts old results beyond `bound` bytes.
    pub fn record_result(
        &mut self,
        at: Timestamp,
        key: BarrierKey,
        instance: &BarrierInstance,
        result: Result<(), Arc<Failure>>,
        bound: usize,
    ) {
        let mut behind = self.evict_result(&key).map(|ended| ended.lagging).unwrap_or_default();
        behind.retain(|task| !matches!(instance.member_state(*task), Some(MemberState::Arrived(_))));
        if result.is_ok() {
            behind.extend(instance.not_arrived_tasks());
        }
        self.next_sequence += 1;
        let (counter, members) = (instance.counter, instance.members.clone());
        let ended =
            EndedBarrier { counter, members, result, lagging: behind, at, sequence: self.next_sequence };
        self.weight += ended.retained_bytes(&key);
        if key.is_client_barrier() {
            self.eviction_order.insert((counter > 0, ended.sequence, key.clone()), ());
        }
        self.ended.insert(key, ended);
        while self.weight > bound {
            let Some(((_, _, oldest), ())) = self.eviction_order.first_key_value() else { break };
            let oldest = oldest.clone();
            self.evict_result(&oldest);
        }
    }

    fn evict_result(&mut self, key: &BarrierKey) -> Option<EndedBarrier> {
        let ended = self.ended.remove(key)?;
        self.weight -= ended.retained_bytes(key);
        self.eviction_order.remove(&(ended.counter > 0, ended.sequence, key.clone()));
        Some(ended)
    }

    /// Takes out the results of ended barriers, which only callers need, so that they can be freed.
    pub fn take_results(&mut self) -> DeferredFree {
        self.weight = 0;
        let (ended, order) = (std::mem::take(&mut self.ended), std::mem::take(&mut self.eviction_order));
        let weight = 4 * ended.len();
        DeferredFree::of_value_with_weight((ended, order), weight)
    }

    /// Checks that the counted size of the retained results is right and within `bound`.
    pub fn check_invariants(&self, bound: usize) -> Result<(), String> {
        let weight: usize = self.ended.iter().map(|(key, ended)| ended.retained_bytes(key)).sum();
        if weight != self.weight {
            return Err(format!("ended barriers weigh {weight} bytes, {} counted", self.weight));
        }
        if weight > bound && !self.eviction_order.is_empty() {
            return Err(format!("ended barriers weigh {weight} bytes, {bound} are allowed"));
        }
        let named = self.ended.keys().filter(|key| key.is_client_barrier()).count();
        if named != self.eviction_order.len() {
            return Err(format!(
                "{named} ended barriers, {} in line to be forgotten",
                self.eviction_order.len()
            ));
        }
        Ok(())
    }
}

//! Assigns task ids to processes. A process that does not know its task id claims the id that belongs to its
//! identity. The process gets the same id in every run, whatever the order in which processes start. Begin at
//! `Job::claim_task_id`.
//!
//! - A known identity gets its task id at once, unless another process holds the id.
//! - A new identity waits while the processes that hold an id and the processes that wait for one are together fewer
//!   than the tasks of the job. Until then, a free id may belong to a process that has not started yet.
//! - When there are enough processes, the waiting ones, in the order of their identities, get the free ids in
//!   ascending order. So the hosts of a new job are numbered in the order of their identities, and get the same
//!   numbers again after the service has lost its state. A host that replaces another gets the id of the replaced
//!   host.
//! - A process holds an id while its task registers or is connected in the run, and also for a short time after a
//!   claim. If the task registers after the claim and then leaves, that time ends early.
//! - While a process holds an id, other processes with the same identity wait, and the answers to their claims state
//!   the address of the holder. A registration replaces a connected process of the same task; a claim never does.
//! - The service forgets the owner of an id when another process gets the id, when the number of tasks becomes too
//!   small for the id, or when an operator orders it.
//! - A claim is for the present run, or for the next one if the present run has ended.
//!
//! Every claim is answered at once. If the answer is to wait, the client repeats the claim, so no call is kept
//! waiting here.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::actor::{Actor, CommandReason};
use super::barrier_table::{BarrierKey, MemberState};
use super::command::CommandRefusal;
use super::event::EventKind;
use super::ids::{RunNumber, TaskId, Timestamp};
use super::input::Effect;
use super::job::{Job, with_run};
use super::task_owner_table::{
    AddClaimResult, ClaimAnswer, ClaimRefusal, ClaimWaitReason, TaskClaim, TaskOwner,
};

/// The number of assignments that the reason of an event names.
const ASSIGNMENTS_NAMED: usize = 8;

/// Returns the time after which a waiting claim should be repeated: longer in large jobs, so that all their processes
/// together ask no more than some thousand times a second.
fn claim_retry_interval(tasks: u32) -> Duration {
    Duration::from_millis((100 + u64::from(tasks) / 4).min(2_000))
}

impl Job {
    /// Answers the claim of a process on the task id of its identity. `address` is that of the process.
    ///
    /// # Errors
    /// If too many claims wait.
    pub(super) fn claim_task_id(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        claim: &TaskClaim,
        address: Option<IpAddr>,
    ) -> Result<ClaimAnswer, ClaimRefusal> {
        let tasks = self.settings.tasks;
        let joins = self.run_that_registrations_join();
        let pending = |why| Ok(ClaimAnswer::Pending { why, tasks, retry_after: claim_retry_interval(tasks) });
        let owners = Arc::make_mut(&mut self.task_owners);
        owners.drop_unrenewed_claims(now);
        if let Some((task, owner)) = owners
            .task_of_identity(&claim.identity)
            .and_then(|task| Some((task, owners.owner(task)?.clone())))
        {
            let is_same = owner.run == joins && owner.claimant == claim.claimant;
            if !is_same && self.is_task_id_held(task, joins, now) {
                let (identity, address) = (claim.identity.clone(), owner.address);
                return pending(ClaimWaitReason::HeldBySame { identity, task: Some(task), address });
            }
            let (identity, claimant) = (claim.identity.clone(), claim.claimant);
            let owner = TaskOwner { identity, claimant, run: joins, claimed_at: now, address };
            Arc::make_mut(&mut self.task_owners).set_owner(task, owner);
            return Ok(ClaimAnswer::Granted { task, tasks });
        }
        let count = tasks as usize;
        match owners.add_waiting_claim(claim, address, now, count) {
            AddClaimResult::Waits => {}
            AddClaimResult::Duplicate(other) => {
                let (identity, address) = (claim.identity.clone(), other.address);
                return pending(ClaimWaitReason::HeldBySame { identity, task: None, address });
            }
            AddClaimResult::Full => {
                let waiting = self.task_owners.waiting_claim_count();
                return Err(ClaimRefusal::TooManyClaims { waiting, tasks: count });
            }
        }
        let waiting = self.task_owners.waiting_claim_count();
        // At least as many as hold an id, without a look at each task.
        let present = waiting
            + self.task_owners.count_owners_that_claimed_for_run(joins)
            + self.registering_or_connected_task_count(joins);
        if present < count {
            return pending(ClaimWaitReason::TooFew { present, tasks: count });
        }
        let free: Vec<TaskId> =
            self.run.task_ids().take(count).filter(|task| !self.is_task_id_held(*task, joins, now)).collect();
        if waiting < free.len() {
            let present = count - free.len() + waiting;
            return pending(ClaimWaitReason::TooFew { present, tasks: count });
        }
        self.assign_ids_to_waiting_claims(now, effects, &free, joins);
        match self.task_owners.task_of_identity(&claim.identity) {
            Some(task) => Ok(ClaimAnswer::Granted { task, tasks }),
            None => pending(ClaimWaitReason::NoneFree { tasks: count }),
        }
    }

    /// Returns the run that a process joins that registers now.
    pub(super) fn run_that_registrations_join(&self) -> RunNumber {
        RunNumber(self.run.number.0 + u64::from(self.run.ended.is_some()))
    }

    /// Returns the number of tasks that register or are connected in the run `joins`.
    fn registering_or_connected_task_count(&self, joins: RunNumber) -> usize {
        if self.run.number != joins {
            return 0;
        }
        let registering = self.run.barriers.instance(&BarrierKey::Registration);
        self.run.connected_tasks + registering.map_or(0, |instance| instance.arrived_count())
    }

    /// Returns whether a process holds a task id in the run `joins`.
    pub(super) fn is_task_id_held(&self, id: TaskId, joins: RunNumber, now: Timestamp) -> bool {
        let owner = self.task_owners.owner(id);
        let has_lease = owner.is_some_and(|owner| owner.has_lease(joins, now));
        let Some(task) = self.run.task(id).filter(|_| self.run.number == joins) else { return has_lease };
        let registration = self.run.barriers.instance(&BarrierKey::Registration);
        let arrived = registration.and_then(|instance| instance.member_state(id));
        if task.is_connected() || matches!(arrived, Some(MemberState::Arrived(_))) {
            return true;
        }
        // A process that has registered since it claimed the id, and is not here, is gone.
        let is_gone = task.incarnation.is_some()
            && owner.is_some_and(|owner| owner.run == joins && task.registered_at >= owner.claimed_at);
        has_lease && !is_gone
    }

    /// Gives the free ids to the waiting claims.
    fn assign_ids_to_waiting_claims(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        free: &[TaskId],
        joins: RunNumber,
    ) {
        let given = Arc::make_mut(&mut self.task_owners).assign_ids_to_waiting_claims(free, joins, now);
        if given.is_empty() {
            return;
        }
        let mut named: Vec<String> = given
            .iter()
            .take(ASSIGNMENTS_NAMED)
            .map(|(task, identity, before)| match before {
                Some(before) => format!("task {task} is {identity} now, it was {before}"),
                None => format!("task {task} is {identity}"),
            })
            .collect();
        if given.len() > ASSIGNMENTS_NAMED {
            named.push(format!("and {} more", given.len() - ASSIGNMENTS_NAMED));
        }
        let tasks = given.into_iter().map(|(task, ..)| task).collect();
        with_run!(self, now, effects, |_run, cx| {
            cx.emit_event(EventKind::TaskIdsAssigned { tasks }, named.join("; "));
        });
    }

    /// Forgets to which process a task id belongs, or every one; returns how many were forgotten.
    pub(super) fn forget_task_owners(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: &CommandReason,
        task: Option<TaskId>,
    ) -> Result<usize, CommandRefusal> {
        let tasks: Vec<TaskId> = match task {
            Some(task) if self.task_owners.owner(task).is_none() => {
                return Err(CommandRefusal::NoTaskOwner(task));
            }
            Some(task) => vec![task],
            None => self.task_owners.owners().map(|(task, _)| task).collect(),
        };
        let owners = Arc::make_mut(&mut self.task_owners);
        for task in &tasks {
            owners.remove_owner_of_task(*task);
        }
        let count = tasks.len();
        with_run!(self, now, effects, |_run, cx| {
            let what = match task {
                Some(task) => format!("the owner of task id {task} was"),
                None => format!("the owners of all task ids ({count}) were"),
            };
            let text = format!("{what} forgotten by {actor}: {reason}");
            cx.emit_event(EventKind::TaskOwnersForgotten { tasks, actor }, text);
        });
        Ok(count)
    }
}

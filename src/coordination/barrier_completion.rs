//! Decides when a barrier instance passes, and handles timeouts and cancellations. Begin at
//! `Run::pass_barrier_if_complete`.
//!
//! `barrier_arrival.rs` records arrivals. `barrier_ends_and_task_removal.rs` ends instances, and removes failed tasks
//! from them. `barrier_stats.rs` measures ended instances.
//!
//! An instance passes when no member is missing. Excused tasks (`exclusion_rules.rs`) are never missing. A
//! recoverable task may restart and register again in the same run. Two rules prevent that such a task blocks the
//! others at a barrier that clients name:
//!
//! 1. An instance that began before the task registered again does not wait for the task.
//! 2. If every missing member of an instance is unsynced and waits at another instance, the instance passes without
//!    these members.

use std::sync::Arc;

use super::barrier_table::{BarrierKey, MemberState};
use super::context::TransitionContext;
use super::failure::{Code, Failure};
use super::ids::TaskId;
use super::run::Run;
use crate::text::format_ranges;

/// The most ranges of missing tasks in the reason of a barrier that failed.
const RANGES_SHOWN: usize = 12;

/// The reason of a barrier that passed although excluded members had not arrived.
pub const PASSED_WITHOUT_EXCLUDED: &str = "passed without members that are excluded or have not registered since their exclusion; all others had arrived";

impl Run {
    /// Passes the instance if no member is missing.
    pub(super) fn pass_barrier_if_complete(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey) {
        if let Some(instance) = self.barriers.instance(key)
            && instance.missing_count() == 0
            && instance.arrived_count() > 0
        {
            let reason = if instance.arrived_count() == instance.members.len() {
                "all members arrived"
            } else if instance.not_arrived_tasks().any(|id| self.expect_task(id).is_excused) {
                PASSED_WITHOUT_EXCLUDED
            } else {
                "passed without members that restarted after it began; all others had arrived"
            };
            self.end_barrier_instance(cx, key, Ok(()), reason);
        }
    }

    /// Applies rule 2. Checks every instance, because one arrival may complete the condition for several
    /// others.
    pub(super) fn pass_barriers_missing_unsynced_waiters(&mut self, cx: &mut TransitionContext<'_>) {
        if self.unsynced_tasks == 0 {
            return;
        }
        let named = self.barriers.in_progress().filter(|(key, _)| key.is_client_barrier());
        let keys: Vec<BarrierKey> = named.map(|(key, _)| key.clone()).collect();
        for key in keys {
            let Some(instance) = self.barriers.instance(&key) else { continue };
            if instance.missing_count() > self.unsynced_tasks || instance.missing_count() == 0 {
                continue;
            }
            let waits_elsewhere = |id: TaskId| {
                let task = self.expect_task(id);
                task.unsynced && task.is_connected() && self.barrier_wait_count(id) > 0
            };
            if instance.missing_tasks().all(waits_elsewhere) {
                let reason = "passed without members that restarted in this run and wait at another barrier; all others had \
                              arrived";
                self.end_barrier_instance(cx, &key, Ok(()), reason);
            }
        }
    }

    /// Applies rule 1: the task has registered again, so no instance that began before waits for it. If the
    /// task is excused, this holds for the service's own barriers too.
    pub(super) fn mark_not_required_at_barriers(&mut self, cx: &mut TransitionContext<'_>, id: TaskId) {
        let every = self.expect_task(id).is_excused;
        let concerned = self.barriers.in_progress().filter(|(key, _)| every || key.is_client_barrier());
        let keys: Vec<BarrierKey> = concerned
            .filter(|(_, instance)| instance.member_state(id) == Some(MemberState::Missing))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            if let Some(instance) = self.barriers.instance_mut(&key) {
                instance.set_member_state(id, MemberState::NotRequired);
            }
            self.pass_barrier_if_complete(cx, &key);
        }
        self.pass_barriers_missing_unsynced_waiters(cx);
    }

    /// Fails an instance at its deadline.
    pub(super) fn on_barrier_timeout(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey) {
        let Some(instance) = self.barriers.instance(key) else { return };
        let (arrived, members) = (instance.arrived_count(), instance.members.len());
        let missing = self.describe_tasks(instance.missing_tasks());
        let text = format!(
            "Barrier timed out. Id: {}::{}. This usually happens because a task triggered the barrier too early or too \
             slowly. Please look at the task logs (both timed out and first task) to debug further.\n# of tasks that \
             reached the barrier: {arrived}/{members}.\nThe first task at the barrier: {}. Some timed out task names:\n\
             {missing}",
            self.id_of_barrier_for_clients(key),
            instance.counter,
            self.describe_task(instance.first),
        );
        // For people, who see many tasks by their numbers sooner than by their addresses.
        let named = match instance.missing_count() {
            0..=2 => missing,
            count => {
                let numbers = instance.missing_tasks().map(|task| task.0);
                format!("{count} tasks ({})", format_ranges(numbers, RANGES_SHOWN, "-", "…"))
            }
        };
        let why = format!("timed out with {arrived} of {members} tasks at the barrier; missing: {named}");
        self.fail_barrier(cx, key, Code::DeadlineExceeded, text, &why);
    }

    /// Cancels an instance in progress at the request of a task.
    pub(super) fn cancel_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        name: String,
        counter: i64,
    ) -> Result<(), Failure> {
        let name: Arc<str> = name.into();
        let key = BarrierKey::Named(Arc::clone(&name));
        let refuse = |text: String, known| {
            Err(Failure::from_service(Code::FailedPrecondition, text).with_barrier(&name, known))
        };
        if self.task(id).is_none() {
            return Err(self.unknown_task_failure("cancelled a barrier", id));
        }
        let running = self.barriers.instance(&key).map(|instance| instance.counter);
        let ended = self.barriers.last_ended(&key).map(|ended| (ended.counter, ended.result.is_ok()));
        match (running, ended) {
            (Some(known), _) if known == counter => {
                let text =
                    format!("Barrier ({name}::{counter}) is cancelled by task: {}", self.describe_task(id));
                let why = format!("cancelled by {}", self.describe_task(id));
                self.fail_barrier(cx, &key, Code::Cancelled, text, &why);
                Ok(())
            }
            (Some(known), _) => refuse(cancelled_other_instance_text(&name, counter, known), known),
            (None, Some((known, ok))) if known == counter => {
                let how = if ok { "has passed" } else { "has failed" };
                refuse(format!("Barrier ({name}::{counter}) has already been passed: it {how}."), known)
            }
            (None, Some((known, _))) => refuse(cancelled_other_instance_text(&name, counter, known), known),
            (None, None) => refuse(
                format!("Barrier ({name}::{counter}) cannot be cancelled: nobody has begun it."),
                counter,
            ),
        }
    }
}

fn cancelled_other_instance_text(name: &str, counter: i64, known: i64) -> String {
    format!(
        "Barrier ({name}::{counter}) is cancelled by task, but the service thinks it is the {known}-th instance. This \
         is likely due to a restart in the task or service."
    )
}

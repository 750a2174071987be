//! Completion of barriers: how an instance passes, fails, times out or is cancelled.
//!
//! `barrier_arrival.rs` fills instances; `barrier_stats.rs` measures ended ones. Begin at `Run::pass_barrier`.
//!
//! The end of an instance changes the state at once and queues the answers of all members;
//! `Run::run_pending_work` sends them. An instance does not wait for exempt tasks (removed by an exclusion;
//! see `exclusion_rules.rs`). Two rules keep a restarted task (a recoverable task that registered again in
//! this run) from blocking the others:
//!
//! 1. an instance that began before a task's present registration does not wait for that task;
//! 2. an instance whose only missing members are unsynced tasks that wait at another instance passes without them.

use std::sync::Arc;

use super::barrier::{BarrierInstance, BarrierKey, MemberState};
use super::call::SharedReply;
use super::context::TransitionContext;
use super::event::{EventKind, RunOutcome};
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, TaskId};
use super::pending_barrier_stats::PendingBarrierStats;
use super::run::{Cached, Run};
use super::timers::Timer;
use super::waiters::{CallSelection, SharedAnswer};

impl Run {
    pub(super) fn pass_if_complete(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey) {
        if let Some(instance) = self.barriers.instance(key)
            && instance.missing() == 0
            && instance.arrived() > 0
        {
            let reason = if instance.arrived() == instance.members.len() {
                "all members arrived"
            } else if instance.absent_tasks().any(|id| self.expect_task(id).is_exempt) {
                "all members arrived except excluded ones and ones that have not registered since their exclusion"
            } else {
                "all members arrived except those that restarted after the barrier began"
            };
            self.pass_barrier(cx, key, Ok(()), reason);
        }
    }

    /// Applies rule 2. Checks every instance, because one arrival may complete the condition for several
    /// others.
    pub(super) fn pass_without_unsynced(&mut self, cx: &mut TransitionContext<'_>) {
        if self.unsynced_tasks == 0 {
            return;
        }
        let named = self.barriers.in_progress().filter(|(key, _)| key.is_named());
        let keys: Vec<BarrierKey> = named.map(|(key, _)| key.clone()).collect();
        for key in keys {
            let Some(instance) = self.barriers.instance(&key) else { continue };
            if instance.missing() > self.unsynced_tasks || instance.missing() == 0 {
                continue;
            }
            let waits_elsewhere = |id: TaskId| {
                let task = self.expect_task(id);
                task.unsynced && task.is_connected() && self.barrier_waits(id) > 0
            };
            if instance.missing_tasks().all(waits_elsewhere) {
                let reason = "the missing members restarted in this run and wait at another barrier: this one would never be \
                     complete";
                self.pass_barrier(cx, &key, Ok(()), reason);
            }
        }
    }

    /// Applies rule 1: the task has registered again, so no instance that began before waits for it. If the
    /// task is exempt, this holds for the service's own barriers too.
    pub(super) fn release_from_barriers(&mut self, cx: &mut TransitionContext<'_>, id: TaskId) {
        let every = self.expect_task(id).is_exempt;
        let concerned = self.barriers.in_progress().filter(|(key, _)| every || key.is_named());
        let keys: Vec<BarrierKey> = concerned
            .filter(|(_, instance)| instance.member_state(id) == Some(MemberState::Missing))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            if let Some(instance) = self.barriers.instance_mut(&key) {
                instance.set_member_state(id, MemberState::Released);
            }
            self.pass_if_complete(cx, &key);
        }
        self.pass_without_unsynced(cx);
    }

    /// Ends an instance: queues the answers of all members that arrived, and keeps the result.
    pub(super) fn pass_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        result: Result<(), Arc<Failure>>,
        reason: &str,
    ) {
        let Some(instance) = self.barriers.remove_instance(key) else { return };
        self.timers.clear(instance.deadline, Timer::Barrier(key.clone()));
        let counter = instance.counter;
        let bound = cx.settings.bounds.barrier_memory_bytes;
        self.barriers.record_result(cx.now, key.clone(), &instance, result.clone(), bound);
        let barrier = self.wire_id(key);
        let id = Arc::clone(&barrier);
        let change = match &result {
            Ok(()) => {
                EventKind::BarrierPassed { barrier, counter, without: instance.absent_tasks().collect() }
            }
            Err(_) => EventKind::BarrierFailed { barrier, counter },
        };
        cx.emit(change, reason);
        let passed = result.is_ok();
        self.pending_barrier_stats.push_back(PendingBarrierStats::new(cx.now, key, id, &instance, passed));
        let calls = || CallSelection::List(instance.arrivals().map(|(_, arrival)| arrival.call).collect());
        match key {
            BarrierKey::Named(_) => {
                self.release_arrivals(&instance, passed);
                self.waiters
                    .queue_answer(calls(), SharedAnswer::to(&result, SharedAnswer::BarrierPassed(counter)));
            }
            BarrierKey::Devices => {
                let devices = if passed { self.exchanged_devices() } else { SharedReply::new(Vec::new()) };
                let answer = SharedAnswer::to(&result, SharedAnswer::Devices(self.incarnation, devices));
                self.waiters.queue_answer(calls(), answer);
            }
            BarrierKey::Registration => match &result {
                Ok(()) => self.start_run(cx, &instance),
                Err(failure) => {
                    self.waiters.queue_answer(calls(), SharedAnswer::Failed(Arc::clone(failure)));
                    self.fail_registration(cx, failure);
                }
            },
            BarrierKey::Shutdown => {
                let told = result.clone().map_err(|failure| Arc::new(shutdown_failure(&failure)));
                self.waiters.queue_answer(calls(), SharedAnswer::to(&told, SharedAnswer::Done));
                self.finish_shutdown(cx, &instance.members, &result);
            }
        }
    }

    /// Records that the members which arrived at a client's barrier wait there no more. If it passed with all
    /// its members, they are in step with one another.
    fn release_arrivals(&mut self, instance: &BarrierInstance, passed: bool) {
        for (id, _) in instance.arrivals() {
            self.adjust_barrier_waits(id, -1);
        }
        if self.unsynced_tasks == 0 || !passed || instance.arrived() != instance.members.len() {
            return;
        }
        for (id, _) in instance.arrivals() {
            if self.expect_task(id).unsynced {
                self.expect_task_mut(id).unsynced = false;
                self.unsynced_tasks -= 1;
            }
        }
    }

    fn fail_registration(&mut self, cx: &mut TransitionContext<'_>, failure: &Arc<Failure>) {
        let text = format!("Cluster registration failed with error: {failure}");
        self.fail_all_tasks(cx, Failure::from_service(Code::Internal, text));
        self.record_first_cause(cx, None, failure);
        self.end_run(cx, RunOutcome::Failed, failure.summary());
    }

    /// Fails an instance. Its callers get `text`; `why` is for people.
    pub(super) fn fail_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        code: Code,
        text: String,
        why: &str,
    ) {
        let Some(counter) = self.barriers.instance(key).map(|instance| instance.counter) else { return };
        let failure =
            Failure::from_service(code, text).with_barrier(&self.wire_id(key), counter).with_cause(why);
        self.pass_barrier(cx, key, Err(Arc::new(failure)), why);
    }

    /// Fails an instance at its deadline.
    pub(super) fn on_barrier_timeout(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey) {
        let Some(instance) = self.barriers.instance(key) else { return };
        let (arrived, members) = (instance.arrived(), instance.members.len());
        let missing = self.describe_all(instance.missing_tasks());
        let text = format!(
            "Barrier timed out. Id: {}::{}. This usually happens because a task triggered the barrier too early or too \
             slowly. Please look at the task logs (both timed out and first task) to debug further.\n# of tasks that \
             reached the barrier: {arrived}/{members}.\nThe first task at the barrier: {}. Some timed out task names:\n\
             {missing}",
            self.wire_id(key),
            instance.counter,
            self.describe(instance.first),
        );
        let why = format!("timed out with {arrived} of {members} tasks at the barrier; missing: {missing}");
        self.fail_barrier(cx, key, Code::DeadlineExceeded, text, &why);
    }

    /// Removes these tasks, ascending, from every barrier in progress. A barrier waits again for a
    /// recoverable task and fails without any other task. `reason` is for the waiting callers, `why` for
    /// people.
    pub(super) fn leave_all_barriers(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: &[TaskId],
        reason: &str,
        why: &str,
    ) {
        let keys: Vec<BarrierKey> = self.barriers.in_progress().map(|(key, _)| key.clone()).collect();
        for key in keys {
            let Some(instance) = self.barriers.instance(&key) else { continue };
            let counter = instance.counter;
            let leaving = instance.members_among(tasks);
            let barrier = self.wire_id(&key);
            if let Some(id) = leaving.iter().copied().find(|id| !self.expect_task(*id).recoverable) {
                let text = format!(
                    "Barrier failed because: {reason}. Barrier Id: {barrier}, Task: {}",
                    self.describe(id)
                );
                let why = format!("cannot pass without {}: {why}", self.describe(id));
                self.fail_barrier(cx, &key, Code::Internal, text, &why);
                continue;
            }
            for id in leaving {
                let Some(instance) = self.barriers.instance(&key) else { break };
                let Some(MemberState::Arrived(arrival)) = instance.member_state(id) else { continue };
                self.leave_barrier(&key, id, arrival.call);
                self.waiters.remove(arrival.call);
                let text = format!(
                    "Stale barrier invocation is cancelled because: {reason}. Barrier: {barrier}::{counter} Task {id}"
                );
                let failure = Failure::from_service(Code::Cancelled, text).with_barrier(&barrier, counter);
                cx.reply(arrival.call, Err(Arc::new(failure)));
            }
        }
    }

    /// Removes the task's arrival with this call; the caller answers or withdraws the call itself.
    pub(super) fn leave_barrier(&mut self, key: &BarrierKey, id: TaskId, call: CallId) {
        let left = if self.expect_task(id).is_exempt { MemberState::Released } else { MemberState::Missing };
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        // A call whose answer is decided is in no slot; the slot may belong to the next instance.
        if !matches!(instance.member_state(id), Some(MemberState::Arrived(arrival)) if arrival.call == call) {
            return;
        }
        instance.set_member_state(id, left);
        if key.is_named() {
            self.adjust_barrier_waits(id, -1);
        }
        self.remove_if_empty(key);
    }

    /// Removes an instance at which no member waits, as if it had never begun.
    pub(super) fn remove_if_empty(&mut self, key: &BarrierKey) {
        if self.barriers.instance(key).is_some_and(|instance| instance.arrived() == 0)
            && let Some(instance) = self.barriers.remove_instance(key)
        {
            self.timers.clear(instance.deadline, Timer::Barrier(key.clone()));
        }
    }

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
        let ended = self.barriers.ended(&key).map(|ended| (ended.counter, ended.result.is_ok()));
        match (running, ended) {
            (Some(known), _) if known == counter => {
                let text = format!("Barrier ({name}::{counter}) is cancelled by task: {}", self.describe(id));
                let why = format!("cancelled by {}", self.describe(id));
                self.fail_barrier(cx, &key, Code::Cancelled, text, &why);
                Ok(())
            }
            (Some(known), _) => refuse(other_instance_text(&name, counter, known), known),
            (None, Some((known, ok))) if known == counter => {
                let how = if ok { "has passed" } else { "has failed" };
                refuse(format!("Barrier ({name}::{counter}) has already been passed: it {how}."), known)
            }
            (None, Some((known, _))) => refuse(other_instance_text(&name, counter, known), known),
            (None, None) => refuse(
                format!("Barrier ({name}::{counter}) cannot be cancelled: nobody has begun it."),
                counter,
            ),
        }
    }

    /// Returns the devices of all tasks once the exchange is over; all callers share the value.
    pub(super) fn exchanged_devices(&mut self) -> Arc<SharedReply<Vec<bytes::Bytes>>> {
        if let Some(devices) = &self.exchanged_devices.0 {
            return Arc::clone(devices);
        }
        let devices = SharedReply::new(self.exchanged.values().flatten().cloned().collect());
        self.exchanged_devices = Cached(Some(Arc::clone(&devices)));
        devices
    }
}

fn other_instance_text(name: &str, counter: i64, known: i64) -> String {
    format!(
        "Barrier ({name}::{counter}) is cancelled by task, but the service thinks it is the {known}-th instance. This \
         is likely due to a restart in the task or service."
    )
}

//! Ends barrier instances, and removes tasks from the run. Begin at `Run::end_barrier_instance` and `Run::fail_task`.
//!
//! `barrier_completion.rs` decides when an instance passes, and `failure_detection.rs` when a task has failed. Ends
//! and removals are in one file, because each can cause the other:
//!
//! - If a task fails or disconnects, it leaves its barriers. If the task is not recoverable, the instances that it
//!   leaves fail.
//! - If the registration barrier fails, all tasks fail.
//! - If the shutdown barrier passes, its members disconnect. If it fails, all tasks fail.
//!
//! An instance ends only once, and a task that is already in the new state is skipped, so this recursion ends.
//!
//! The end of an instance changes the state at once, and queues the answers to the members that arrived
//! (`pending_work.rs`). The first error of a run and its task are kept as the first cause. Later errors are shown as
//! its consequences.

use std::collections::VecDeque;
use std::mem::discriminant;
use std::sync::Arc;

use super::barrier_table::{BarrierInstance, BarrierKey, BarrierMembers, MemberState};
use super::context::TransitionContext;
use super::event::{EventKind, FailureClass, RunOutcome};
use super::failure::{Code, Failure};
use super::ids::{CallId, TaskId, TaskIncarnation};
use super::run::{CachedValue, Run};
use super::shared_failures::failed_shutdown_failure;
use super::task::ProtocolState;
use super::timers::Timer;
use super::unmeasured_barrier::UnmeasuredBarrier;
use super::unpublished_events::TaskChange;
use super::waiters::{CallSelection, SharedAnswer};

/// Tasks that ceased to take part at the same moment.
struct InactivatedTasks {
    tasks: Vec<TaskId>,
    /// The tasks that were connected.
    were_live: Vec<TaskId>,
    /// The tasks whose polls are held.
    polling: Vec<TaskId>,
    /// Whether at least one of them is recoverable.
    recoverable: bool,
}

impl Run {
    /// Ends an instance: queues the answers of all members that arrived, and keeps the result.
    pub(super) fn end_barrier_instance(
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
        let barrier = self.id_of_barrier_for_clients(key);
        let id = Arc::clone(&barrier);
        let change = match &result {
            Ok(()) => {
                EventKind::BarrierPassed { barrier, counter, without: instance.not_arrived_tasks().collect() }
            }
            Err(_) => EventKind::BarrierFailed {
                barrier,
                counter,
                without: instance.not_arrived_tasks().take(EventKind::LISTED_MAX).collect(),
            },
        };
        cx.emit_event(change, reason);
        let passed = result.is_ok();
        self.pending_barrier_stats.push_back(UnmeasuredBarrier::new(cx.now, key, id, &instance, passed));
        // The end may bring an unsynced member into step. Until it is measured, it is known which members were.
        if self.unsynced_tasks > 0 && instance.arrivals().any(|(id, _)| self.expect_task(id).unsynced) {
            self.measure_all_unmeasured_barriers(cx);
        }
        let calls = || CallSelection::List(instance.arrivals().map(|(_, arrival)| arrival.call).collect());
        match key {
            BarrierKey::Named(_) => {
                self.end_barrier_waits(&instance, passed);
                self.waiters.queue_answer(
                    calls(),
                    SharedAnswer::done_or_failure(&result, SharedAnswer::BarrierPassed(counter)),
                );
            }
            BarrierKey::Devices => {
                let devices = if passed { self.exchanged_devices() } else { Arc::new(Vec::new()) };
                let answer =
                    SharedAnswer::done_or_failure(&result, SharedAnswer::Devices(self.incarnation, devices));
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
                let told = result.clone().map_err(|failure| Arc::new(failed_shutdown_failure(&failure)));
                self.waiters.queue_answer(calls(), SharedAnswer::done_or_failure(&told, SharedAnswer::Done));
                self.finish_shutdown(cx, &instance.members, &result);
            }
        }
    }

    /// Records that the members which arrived at a client's barrier wait there no more. If it passed with all
    /// its members but excused ones, they are in step with one another.
    fn end_barrier_waits(&mut self, instance: &BarrierInstance, passed: bool) {
        for (id, _) in instance.arrivals() {
            self.adjust_barrier_wait_count(id, -1);
        }
        let is_complete = || instance.not_arrived_tasks().all(|id| self.expect_task(id).is_excused);
        if self.unsynced_tasks == 0 || !passed || !is_complete() {
            return;
        }
        for (id, _) in instance.arrivals() {
            if self.expect_task(id).unsynced {
                self.expect_task_mut(id).unsynced = false;
                self.unsynced_tasks -= 1;
            }
        }
    }

    /// Returns the devices of all tasks once the exchange is over; all callers share the value.
    pub(super) fn exchanged_devices(&mut self) -> Arc<Vec<bytes::Bytes>> {
        if let Some(devices) = &self.exchanged_devices.0 {
            return Arc::clone(devices);
        }
        let devices = Arc::new(self.exchanged.values().flatten().cloned().collect());
        self.exchanged_devices = CachedValue(Some(Arc::clone(&devices)));
        devices
    }

    fn fail_registration(&mut self, cx: &mut TransitionContext<'_>, failure: &Arc<Failure>) {
        let text = format!("Cluster registration failed with error: {failure}");
        self.fail_all_tasks(cx, Failure::from_service(Code::Internal, text));
        self.record_first_cause(cx, None, failure);
        self.end_run(cx, RunOutcome::Failed, failure.summary());
    }

    /// Completes the shutdown after its barrier has passed or failed.
    pub(super) fn finish_shutdown(
        &mut self,
        cx: &mut TransitionContext<'_>,
        members: &BarrierMembers,
        result: &Result<(), Arc<Failure>>,
    ) {
        match result {
            Ok(()) => {
                self.disconnect_tasks(cx, (0..members.len()).map(|position| members.task_at(position)));
            }
            Err(failure) => {
                let failure = failed_shutdown_failure(failure);
                self.propagate_error(cx, None, &Arc::new(failure.clone()));
                self.fail_all_tasks(cx, failure);
            }
        }
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
        let failure = Failure::from_service(code, text)
            .with_barrier(&self.id_of_barrier_for_clients(key), counter)
            .with_cause(why);
        self.end_barrier_instance(cx, key, Err(Arc::new(failure)), why);
    }

    /// Removes these tasks, ascending, from every barrier in progress. If a
    /// removed task is recoverable, the barrier waits for it again; otherwise the barrier fails. `reason` is for
    /// the waiting callers, `why` for people.
    pub(super) fn remove_from_all_barriers(
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
            let barrier = self.id_of_barrier_for_clients(&key);
            if let Some(id) = leaving.iter().copied().find(|id| !self.expect_task(*id).recoverable) {
                let text = format!(
                    "Barrier failed because: {reason}. Barrier Id: {barrier}, Task: {}",
                    self.describe_task(id)
                );
                let why = format!("cannot pass without {}: {why}", self.describe_task(id));
                self.fail_barrier(cx, &key, Code::Internal, text, &why);
                continue;
            }
            for id in leaving {
                let Some(instance) = self.barriers.instance(&key) else { break };
                let Some(MemberState::Arrived(arrival)) = instance.member_state(id) else { continue };
                self.remove_barrier_arrival(cx, &key, id, arrival.call);
                self.waiters.remove(arrival.call);
                let text = format!(
                    "Stale barrier invocation is cancelled because: {reason}. Barrier: {barrier}::{counter} Task {id}"
                );
                let failure = Failure::from_service(Code::Cancelled, text).with_barrier(&barrier, counter);
                cx.reply_to_call(arrival.call, Err(Arc::new(failure)));
            }
        }
    }

    /// Removes the task's arrival with this call; the caller answers or withdraws the call itself.
    pub(super) fn remove_barrier_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        id: TaskId,
        call: CallId,
    ) {
        let left =
            if self.expect_task(id).is_excused { MemberState::NotRequired } else { MemberState::Missing };
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        // A call whose answer is decided is in no slot; the slot may belong to the next instance.
        if !matches!(instance.member_state(id), Some(MemberState::Arrived(arrival)) if arrival.call == call) {
            return;
        }
        instance.set_member_state(id, left);
        if key.is_client_barrier() {
            self.adjust_barrier_wait_count(id, -1);
        }
        if *key == BarrierKey::Registration {
            let reason = "it waits no longer for the others to register";
            cx.emit_event(EventKind::RegistrationWithdrawn { task: id }, reason);
        }
        self.remove_barrier_if_empty(key);
    }

    /// Removes an instance at which no member waits, as if it had never begun.
    pub(super) fn remove_barrier_if_empty(&mut self, key: &BarrierKey) {
        if self.barriers.instance(key).is_some_and(|instance| instance.arrived_count() == 0)
            && let Some(instance) = self.barriers.remove_instance(key)
        {
            self.timers.clear(instance.deadline, Timer::Barrier(key.clone()));
        }
    }

    /// Puts a task into error and removes it from everything in which it takes part. The first error stays.
    pub(super) fn fail_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        failure: &Arc<Failure>,
        class: FailureClass,
        why: &str,
    ) {
        self.fail_tasks(cx, std::iter::once(id), failure, class, why);
    }

    pub(super) fn fail_all_tasks(&mut self, cx: &mut TransitionContext<'_>, failure: Failure) {
        let why = "the run has failed";
        let failure = Arc::new(failure.with_cause(why));
        self.fail_tasks(cx, self.task_ids(), &failure, FailureClass::Consequence, why);
    }

    /// Puts tasks, ascending, into error; those already in error stay as they are.
    fn fail_tasks(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
        failure: &Arc<Failure>,
        class: FailureClass,
        why: &str,
    ) {
        let standing = ProtocolState::Failed(Arc::clone(failure));
        let Some(retired) = self.set_tasks_inactive(cx, tasks, &standing, TaskChange::Failed(class), why)
        else {
            return;
        };
        let reason = format!("task is set to ERROR: {failure}");
        self.remove_from_all_barriers(cx, &retired.tasks, &reason, failure.summary());
        self.remove_from_live_set_requests(&retired.were_live);
        if self.has_no_tasks_left() && self.ended.is_none() && retired.recoverable {
            self.end_run(cx, RunOutcome::Abandoned, format!("its last live task was lost: {why}"));
        }
    }

    /// Disconnects tasks, ascending, in good order; those that have disconnected already stay as they are.
    pub(super) fn disconnect_tasks(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
    ) {
        let standing = ProtocolState::Disconnected(cx.now.after(cx.settings.heartbeat_timeout));
        let Some(retired) =
            self.set_tasks_inactive(cx, tasks, &standing, TaskChange::Disconnected, "shut down")
        else {
            return;
        };
        self.remove_from_all_barriers(cx, &retired.tasks, "task disconnected", "it shut down");
        self.remove_from_live_set_requests(&retired.were_live);
        if !retired.polling.is_empty() {
            let text = "Cancelled error polling because: task has disconnected.";
            let failure = Arc::new(Failure::from_service(Code::Cancelled, text));
            self.answer_error_polls_of(retired.polling.into_iter(), failure);
        }
        if self.has_no_tasks_left() && self.ended.is_none() {
            self.end_run(cx, RunOutcome::Completed, "all remaining tasks have shut down");
        }
    }

    /// Gives tasks, ascending, a state in which they take no part, and emits the events. Tasks already in
    /// that state stay as they are; returns `None` if all are.
    fn set_tasks_inactive(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
        standing: &ProtocolState,
        change: TaskChange,
        reason: &str,
    ) -> Option<InactivatedTasks> {
        let mut events = VecDeque::with_capacity(tasks.len());
        let mut retired = InactivatedTasks {
            tasks: Vec::with_capacity(tasks.len()),
            were_live: Vec::with_capacity(tasks.len()),
            polling: Vec::new(),
            recoverable: false,
        };
        for id in tasks {
            if discriminant(&self.expect_task(id).standing) == discriminant(standing) {
                continue;
            }
            let task = self.expect_task_mut(id);
            if task.is_connected() {
                retired.were_live.push(id);
            }
            let suspicion = task.suspicion.take();
            task.standing = standing.clone();
            task.since = cx.now;
            if task.poll.is_some() {
                retired.polling.push(id);
            }
            retired.recoverable |= task.recoverable;
            retired.tasks.push(id);
            events.push_back((id, task.incarnation.unwrap_or(TaskIncarnation(0))));
            self.clear_grace_timer(id, suspicion);
        }
        if retired.tasks.is_empty() {
            return None;
        }
        self.connected_tasks -= retired.were_live.len();
        self.bump_task_states_version();
        cx.emit_event_for_each_task(change, reason, events);
        Some(retired)
    }

    /// Propagates an error that came from `source` to all tasks and ends the run, unless that task is
    /// recoverable. The first propagated error is the answer to every later poll.
    pub(super) fn propagate_error(
        &mut self,
        cx: &mut TransitionContext<'_>,
        source: Option<TaskId>,
        failure: &Arc<Failure>,
    ) {
        if source.map_or(cx.settings.recoverable, |id| self.expect_task(id).recoverable) {
            return;
        }
        self.record_first_cause(cx, source, failure);
        let whose = source.map_or_else(String::new, |id| format!("{}: ", self.describe_task(id)));
        self.end_run(cx, RunOutcome::Failed, format!("{whose}{}", failure.summary()));
        if !self.has_error_polls {
            // No task polls for errors: the tasks can only be put into error.
            let text = format!(
                "All tasks were set to error because coordination service encountered an error, but was unable to \
                 inform clients. Error: {failure}"
            );
            return self.fail_all_tasks(cx, Failure::from_service(Code::Internal, text));
        }
        if self.propagated_error.is_some() {
            return;
        }
        self.propagated_error = Some(Arc::clone(failure));
        self.answer_all_error_polls(Arc::clone(failure));
    }
}

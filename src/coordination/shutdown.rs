//! Shutdown: the shutdown barrier, and a task that disconnects alone.
//!
//! It does not fill the barrier: `barrier_arrival.rs` does. Begin at `Run::shut_down`.

use std::sync::Arc;

use super::barrier::{Arrival, ArrivalPurpose, BarrierKey, BarrierMembers};
use super::call::{Reply, TaskSet};
use super::context::TransitionContext;
use super::event::RunOutcome;
use super::event_queue::TaskChange;
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, ConnectionId, TaskId};
use super::run::Run;
use super::task::ProtocolState;

impl Run {
    pub(super) fn shut_down(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
    ) {
        let Some(task) = self.task(id) else {
            let failure = shutdown_failure(&self.unknown_task_failure("shut down", id));
            return cx.reply(call, Err(Arc::new(failure)));
        };
        // Recoverable tasks shut down alone: one restart would fail the barrier for all.
        if task.recoverable || cx.settings.shutdown_timeout.is_zero() {
            let outcome = self.disconnect_task(cx, id).map(|()| Reply::Done);
            return cx.reply(call, outcome.map_err(Arc::new));
        }
        let key = BarrierKey::Shutdown;
        if let Some(ended) = self.barriers.ended(&key) {
            let result = ended.result.clone();
            let outcome = match (self.disconnect_task(cx, id), result) {
                (Err(failure), _) => Err(Arc::new(shutdown_failure(&failure))),
                (Ok(()), Err(failure)) => Err(Arc::new(shutdown_failure(&failure))),
                (Ok(()), Ok(())) => Ok(Reply::Done),
            };
            return cx.reply(call, outcome);
        }
        if self.barriers.instance(&key).is_none() {
            let members = self.shutdown_members();
            if let Err(failure) = self.begin_instance(cx, &key, 0, members, cx.settings.shutdown_timeout, id)
            {
                return cx.reply(call, Err(Arc::new(shutdown_failure(&failure))));
            }
        }
        // A task that was recoverable when the barrier began is no member of it.
        if self.barriers.instance(&key).is_some_and(|instance| instance.member_state(id).is_none()) {
            let outcome = self.disconnect_task(cx, id).map(|()| Reply::Done);
            return cx.reply(call, outcome.map_err(Arc::new));
        }
        self.record_arrival(
            cx,
            &key,
            id,
            connection,
            Arrival { call, purpose: ArrivalPurpose::ShutDown, at: cx.now },
        );
    }

    fn shutdown_members(&self) -> BarrierMembers {
        if self.tasks.iter().all(|task| !task.recoverable) {
            return self.all_members();
        }
        let ids = self.task_ids().filter(|id| !self.expect_task(*id).recoverable).collect();
        BarrierMembers::Some(TaskSet::new(ids))
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
                self.disconnect_tasks(cx, (0..members.len()).map(|position| members.at(position)));
            }
            Err(failure) => {
                let failure = shutdown_failure(failure);
                self.propagate_error(cx, None, &Arc::new(failure.clone()));
                self.fail_all_tasks(cx, failure);
            }
        }
    }

    /// Disconnects a task in good order.
    ///
    /// # Errors
    /// If there is no such task, or it is not in the run.
    pub(super) fn disconnect_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
    ) -> Result<(), Failure> {
        let Some(task) = self.task(id) else {
            return Err(self.unknown_task_failure("disconnected", id));
        };
        if matches!(task.standing, ProtocolState::Disconnected(_)) {
            let text = format!("The task is already disconnected: {id}");
            return Err(Failure::from_service(Code::FailedPrecondition, text));
        }
        self.disconnect_tasks(cx, std::iter::once(id));
        Ok(())
    }

    /// Disconnects tasks, ascending, in good order; those that have disconnected already stay as they are.
    fn disconnect_tasks(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
    ) {
        let standing = ProtocolState::Disconnected(cx.now.after(cx.settings.heartbeat_timeout));
        let Some(retired) = self.retire(cx, tasks, &standing, TaskChange::Disconnected, "shut down") else {
            return;
        };
        self.leave_all_barriers(cx, &retired.tasks, "task disconnected", "it shut down");
        self.remove_from_live_set_requests(&retired.were_live);
        if !retired.polling.is_empty() {
            let text = "Cancelled error polling because: task has disconnected.";
            let failure = Arc::new(Failure::from_service(Code::Cancelled, text));
            self.answer_polls_of(retired.polling.into_iter(), failure);
        }
        if self.has_no_tasks_left() && self.ended.is_none() {
            self.end_run(cx, RunOutcome::Completed, "all remaining tasks have shut down");
        }
    }
}

//! Handles shutdown calls: a task waits at the shutdown barrier, or leaves the run without waiting for others.
//!
//! `barrier_arrival.rs` records arrivals at the barrier, and `barrier_ends_and_task_removal.rs` ends it. Begin at
//! `Run::handle_shutdown_call`.

use std::sync::Arc;

use super::barrier_table::{ArrivalCallKind, ArrivedCall, BarrierKey, BarrierMembers};
use super::context::TransitionContext;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId};
use super::request_reply::{Reply, TaskSet};
use super::run::Run;
use super::shared_failures::failed_shutdown_failure;
use super::task::ProtocolState;

impl Run {
    pub(super) fn handle_shutdown_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
    ) {
        let Some(task) = self.task(id) else {
            let failure = failed_shutdown_failure(&self.unknown_task_failure("shut down", id));
            return cx.reply_to_call(call, Err(Arc::new(failure)));
        };
        // Recoverable tasks shut down alone: one restart would fail the barrier for all.
        if task.recoverable || cx.settings.shutdown_timeout.is_zero() {
            let outcome = self.disconnect_task(cx, id).map(|()| Reply::Done);
            return cx.reply_to_call(call, outcome.map_err(Arc::new));
        }
        let key = BarrierKey::Shutdown;
        if let Some(ended) = self.barriers.last_ended(&key) {
            let result = ended.result.clone();
            let outcome = match (self.disconnect_task(cx, id), result) {
                (Err(failure), _) => Err(Arc::new(failed_shutdown_failure(&failure))),
                (Ok(()), Err(failure)) => Err(Arc::new(failed_shutdown_failure(&failure))),
                (Ok(()), Ok(())) => Ok(Reply::Done),
            };
            return cx.reply_to_call(call, outcome);
        }
        if self.barriers.instance(&key).is_none() {
            let members = self.shutdown_members();
            if let Err(failure) =
                self.begin_barrier_instance(cx, &key, 0, members, cx.settings.shutdown_timeout, id)
            {
                return cx.reply_to_call(call, Err(Arc::new(failed_shutdown_failure(&failure))));
            }
        }
        // A task that was recoverable when the barrier began is no member of it.
        if self.barriers.instance(&key).is_some_and(|instance| instance.member_state(id).is_none()) {
            let outcome = self.disconnect_task(cx, id).map(|()| Reply::Done);
            return cx.reply_to_call(call, outcome.map_err(Arc::new));
        }
        self.record_barrier_arrival(
            cx,
            &key,
            id,
            connection,
            ArrivedCall { call, purpose: ArrivalCallKind::ShutDown, at: cx.now },
        );
    }

    fn shutdown_members(&self) -> BarrierMembers {
        if self.tasks.iter().all(|task| !task.recoverable) {
            return self.all_tasks_as_members();
        }
        let ids = self.task_ids().filter(|id| !self.expect_task(*id).recoverable).collect();
        BarrierMembers::Some(TaskSet::new(ids))
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
}

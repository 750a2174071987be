//! Shutdown: the shutdown barrier, and a task that disconnects alone.
//!
//! It does not fill the barrier: `meeting.rs` does. Begin at `Run::shut_down`.

use std::sync::Arc;

use super::barrier::{Arrival, BarrierKey, Members, Purpose};
use super::call::{Reply, TaskSet};
use super::context::Cx;
use super::event::RunOutcome;
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, ConnectionId, TaskId};
use super::outbox::TaskChange;
use super::run::Run;
use super::task::Standing;

impl Run {
    pub(super) fn shut_down(&mut self, cx: &mut Cx<'_>, call: CallId, connection: ConnectionId, id: TaskId) {
        let Some(task) = self.task(id) else {
            let failure = shutdown_failure(&self.unknown("shut down", id));
            return cx.reply(call, Err(Arc::new(failure)));
        };
        // Tasks that may come and go leave alone: one restart would fail the barrier for all.
        if task.recoverable || cx.settings.shutdown_timeout.is_zero() {
            let outcome = self.disconnect(cx, id).map(|()| Reply::Done);
            return cx.reply(call, outcome.map_err(Arc::new));
        }
        let key = BarrierKey::Shutdown;
        if let Some(ended) = self.barriers.ended(&key) {
            let result = ended.result.clone();
            let outcome = match (self.disconnect(cx, id), result) {
                (Err(failure), _) => Err(Arc::new(shutdown_failure(&failure))),
                (Ok(()), Err(failure)) => Err(Arc::new(shutdown_failure(&failure))),
                (Ok(()), Ok(())) => Ok(Reply::Done),
            };
            return cx.reply(call, outcome);
        }
        if self.barriers.instance(&key).is_none() {
            let members = self.those_who_leave_together();
            if let Err(failure) = self.begin(cx, &key, 0, members, cx.settings.shutdown_timeout, id) {
                return cx.reply(call, Err(Arc::new(shutdown_failure(&failure))));
            }
        }
        // One that was recoverable when the others began to leave is not of their number.
        if self.barriers.instance(&key).is_some_and(|instance| instance.slot(id).is_none()) {
            let outcome = self.disconnect(cx, id).map(|()| Reply::Done);
            return cx.reply(call, outcome.map_err(Arc::new));
        }
        self.arrive(cx, &key, id, connection, Arrival { call, purpose: Purpose::ShutDown, at: cx.now });
    }

    fn those_who_leave_together(&self) -> Members {
        if self.tasks.iter().all(|task| !task.recoverable) {
            return self.everybody();
        }
        let ids = self.ids().filter(|id| !self.own(*id).recoverable).collect();
        Members::Some(TaskSet::new(ids))
    }

    /// What follows once it is decided how the shutdown barrier ends.
    pub(super) fn after_shutdown(
        &mut self,
        cx: &mut Cx<'_>,
        members: &Members,
        result: &Result<(), Arc<Failure>>,
    ) {
        match result {
            Ok(()) => {
                self.disconnect_all(cx, (0..members.len()).map(|position| members.at(position)));
            }
            Err(failure) => {
                let failure = shutdown_failure(failure);
                self.propagate(cx, None, &Arc::new(failure.clone()));
                self.fail_all(cx, failure);
            }
        }
    }

    /// Takes a task out of the run in good order.
    ///
    /// # Errors
    /// If there is no such task, or it is not in the run.
    pub(super) fn disconnect(&mut self, cx: &mut Cx<'_>, id: TaskId) -> Result<(), Failure> {
        let Some(task) = self.task(id) else {
            return Err(self.unknown("disconnected", id));
        };
        if matches!(task.standing, Standing::Disconnected(_)) {
            let text = format!("The task is already disconnected: {id}");
            return Err(Failure::service(Code::FailedPrecondition, text));
        }
        self.disconnect_all(cx, std::iter::once(id));
        Ok(())
    }

    /// Takes tasks, ascending, out of the run in good order; those that have left already stay as they are.
    fn disconnect_all(&mut self, cx: &mut Cx<'_>, tasks: impl ExactSizeIterator<Item = TaskId>) {
        let standing = Standing::Disconnected(cx.now.after(cx.settings.heartbeat_timeout));
        let Some(retired) = self.retire(cx, tasks, &standing, TaskChange::Disconnected, "shut down") else {
            return;
        };
        self.leave_all_barriers(cx, &retired.tasks, "task disconnected", "it shut down");
        self.leave_questions(&retired.were_live);
        if !retired.polling.is_empty() {
            let text = "Cancelled error polling because: task has disconnected.";
            let failure = Arc::new(Failure::service(Code::Cancelled, text));
            self.answer_polls_of(retired.polling.into_iter(), failure);
        }
        if self.is_deserted() && self.ended.is_none() {
            self.end(cx, RunOutcome::Completed, "all remaining tasks have shut down");
        }
    }
}

//! Leaving in good order: the shutdown barrier, and leaving alone.

use std::collections::VecDeque;
use std::sync::Arc;

use super::barrier::{Arrival, BarrierKey, Members, Purpose};
use super::call::{Reply, TaskSet};
use super::context::Cx;
use super::event::RunOutcome;
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::outbox::TaskChange;
use super::run::Run;
use super::task::Standing;
use super::waiters::{Answer, Calls};

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
        let until = cx.now.after(cx.settings.heartbeat_timeout);
        let (mut polls, mut left) = (VecDeque::new(), VecDeque::with_capacity(tasks.len()));
        let mut were_live = Vec::with_capacity(tasks.len());
        let mut tasks_left = Vec::with_capacity(tasks.len());
        for id in tasks {
            let task = self.own_mut(id);
            match task.standing {
                Standing::Disconnected(_) => continue,
                Standing::Connected => were_live.push(id),
                Standing::Failed(_) => {}
            }
            let suspicion = task.suspicion.take();
            task.standing = Standing::Disconnected(until);
            task.since = cx.now;
            polls.extend(task.poll.take());
            tasks_left.push(id);
            left.push_back((id, task.incarnation.unwrap_or(TaskIncarnation(0))));
            self.clear_grace(id, suspicion);
        }
        if tasks_left.is_empty() {
            return;
        }
        self.connected -= were_live.len();
        self.touch();
        cx.task_events(TaskChange::Disconnected, "shut down", left);
        self.leave_all_barriers(cx, &tasks_left, "task disconnected", "it shut down");
        self.leave_questions(&were_live);
        if !polls.is_empty() {
            let text = "Cancelled error polling because: task has disconnected.";
            let failure = Arc::new(Failure::service(Code::Cancelled, text));
            self.waiters.decide(Calls::List(polls), Answer::Failed(failure));
        }
        if self.is_deserted() && self.ended.is_none() {
            self.end(cx, RunOutcome::Completed, "all remaining tasks have shut down");
        }
    }
}

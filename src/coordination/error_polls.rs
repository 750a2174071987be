//! Error polls: calls by which a task asks for errors of the run. A setting of the job decides whether a poll is held
//! until there is an error, or is answered with CANCELLED at once.
//!
//! `barrier_ends_and_task_removal.rs` delivers an error to the held polls. Tasks whose polls are not held learn of
//! errors from the answers to their heartbeats (`failure_detection.rs`). Begin at `Run::handle_error_poll`.

use std::collections::VecDeque;
use std::sync::Arc;

use super::context::TransitionContext;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId};
use super::request_reply::Reply;
use super::run::Run;
use super::settings::{ErrorDelivery, JobSettings};
use super::task::Task;
use super::waiters::{CallSelection, SharedAnswer, WaitTarget};

/// Returns whether the task's polls are held until there is an error.
pub(super) fn are_polls_held_for(settings: &JobSettings, task: &Task) -> bool {
    match settings.error_delivery {
        ErrorDelivery::Auto => !task.recoverable,
        ErrorDelivery::Hold => true,
        ErrorDelivery::Cancel => false,
    }
}

impl Run {
    /// Handles an error poll: answers it, or holds it until there is an error.
    pub(super) fn handle_error_poll(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
    ) {
        self.has_error_polls = true;
        let refuse = |code, text: String| Err(Arc::new(Failure::from_service(code, text)));
        let Some(task) = self.task(id) else {
            let text = format!("Unexpected task ({id}) that is not in the cluster polling for errors.");
            return cx.reply_to_call(call, refuse(Code::InvalidArgument, text));
        };
        let holds = are_polls_held_for(cx.settings, task);
        let outcome = if task.is_past_shutdown_grace(cx.now) {
            let text =
                format!("Task ({id}) that has not been registered or has disconnected polling for errors.");
            refuse(Code::FailedPrecondition, text)
        } else if let Some(failure) = task.failure() {
            let text = format!(
                "Task ({id}) that is already in error state polling for errors. Current error: {failure}"
            );
            refuse(Code::FailedPrecondition, text)
        } else if let Some(sticky) = &self.propagated_error {
            Err(Arc::clone(sticky))
        } else if holds {
            if !self.admit_waiter(cx, call, connection) {
                return;
            }
            let text = "Cancelled error polling because: new request from the same task";
            self.answer_error_poll(cx, id, &Arc::new(Failure::from_service(Code::Cancelled, text)));
            self.expect_task_mut(id).poll = Some(call);
            self.waiters.insert(call, connection, WaitTarget::Poll(id));
            return;
        } else {
            let text = "Errors of this job are delivered with heartbeats; no need to poll.";
            Err(Arc::new(Failure::without_details(Code::Cancelled, text)))
        };
        let outcome: Result<Reply, _> = outcome;
        cx.reply_to_call(call, outcome);
    }

    /// Answers every held poll with `failure`.
    pub(super) fn answer_all_error_polls(&mut self, failure: Arc<Failure>) {
        self.answer_error_polls_of(self.task_ids(), failure);
    }

    /// Answers the held polls of these tasks with `failure`.
    pub(super) fn answer_error_polls_of(
        &mut self,
        tasks: impl Iterator<Item = TaskId>,
        failure: Arc<Failure>,
    ) {
        let polls: VecDeque<CallId> = tasks.filter_map(|id| self.take_error_poll(id)).collect();
        self.waiters.queue_answer(CallSelection::List(polls), SharedAnswer::Failed(failure));
    }

    /// Answers the held poll of a task, if there is one.
    pub(super) fn answer_error_poll(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        failure: &Arc<Failure>,
    ) {
        if let Some(call) = self.take_error_poll(id) {
            self.waiters.remove(call);
            cx.reply_to_call(call, Err(Arc::clone(failure)));
        }
    }

    /// Removes and returns the held poll of a task, to be answered.
    fn take_error_poll(&mut self, id: TaskId) -> Option<CallId> {
        self.expect_task(id).poll?;
        self.expect_task_mut(id).poll.take()
    }
}

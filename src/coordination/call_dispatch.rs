//! Passes each admitted call to the function that handles it, and answers the calls that ask for the present states
//! of tasks.
//!
//! `exclusion_rules.rs` and `fencing.rs` decide which calls are admitted. `store_calls.rs` handles the calls on the
//! key-value store. A call is either answered at once or becomes a waiting call (`waiters.rs`). `pending_work.rs`
//! sends the queued answers of waiting calls. Begin at `Run::dispatch_call`.

use std::net::SocketAddr;
use std::sync::Arc;

use super::context::TransitionContext;
use super::failure::{Code, Failure};
use super::ids::{CallId, TaskId};
use super::request_reply::{Caller, Reply, Request, TaskStates};
use super::run::Run;

impl Run {
    /// Performs an admitted call.
    pub(super) fn dispatch_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        caller: Caller,
        peer: Option<SocketAddr>,
        writer: Option<TaskId>,
        request: Request,
    ) {
        let connection = caller.connection;
        match request {
            Request::Register { task, incarnation, recoverable } => {
                self.register_task(cx, call, connection, peer, task, incarnation, recoverable);
            }
            Request::Heartbeat { task, incarnation } => {
                let outcome = self.handle_heartbeat(cx, connection, task, incarnation);
                cx.reply_to_call(call, outcome.map(|()| Reply::ServiceIncarnation(self.incarnation)));
            }
            Request::PollForError { task } => self.handle_error_poll(cx, call, connection, task),
            Request::Shutdown { task } => self.handle_shutdown_call(cx, call, connection, task),
            Request::Reset { task } => {
                let outcome = self.disconnect_task(cx, task).map(|()| Reply::Done);
                cx.reply_to_call(call, outcome.map_err(Arc::new));
            }
            Request::ReportError { task, code, message } => {
                let outcome = self.handle_reported_error(cx, task, code, message).map(|()| Reply::Done);
                cx.reply_to_call(call, outcome.map_err(Arc::new));
            }
            Request::WaitForAllTasks { task, devices } => {
                self.arrive_at_device_exchange(cx, call, connection, task, devices);
            }
            Request::TaskStates { tasks } => {
                let outcome = self.task_states_reply(&tasks).map_err(Arc::new);
                cx.reply_to_call(call, outcome);
            }
            Request::JobState => cx.reply_to_call(call, Ok(Reply::States(self.shared_task_states()))),
            Request::Watch { version } => self.handle_task_states_watch(cx, call, connection, version),
            Request::Barrier { id, counter, timeout_ms, members, task } => {
                self.arrive_at_barrier(cx, call, connection, task, id, counter, timeout_ms, members);
            }
            Request::CancelBarrier { id, counter, task } => {
                let outcome = self.cancel_barrier(cx, task, id, counter).map(|()| Reply::Done);
                cx.reply_to_call(call, outcome.map_err(Arc::new));
            }
            Request::LiveSet { task, tasks } => self.handle_live_set_call(cx, call, connection, task, tasks),
            Request::FromPeerJob { from, question } => {
                self.handle_peer_job_call(cx, call, connection, from, question);
            }
            of_store => self.dispatch_store_call(cx, call, connection, writer, of_store),
        }
    }

    fn task_states_reply(&self, tasks: &[TaskId]) -> Result<Reply, Failure> {
        if tasks.len() > self.tasks.len() {
            let text = format!(
                "The states of {} tasks are asked for; this job has {}.",
                tasks.len(),
                self.tasks.len()
            );
            return Err(Failure::from_service(Code::InvalidArgument, text));
        }
        if let Some(unknown) = tasks.iter().find(|task| self.task(**task).is_none()) {
            return Err(self.unknown_task_failure("asked about", *unknown));
        }
        let tasks = tasks.iter().map(|task| self.task_info(*task)).collect();
        Ok(Reply::States(Arc::new(TaskStates { version: self.version, tasks })))
    }
}

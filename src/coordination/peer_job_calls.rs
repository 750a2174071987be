//! Answers calls from tasks of other jobs. Such a call can read the states of a run's tasks and their engine records,
//! and nothing else. The module also handles the watch of the task states by tasks of the own job.
//!
//! `peer_jobs.rs` decides which calls are admitted. When a job withdraws its permission, `peer_jobs.rs` ends the
//! waiting calls. Begin at `Run::handle_peer_job_call`.

use std::sync::Arc;

use bytes::Bytes;

use super::context::TransitionContext;
use super::failure::Failure;
use super::ids::{CallId, ConnectionId, JobId};
use super::request_reply::{PeerJobQuery, Reply, Request};
use super::run::Run;
use super::waiters::{CallSelection, SharedAnswer, WaitTarget};

impl Run {
    /// Answers an admitted call of a task of another job, now or later.
    pub(super) fn handle_peer_job_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        from: JobId,
        question: PeerJobQuery,
    ) {
        match question {
            PeerJobQuery::TaskStates { version } => {
                self.handle_task_states_watch(cx, call, connection, version)
            }
            PeerJobQuery::EngineRecord { task, .. } if self.task(task).is_none() => {
                cx.reply_to_call(call, Err(Arc::new(self.unknown_task_failure("asked about", task))));
            }
            PeerJobQuery::EngineRecord { task, incarnation } => {
                let key = Bytes::from(PeerJobQuery::engine_record_key(task, incarnation));
                self.dispatch_store_call(cx, call, connection, None, Request::Get { key });
            }
        }
        self.waiters.mark_as_call_of_peer_job(call, from);
    }

    /// Waits for a change of a task's state, unless the caller's version is another one.
    pub(super) fn handle_task_states_watch(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        version: i64,
    ) {
        // A version that this service has not reached comes from an earlier service; the watcher gets the
        // present states.
        if version == self.version {
            if self.admit_waiter(cx, call, connection) {
                self.waiters.insert(call, connection, WaitTarget::Watch);
            }
            return;
        }
        cx.reply_to_call(call, Ok(Reply::States(self.shared_task_states())));
    }

    /// Decides that every waiting call of a task of job `from` fails.
    pub(super) fn fail_calls_of_peer_job(&mut self, from: JobId, failure: &Arc<Failure>) {
        let of_job = self.waiters.waiting_calls_of_peer_jobs().filter(|(_, job)| *job == from);
        let calls: Vec<CallId> = of_job.map(|(call, _)| call).collect();
        for call in &calls {
            self.waiters.stop_watching(*call);
            if let Some(WaitTarget::Key(key, _)) = self.waiters.wait_target(*call) {
                let key = key.clone();
                self.store.remove_waiter(&key, *call);
            }
        }
        if !calls.is_empty() {
            let calls = CallSelection::List(calls.into());
            self.waiters.queue_answer(calls, SharedAnswer::Failed(Arc::clone(failure)));
        }
    }
}

//! Failure of tasks: heartbeats and their timeout, suspicion after a lost connection, the first cause, propagation,
//! and error polls.
//!
//! It keeps no statistics (`heartbeat_stats.rs`) and excludes no task (`exclusion_rules.rs`). Begin at `Run::heartbeat`,
//! `Run::on_connection_lost` and `Run::fail_task`.
//!
//! - A heartbeat moves no deadline. The timer of a task fires, compares with the last sign of life, and is set
//!   again to the exact moment.
//! - A connection that breaks while an error poll is held on it means a dead process, because clients abort then:
//!   the task fails at once. Otherwise the task is suspect for `disconnect_grace` and fails afterwards, unless it
//!   speaks again with the same incarnation.
//! - The first error of a run and its task are kept as the first cause; later errors are shown as consequences.
//! - A job either holds error polls or answers them with CANCELLED; in the latter case errors arrive with
//!   heartbeats.

use std::collections::VecDeque;
use std::mem::discriminant;
use std::sync::Arc;
use std::time::Duration;

use super::call::Reply;
use super::context::TransitionContext;
use super::event::{EventKind, FailureClass, FirstCause, RunOutcome};
use super::event_queue::TaskChange;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::input::ConnectionEnd;
use super::run::Run;
use super::settings::{ErrorDelivery, JobSettings};
use super::task::{ProtocolState, Suspicion, Task};
use super::timers::Timer;
use super::waiters::{CallSelection, SharedAnswer, WaitTarget};

/// The advice for people about a lost task; its words are those that people search for.
const TROUBLESHOOTING_HINT: &str = "Check the task logs for an earlier error or scheduler events (e.g. preemption, eviction) to \
                            debug further.";

impl Failure {
    /// Returns whether the task was lost, rather than reported an error or broke a rule: a lost task may
    /// return.
    pub(super) fn is_task_loss(&self) -> bool {
        self.code == Code::Unavailable && self.service_error.is_some_and(|e| !e.reported)
    }
}

/// Formats a short time for people.
fn format_short(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        _ => format!("{} s", time.as_secs_f64()),
    }
}

/// Returns whether the task's polls are held until there is an error.
fn holds_polls_of(settings: &JobSettings, task: &Task) -> bool {
    match settings.error_delivery {
        ErrorDelivery::Auto => !task.recoverable,
        ErrorDelivery::Hold => true,
        ErrorDelivery::Cancel => false,
    }
}

/// Tasks that ceased to take part at the same moment.
pub(super) struct Retired {
    pub tasks: Vec<TaskId>,
    /// The tasks that were connected.
    pub were_live: Vec<TaskId>,
    /// The tasks whose polls are held.
    pub polling: Vec<TaskId>,
    /// Whether at least one of them is recoverable.
    pub recoverable: bool,
}

impl Run {
    pub(super) fn heartbeat(
        &mut self,
        cx: &mut TransitionContext<'_>,
        connection: ConnectionId,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) -> Result<(), Arc<Failure>> {
        let Some(task) = self.task(id) else {
            let text = format!(
                "Unexpected heartbeat request from task: {id}. This usually implies a configuration error: this job \
                 has {} tasks.",
                self.tasks.len()
            );
            return Err(Arc::new(Failure::from_service(Code::InvalidArgument, text)));
        };
        if let Some(failure) = task.failure() {
            let text = format!(
                "Unexpected heartbeat request from an already-in-error task: {id} with existing error: {failure}"
            );
            return Err(Arc::new(Failure::from_service(Code::Aborted, text)));
        }
        if task.is_past_disconnect_grace(cx.now) {
            let text = format!(
                "Task with task={id} must be registered before sending heartbeat messages. The service might have \
                 restarted, please restart / reset and register again."
            );
            return Err(Arc::new(Failure::from_service(Code::InvalidArgument, text)));
        }
        if task.incarnation != Some(incarnation) {
            return self.handle_incarnation_mismatch(cx, id, incarnation);
        }
        // A task whose polls are not held learns of the run's first error with its heartbeat.
        if let Some(sticky) = &self.propagated_error
            && !holds_polls_of(cx.settings, task)
        {
            let text = format!("The run has failed: {sticky}");
            return Err(Arc::new(Failure::from_service(Code::Aborted, text)));
        }
        self.record_contact(cx, connection, id);
        let task = self.expect_task_mut(id);
        task.last_heartbeat = Some(cx.now);
        task.heartbeat_stats.record_heartbeat(cx.now);
        Ok(())
    }

    /// Handles a heartbeat of an incarnation that this run does not know.
    fn handle_incarnation_mismatch(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) -> Result<(), Arc<Failure>> {
        let task = self.expect_task(id);
        if task.recoverable {
            return Ok(());
        }
        let expected = task.incarnation.map_or_else(|| "none".to_owned(), |known| known.to_string());
        let text = format!(
            "{id} Heartbeat: Incarnation ID mismatch: expecting {expected} but got {incarnation}. The task has \
             restarted and likely crashed earlier. {TROUBLESHOOTING_HINT}"
        );
        let why = "heartbeat from another incarnation";
        let failure = Arc::new(Failure::from_service(Code::Aborted, text).with_cause(why));
        self.fail_task(cx, id, &failure, FailureClass::Restarted, why);
        self.propagate_error(cx, Some(id), &failure);
        Err(failure)
    }

    /// Records that the present incarnation of the task made a call on this connection.
    pub(super) fn record_contact(
        &mut self,
        cx: &mut TransitionContext<'_>,
        connection: ConnectionId,
        id: TaskId,
    ) {
        let task = self.expect_task_mut(id);
        if task.connection == Some(connection) && task.suspicion.is_none() {
            return;
        }
        task.connection = Some(connection);
        let returned = task.suspicion.is_some();
        self.clear_suspicion(id);
        if returned {
            cx.emit(EventKind::TaskReturned { task: id }, "reconnected in time");
        }
    }

    pub(super) fn clear_suspicion(&mut self, id: TaskId) {
        let suspicion = self.expect_task_mut(id).suspicion.take();
        self.clear_grace(id, suspicion);
    }

    /// Stops the grace timer of a suspicion that has ended.
    pub(super) fn clear_grace(&mut self, id: TaskId, suspicion: Option<Suspicion>) {
        if let Some(suspicion) = suspicion {
            self.timers.clear(suspicion.until, Timer::Grace(id));
        }
    }

    /// Sets the first heartbeat timer of a task that has become connected.
    pub(super) fn set_heartbeat_timer(&mut self, cx: &TransitionContext<'_>, id: TaskId) {
        let heard = self.expect_task(id).last_heartbeat.unwrap_or(cx.now);
        self.timers.set(heard.after(cx.settings.heartbeat_timeout), Timer::Heartbeat(id));
    }

    /// Handles the heartbeat timer of a task: fails the task, or sets the timer again from its last
    /// heartbeat.
    pub(super) fn on_heartbeat_timer(&mut self, cx: &mut TransitionContext<'_>, id: TaskId) {
        let task = self.expect_task_mut(id);
        if !task.is_connected() {
            task.has_heartbeat_timer = false;
            return;
        }
        let heard = task.last_heartbeat.unwrap_or_default();
        let due = heard.after(cx.settings.heartbeat_timeout);
        if due > cx.now {
            self.timers.set(due, Timer::Heartbeat(id));
            return;
        }
        task.has_heartbeat_timer = false;
        let silent = humantime::format_duration(cx.settings.heartbeat_timeout);
        let text = format!(
            "Task {id} heartbeat timeout: nothing was heard of {} for {silent}. This indicates that the remote task has \
             failed, got preempted, or crashed unexpectedly. {TROUBLESHOOTING_HINT}",
            self.describe(id)
        );
        let told = format!(
            "The following tasks are unhealthy (stopped sending heartbeats):\n{id}\nNothing was heard of {} for \
             {silent}. {TROUBLESHOOTING_HINT}",
            self.describe(id)
        );
        let why = format!("no heartbeat for {}", format_short(cx.settings.heartbeat_timeout));
        self.fail_as_lost(cx, id, [text, told], FailureClass::HeartbeatTimeout, &why, &why);
    }

    /// Handles a broken connection for one task that used it.
    pub(super) fn on_connection_lost(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        poll_was_held: bool,
        ending: &ConnectionEnd,
    ) {
        let Some(grace) = cx.settings.disconnect_grace else { return };
        if poll_was_held {
            // A client whose connection breaks under a held poll aborts its own process.
            let follows = " while still registered; the process probably died";
            return self.fail_for_lost_connection(cx, id, ending, "with its error poll held on it", follows);
        }
        let until = cx.now.after(grace);
        self.clear_suspicion(id);
        let suspicion = Suspicion { since: cx.now, until, evidence: ending.clone() };
        self.expect_task_mut(id).suspicion = Some(suspicion);
        self.timers.set(until, Timer::Grace(id));
        let reason = format!(
            "connection{} {}; waiting {} for a reconnect",
            self.peer_suffix(id),
            ending.word(),
            format_short(grace)
        );
        cx.emit(EventKind::TaskSuspected { task: id }, reason);
    }

    pub(super) fn on_grace_expired(&mut self, cx: &mut TransitionContext<'_>, id: TaskId) {
        let Some(suspicion) = self.expect_task_mut(id).suspicion.take() else { return };
        if self.expect_task(id).is_connected() {
            let grace = suspicion.until.since(suspicion.since);
            let follows = format!("; no reconnect within {}", format_short(grace));
            self.fail_for_lost_connection(
                cx,
                id,
                &suspicion.evidence,
                "and it was not heard again",
                &follows,
            );
        }
    }

    /// Returns the address from which a task registered, for people.
    fn peer_suffix(&self, id: TaskId) -> String {
        self.expect_task(id).peer.map_or_else(String::new, |peer| format!(" from {peer}"))
    }

    /// Fails a task because its connection broke: `how` is for clients, `follows` for people.
    fn fail_for_lost_connection(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        ending: &ConnectionEnd,
        how: &str,
        follows: &str,
    ) {
        let task = self.describe(id);
        let text = format!(
            "Task {id} connection lost: the connection of {task} {ending}, {how}. This indicates that the remote task \
             has failed, got preempted, or crashed unexpectedly. {TROUBLESHOOTING_HINT}"
        );
        let told = format!(
            "The following tasks are unhealthy (connection lost):\n{id}\nThe connection of {task} {ending}, {how}. \
             {TROUBLESHOOTING_HINT}"
        );
        let [cause, why] =
            ["", &self.peer_suffix(id)].map(|from| format!("connection{from} {}{follows}", ending.word()));
        self.fail_as_lost(cx, id, [text, told], FailureClass::ConnectionLost, &cause, &why);
    }

    /// Fails a lost task with its own error, and propagates the other text. `why` names the address of its
    /// process, `cause` does not.
    fn fail_as_lost(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        texts: [String; 2],
        class: FailureClass,
        cause: &str,
        why: &str,
    ) {
        let [own, told] =
            texts.map(|text| Arc::new(Failure::from_service(Code::Unavailable, text).with_cause(cause)));
        self.fail_task(cx, id, &own, class, why);
        self.propagate_error(cx, Some(id), &told);
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
        let Some(retired) = self.retire(cx, tasks, &standing, TaskChange::Failed(class), why) else { return };
        let reason = format!("task is set to ERROR: {failure}");
        self.leave_all_barriers(cx, &retired.tasks, &reason, failure.summary());
        self.remove_from_live_set_requests(&retired.were_live);
        if self.has_no_tasks_left() && self.ended.is_none() && retired.recoverable {
            self.end_run(cx, RunOutcome::Abandoned, format!("its last live task was lost: {why}"));
        }
    }

    /// Gives tasks, ascending, a state in which they take no part, and emits the events. Tasks already in
    /// that state stay as they are; returns `None` if all are.
    pub(super) fn retire(
        &mut self,
        cx: &mut TransitionContext<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
        standing: &ProtocolState,
        change: TaskChange,
        reason: &str,
    ) -> Option<Retired> {
        let mut events = VecDeque::with_capacity(tasks.len());
        let mut retired = Retired {
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
            self.clear_grace(id, suspicion);
        }
        if retired.tasks.is_empty() {
            return None;
        }
        self.connected_tasks -= retired.were_live.len();
        self.bump_version();
        cx.emit_for_tasks(change, reason, events);
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
        let whose = source.map_or_else(String::new, |id| format!("{}: ", self.describe(id)));
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
        self.answer_all_polls(Arc::clone(failure));
    }

    /// Answers every held poll with `failure`.
    pub(super) fn answer_all_polls(&mut self, failure: Arc<Failure>) {
        self.answer_polls_of(self.task_ids(), failure);
    }

    /// Answers the held polls of these tasks with `failure`.
    pub(super) fn answer_polls_of(&mut self, tasks: impl Iterator<Item = TaskId>, failure: Arc<Failure>) {
        let polls: VecDeque<CallId> = tasks.filter_map(|id| self.take_poll(id)).collect();
        self.waiters.queue_answer(CallSelection::List(polls), SharedAnswer::Failed(failure));
    }

    pub(super) fn record_first_cause(
        &mut self,
        cx: &mut TransitionContext<'_>,
        source: Option<TaskId>,
        failure: &Failure,
    ) {
        if self.first_cause.is_none() {
            let (error, why) = (failure.to_string(), failure.summary().to_owned());
            cx.emit(EventKind::FirstCause { task: source }, &*why);
            self.first_cause = Some(FirstCause { at: cx.now, task: source, error, why });
        }
    }

    pub(super) fn fail_all_tasks(&mut self, cx: &mut TransitionContext<'_>, failure: Failure) {
        let why = "the run has failed";
        let failure = Arc::new(failure.with_cause(why));
        self.fail_tasks(cx, self.task_ids(), &failure, FailureClass::Consequence, why);
    }

    /// Removes and returns the held poll of a task, to be answered.
    fn take_poll(&mut self, id: TaskId) -> Option<CallId> {
        self.expect_task(id).poll?;
        self.expect_task_mut(id).poll.take()
    }

    /// Answers the held poll of a task, if there is one.
    pub(super) fn answer_poll(&mut self, cx: &mut TransitionContext<'_>, id: TaskId, failure: &Arc<Failure>) {
        if let Some(call) = self.take_poll(id) {
            self.waiters.remove(call);
            cx.reply(call, Err(Arc::clone(failure)));
        }
    }

    pub(super) fn poll_for_error(
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
            return cx.reply(call, refuse(Code::InvalidArgument, text));
        };
        let holds = holds_polls_of(cx.settings, task);
        let outcome = if task.is_past_disconnect_grace(cx.now) {
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
            self.answer_poll(cx, id, &Arc::new(Failure::from_service(Code::Cancelled, text)));
            self.expect_task_mut(id).poll = Some(call);
            self.waiters.insert(call, connection, WaitTarget::Poll(id));
            return;
        } else {
            let text = "Errors of this job are delivered with heartbeats; no need to poll.";
            Err(Arc::new(Failure::without_details(Code::Cancelled, text)))
        };
        let outcome: Result<Reply, _> = outcome;
        cx.reply(call, outcome);
    }
}

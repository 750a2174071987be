//! Detects failed tasks: by a heartbeat timeout, a lost connection, an error that a task reports, or a heartbeat of
//! an unknown incarnation.
//!
//! `barrier_ends_and_task_removal.rs` removes a failed task from the run. `heartbeat_stats.rs` has the statistics of
//! heartbeats. Begin at `Run::handle_heartbeat` and `Run::on_connection_lost`.
//!
//! - The handler of a heartbeat only records the time. When the heartbeat timer of a task fires, the handler of the
//!   timer computes the deadline again from the last heartbeat. If the deadline is in the future, the handler sets
//!   the timer to it. Otherwise the task fails.
//! - If a connection breaks while it holds an error poll of a task, the task fails at once, because a client aborts
//!   when its poll breaks. If the connection holds no poll, the task becomes suspect. A suspect task fails after
//!   `disconnect_grace`, unless the same incarnation has made another call by then. In a job without
//!   `disconnect_grace`, a broken connection fails no task.

use std::sync::Arc;
use std::time::Duration;

use super::context::TransitionContext;
use super::error_polls::are_polls_held_for;
use super::event::{EventKind, FailureClass};
use super::failure::{Code, Failure, ServiceErrorMark};
use super::ids::{ConnectionId, TaskId, TaskIncarnation};
use super::input::ConnectionEnd;
use super::run::Run;
use super::task::Suspicion;
use super::timers::Timer;

/// The advice for people about a lost task; its words are those that people search for.
const TROUBLESHOOTING_HINT: &str = "Check the task logs for an earlier error or scheduler events (e.g. preemption, eviction) to \
                            debug further.";

/// The beginnings of the reasons of failures in which the host of a task did not answer.
const NO_HEARTBEAT_FOR: &str = "no heartbeat for ";
const CONNECTION_TIMED_OUT: &str = "connection timed out";

/// Returns whether a task failed because nothing came from its host: a heartbeat timeout, or a connection that timed out. The state keeps
/// the reason for the end of an incarnation as text only.
#[must_use]
pub fn is_unreachable_host(reason: &str) -> bool {
    reason.starts_with(NO_HEARTBEAT_FOR) || reason.starts_with(CONNECTION_TIMED_OUT)
}

/// Formats a short time for people.
fn format_short_duration(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        _ => format!("{} s", time.as_secs_f64()),
    }
}

impl Run {
    pub(super) fn handle_heartbeat(
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
        if task.is_past_shutdown_grace(cx.now) {
            let text = format!(
                "Task with task={id} must be registered before sending heartbeat messages. The service might have \
                 restarted, please restart / reset and register again."
            );
            return Err(Arc::new(Failure::from_service(Code::InvalidArgument, text)));
        }
        if task.incarnation != Some(incarnation) {
            return self.handle_heartbeat_of_unknown_incarnation(cx, id, incarnation);
        }
        // A task whose polls are not held learns of the run's first error with its heartbeat.
        if let Some(sticky) = &self.propagated_error
            && !are_polls_held_for(cx.settings, task)
        {
            let text = format!("The run has failed: {sticky}");
            return Err(Arc::new(Failure::from_service(Code::Aborted, text)));
        }
        self.record_call_on_connection(cx, connection, id);
        let task = self.expect_task_mut(id);
        task.last_heartbeat = Some(cx.now);
        task.heartbeat_stats.record_heartbeat(cx.now);
        Ok(())
    }

    /// Handles a heartbeat of an incarnation that this run does not know.
    fn handle_heartbeat_of_unknown_incarnation(
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
    pub(super) fn record_call_on_connection(
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
            cx.emit_event(EventKind::TaskReturned { task: id }, "reconnected in time");
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
            self.describe_task(id)
        );
        let told = format!(
            "The following tasks are unhealthy (stopped sending heartbeats):\n{id}\nNothing was heard of {} for \
             {silent}. {TROUBLESHOOTING_HINT}",
            self.describe_task(id)
        );
        let why = format!("{NO_HEARTBEAT_FOR}{}", format_short_duration(cx.settings.heartbeat_timeout));
        self.fail_lost_task(cx, id, [text, told], FailureClass::HeartbeatTimeout, &why, &why);
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
            return self.fail_task_for_lost_connection(
                cx,
                id,
                ending,
                "with its error poll held on it",
                follows,
            );
        }
        let until = cx.now.after(grace);
        self.clear_suspicion(id);
        let suspicion = Suspicion { since: cx.now, until, evidence: ending.clone() };
        self.expect_task_mut(id).suspicion = Some(suspicion);
        self.timers.set(until, Timer::Grace(id));
        let reason = format!(
            "connection{} {}; waiting {} for a reconnect",
            self.task_address_suffix(id),
            ending.short_text(),
            format_short_duration(grace)
        );
        cx.emit_event(EventKind::TaskSuspected { task: id }, reason);
    }

    pub(super) fn on_disconnect_grace_expired(&mut self, cx: &mut TransitionContext<'_>, id: TaskId) {
        let Some(suspicion) = self.expect_task_mut(id).suspicion.take() else { return };
        if self.expect_task(id).is_connected() {
            let grace = suspicion.until.since(suspicion.since);
            let follows = format!("; no reconnect within {}", format_short_duration(grace));
            self.fail_task_for_lost_connection(
                cx,
                id,
                &suspicion.evidence,
                "and it was not heard again",
                &follows,
            );
        }
    }

    /// Returns the address from which a task registered, for people.
    fn task_address_suffix(&self, id: TaskId) -> String {
        self.expect_task(id).peer.map_or_else(String::new, |peer| format!(" from {peer}"))
    }

    /// Fails a task because its connection broke: `how` is for clients, `follows` for people.
    fn fail_task_for_lost_connection(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        ending: &ConnectionEnd,
        how: &str,
        follows: &str,
    ) {
        let task = self.describe_task(id);
        let text = format!(
            "Task {id} connection lost: the connection of {task} {ending}, {how}. This indicates that the remote task \
             has failed, got preempted, or crashed unexpectedly. {TROUBLESHOOTING_HINT}"
        );
        let told = format!(
            "The following tasks are unhealthy (connection lost):\n{id}\nThe connection of {task} {ending}, {how}. \
             {TROUBLESHOOTING_HINT}"
        );
        let [cause, why] = ["", &self.task_address_suffix(id)]
            .map(|from| format!("connection{from} {}{follows}", ending.short_text()));
        self.fail_lost_task(cx, id, [text, told], FailureClass::ConnectionLost, &cause, &why);
    }

    /// Fails a lost task with its own error, and propagates the other text. `why` names the address of its
    /// process, `cause` does not.
    fn fail_lost_task(
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

    /// Handles an error that a task reports about itself.
    pub(super) fn handle_reported_error(
        &mut self,
        cx: &mut TransitionContext<'_>,
        task: TaskId,
        code: i32,
        mut message: String,
    ) -> Result<(), Failure> {
        let Some(reporter) = self.task(task) else {
            return Err(Failure::from_service(
                Code::InvalidArgument,
                format!("Unexpected request from task {task}: it is not in this job."),
            ));
        };
        if !reporter.is_connected() {
            let text = "The task is not connected or already has an error.";
            return Err(Failure::from_service(Code::FailedPrecondition, text));
        }
        let Some(code) = Code::from_number(code) else {
            return Err(Failure::from_service(
                Code::InvalidArgument,
                "An error cannot be reported with code 0, which is OK.",
            ));
        };
        message.truncate(message.floor_char_boundary(cx.settings.bounds.error_message_bytes));
        let mut failure = Failure::without_details(code, message);
        failure.service_error = Some(ServiceErrorMark { reported: true, source: Some(task) });
        let failure = Arc::new(failure);
        self.fail_task(cx, task, &failure, FailureClass::Reported, "the task reported it");
        self.propagate_error(cx, Some(task), &failure);
        Ok(())
    }
}

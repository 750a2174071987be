//! Registers tasks in a run. No task is connected until all tasks of the run that are not excused have registered. A
//! newer incarnation of a task replaces the older one.
//!
//! `fencing.rs` refuses old incarnations, `exclusion_rules.rs` refuses excluded tasks, and `run_start.rs` starts the
//! run. Begin at `Run::register_task`.
//!
//! In a fate-sharing run, the registration of a second incarnation of a connected task fails the run. The
//! registration is refused once with ABORTED, which clients retry. The retry is the first registration of the next
//! run. A recoverable task that restarted, was lost or was excluded may register again in the same run. Such a task
//! is unsynced until an instance passes at which all members that are not excused have arrived, this task among them.
//! A task that reported an error about itself cannot register again in the same run.

use std::net::SocketAddr;
use std::sync::Arc;

use super::barrier_table::{ArrivalCallKind, ArrivedCall, BarrierKey};
use super::context::TransitionContext;
use super::event::{EventKind, FailureClass};
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::request_reply::Reply;
use super::run::Run;
use super::shared_failures::incarnation_replaced_failure;
use super::task::ProtocolState;

impl Run {
    #[expect(clippy::too_many_arguments, reason = "what a registration is made of")]
    pub(super) fn register_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        peer: Option<SocketAddr>,
        id: TaskId,
        incarnation: TaskIncarnation,
        recoverable: bool,
    ) {
        let Some(task) = self.task(id) else {
            let failure = self.unknown_task_failure("registered", id);
            return cx.reply_to_call(call, Err(Arc::new(failure)));
        };
        if task.has_superseded(incarnation) {
            let failure = self.superseded_failure(id, incarnation, peer);
            return cx.reply_to_call(call, Err(failure));
        }
        let recoverable = cx.settings.recoverable || recoverable;
        let same = task.incarnation == Some(incarnation);
        match &task.standing {
            ProtocolState::Disconnected(_) => {
                self.replace_incarnation(cx, connection, peer, id, incarnation, recoverable);
                self.join_registration_barrier(cx, call, connection, id, incarnation);
            }
            // Only an error that the task reported itself is permanent; a lost or excluded task may return.
            ProtocolState::Failed(failure)
                if recoverable && (failure.is_task_loss() || failure.is_exclusion()) =>
            {
                self.replace_incarnation(cx, connection, peer, id, incarnation, recoverable);
                self.join_registration_barrier(cx, call, connection, id, incarnation);
            }
            ProtocolState::Connected if same || recoverable => {
                let again = !same;
                self.replace_incarnation(cx, connection, peer, id, incarnation, recoverable);
                if recoverable {
                    let why = "the task registered again";
                    self.remove_from_all_barriers(cx, &[id], why, why);
                }
                self.connect_task(cx, id, again);
                cx.reply_to_call(call, Ok(Reply::ServiceIncarnation(self.incarnation)));
            }
            ProtocolState::Connected => {
                let text = format!(
                    "{id} unexpectedly tried to connect with a different incarnation. It has likely restarted: {} came \
                     from {}, {} is the one that this run knows ({}).",
                    incarnation,
                    peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string()),
                    task.incarnation.map_or_else(String::new, |old| old.to_string()),
                    self.describe_task(id),
                );
                self.fail_registering_task(cx, call, id, text, "the task restarted");
            }
            ProtocolState::Failed(failure) => {
                let text = format!(
                    "{id} unexpectedly tried to connect while it is already in error. ResetTask() should be called \
                     before a subsequent connect attempt. Existing error: {failure}"
                );
                self.fail_registering_task(cx, call, id, text, "the task registered again while in error");
            }
        }
    }

    /// Handles a registration that shows that the run is broken: the caller and all other tasks get the
    /// error.
    fn fail_registering_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        id: TaskId,
        text: String,
        why: &str,
    ) {
        let failure = Arc::new(Failure::from_service(Code::Aborted, text).with_source(id).with_cause(why));
        self.fail_task(cx, id, &failure, FailureClass::Restarted, why);
        self.propagate_error(cx, Some(id), &failure);
        cx.reply_to_call(call, Err(failure));
    }

    /// Makes `incarnation` the present one of the task, and fences the one before it.
    fn replace_incarnation(
        &mut self,
        cx: &mut TransitionContext<'_>,
        connection: ConnectionId,
        peer: Option<SocketAddr>,
        id: TaskId,
        incarnation: TaskIncarnation,
        recoverable: bool,
    ) {
        let kept = cx.settings.bounds.incarnations_kept;
        let task = self.expect_task_mut(id);
        let old = task.incarnation.filter(|old| *old != incarnation);
        let old_peer = task.peer;
        let was_failed = task.failure().is_some();
        let old_poll = if old.is_some() { task.poll.take() } else { None };
        let ended = match &task.standing {
            ProtocolState::Failed(failure) => failure.summary().to_owned(),
            ProtocolState::Connected => "replaced by a newer process".to_owned(),
            ProtocolState::Disconnected(_) if task.was_connected => "shut down".to_owned(),
            ProtocolState::Disconnected(_) => {
                "replaced by a newer process before all tasks had registered".to_owned()
            }
        };
        task.begin_incarnation(incarnation, peer, cx.now, &ended, kept);
        task.connection = Some(connection);
        task.recoverable = recoverable;
        self.clear_suspicion(id);
        if old.is_some() {
            self.cancel_live_set_calls_of(id, &incarnation_replaced_failure(id, incarnation));
        }
        if let Some(call) = old_poll {
            self.waiters.remove(call);
            cx.reply_to_call(call, Err(incarnation_replaced_failure(id, incarnation)));
        }
        let waits = self.barriers.instance(&BarrierKey::Registration).and_then(|i| i.member_state(id));
        let rival = matches!(waits, Some(super::barrier_table::MemberState::Arrived(_)));
        if let Some(old) = old
            && (rival || (self.expect_task(id).is_connected() && !was_failed))
        {
            let change =
                EventKind::TaskSuperseded { task: id, old, old_peer, new: incarnation, new_peer: peer };
            let reason = format!("a newer process registered as task {id} and takes its place");
            cx.emit_event(change, reason);
        }
    }

    fn join_registration_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) {
        self.bump_task_states_version();
        if self.started_at.is_some() {
            // The run has started: a task that registers now connects at once, without waiting for others.
            self.connect_task(cx, id, true);
            return cx.reply_to_call(call, Ok(Reply::ServiceIncarnation(self.incarnation)));
        }
        let key = BarrierKey::Registration;
        if self.barriers.instance(&key).is_none()
            && let Err(failure) = self.begin_barrier_instance(
                cx,
                &key,
                0,
                self.all_tasks_as_members(),
                cx.settings.register_timeout,
                id,
            )
        {
            return cx.reply_to_call(call, Err(failure));
        }
        if !self.admit_barrier_arrival(cx, &key, id, connection, call) {
            return;
        }
        let peer = self.expect_task(id).peer;
        let missing = self.barriers.instance(&key).map_or(0, |i| i.missing_count().saturating_sub(1));
        let others = match missing {
            0 => "no task is missing".to_owned(),
            1 => "1 task is missing".to_owned(),
            many => format!("{many} tasks are missing"),
        };
        let from = peer.map_or_else(String::new, |peer| format!(" from {peer}"));
        let reason = format!("registered{from}; {others}");
        cx.emit_event(EventKind::TaskRegistering { task: id, incarnation, peer }, reason);
        self.record_barrier_arrival(
            cx,
            &key,
            id,
            connection,
            ArrivedCall { call, purpose: ArrivalCallKind::Register(incarnation), at: cx.now },
        );
    }

    /// Connects a task. `again`: the run has already started.
    pub(super) fn connect_task(&mut self, cx: &mut TransitionContext<'_>, id: TaskId, again: bool) {
        let late = again;
        if late {
            self.measure_all_unmeasured_barriers(cx);
        }
        // A task that was excluded when the run started connects late, but for the first time.
        let again = again && self.expect_task(id).was_connected;
        let entered = self.mark_connected(cx, id, late);
        if again {
            self.expect_task_mut(id).since = cx.now;
        }
        if entered {
            self.add_to_live_set_requests(id);
        }
        if entered || again {
            let reason = match (again, late) {
                (true, _) => "registered again",
                (false, true) => "registered after the run had started without it",
                (false, false) => "all tasks have registered",
            };
            let incarnation = self.expect_task(id).incarnation.unwrap_or(TaskIncarnation(0));
            cx.emit_event(EventKind::TaskConnected { task: id, incarnation, again }, reason);
        }
        if late {
            self.mark_not_required_at_barriers(cx, id);
        }
    }
}

//! Failure of tasks: heartbeats and their timeout, suspicion after a lost connection, the first cause, propagation,
//! and error polls.
//!
//! It keeps no statistics (`pulse.rs`) and excludes nobody (`excluding.rs`). Begin at `Run::heartbeat`,
//! `Run::connection_lost` and `Run::fail_task`.
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
use super::context::Cx;
use super::event::{Change, FailureClass, FirstCause, RunOutcome};
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::input::Ending;
use super::outbox::TaskChange;
use super::run::Run;
use super::settings::{ErrorDelivery, JobSettings};
use super::task::{Standing, Suspicion, Task};
use super::timers::Timer;
use super::waiters::{Answer, Calls, Place};

/// What a person should do about a lost task; the words are those that people search for.
const LOOK_FURTHER: &str = "Check the task logs for an earlier error or scheduler events (e.g. preemption, eviction) to \
                            debug further.";

impl Failure {
    /// The task was lost, rather than reporting an error of its own or breaking a rule: it may come back.
    pub(super) fn is_loss(&self) -> bool {
        self.code == Code::Unavailable && self.service_error.is_some_and(|e| !e.reported)
    }
}

/// A short time for people.
fn short(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        _ => format!("{} s", time.as_secs_f64()),
    }
}

/// Whether the task's polls wait for an error.
fn holds_poll(settings: &JobSettings, task: &Task) -> bool {
    match settings.error_delivery {
        ErrorDelivery::Auto => !task.recoverable,
        ErrorDelivery::Hold => true,
        ErrorDelivery::Cancel => false,
    }
}

/// Tasks that take no part any more, all since the same moment.
pub(super) struct Retired {
    pub tasks: Vec<TaskId>,
    /// Those of them that were connected.
    pub were_live: Vec<TaskId>,
    /// Those of them whose polls are held.
    pub polling: Vec<TaskId>,
    /// One of them is recoverable.
    pub recoverable: bool,
}

impl Run {
    pub(super) fn heartbeat(
        &mut self,
        cx: &mut Cx<'_>,
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
            return Err(Arc::new(Failure::service(Code::InvalidArgument, text)));
        };
        if let Some(failure) = task.failure() {
            let text = format!(
                "Unexpected heartbeat request from an already-in-error task: {id} with existing error: {failure}"
            );
            return Err(Arc::new(Failure::service(Code::Aborted, text)));
        }
        if task.is_beyond_grace(cx.now) {
            let text = format!(
                "Task with task={id} must be registered before sending heartbeat messages. The service might have \
                 restarted, please restart / reset and register again."
            );
            return Err(Arc::new(Failure::service(Code::InvalidArgument, text)));
        }
        if task.incarnation != Some(incarnation) {
            return self.strange_heartbeat(cx, id, incarnation);
        }
        // Those whose polls are not held learn of the run's first error here.
        if let Some(sticky) = &self.sticky
            && !holds_poll(cx.settings, task)
        {
            let text = format!("The run has failed: {sticky}");
            return Err(Arc::new(Failure::service(Code::Aborted, text)));
        }
        self.hear(cx, connection, id);
        let task = self.own_mut(id);
        task.last_heartbeat = Some(cx.now);
        task.pulse.beat(cx.now);
        Ok(())
    }

    /// A heartbeat of a life that this run does not know.
    fn strange_heartbeat(
        &mut self,
        cx: &mut Cx<'_>,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) -> Result<(), Arc<Failure>> {
        let task = self.own(id);
        if task.recoverable {
            return Ok(());
        }
        let expected = task.incarnation.map_or_else(|| "none".to_owned(), |known| known.to_string());
        let text = format!(
            "{id} Heartbeat: Incarnation ID mismatch: expecting {expected} but got {incarnation}. The task has \
             restarted and likely crashed earlier. {LOOK_FURTHER}"
        );
        let why = "heartbeat from another incarnation";
        let failure = Arc::new(Failure::service(Code::Aborted, text).because(why));
        self.fail_task(cx, id, &failure, FailureClass::Restarted, why);
        self.propagate(cx, Some(id), &failure);
        Err(failure)
    }

    /// The task has spoken, with the incarnation that counts, on this connection.
    pub(super) fn hear(&mut self, cx: &mut Cx<'_>, connection: ConnectionId, id: TaskId) {
        let task = self.own_mut(id);
        if task.connection == Some(connection) && task.suspicion.is_none() {
            return;
        }
        task.connection = Some(connection);
        let returned = task.suspicion.is_some();
        self.clear_suspicion(id);
        if returned {
            cx.event(Change::TaskReturned { task: id }, "reconnected in time");
        }
    }

    pub(super) fn clear_suspicion(&mut self, id: TaskId) {
        let suspicion = self.own_mut(id).suspicion.take();
        self.clear_grace(id, suspicion);
    }

    /// The task is suspected no more: its grace does not run out.
    pub(super) fn clear_grace(&mut self, id: TaskId, suspicion: Option<Suspicion>) {
        if let Some(suspicion) = suspicion {
            self.timers.clear(suspicion.until, Timer::Grace(id));
        }
    }

    /// Sets the first heartbeat timer of a task that has become connected.
    pub(super) fn set_heartbeat_timer(&mut self, cx: &Cx<'_>, id: TaskId) {
        let heard = self.own(id).last_heartbeat.unwrap_or(cx.now);
        self.timers.set(heard.after(cx.settings.heartbeat_timeout), Timer::Heartbeat(id));
    }

    /// The heartbeat timer of a task has fired: it is dead, or the timer stands again where it belongs.
    pub(super) fn check_heartbeat(&mut self, cx: &mut Cx<'_>, id: TaskId) {
        let task = self.own_mut(id);
        if !task.is_connected() {
            task.watched = false;
            return;
        }
        let heard = task.last_heartbeat.unwrap_or_default();
        let due = heard.after(cx.settings.heartbeat_timeout);
        if due > cx.now {
            self.timers.set(due, Timer::Heartbeat(id));
            return;
        }
        task.watched = false;
        let silent = humantime::format_duration(cx.settings.heartbeat_timeout);
        let text = format!(
            "Task {id} heartbeat timeout: nothing was heard of {} for {silent}. This indicates that the remote task has \
             failed, got preempted, or crashed unexpectedly. {LOOK_FURTHER}",
            self.describe(id)
        );
        let told = format!(
            "The following tasks are unhealthy (stopped sending heartbeats):\n{id}\nNothing was heard of {} for \
             {silent}. {LOOK_FURTHER}",
            self.describe(id)
        );
        let why = format!("no heartbeat for {}", short(cx.settings.heartbeat_timeout));
        self.lose(cx, id, [text, told], FailureClass::HeartbeatTimeout, &why, &why);
    }

    /// Everything that a broken connection means for the task that spoke on it.
    pub(super) fn connection_lost(
        &mut self,
        cx: &mut Cx<'_>,
        id: TaskId,
        poll_was_held: bool,
        ending: &Ending,
    ) {
        let Some(grace) = cx.settings.disconnect_grace else { return };
        if poll_was_held {
            // A client whose connection breaks under a held poll aborts its own process.
            let follows = " while still registered; the process probably died";
            return self.lose_connection(cx, id, ending, "with its error poll held on it", follows);
        }
        let until = cx.now.after(grace);
        self.clear_suspicion(id);
        let suspicion = Suspicion { since: cx.now, until, evidence: ending.clone() };
        self.own_mut(id).suspicion = Some(suspicion);
        self.timers.set(until, Timer::Grace(id));
        let reason = format!(
            "connection{} {}; waiting {} for a reconnect",
            self.from(id),
            ending.word(),
            short(grace)
        );
        cx.event(Change::TaskSuspected { task: id }, reason);
    }

    pub(super) fn grace_is_over(&mut self, cx: &mut Cx<'_>, id: TaskId) {
        let Some(suspicion) = self.own_mut(id).suspicion.take() else { return };
        if self.own(id).is_connected() {
            let grace = suspicion.until.since(suspicion.since);
            let follows = format!("; no reconnect within {}", short(grace));
            self.lose_connection(cx, id, &suspicion.evidence, "and it was not heard again", &follows);
        }
    }

    /// From where a task registered, for people.
    fn from(&self, id: TaskId) -> String {
        self.own(id).peer.map_or_else(String::new, |peer| format!(" from {peer}"))
    }

    /// A task is lost with its connection: `how`, as clients are told, and what `follows` for people.
    fn lose_connection(&mut self, cx: &mut Cx<'_>, id: TaskId, ending: &Ending, how: &str, follows: &str) {
        let task = self.describe(id);
        let text = format!(
            "Task {id} connection lost: the connection of {task} {ending}, {how}. This indicates that the remote task \
             has failed, got preempted, or crashed unexpectedly. {LOOK_FURTHER}"
        );
        let told = format!(
            "The following tasks are unhealthy (connection lost):\n{id}\nThe connection of {task} {ending}, {how}. \
             {LOOK_FURTHER}"
        );
        let [cause, why] =
            ["", &self.from(id)].map(|from| format!("connection{from} {}{follows}", ending.word()));
        self.lose(cx, id, [text, told], FailureClass::ConnectionLost, &cause, &why);
    }

    /// A task is lost: its own error, and what the others are told; why, beside its name and without it.
    fn lose(
        &mut self,
        cx: &mut Cx<'_>,
        id: TaskId,
        texts: [String; 2],
        class: FailureClass,
        cause: &str,
        why: &str,
    ) {
        let [own, told] =
            texts.map(|text| Arc::new(Failure::service(Code::Unavailable, text).because(cause)));
        self.fail_task(cx, id, &own, class, why);
        self.propagate(cx, Some(id), &told);
    }

    /// Puts a task into error, with everything that follows for what it takes part in. The first error stays.
    pub(super) fn fail_task(
        &mut self,
        cx: &mut Cx<'_>,
        id: TaskId,
        failure: &Arc<Failure>,
        class: FailureClass,
        why: &str,
    ) {
        self.fail_tasks(cx, std::iter::once(id), failure, class, why);
    }

    /// Puts tasks, ascending, into error; those that are in error stay as they are.
    fn fail_tasks(
        &mut self,
        cx: &mut Cx<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
        failure: &Arc<Failure>,
        class: FailureClass,
        why: &str,
    ) {
        let standing = Standing::Failed(Arc::clone(failure));
        let Some(retired) = self.retire(cx, tasks, &standing, TaskChange::Failed(class), why) else { return };
        let reason = format!("task is set to ERROR: {failure}");
        self.leave_all_barriers(cx, &retired.tasks, &reason, failure.why());
        self.leave_questions(&retired.were_live);
        if self.is_deserted() && self.ended.is_none() && retired.recoverable {
            self.end(cx, RunOutcome::Abandoned, format!("its last live task was lost: {why}"));
        }
    }

    /// Gives tasks, ascending, a standing in which they take no part, and tells of it. Those that stand so already stay as
    /// they are; `None` if all do.
    pub(super) fn retire(
        &mut self,
        cx: &mut Cx<'_>,
        tasks: impl ExactSizeIterator<Item = TaskId>,
        standing: &Standing,
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
            if discriminant(&self.own(id).standing) == discriminant(standing) {
                continue;
            }
            let task = self.own_mut(id);
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
        self.connected -= retired.were_live.len();
        self.touch();
        cx.task_events(change, reason, events);
        Some(retired)
    }

    /// Tells everybody of an error that came from `source`, unless that task may fail. The first one told is the one
    /// that every later poll gets too, and the end of the run.
    pub(super) fn propagate(&mut self, cx: &mut Cx<'_>, source: Option<TaskId>, failure: &Arc<Failure>) {
        if source.map_or(cx.settings.recoverable, |id| self.own(id).recoverable) {
            return;
        }
        self.note_first_cause(cx, source, failure);
        let whose = source.map_or_else(String::new, |id| format!("{}: ", self.describe(id)));
        self.end(cx, RunOutcome::Failed, format!("{whose}{}", failure.why()));
        if !self.polled {
            // Nobody listens: all there is left to do is to be found in error.
            let text = format!(
                "All tasks were set to error because coordination service encountered an error, but was unable to \
                 inform clients. Error: {failure}"
            );
            return self.fail_all(cx, Failure::service(Code::Internal, text));
        }
        if self.sticky.is_some() {
            return;
        }
        self.sticky = Some(Arc::clone(failure));
        self.answer_all_polls(Arc::clone(failure));
    }

    /// Ends every held poll with `failure`.
    pub(super) fn answer_all_polls(&mut self, failure: Arc<Failure>) {
        self.answer_polls_of(self.ids(), failure);
    }

    /// Ends the held polls of these tasks with `failure`.
    pub(super) fn answer_polls_of(&mut self, tasks: impl Iterator<Item = TaskId>, failure: Arc<Failure>) {
        let polls: VecDeque<CallId> = tasks.filter_map(|id| self.take_poll(id)).collect();
        self.waiters.decide(Calls::List(polls), Answer::Failed(failure));
    }

    pub(super) fn note_first_cause(&mut self, cx: &mut Cx<'_>, source: Option<TaskId>, failure: &Failure) {
        if self.first_cause.is_none() {
            let (error, why) = (failure.to_string(), failure.why().to_owned());
            cx.event(Change::FirstCause { task: source }, &*why);
            self.first_cause = Some(FirstCause { at: cx.now, task: source, error, why });
        }
    }

    pub(super) fn fail_all(&mut self, cx: &mut Cx<'_>, failure: Failure) {
        let why = "the run has failed";
        let failure = Arc::new(failure.because(why));
        self.fail_tasks(cx, self.ids(), &failure, FailureClass::Consequence, why);
    }

    /// The held poll of a task, which is to be answered.
    fn take_poll(&mut self, id: TaskId) -> Option<CallId> {
        self.own(id).poll?;
        self.own_mut(id).poll.take()
    }

    /// Answers the held poll of a task, if there is one.
    pub(super) fn answer_poll(&mut self, cx: &mut Cx<'_>, id: TaskId, failure: &Arc<Failure>) {
        if let Some(call) = self.take_poll(id) {
            self.waiters.remove(call);
            cx.reply(call, Err(Arc::clone(failure)));
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Cx<'_>, call: CallId, connection: ConnectionId, id: TaskId) {
        self.polled = true;
        let refuse = |code, text: String| Err(Arc::new(Failure::service(code, text)));
        let Some(task) = self.task(id) else {
            let text = format!("Unexpected task ({id}) that is not in the cluster polling for errors.");
            return cx.reply(call, refuse(Code::InvalidArgument, text));
        };
        let holds = holds_poll(cx.settings, task);
        let outcome = if task.is_beyond_grace(cx.now) {
            let text =
                format!("Task ({id}) that has not been registered or has disconnected polling for errors.");
            refuse(Code::FailedPrecondition, text)
        } else if let Some(failure) = task.failure() {
            let text = format!(
                "Task ({id}) that is already in error state polling for errors. Current error: {failure}"
            );
            refuse(Code::FailedPrecondition, text)
        } else if let Some(sticky) = &self.sticky {
            Err(Arc::clone(sticky))
        } else if holds {
            if !self.has_room(cx, call, connection) {
                return;
            }
            let text = "Cancelled error polling because: new request from the same task";
            self.answer_poll(cx, id, &Arc::new(Failure::service(Code::Cancelled, text)));
            self.own_mut(id).poll = Some(call);
            self.waiters.insert(call, connection, Place::Poll(id));
            return;
        } else {
            let text = "Errors of this job are delivered with heartbeats; no need to poll.";
            Err(Arc::new(Failure::plain(Code::Cancelled, text)))
        };
        let outcome: Result<Reply, _> = outcome;
        cx.reply(call, outcome);
    }
}

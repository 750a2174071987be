//! Registration: no task is connected before all required tasks have registered, and the newest incarnation of a
//! task wins.
//!
//! Admission of old incarnations is in `job.rs`; refusal of excluded tasks is in `excluding.rs`. Begin at
//! `Run::register`.
//!
//! A registration that breaks a fate-sharing run (a second incarnation of a connected task that is not recoverable)
//! fails the run, and is itself refused once with ABORTED, which clients retry. The retry is the first registration
//! of the next run. A recoverable task that was lost or excluded may register again in the same run; it is unsynced
//! until it has passed a barrier with all its members. An error that a task reported itself never heals within the
//! run.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use super::barrier::{Arrival, BarrierKey, Instance, Purpose};
use super::call::Reply;
use super::context::Cx;
use super::event::{Change, FailureClass};
use super::failure::{Code, Failure};
use super::failure_texts::taken_over;
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::outbox::TaskChange;
use super::run::Run;
use super::task::Standing;
use super::waiters::{Answer, Calls};

impl Run {
    #[expect(clippy::too_many_arguments, reason = "what a registration is made of")]
    pub(super) fn register(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        connection: ConnectionId,
        peer: Option<SocketAddr>,
        id: TaskId,
        incarnation: TaskIncarnation,
        recoverable: bool,
    ) {
        let Some(task) = self.task(id) else {
            let failure = self.unknown("registered", id);
            return cx.reply(call, Err(Arc::new(failure)));
        };
        if task.has_outlived(incarnation) {
            let failure = self.superseded(id, incarnation, peer);
            return cx.reply(call, Err(failure));
        }
        let recoverable = cx.settings.recoverable || recoverable;
        let same = task.incarnation == Some(incarnation);
        match &task.standing {
            Standing::Disconnected(_) => {
                self.take_up(cx, connection, peer, id, incarnation, recoverable);
                self.await_registration(cx, call, connection, id, incarnation);
            }
            // Lost or excluded, and back: only an error that the task reported itself never heals.
            Standing::Failed(failure) if recoverable && (failure.is_loss() || failure.is_exclusion()) => {
                self.take_up(cx, connection, peer, id, incarnation, recoverable);
                self.await_registration(cx, call, connection, id, incarnation);
            }
            Standing::Connected if same || recoverable => {
                let again = !same;
                self.take_up(cx, connection, peer, id, incarnation, recoverable);
                if recoverable {
                    let why = "the task registered again";
                    self.leave_all_barriers(cx, &[id], why, why);
                }
                self.connect(cx, id, again);
                cx.reply(call, Ok(Reply::Service(self.incarnation)));
            }
            Standing::Connected => {
                let text = format!(
                    "{id} unexpectedly tried to connect with a different incarnation. It has likely restarted: {} came \
                     from {}, {} is the one that this run knows ({}).",
                    incarnation,
                    peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string()),
                    task.incarnation.map_or_else(String::new, |old| old.to_string()),
                    self.describe(id),
                );
                self.refuse_for_good(cx, call, id, text, "the task restarted");
            }
            Standing::Failed(failure) => {
                let text = format!(
                    "{id} unexpectedly tried to connect while it is already in error. ResetTask() should be called \
                     before a subsequent connect attempt. Existing error: {failure}"
                );
                self.refuse_for_good(cx, call, id, text, "the task registered again while in error");
            }
        }
    }

    /// A registration that says that the run is broken: the caller and everybody else is told.
    fn refuse_for_good(&mut self, cx: &mut Cx<'_>, call: CallId, id: TaskId, text: String, why: &str) {
        let failure = Arc::new(Failure::service(Code::Aborted, text).from_task(id).because(why));
        self.fail_task(cx, id, &failure, FailureClass::Restarted, why);
        self.propagate(cx, Some(id), &failure);
        cx.reply(call, Err(failure));
    }

    /// What a life that another has taken the place of is told. Final for its client.
    pub(super) fn superseded(
        &self,
        id: TaskId,
        incarnation: TaskIncarnation,
        peer: Option<SocketAddr>,
    ) -> Arc<Failure> {
        let newer = self.task(id).and_then(|task| task.incarnation);
        let text = format!(
            "Aborted connect attempt as there is a request from a newer incarnation. Two processes claim task {id}: \
             incarnation {incarnation} from {}, and incarnation {} ({}), which holds it now. Check that every process \
             has its own process id.",
            peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string()),
            newer.map_or_else(String::new, |newer| newer.to_string()),
            self.describe(id),
        );
        Arc::new(Failure::service(Code::AlreadyExists, text))
    }

    /// Makes `incarnation` the life of the task that counts, and turns the one before it away.
    fn take_up(
        &mut self,
        cx: &mut Cx<'_>,
        connection: ConnectionId,
        peer: Option<SocketAddr>,
        id: TaskId,
        incarnation: TaskIncarnation,
        recoverable: bool,
    ) {
        let kept = cx.settings.bounds.incarnations_kept;
        let task = self.own_mut(id);
        let old = task.incarnation.filter(|old| *old != incarnation);
        let old_peer = task.peer;
        let was_failed = task.failure().is_some();
        let old_poll = if old.is_some() { task.poll.take() } else { None };
        let ended = match &task.standing {
            Standing::Failed(failure) => failure.why().to_owned(),
            Standing::Connected => "replaced by a newer process".to_owned(),
            Standing::Disconnected(_) if task.was_connected => "shut down".to_owned(),
            Standing::Disconnected(_) => {
                "replaced by a newer process before all tasks had registered".to_owned()
            }
        };
        task.begin_life(incarnation, peer, cx.now, &ended, kept);
        task.connection = Some(connection);
        task.recoverable = recoverable;
        self.clear_suspicion(id);
        if old.is_some() {
            self.drop_questions_of(id, &taken_over(id, incarnation));
        }
        if let Some(call) = old_poll {
            self.waiters.remove(call);
            cx.reply(call, Err(taken_over(id, incarnation)));
        }
        let waits = self.barriers.instance(&BarrierKey::Registration).and_then(|i| i.slot(id));
        let rival = matches!(waits, Some(super::barrier::Slot::Arrived(_)));
        if let Some(old) = old
            && (rival || (self.own(id).is_connected() && !was_failed))
        {
            let change = Change::TaskSuperseded { task: id, old, old_peer, new: incarnation, new_peer: peer };
            let reason = format!("a newer process registered as task {id} and takes its place");
            cx.event(change, reason);
        }
    }

    fn await_registration(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) {
        self.touch();
        if self.started_at.is_some() {
            // All have come once; nobody waits for the rest again.
            self.connect(cx, id, true);
            return cx.reply(call, Ok(Reply::Service(self.incarnation)));
        }
        let key = BarrierKey::Registration;
        if self.barriers.instance(&key).is_none()
            && let Err(failure) = self.begin(cx, &key, 0, self.everybody(), cx.settings.register_timeout, id)
        {
            return cx.reply(call, Err(failure));
        }
        let peer = self.own(id).peer;
        let missing = self.barriers.instance(&key).map_or(0, |i| i.missing().saturating_sub(1));
        let others = match missing {
            0 => "no task is missing".to_owned(),
            1 => "1 task is missing".to_owned(),
            many => format!("{many} tasks are missing"),
        };
        let from = peer.map_or_else(String::new, |peer| format!(" from {peer}"));
        let reason = format!("registered{from}; {others}");
        cx.event(Change::TaskRegistering { task: id, incarnation, peer }, reason);
        self.arrive(
            cx,
            &key,
            id,
            connection,
            Arrival { call, purpose: Purpose::Register(incarnation), at: cx.now },
        );
    }

    /// All tasks have registered: those that wait at the registration barrier take part from now on.
    pub(super) fn start(&mut self, cx: &mut Cx<'_>, registration: &Instance) {
        self.started_at = Some(cx.now);
        let tasks = registration.arrived();
        let (mut calls, mut connected) = (VecDeque::with_capacity(tasks), VecDeque::with_capacity(tasks));
        self.unwatched.reserve(tasks);
        for (id, arrival) in registration.arrivals() {
            match arrival.purpose {
                Purpose::Register(incarnation) if self.own(id).incarnation == Some(incarnation) => {
                    calls.push_back(arrival.call);
                    if self.mark_connected(cx, id, false) {
                        connected.push_back((id, incarnation));
                    }
                }
                Purpose::Register(incarnation) => {
                    self.waiters.remove(arrival.call);
                    cx.reply(arrival.call, Err(self.superseded(id, incarnation, None)));
                }
                _ => {}
            }
        }
        self.recount_questions();
        cx.task_events(TaskChange::Connected, "all tasks have registered", connected);
        self.waiters.decide(Calls::List(calls), Answer::Registered(self.incarnation));
    }

    /// The task takes part from now on. `again`: others have begun before.
    pub(super) fn connect(&mut self, cx: &mut Cx<'_>, id: TaskId, again: bool) {
        let late = again;
        // One that was excluded when the others began comes late, for the first time.
        let again = again && self.own(id).was_connected;
        let entered = self.mark_connected(cx, id, late);
        if again {
            self.own_mut(id).since = cx.now;
        }
        if entered {
            self.enter_questions(id);
        }
        if entered || again {
            let reason = match (again, late) {
                (true, _) => "registered again",
                (false, true) => "registered after the run had started without it",
                (false, false) => "all tasks have registered",
            };
            let incarnation = self.own(id).incarnation.unwrap_or(TaskIncarnation(0));
            cx.event(Change::TaskConnected { task: id, incarnation, again }, reason);
        }
        if late {
            self.release_from_barriers(cx, id);
        }
    }

    /// Makes a task connected; returns whether it was not. `late`: others have begun before.
    fn mark_connected(&mut self, cx: &Cx<'_>, id: TaskId, late: bool) -> bool {
        let task = self.own_mut(id);
        let entered = !task.is_connected();
        let unsynced = late && !task.unsynced;
        let watch = !task.watched;
        task.standing = Standing::Connected;
        task.last_heartbeat = Some(cx.now);
        task.pulse.pause();
        task.watched = true;
        task.was_connected = true;
        task.unsynced |= late;
        task.excused = false;
        if entered {
            task.since = cx.now;
        }
        self.connected += usize::from(entered);
        self.unsynced += usize::from(unsynced);
        if watch {
            self.unwatched.push_back(id);
        }
        self.touch();
        entered
    }
}

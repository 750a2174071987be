//! A job: its settings, its present run, its past runs, and the admission of calls.
//!
//! It does not decide that a run has ended: registration, failure and shutdown do. Begin at `Job::handle_call`, then
//! `Job::admit_call`.
//!
//! - *Runs.* A run opens when the first new incarnation registers after the last run has ended, not before. Until
//!   then the ended run stays, and its tasks get the answers that the C++ service would give. The next run has its
//!   own service incarnation and tables; calls that the tasks of the ended run left waiting, polls among them, are
//!   answered when it opens.
//! - *Fencing.* Admission refuses calls of incarnations that another one has replaced, and of runs that have ended.
//!   Generation C names its incarnations with each call (a claim); generation A does not, so a connection is bound
//!   to the incarnation that registered on it.
//! - *Connections.* A closed connection first loses its calls, a bounded number at a time, and then its tasks are
//!   judged (`task_failure.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actor::{Actor, Reason};
use super::call::{Caller, ClaimedIncarnations, Request};
use super::deferred_free::DeferredFree;
use super::devices;
use super::event::{EventKind, RunOutcome};
use super::event_queue::EventQueue;
use super::exclusion::{ExclusionTable, PendingEviction};
use super::failure::{Code, Failure};
use super::failure_texts::deleted_job_failure;
use super::ids::{
    CallId, ConnectionId, JobId, JobName, RunNumber, ServiceIncarnation, TaskId, TaskIncarnation, Timestamp,
};
use super::input::{ConnectionEnd, Effect, FindingNote, TransferFailure};
use super::run::Run;
use super::settings::JobSettings;
use super::topology::Topology;
use super::view::RunSummary;
use super::waiters::{WaitTarget, WaiterTable};
use crate::cow::CowMap;

/// The number of ended runs whose incarnations are remembered, to recognise surviving processes of those
/// runs.
const RUNS_WITH_INCARNATIONS: usize = 8;

/// The number of ended runs whose devices are remembered, to show which devices moved.
const RUNS_WITH_DEVICES: usize = 2;

/// A connection as this job knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ConnectionRecord {
    peer: SocketAddr,
    /// The incarnations that made calls on it, with their run.
    known_incarnations: BTreeMap<TaskId, (RunNumber, TaskIncarnation)>,
    /// Whether a refusal on this connection has been reported as an event.
    is_fence_reported: bool,
}

/// The record of an ended run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PastRun {
    summary: RunSummary,
    incarnation: ServiceIncarnation,
    /// Every incarnation of its tasks, ascending; empty once the run is too old.
    known_incarnations: Vec<TaskIncarnation>,
    /// The topology values that its tasks published; empty once the run is too old.
    topology: Topology,
}

impl PastRun {
    fn summary(&self) -> RunSummary {
        RunSummary { devices: devices::decode_topology(&self.topology), ..self.summary.clone() }
    }
}

/// A connection that ended and whose calls are being withdrawn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ClosingConnection {
    connection: ConnectionId,
    presence: ConnectionRecord,
    /// The way in which it ended, if that is evidence about its tasks.
    end_evidence: Option<ConnectionEnd>,
    /// The tasks whose polls were held on it.
    polling: BTreeSet<TaskId>,
}

/// Calls to an ended run that are being answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EndedRunCalls {
    waiters: WaiterTable,
    failure: Arc<Failure>,
    poll: Arc<Failure>,
}

/// One job and its present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    pub id: JobId,
    pub name: JobName,
    pub settings: JobSettings,
    pub run: Run,
    /// Ended runs, newest first.
    past: VecDeque<Arc<PastRun>>,
    /// The incarnation of the next run.
    next_incarnation: Option<ServiceIncarnation>,
    connections: CowMap<ConnectionId, ConnectionRecord>,
    /// The connections on which each task has made calls, present or past.
    task_connections: CowMap<(TaskId, ConnectionId), ()>,
    pub exclusions: Arc<ExclusionTable>,
    closing: VecDeque<ClosingConnection>,
    ended_run_calls: VecDeque<EndedRunCalls>,
    /// The exclusions in force whose tasks are being evicted.
    pub pending_evictions: VecDeque<PendingEviction>,
    pub event_queue: EventQueue,
}

/// Runs `body` with the present run and a context, then releases the watchers if `body` changed a task's
/// state.
macro_rules! with_run {
    ($job:expr, $now:expr, $effects:expr, |$run:ident, $cx:ident| $body:expr) => {{
        let Job { id, settings, run: $run, event_queue, .. } = &mut *$job;
        let $cx = &mut $crate::coordination::context::TransitionContext {
            now: $now,
            job: *id,
            run: $run.number,
            settings,
            effects: $effects,
            event_queue,
        };
        let value = $body;
        $run.notify_watchers();
        value
    }};
}

pub(super) use with_run;

impl Job {
    pub fn new(
        id: JobId,
        name: JobName,
        settings: JobSettings,
        (incarnation, actor): (ServiceIncarnation, Option<Actor>),
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> Self {
        let run = Run::new(RunNumber(1), incarnation, &settings, now);
        let mut job = Self {
            id,
            name,
            settings,
            run,
            past: VecDeque::new(),
            next_incarnation: None,
            connections: CowMap::default(),
            task_connections: CowMap::default(),
            exclusions: Arc::default(),
            closing: VecDeque::new(),
            ended_run_calls: VecDeque::new(),
            pending_evictions: VecDeque::new(),
            event_queue: EventQueue::default(),
        };
        with_run!(&mut job, now, effects, |_run, cx| {
            let by = actor.as_ref().map_or_else(String::new, |actor| format!(", made by {actor}"));
            cx.emit(EventKind::JobDeclared { actor }, format!("a job of {} tasks{by}", cx.settings.tasks));
            cx.emit(EventKind::RunOpened, "the job was declared");
        });
        effects.push(Effect::RequestIncarnation(id));
        job
    }

    pub fn set_next_incarnation(&mut self, incarnation: ServiceIncarnation) {
        self.next_incarnation = Some(incarnation);
    }

    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let ends = [self.run.timers.next(), self.exclusions.next_expiry()];
        ends.into_iter().flatten().min()
    }

    /// Returns the connections on which only the present incarnation of this task made calls.
    pub fn connections_of(&self, id: TaskId) -> Vec<ConnectionId> {
        let life = self.run.task(id).and_then(|task| Some((self.run.number, task.incarnation?)));
        let spoken = self.task_connections.range_from(Bound::Included(&(id, ConnectionId(0))));
        let of_task = spoken.map(|(place, ())| *place).take_while(|(task, _)| *task == id);
        let is_own = |connection: &ConnectionId| {
            let lives = self.connections.get(connection).map(|presence| &presence.known_incarnations);
            lives.is_some_and(|lives| lives.len() == 1 && lives.get(&id).copied() == life)
        };
        of_task.map(|(_, connection)| connection).filter(is_own).collect()
    }

    /// Returns every open connection with each task that made calls on it.
    pub fn task_connections(&self) -> impl Iterator<Item = (ConnectionId, TaskId)> + '_ {
        let tasks = |(connection, presence): (&ConnectionId, &'_ ConnectionRecord)| {
            let connection = *connection;
            presence.known_incarnations.keys().map(move |task| (connection, *task)).collect::<Vec<_>>()
        };
        self.connections.iter().flat_map(tasks)
    }

    pub fn has_task_connection(&self, task: TaskId, connection: ConnectionId) -> bool {
        self.task_connections.contains_key(&(task, connection))
    }

    /// Returns how many entries the table of connections by task has, and how many it must have.
    pub fn count_task_connections(&self) -> (usize, usize) {
        let closing: usize =
            self.closing.iter().map(|closing| closing.presence.known_incarnations.len()).sum();
        let present: usize =
            self.connections.values().map(|presence| presence.known_incarnations.len()).sum();
        (self.task_connections.len(), present + closing)
    }

    /// Drops records beyond the bounds.
    pub fn trim_to_bounds(&mut self) {
        self.past.truncate(self.settings.bounds.runs_kept);
        Arc::make_mut(&mut self.exclusions).trim_ended(&self.settings.bounds);
        self.run.trim_barrier_records(self.settings.bounds.barriers_recent);
    }

    pub fn has_connection(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    pub fn add_connection(&mut self, connection: ConnectionId, peer: SocketAddr) {
        self.connections.insert(
            connection,
            ConnectionRecord { peer, known_incarnations: BTreeMap::new(), is_fence_reported: false },
        );
    }

    /// Returns the ended runs, newest first, without their devices.
    pub fn past_runs(&self) -> impl Iterator<Item = &RunSummary> {
        self.past.iter().map(|past| &past.summary)
    }

    /// Returns the ended runs, newest first.
    pub fn past_runs_with_devices(&self) -> impl Iterator<Item = RunSummary> {
        self.past.iter().map(|past| past.summary())
    }

    pub fn handle_call(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        call: CallId,
        caller: Caller,
        request: Request,
    ) {
        let presence = self.connections.get(&caller.connection);
        let peer = presence.map(|presence| presence.peer);
        let writer = presence
            .filter(|presence| presence.known_incarnations.len() == 1)
            .and_then(|presence| presence.known_incarnations.keys().next().copied());
        if let Request::Register { task, incarnation, .. } = &request {
            let (task, incarnation) = (*task, *incarnation);
            if let Some(failure) = self.registration_refusal(now, effects, task, peer) {
                return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
            }
            if let Err(failure) = self.admit_registration(now, effects, task, incarnation) {
                return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
            }
            // Bound before the registration completes, so that the end of the connection fails the task even
            // while it waits.
            self.bind_incarnation(caller.connection, task, incarnation);
        } else if let Some(failure) =
            request.task().or(writer).and_then(|id| self.exclusion_refusal(id, peer))
        {
            return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
        } else if let Err(failure) = self.admit_call(now, effects, caller, &request) {
            return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
        }
        with_run!(self, now, effects, |run, cx| run.dispatch_call(cx, call, caller, peer, writer, request));
    }

    pub fn cancel_call(&mut self, now: Timestamp, effects: &mut Vec<Effect>, call: CallId) {
        if !self.ended_run_calls.iter_mut().any(|stale| stale.waiters.remove(call).is_some()) {
            with_run!(self, now, effects, |run, _cx| run.withdraw_call(call));
        }
    }

    /// Returns the number of waiting calls, without those of closed connections.
    pub fn waiting_calls(&self) -> usize {
        let tables = || {
            std::iter::once(&self.run.waiters).chain(self.ended_run_calls.iter().map(|stale| &stale.waiters))
        };
        let gone = |waiters: &WaiterTable| -> usize {
            self.closing.iter().map(|closing| waiters.count_on(closing.connection)).sum()
        };
        tables().map(|waiters| waiters.len() - gone(waiters)).sum()
    }

    /// Returns whether the connection has ended and some of its calls are not withdrawn yet.
    pub fn is_closing(&self, connection: ConnectionId) -> bool {
        self.closing.iter().any(|closing| closing.connection == connection)
    }

    /// Returns whether work is pending.
    pub fn has_pending_work(&self) -> bool {
        !self.closing.is_empty()
            || !self.pending_evictions.is_empty()
            || !self.event_queue.is_empty()
            || self.run.has_pending_work()
            || !self.ended_run_calls.is_empty()
    }

    /// Does pending work within `budget`.
    pub fn run_pending_work(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        // Calls of closed connections count against the bounds, so they go first, with at most half of the
        // budget.
        let mut part = budget.div_ceil(2);
        *budget -= part;
        while part > 0 && !self.closing.is_empty() {
            self.finish_closing(now, effects, &mut part);
        }
        *budget += part;
        while *budget > 0 && !self.pending_evictions.is_empty() {
            self.evict_next_task(now, effects, budget);
        }
        with_run!(self, now, effects, |run, cx| {
            // Events are published before the answers that they explain.
            while *budget > 0 && cx.publish_next_event() {
                *budget -= 1;
            }
            run.run_pending_work(cx, budget);
        });
        while *budget > 0
            && let Some(stale) = self.ended_run_calls.front_mut()
        {
            while *budget > 0
                && let Some((call, answer)) = stale.waiters.pop_queued_answer()
            {
                *budget -= 1;
                if stale.waiters.remove(call).is_some() {
                    effects.push(Effect::Reply(call, answer.into()));
                }
            }
            for (call, is_poll) in stale.waiters.first_calls(*budget) {
                *budget -= 1;
                stale.waiters.remove(call);
                let failure = if is_poll { &stale.poll } else { &stale.failure };
                effects.push(Effect::Reply(call, Err(Arc::clone(failure))));
            }
            if stale.waiters.len() == 0 {
                self.ended_run_calls.pop_front();
            }
        }
        while *budget > 0 && !self.closing.is_empty() {
            self.finish_closing(now, effects, budget);
        }
    }

    /// Withdraws calls of the oldest closed connection; after the last of them, judges the tasks that used
    /// it.
    fn finish_closing(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        let Some(mut closing) = self.closing.pop_front() else { return };
        let connection = closing.connection;
        for stale in &mut self.ended_run_calls {
            for call in stale.waiters.calls_on(connection, *budget) {
                *budget -= 1;
                stale.waiters.remove(call);
            }
        }
        self.ended_run_calls.retain(|stale| stale.waiters.len() > 0);
        let polling = &mut closing.polling;
        with_run!(self, now, effects, |run, _cx| {
            for call in run.waiters.calls_on(connection, *budget) {
                *budget -= 1;
                if let Some(WaitTarget::Poll(task)) = run.waiters.wait_target(call)
                    && run.expect_task(*task).poll == Some(call)
                {
                    polling.insert(*task);
                }
                run.withdraw_call(call);
            }
        });
        let left = self.ended_run_calls.iter().any(|stale| stale.waiters.count_on(connection) > 0);
        if left || self.run.waiters.count_on(connection) > 0 {
            return self.closing.push_front(closing);
        }
        // The cost of judging a task, in answers.
        const COST: usize = 8;
        let ClosingConnection { presence, end_evidence: blame, polling, .. } = &mut closing;
        while *budget > 0
            && let Some((task, (number, incarnation))) = presence.known_incarnations.pop_first()
        {
            *budget = budget.saturating_sub(COST);
            self.task_connections.remove(&(task, connection));
            let (Some(ending), Some(known)) = (&*blame, self.run.task(task)) else { continue };
            let concerns = number == self.run.number
                && known.incarnation == Some(incarnation)
                && known.is_connected()
                && (known.connection == Some(connection) || polling.contains(&task));
            if concerns {
                let polled = polling.contains(&task);
                with_run!(self, now, effects, |run, cx| run.on_connection_lost(cx, task, polled, ending));
            }
        }
        if !closing.presence.known_incarnations.is_empty() {
            self.closing.push_front(closing);
        }
    }

    /// Records the end of a connection. Without a `blame`, it is no evidence about the tasks that used it.
    pub fn connection_closed(&mut self, connection: ConnectionId, blame: Option<&ConnectionEnd>) {
        let Some(presence) = self.connections.remove(&connection) else { return };
        let blame = blame.cloned();
        self.closing.push_back(ClosingConnection {
            connection,
            presence,
            end_evidence: blame,
            polling: BTreeSet::new(),
        });
    }

    /// Records that an observer opened or closed a finding.
    pub fn record_finding(&mut self, now: Timestamp, effects: &mut Vec<Effect>, note: FindingNote) {
        let FindingNote { finding, open, tasks, reason } = note;
        let change = if open {
            EventKind::FindingOpened { finding, tasks }
        } else {
            EventKind::FindingClosed { finding }
        };
        with_run!(self, now, effects, |_run, cx| cx.emit(change, reason));
    }

    /// Records a worker's report of failed transfers.
    pub fn record_transfer_failure(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        note: TransferFailure,
    ) {
        let TransferFailure { task, with, error, count, reason } = note;
        let change = EventKind::TransferFailed { task, with, error, count };
        with_run!(self, now, effects, |_run, cx| cx.emit(change, reason));
    }

    pub fn tick(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        self.expire_exclusions(now, effects);
        with_run!(self, now, effects, |run, cx| run.fire_timers(cx, budget));
    }

    /// Restarts the heartbeat timeout of every task, because the service itself did not run.
    pub fn reset_heartbeats(&mut self, now: Timestamp) {
        for id in self.run.task_ids() {
            let task = self.run.expect_task_mut(id);
            if task.is_connected() {
                task.last_heartbeat = Some(now);
                task.heartbeat_stats.skip_next_gap();
            }
        }
    }

    /// Continues after a restart of the service, which lost every connection and every waiting call.
    pub fn resume(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        self.connections = CowMap::default();
        self.task_connections = CowMap::default();
        self.closing.clear();
        self.ended_run_calls.clear();
        self.pending_evictions.clear();
        with_run!(self, now, effects, |run, _cx| {
            for (call, _) in run.waiters.first_calls(usize::MAX) {
                run.withdraw_call(call);
            }
            for id in run.task_ids() {
                run.clear_suspicion(id);
                run.expect_task_mut(id).connection = None;
            }
        });
        self.reset_heartbeats(now);
    }

    /// Announces the deletion of the job: every waiting call gets the answer that later calls get.
    pub fn announce_deletion(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: &Reason,
    ) {
        let gone = Arc::new(deleted_job_failure());
        self.move_calls_to_ended_run(&gone);
        with_run!(self, now, effects, |_run, cx| {
            let text = format!("deleted by {actor}: {reason}");
            cx.emit(EventKind::JobDeleted { actor }, text);
        });
    }

    /// Moves all waiting calls of the present run aside, to be answered with `failure`.
    fn move_calls_to_ended_run(&mut self, failure: &Arc<Failure>) {
        let waiters = std::mem::take(&mut self.run.waiters);
        if waiters.len() > 0 {
            let (failure, poll) = (Arc::clone(failure), Arc::clone(failure));
            self.ended_run_calls.push_back(EndedRunCalls { waiters, failure, poll });
        }
    }

    /// Answers waiting calls within `budget`, because the service stops.
    pub fn stop(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        // Without the mark of the service's own statements: registering clients take it for a transport
        // failure and retry.
        let stopping =
            Arc::new(Failure::without_details(Code::Unavailable, "The coordination service is stopping."));
        let text = "The coordination service is stopping. Cancelling PollForError.";
        let poll = Arc::new(Failure::without_details(Code::Cancelled, text));
        with_run!(self, now, effects, |run, cx| {
            // Calls whose answer is decided get that answer.
            run.run_pending_work(cx, budget);
            run.fail_waiting_calls(cx, &stopping, &poll, budget);
        });
    }

    /// Records that the incarnation made a call in the present run on this connection.
    fn bind_incarnation(&mut self, connection: ConnectionId, task: TaskId, incarnation: TaskIncarnation) {
        let life = (self.run.number, incarnation);
        let spoke = self
            .connections
            .get(&connection)
            .is_none_or(|known| known.known_incarnations.get(&task) == Some(&life));
        if !spoke
            && self.run.task(task).is_some()
            && let Some(presence) = self.connections.get_mut(&connection)
        {
            presence.known_incarnations.insert(task, life);
            self.task_connections.insert((task, connection), ());
        }
    }

    /// Refuses incarnations of ended runs, and opens the next run for a new incarnation if the present run
    /// has ended.
    fn admit_registration(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) -> Result<(), Failure> {
        if let Some(past) = self.past_run_with(incarnation) {
            return Err(self.fenced_failure(
                Code::FailedPrecondition,
                &format!("incarnation {incarnation}"),
                past,
            ));
        }
        // The run itself refuses an unknown id, in whatever state it is.
        let Some(task) = self.run.task(id) else { return Ok(()) };
        let Some((outcome, _)) = self.run.ended else { return Ok(()) };
        let known = task.incarnation == Some(incarnation) || task.has_superseded(incarnation);
        match (known, outcome) {
            (false, _) => self.open_next_run(now, effects),
            (true, RunOutcome::Failed) => Ok(()),
            (true, _) => {
                let text = format!(
                    "Run {} of job {}, in which task {id} had incarnation {incarnation}, is over. A new process of the task \
                     opens the next run.",
                    self.run.number, self.name
                );
                Err(Failure::from_service(Code::FailedPrecondition, text))
            }
        }
    }

    pub fn open_next_run(&mut self, now: Timestamp, effects: &mut Vec<Effect>) -> Result<(), Failure> {
        let Some(incarnation) = self.next_incarnation.take() else {
            let text = format!(
                "Run {} of job {} has ended and the next is being prepared.",
                self.run.number, self.name
            );
            return Err(Failure::from_service(Code::Aborted, text));
        };
        let number = RunNumber(self.run.number.0 + 1);
        let text = format!(
            "Run {} of job {} has ended ({}), and run {number} has begun. This call belongs to the ended run.",
            self.run.number,
            self.name,
            self.first_cause_text(),
        );
        let over = Arc::new(Failure::from_service(Code::Aborted, text));
        with_run!(self, now, effects, |run, cx| run.record_all_barrier_stats(cx));
        self.pending_evictions.clear();
        self.move_calls_to_ended_run(&over);
        let next = Run::new(number, incarnation, &self.settings, now);
        let ended = std::mem::replace(&mut self.run, next);
        self.archive_run(&ended);
        let weight = ended.weight();
        effects.push(Effect::FreeLater(DeferredFree::of_weight(ended, weight)));
        self.exempt_excluded_tasks();
        with_run!(self, now, effects, |_run, cx| {
            cx.emit(EventKind::RunOpened, "a new process registered after the last run had ended");
        });
        effects.push(Effect::RequestIncarnation(self.id));
        Ok(())
    }

    fn archive_run(&mut self, run: &Run) {
        let mut lives: Vec<TaskIncarnation> = run
            .tasks
            .iter()
            .flat_map(|task| {
                task.incarnation.into_iter().chain(task.past_incarnations.iter().map(|life| life.incarnation))
            })
            .collect();
        lives.sort_unstable();
        let (summary, topology) = (run.summary(), run.store.topology().clone());
        self.past.push_front(Arc::new(PastRun {
            summary,
            incarnation: run.incarnation,
            known_incarnations: lives,
            topology,
        }));
        self.past.truncate(self.settings.bounds.runs_kept);
        if let Some(old) = self.past.get_mut(RUNS_WITH_INCARNATIONS) {
            Arc::make_mut(old).known_incarnations = Vec::new();
        }
        if let Some(old) = self.past.get_mut(RUNS_WITH_DEVICES) {
            Arc::make_mut(old).topology = Topology::default();
        }
    }

    fn first_cause_text(&self) -> String {
        match (&self.run.first_cause, self.run.ended) {
            (Some(cause), _) => cause.error.clone(),
            (None, Some((RunOutcome::Completed, _))) => "all its tasks had shut down".to_owned(),
            (None, _) => "all its live tasks were lost".to_owned(),
        }
    }

    fn past_run_with(&self, incarnation: TaskIncarnation) -> Option<&RunSummary> {
        let past =
            self.past.iter().find(|past| past.known_incarnations.binary_search(&incarnation).is_ok())?;
        Some(&past.summary)
    }

    /// Returns the failure for an incarnation of an ended run.
    fn fenced_failure(&self, code: Code, who: &str, past: &RunSummary) -> Failure {
        let why = match &past.first_cause {
            Some(cause) => format!("it failed first with: {}", cause.error),
            None => "it had come to its end".to_owned(),
        };
        let text = format!(
            "Fenced: {who} belongs to run {} of job {}, which is over ({why}). The job is in run {} now; end this process.",
            past.number, self.name, self.run.number,
        );
        Failure::from_service(code, text)
    }

    /// Checks whether the present run admits a call other than registration.
    fn admit_call(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        caller: Caller,
        request: &Request,
    ) -> Result<(), Failure> {
        let task = request.task();
        let refusal = match caller.claim {
            Some(claim) => self.fence_by_claim(claim, task),
            None => self.fence_by_connection(caller.connection, request),
        };
        if let Some(failure) = refusal {
            self.report_fenced(now, effects, caller.connection, task, &failure);
            return Err(failure);
        }
        // A call with the present incarnation is a sign of life.
        let said = match (caller.claim, request) {
            (_, Request::Heartbeat { incarnation, .. }) => Some(*incarnation),
            (Some(claim), _) => Some(claim.task),
            (None, _) => None,
        };
        if let (Some(id), Some(incarnation)) = (task, said)
            && self.run.task(id).is_some_and(|t| t.incarnation == Some(incarnation) && t.is_connected())
        {
            self.bind_incarnation(caller.connection, id, incarnation);
            with_run!(self, now, effects, |run, cx| run.record_contact(cx, caller.connection, id));
        }
        Ok(())
    }

    /// Checks the incarnations that a caller of generation C states.
    fn fence_by_claim(&self, claim: ClaimedIncarnations, task: Option<TaskId>) -> Option<Failure> {
        let current = self.run.incarnation;
        if claim.service != current {
            let mut text =
                format!("wrong service incarnation: requested {}, currently {}", claim.service.0, current.0);
            if let Some(past) = self.past.iter().find(|past| past.incarnation == claim.service) {
                let who = "this process";
                text = format!("{text}. {}", self.fenced_failure(Code::Internal, who, &past.summary).message);
            }
            let mut failure = Failure::from_service(Code::Internal, text);
            failure.service_mismatch = Some(current);
            return Some(failure);
        }
        self.fence_superseded(task?, claim.task)
    }

    /// Checks a caller of generation A, which states no incarnation, by the earlier calls on its connection.
    fn fence_by_connection(&self, connection: ConnectionId, request: &Request) -> Option<Failure> {
        if let Request::Heartbeat { task, incarnation } = request {
            if let Some(past) = self.past_run_with(*incarnation) {
                return Some(self.fenced_failure(Code::Aborted, &format!("incarnation {incarnation}"), past));
            }
            return self.fence_superseded(*task, *incarnation);
        }
        let lives = &self.connections.get(&connection)?.known_incarnations;
        let number = match request.task() {
            Some(task) => {
                let (number, incarnation) = lives.get(&task)?;
                if *number == self.run.number {
                    return self.fence_superseded(task, *incarnation);
                }
                *number
            }
            // The request names no task: admitted if any task of the present run uses this connection.
            None => lives.values().map(|(number, _)| *number).max().filter(|last| *last < self.run.number)?,
        };
        let past = self.past.iter().find(|past| past.summary.number == number)?;
        Some(self.fenced_failure(Code::Aborted, "this connection", &past.summary))
    }

    fn fence_superseded(&self, id: TaskId, incarnation: TaskIncarnation) -> Option<Failure> {
        let task = self.run.task(id).filter(|task| task.has_superseded(incarnation))?;
        let newer = task.incarnation.map_or_else(String::new, |newer| newer.to_string());
        let text = format!(
            "Fenced: incarnation {incarnation} of task {id} was taken over by incarnation {newer} ({}). End this process.",
            self.run.describe(id)
        );
        Some(Failure::from_service(Code::Aborted, text))
    }

    fn report_fenced(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        connection: ConnectionId,
        task: Option<TaskId>,
        failure: &Failure,
    ) {
        if self.connections.get(&connection).is_none_or(|presence| presence.is_fence_reported) {
            return;
        }
        let Some(presence) = self.connections.get_mut(&connection) else { return };
        presence.is_fence_reported = true;
        let reason = format!("call from {} rejected: {}", presence.peer, failure.message);
        with_run!(self, now, effects, |_run, cx| cx.emit(EventKind::Fenced { task }, reason));
    }
}

//! A job: its settings, its present run, records of its past runs, and its connections.
//!
//! The rules are `impl Job` blocks in files by subject: `connections.rs`, `peer_jobs.rs`, `exclusion_rules.rs`,
//! `run_lifecycle.rs` (one run after another), `fencing.rs` (admission of calls), `job_settings.rs`,
//! `task_id_claims.rs`. `operator_commands.rs` handles the inputs that are commands, and `job_input_handlers.rs` the
//! others. Begin at [`Job`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actor::Actor;
use super::deferred_free::DeferredFree;
use super::event::EventKind;
use super::exclusion::{ExclusionTable, PendingEviction};
use super::failure::Failure;
use super::ids::{
    CallId, ConnectionId, JobId, JobName, RunNumber, ServiceIncarnation, TaskId, TaskIncarnation, Timestamp,
};
use super::input::{ConnectionEnd, Effect};
use super::past_runs::PastRuns;
use super::run::Run;
use super::run_state::RunSummary;
use super::settings::JobSettings;
use super::task_owner_table::TaskOwnerTable;
use super::unpublished_events::UnpublishedEvents;
use super::waiters::WaiterTable;
use crate::cow::CowMap;

/// A connection as this job knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ConnectionRecord {
    pub peer: SocketAddr,
    /// The incarnations that made calls on it, with their run.
    pub known_incarnations: BTreeMap<TaskId, (RunNumber, TaskIncarnation)>,
    /// Whether a refusal on this connection has been reported as an event.
    pub is_fence_reported: bool,
}

/// A connection that ended and whose calls are being withdrawn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClosingConnection {
    pub connection: ConnectionId,
    pub presence: ConnectionRecord,
    /// The way in which it ended, if that is evidence about its tasks.
    pub end_evidence: Option<ConnectionEnd>,
    /// The tasks whose polls were held on it.
    pub polling: BTreeSet<TaskId>,
}

/// Calls to an ended run that are being answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndedRunCalls {
    pub waiters: WaiterTable,
    pub failure: Arc<Failure>,
    pub poll: Arc<Failure>,
}

/// One job and its present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    pub id: JobId,
    pub name: JobName,
    pub settings: JobSettings,
    pub run: Run,
    /// Ended runs, newest first.
    pub past: PastRuns,
    /// The incarnation of the next run.
    pub next_incarnation: Option<ServiceIncarnation>,
    pub connections: CowMap<ConnectionId, ConnectionRecord>,
    /// The connections on which each task has made calls, present or past.
    pub task_connections: CowMap<(TaskId, ConnectionId), ()>,
    pub exclusions: Arc<ExclusionTable>,
    /// The processes to which task ids belong.
    pub task_owners: Arc<TaskOwnerTable>,
    pub closing: VecDeque<ClosingConnection>,
    pub ended_run_calls: VecDeque<EndedRunCalls>,
    /// The exclusions in force whose tasks are being evicted.
    pub pending_evictions: VecDeque<PendingEviction>,
    pub event_queue: UnpublishedEvents,
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
        $run.wake_watchers_if_changed();
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
            past: PastRuns::default(),
            next_incarnation: None,
            connections: CowMap::default(),
            task_connections: CowMap::default(),
            exclusions: Arc::default(),
            task_owners: Arc::default(),
            closing: VecDeque::new(),
            ended_run_calls: VecDeque::new(),
            pending_evictions: VecDeque::new(),
            event_queue: UnpublishedEvents::default(),
        };
        with_run!(&mut job, now, effects, |_run, cx| {
            let by = actor.as_ref().map_or_else(String::new, |actor| format!(", made by {actor}"));
            cx.emit_event(
                EventKind::JobDeclared { actor },
                format!("a job of {} tasks{by}", cx.settings.tasks),
            );
            cx.emit_event(EventKind::RunOpened, "the job was declared");
        });
        effects.push(Effect::RequestIncarnation(id));
        job
    }

    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let ends = [self.run.timers.next_deadline(), self.exclusions.next_expiry()];
        ends.into_iter().flatten().min()
    }

    /// Drops records beyond the bounds, and returns what takes long to free.
    pub fn drop_records_beyond_bounds(&mut self) -> DeferredFree {
        Arc::make_mut(&mut self.exclusions).trim_ended(&self.settings.bounds);
        self.run.trim_barrier_records(self.settings.bounds.barriers_recent);
        self.past.truncate(self.settings.bounds.runs_kept)
    }

    /// Returns the ended runs, newest first, without their devices.
    pub fn past_runs(&self) -> impl Iterator<Item = &RunSummary> {
        self.past.iter().map(|past| &past.summary)
    }

    /// Returns the connection on which a call waits.
    pub fn connection_of_waiting_call(&self, call: CallId) -> Option<ConnectionId> {
        let of_ended_runs = self.ended_run_calls.iter().map(|calls| &calls.waiters);
        std::iter::once(&self.run.waiters)
            .chain(of_ended_runs)
            .find_map(|waiters| waiters.connection_of(call))
    }

    /// Returns the number of waiting calls, without those of closed connections.
    pub fn waiting_call_count(&self) -> usize {
        let tables = || {
            std::iter::once(&self.run.waiters).chain(self.ended_run_calls.iter().map(|stale| &stale.waiters))
        };
        let gone = |waiters: &WaiterTable| -> usize {
            self.closing.iter().map(|closing| waiters.count_calls_on_connection(closing.connection)).sum()
        };
        tables().map(|waiters| waiters.len() - gone(waiters)).sum()
    }

    /// Returns whether work is pending.
    pub fn has_pending_work(&self) -> bool {
        !self.closing.is_empty()
            || !self.pending_evictions.is_empty()
            || !self.event_queue.is_empty()
            || self.run.has_pending_work()
            || !self.ended_run_calls.is_empty()
    }
}

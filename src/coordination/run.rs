//! One run of a job: its tasks, barriers, store, waiting calls and timers.
//!
//! The rules are `impl Run` blocks in files by subject: `registration.rs`, `barrier_arrival.rs` and
//! `barrier_completion.rs` (barriers), `failure_detection.rs`, `barrier_ends_and_task_removal.rs`,
//! `live_set_rules.rs`, `store_calls.rs`, `shutdown.rs`. `call_dispatch.rs` passes calls to these files, and
//! `pending_work.rs` sends queued answers. This file has the methods that several rules use. Begin at [`Run`].
//!
//! Invariants: The outcome of a run, once set, never changes. Neither does its first cause, the first error of the
//! run. A later run has its own tables. It uses only the list of this run's task incarnations, in order to refuse
//! their calls. One connection holds at most half of the waiting calls that the job may have. Every task that watches
//! the task states has received their present version, or its answer is queued.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier_record::BarrierRecord;
use super::barrier_table::{BarrierKey, BarrierMembers, BarrierTable};
use super::command::DrainRequest;
use super::context::TransitionContext;
use super::event::{EventKind, FirstCause, RunOutcome};
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, RunNumber, ServiceIncarnation, TaskId, TaskIncarnation, Timestamp};
use super::key_value_store::{KeyValueStore, display_key};
use super::live_set_request::LiveSetRequest;
use super::request_reply::{TaskInfo, TaskSet, TaskStates};
use super::run_state::RunState;
use super::settings::JobSettings;
use super::task::{Suspicion, Task};
use super::timers::{Timer, Timers};
use super::unmeasured_barrier::UnmeasuredBarrier;
use super::waiters::WaiterTable;
use crate::cow::{CowMap, CowVec};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Run {
    pub number: RunNumber,
    pub incarnation: ServiceIncarnation,
    pub opened_at: Timestamp,
    /// The time at which the registration barrier passed.
    pub started_at: Option<Timestamp>,
    pub ended: Option<(RunOutcome, Timestamp)>,
    /// The reason for its end, in words.
    pub end_reason: String,
    pub first_cause: Option<FirstCause>,
    /// The time at which the preemption notice was written.
    pub noticed_at: Option<Timestamp>,
    /// The operator who requested the drain, if one did.
    pub drain: Option<DrainRequest>,
    pub tasks: CowVec<Task>,
    pub connected_tasks: usize,
    pub unsynced_tasks: usize,
    /// The version of the task states; it grows with every change.
    pub version: i64,
    /// The version that the watchers have received.
    pub notified_version: i64,
    pub barriers: BarrierTable,
    /// The latest ended barrier instances, the newest last.
    pub recent: VecDeque<BarrierRecord>,
    pub store: KeyValueStore,
    pub live_set_requests: BTreeMap<TaskSet, LiveSetRequest>,
    /// The devices that the tasks published in the exchange (generation A).
    pub exchanged: CowMap<TaskId, Vec<Bytes>>,
    /// Whether any task has polled for errors.
    pub has_error_polls: bool,
    /// The first propagated error; every later poll gets it too.
    pub propagated_error: Option<Arc<Failure>>,
    pub waiters: WaiterTable,
    pub timers: Timers,
    /// Connected tasks whose first heartbeat timer is not set yet.
    pub tasks_without_timer: VecDeque<TaskId>,
    /// Ended barrier instances that are not measured yet.
    pub pending_barrier_stats: VecDeque<UnmeasuredBarrier>,
    /// The number of client barriers at which each task waits.
    pub barrier_waits: CowVec<u32>,
    #[serde(skip)]
    pub exchanged_devices: CachedValue<Arc<Vec<Bytes>>>,
    /// The id of the barrier that was called last: of all tasks at a barrier, only the first allocates its id.
    #[serde(skip)]
    latest_barrier_id: CachedValue<Arc<str>>,
    #[serde(skip)]
    states: CachedValue<(i64, Arc<TaskStates>)>,
}

/// A value derived from the state and kept beside it. It is no part of the state: two of them are always
/// equal.
#[derive(Clone)]
pub(super) struct CachedValue<T>(pub Option<T>);

impl<T> Default for CachedValue<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> fmt::Debug for CachedValue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remembered")
    }
}

impl<T> PartialEq for CachedValue<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for CachedValue<T> {}

impl Run {
    pub fn new(
        number: RunNumber,
        incarnation: ServiceIncarnation,
        settings: &JobSettings,
        now: Timestamp,
    ) -> Self {
        let task = Task::new(now, settings.recoverable);
        Self {
            number,
            incarnation,
            opened_at: now,
            started_at: None,
            ended: None,
            end_reason: String::new(),
            first_cause: None,
            noticed_at: None,
            drain: None,
            tasks: CowVec::filled_with(&task, settings.tasks as usize),
            connected_tasks: 0,
            unsynced_tasks: 0,
            version: 0,
            notified_version: 0,
            barriers: BarrierTable::default(),
            recent: VecDeque::new(),
            store: KeyValueStore::default(),
            live_set_requests: BTreeMap::new(),
            exchanged: CowMap::default(),
            has_error_polls: false,
            propagated_error: None,
            waiters: WaiterTable::default(),
            timers: Timers::default(),
            tasks_without_timer: VecDeque::new(),
            pending_barrier_stats: VecDeque::new(),
            barrier_waits: CowVec::filled_with(&0, settings.tasks as usize),
            exchanged_devices: CachedValue::default(),
            latest_barrier_id: CachedValue::default(),
            states: CachedValue::default(),
        }
    }

    /// Returns the state of the run.
    pub fn state(&self) -> RunState {
        match (self.ended, self.started_at) {
            (Some((outcome, _)), _) => RunState::ended(outcome),
            (None, Some(_)) => RunState::Running,
            (None, None) => RunState::Forming,
        }
    }

    /// Returns why there is no run to drain, if there is none.
    pub fn not_running_reason(&self) -> Option<String> {
        match self.state() {
            RunState::Running => None,
            RunState::Forming => Some(format!("run {} still waits for its tasks to register", self.number)),
            state => Some(format!("run {} is over ({state})", self.number)),
        }
    }

    pub fn task(&self, task: TaskId) -> Option<&Task> {
        self.tasks.get(usize::try_from(task.0).ok()?)
    }

    /// Returns a task that is known to exist, because its id came from this run's own tables.
    pub fn expect_task(&self, task: TaskId) -> &Task {
        &self.tasks[usize::try_from(task.0).unwrap_or(usize::MAX)]
    }

    pub fn expect_task_mut(&mut self, task: TaskId) -> &mut Task {
        &mut self.tasks[usize::try_from(task.0).unwrap_or(usize::MAX)]
    }

    /// Returns the ids of a set that the job has.
    pub fn known_tasks_of(&self, set: TaskSet) -> TaskSet {
        let ends = [set.ids().first(), set.ids().last()];
        if ends.into_iter().flatten().all(|id| self.task(*id).is_some()) {
            return set;
        }
        // The ids are ascending, so unknown ids are at the ends, however many there are.
        let from = set.ids().partition_point(|id| id.0 < 0);
        let to = set.ids().partition_point(|id| id.0 < 0 || self.task(*id).is_some());
        TaskSet::new(set.ids()[from..to].to_vec())
    }

    /// Returns the members of a barrier that names none: all tasks.
    pub fn all_tasks_as_members(&self) -> BarrierMembers {
        BarrierMembers::All(u32::try_from(self.tasks.len()).unwrap_or(u32::MAX))
    }

    /// Returns the id of a barrier in shared memory.
    pub fn share_barrier_id(&mut self, id: String) -> Arc<str> {
        match &self.latest_barrier_id.0 {
            Some(latest) if **latest == *id => Arc::clone(latest),
            _ => Arc::clone(self.latest_barrier_id.0.insert(id.into())),
        }
    }

    /// Returns the id of a barrier as clients know it.
    pub fn id_of_barrier_for_clients(&self, key: &BarrierKey) -> Arc<str> {
        key.barrier_id_for_clients(self.incarnation.0)
    }

    /// Adds `by` to the number of client barriers at which the task waits.
    pub fn adjust_barrier_wait_count(&mut self, task: TaskId, by: i32) {
        let waits = &mut self.barrier_waits[usize::try_from(task.0).unwrap_or(usize::MAX)];
        *waits = waits.saturating_add_signed(by);
    }

    /// Returns the number of client barriers at which the task waits.
    pub fn barrier_wait_count(&self, task: TaskId) -> u32 {
        usize::try_from(task.0)
            .ok()
            .and_then(|place| self.barrier_waits.get(place))
            .copied()
            .unwrap_or_default()
    }

    pub fn task_ids(&self) -> impl ExactSizeIterator<Item = TaskId> + use<> {
        (0..i32::try_from(self.tasks.len()).unwrap_or(i32::MAX)).map(TaskId)
    }

    /// Describes a task for people: its number and its address.
    pub fn describe_task(&self, task: TaskId) -> String {
        match self.task(task).and_then(|t| t.peer) {
            Some(peer) => format!("task {task} at {peer}"),
            None => format!("task {task}"),
        }
    }

    /// Describes tasks for people: the first few with their addresses, the rest as a number.
    pub fn describe_tasks(&self, tasks: impl Iterator<Item = TaskId>) -> String {
        const SHOWN: usize = 8;
        let mut tasks = tasks.peekable();
        let mut text: Vec<String> = tasks.by_ref().take(SHOWN).map(|task| self.describe_task(task)).collect();
        let rest = tasks.count();
        if rest > 0 {
            text.push(format!("and {rest} more"));
        }
        if text.is_empty() { "none".to_owned() } else { text.join(", ") }
    }

    /// Records that a task's state changed, so that watchers are notified.
    pub fn bump_task_states_version(&mut self) {
        self.version += 1;
    }

    /// Ends the suspicion of a task, if there is one.
    pub fn clear_suspicion(&mut self, id: TaskId) {
        let suspicion = self.expect_task_mut(id).suspicion.take();
        self.clear_grace_timer(id, suspicion);
    }

    /// Stops the grace timer of a suspicion that has ended.
    pub fn clear_grace_timer(&mut self, id: TaskId, suspicion: Option<Suspicion>) {
        if let Some(suspicion) = suspicion {
            self.timers.clear(suspicion.until, Timer::Grace(id));
        }
    }

    /// Checks whether one more call may wait, and refuses it otherwise. One connection may use half of the
    /// bound, so that a caller that waits for everything leaves room for others.
    pub fn admit_waiter(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
    ) -> bool {
        let bound = cx.settings.bounds.waiters;
        let share = bound.div_ceil(2);
        let text = if self.waiters.len() >= bound {
            format!("{bound} calls of this job wait already, the most allowed (setting bounds.waiters).")
        } else if self.waiters.count_calls_on_connection(connection) >= share {
            format!(
                "{share} calls on this connection wait already, half of what its job may have (setting bounds.waiters)."
            )
        } else {
            return true;
        };
        cx.reply_to_call(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        false
    }

    /// Releases the watchers if a state has changed since the last time.
    pub fn wake_watchers_if_changed(&mut self) {
        if self.notified_version != self.version {
            self.notified_version = self.version;
            self.waiters.wake_watchers();
        }
    }

    /// Returns the approximate number of allocations.
    pub fn approximate_allocations(&self) -> usize {
        2 * self.store.len()
            + 4 * self.tasks.len()
            + 2 * self.waiters.len()
            + 4 * self.barriers.in_progress_count()
    }

    /// Keeps the latest `most` records.
    pub fn trim_barrier_records(&mut self, most: usize) {
        self.recent.drain(..self.recent.len().saturating_sub(most));
    }

    /// Returns the states of all tasks; callers share the value until a state changes.
    pub fn shared_task_states(&mut self) -> Arc<TaskStates> {
        if let Some((version, states)) = &self.states.0
            && *version == self.version
        {
            return Arc::clone(states);
        }
        let tasks = self.task_ids().map(|task| self.task_info(task)).collect();
        let states = Arc::new(TaskStates { version: self.version, tasks });
        self.states = CachedValue(Some((self.version, Arc::clone(&states))));
        states
    }

    /// Returns whether the cached states equal those of the tasks.
    pub fn is_state_cache_valid(&self) -> bool {
        let Some((version, states)) = &self.states.0 else { return true };
        *version != self.version
            || self.task_ids().map(|task| self.task_info(task)).eq(states.tasks.iter().cloned())
    }

    pub fn task_info(&self, id: TaskId) -> TaskInfo {
        let task = self.expect_task(id);
        TaskInfo {
            task: id,
            state: task.state_for_clients(),
            incarnation: task.incarnation.unwrap_or(TaskIncarnation(0)),
            error: task.failure().cloned(),
        }
    }

    /// Returns the refusal of a task id that the job does not have.
    pub fn unknown_task_failure(&self, did: &str, task: TaskId) -> Failure {
        let last = self.tasks.len().saturating_sub(1);
        let text = format!(
            "Unexpected task {did} with task={task}: this job has the tasks 0 to {last}. Check the process ids and the \
             number of processes that the job was declared with."
        );
        Failure::from_service(Code::InvalidArgument, text)
    }

    /// Returns the failure for an incarnation that another one replaced. It is final for the client.
    pub fn superseded_failure(
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
            self.describe_task(id),
        );
        Arc::new(Failure::from_service(Code::AlreadyExists, text))
    }

    /// Ends the run, unless it has already ended: the first outcome stays.
    pub fn end_run(
        &mut self,
        cx: &mut TransitionContext<'_>,
        outcome: RunOutcome,
        reason: impl Into<String>,
    ) {
        if self.ended.is_none() {
            let reason = reason.into();
            self.ended = Some((outcome, cx.now));
            self.end_reason = display_key(reason.as_bytes()).into_owned();
            cx.emit_event(EventKind::RunEnded { outcome }, reason);
        }
    }

    /// Records the first error of the run, unless there is one already.
    pub fn record_first_cause(
        &mut self,
        cx: &mut TransitionContext<'_>,
        source: Option<TaskId>,
        failure: &Failure,
    ) {
        if self.first_cause.is_none() {
            let (error, why) = (failure.to_string(), failure.summary().to_owned());
            cx.emit_event(EventKind::FirstCause { task: source }, &*why);
            self.first_cause = Some(FirstCause { at: cx.now, task: source, error, why });
        }
    }

    /// Returns whether the run has started and no task is connected.
    pub fn has_no_tasks_left(&self) -> bool {
        self.started_at.is_some() && self.connected_tasks == 0
    }
}

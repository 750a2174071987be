//! One run of a job: its tasks, barriers, store, waiting calls and timers, and the dispatch of calls to their
//! rules.
//!
//! The rules are `impl Run` blocks in files by subject: `registration.rs`, `barrier_arrival.rs` and `barrier_completion.rs`
//! (barriers), `task_failure.rs`, `live_set_rules.rs`, `shutdown.rs`. Calls upon the store are here. Begin at `Run::dispatch_call`;
//! `Run::run_pending_work` hands out queued answers within a budget.
//!
//! Invariants: a run has one outcome and one first cause. A later run shares nothing with it but the record
//! of its incarnations. One connection may hold at most half of the waiting calls that the job may have. A
//! watcher knows the present version of the task states, or its answer is queued.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier::BarrierTable;
use super::barrier_record::BarrierRecord;
use super::call::{Caller, Reply, Request, SharedReply, TaskInfo, TaskSet, TaskStates};
use super::command::DrainRequest;
use super::context::TransitionContext;
use super::directory::StoreEntry;
use super::event::{EventKind, FailureClass, FirstCause, RunOutcome};
use super::failure::{Code, Failure, ServiceError};
use super::ids::{CallId, ConnectionId, RunNumber, ServiceIncarnation, TaskId, TaskIncarnation, Timestamp};
use super::live_set::LiveSetRequest;
use super::pending_barrier_stats::PendingBarrierStats;
use super::settings::JobSettings;
use super::store::{Store, display_key};
use super::task::Task;
use super::timers::{Timer, Timers};
use super::waiters::{SharedAnswer, WaitTarget, WaiterTable};
use crate::cow::{CowMap, CowVec};

/// The key of the preemption notice, which all tasks watch.
pub(super) const PREEMPTION_NOTICE: &[u8] = b"RECEIVED_PREEMPTION_NOTICE";

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
    pub store: Store,
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
    pub pending_barrier_stats: VecDeque<PendingBarrierStats>,
    /// The number of client barriers at which each task waits.
    pub barrier_waits: CowVec<u32>,
    #[serde(skip)]
    pub exchanged_devices: Cached<Arc<SharedReply<Vec<Bytes>>>>,
    #[serde(skip)]
    states: Cached<(i64, Arc<SharedReply<TaskStates>>)>,
}

/// A value derived from the state and kept beside it. It is no part of the state: two of them are always
/// equal.
#[derive(Clone)]
pub(super) struct Cached<T>(pub Option<T>);

impl<T> Default for Cached<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remembered")
    }
}

impl<T> PartialEq for Cached<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for Cached<T> {}

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
            tasks: CowVec::of(&task, settings.tasks as usize),
            connected_tasks: 0,
            unsynced_tasks: 0,
            version: 0,
            notified_version: 0,
            barriers: BarrierTable::default(),
            recent: VecDeque::new(),
            store: Store::default(),
            live_set_requests: BTreeMap::new(),
            exchanged: CowMap::default(),
            has_error_polls: false,
            propagated_error: None,
            waiters: WaiterTable::default(),
            timers: Timers::default(),
            tasks_without_timer: VecDeque::new(),
            pending_barrier_stats: VecDeque::new(),
            barrier_waits: CowVec::of(&0, settings.tasks as usize),
            exchanged_devices: Cached::default(),
            states: Cached::default(),
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

    /// Adds `by` to the number of client barriers at which the task waits.
    pub fn adjust_barrier_waits(&mut self, task: TaskId, by: i32) {
        let waits = &mut self.barrier_waits[usize::try_from(task.0).unwrap_or(usize::MAX)];
        *waits = waits.saturating_add_signed(by);
    }

    /// Returns the number of client barriers at which the task waits.
    pub fn barrier_waits(&self, task: TaskId) -> u32 {
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
    pub fn describe(&self, task: TaskId) -> String {
        match self.task(task).and_then(|t| t.peer) {
            Some(peer) => format!("task {task} at {peer}"),
            None => format!("task {task}"),
        }
    }

    /// Describes tasks for people: the first few with their addresses, the rest as a number.
    pub fn describe_all(&self, tasks: impl Iterator<Item = TaskId>) -> String {
        const SHOWN: usize = 8;
        let mut tasks = tasks.peekable();
        let mut text: Vec<String> = tasks.by_ref().take(SHOWN).map(|task| self.describe(task)).collect();
        let rest = tasks.count();
        if rest > 0 {
            text.push(format!("and {rest} more"));
        }
        if text.is_empty() { "none".to_owned() } else { text.join(", ") }
    }

    /// Records that a task's state changed, so that watchers are notified.
    pub fn bump_version(&mut self) {
        self.version += 1;
    }

    /// Performs an admitted call.
    pub fn dispatch_call(
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
                self.register(cx, call, connection, peer, task, incarnation, recoverable);
            }
            Request::Heartbeat { task, incarnation } => {
                let outcome = self.heartbeat(cx, connection, task, incarnation);
                cx.reply(call, outcome.map(|()| Reply::ServiceIncarnation(self.incarnation)));
            }
            Request::PollForError { task } => self.poll_for_error(cx, call, connection, task),
            Request::Shutdown { task } => self.shut_down(cx, call, connection, task),
            Request::Reset { task } => {
                let outcome = self.disconnect_task(cx, task).map(|()| Reply::Done);
                cx.reply(call, outcome.map_err(Arc::new));
            }
            Request::ReportError { task, code, message } => {
                let outcome = self.report_error(cx, task, code, message).map(|()| Reply::Done);
                cx.reply(call, outcome.map_err(Arc::new));
            }
            Request::WaitForAllTasks { task, devices } => {
                self.exchange_devices(cx, call, connection, task, devices);
            }
            Request::TaskStates { tasks } => {
                let outcome = self.task_states(&tasks).map_err(Arc::new);
                cx.reply(call, outcome);
            }
            Request::JobState => cx.reply(call, Ok(Reply::States(self.states()))),
            Request::Watch { version } => self.watch_tasks(cx, call, connection, version),
            Request::Barrier { id, counter, timeout_ms, members, task } => {
                self.arrive_at_barrier(cx, call, connection, task, id, counter, timeout_ms, members);
            }
            Request::CancelBarrier { id, counter, task } => {
                let outcome = self.cancel_barrier(cx, task, id, counter).map(|()| Reply::Done);
                cx.reply(call, outcome.map_err(Arc::new));
            }
            Request::LiveSet { task, tasks } => self.request_live_set(cx, call, connection, task, tasks),
            of_store => self.dispatch_store_call(cx, call, connection, writer, of_store),
        }
    }

    fn dispatch_store_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        writer: Option<TaskId>,
        request: Request,
    ) {
        let outcome = match request {
            Request::Insert { key, value, overwrite } => self.insert(cx, &key, value, overwrite, writer),
            Request::Increment { key, by } => {
                let result = self.store.increment(&key, by, cx.now, writer, &cx.settings.bounds);
                result.map(|(sum, discarded)| {
                    cx.discard(discarded);
                    Reply::Value(sum)
                })
            }
            Request::Get { key } => match self.store.get(&key) {
                Some(entry) => Ok(Reply::Value(entry.value.clone())),
                None => {
                    if !self.admit_waiter(cx, call, connection) {
                        return;
                    }
                    match self.store.add_waiter(&key, call, &cx.settings.bounds) {
                        Ok(key) => {
                            return self.waiters.insert(call, connection, WaitTarget::Key(key, cx.now));
                        }
                        Err(failure) => Err(failure),
                    }
                }
            },
            Request::TryGet { key } => match self.store.get(&key) {
                Some(entry) => Ok(Reply::Value(entry.value.clone())),
                None => Err(Failure::from_service(
                    Code::NotFound,
                    format!("Config key {} not found.", display_key(&key)),
                )),
            },
            Request::List { directory } => Ok(Reply::Directory(self.store.list(&directory))),
            Request::Delete { key } => {
                cx.discard(self.store.delete(&key));
                Ok(Reply::Done)
            }
            _ => Err(Failure::from_service(Code::Internal, "Not a call upon the store.")),
        };
        cx.reply(call, outcome.map_err(Arc::new));
    }

    pub fn insert(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &[u8],
        value: Bytes,
        overwrite: bool,
        by: Option<TaskId>,
    ) -> Result<Reply, Failure> {
        let entry = StoreEntry::new(value.clone(), cx.now, by);
        let discarded = self.store.insert(key, entry, overwrite, &cx.settings.bounds)?;
        cx.discard(discarded);
        if super::store::normalise(key).as_ref() == PREEMPTION_NOTICE {
            self.noticed_at = Some(cx.now);
            let text = String::from_utf8_lossy(&value[..value.len().min(64)]);
            cx.emit(
                EventKind::PreemptionNoticed,
                format!("preemption notice {text}: all tasks agree on a step and save"),
            );
        }
        Ok(Reply::Done)
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
        } else if self.waiters.count_on(connection) >= share {
            format!(
                "{share} calls on this connection wait already, half of what its job may have (setting bounds.waiters)."
            )
        } else {
            return true;
        };
        cx.reply(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        false
    }

    fn watch_tasks(
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
        cx.reply(call, Ok(Reply::States(self.states())));
    }

    /// Releases the watchers if a state has changed since the last time.
    pub fn notify_watchers(&mut self) {
        if self.notified_version != self.version {
            self.notified_version = self.version;
            self.waiters.release_watchers();
        }
    }

    /// Returns the approximate number of allocations.
    pub fn weight(&self) -> usize {
        2 * self.store.len()
            + 4 * self.tasks.len()
            + 2 * self.waiters.len()
            + 4 * self.barriers.in_progress_len()
    }

    /// Returns whether work is pending.
    pub fn has_pending_work(&self) -> bool {
        self.store.has_woken_calls()
            || self.waiters.has_queued_answers()
            || self.waiters.has_released_watchers()
            || !self.tasks_without_timer.is_empty()
            || !self.pending_barrier_stats.is_empty()
    }

    /// Does pending work within `budget`: answers calls whose wait has ended.
    pub fn run_pending_work(&mut self, cx: &mut TransitionContext<'_>, budget: &mut usize) {
        while *budget > 0 {
            if let Some((call, answer)) = self.waiters.pop_queued_answer() {
                *budget -= 1;
                self.send_answer(cx, call, answer);
            } else if let Some((call, value)) = self.store.pop_woken_call() {
                *budget -= 1;
                self.waiters.remove(call);
                cx.reply(call, Ok(Reply::Value(value)));
            } else if let Some(call) = self.waiters.pop_released_watcher() {
                *budget -= 1;
                cx.reply(call, Ok(Reply::States(self.states())));
            } else if let Some(task) = self.tasks_without_timer.pop_front() {
                *budget -= 1;
                self.set_heartbeat_timer(cx, task);
            } else if !self.pending_barrier_stats.is_empty() {
                self.record_next_barrier_stats(cx, budget);
            } else {
                return;
            }
        }
    }

    /// Sends a call its decided answer, unless the call was withdrawn or its task has been excluded since.
    fn send_answer(&mut self, cx: &mut TransitionContext<'_>, call: CallId, answer: SharedAnswer) {
        let Some(place) = self.waiters.wait_target(call) else { return };
        let excluded =
            place.task().and_then(|id| self.task(id)?.failure()).filter(|e| e.is_exclusion()).cloned();
        self.withdraw_call(call);
        cx.reply(call, excluded.map_or_else(|| answer.into(), Err));
    }

    /// Returns the states of all tasks; callers share the value until a state changes.
    fn states(&mut self) -> Arc<SharedReply<TaskStates>> {
        if let Some((version, states)) = &self.states.0
            && *version == self.version
        {
            return Arc::clone(states);
        }
        let tasks = self.task_ids().map(|task| self.task_info(task)).collect();
        let states = SharedReply::new(TaskStates { version: self.version, tasks });
        self.states = Cached(Some((self.version, Arc::clone(&states))));
        states
    }

    /// Returns whether the cached states equal those of the tasks.
    pub fn is_state_cache_valid(&self) -> bool {
        let Some((version, states)) = &self.states.0 else { return true };
        *version != self.version
            || self.task_ids().map(|task| self.task_info(task)).eq(states.tasks.iter().cloned())
    }

    fn task_info(&self, id: TaskId) -> TaskInfo {
        let task = self.expect_task(id);
        TaskInfo {
            task: id,
            state: task.wire_state(),
            incarnation: task.incarnation.unwrap_or(TaskIncarnation(0)),
            error: task.failure().cloned(),
        }
    }

    fn task_states(&self, tasks: &[TaskId]) -> Result<Reply, Failure> {
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
        Ok(Reply::States(SharedReply::new(TaskStates { version: self.version, tasks })))
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

    fn report_error(
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
        failure.service_error = Some(ServiceError { reported: true, source: Some(task) });
        let failure = Arc::new(failure);
        self.fail_task(cx, task, &failure, FailureClass::Reported, "the task reported it");
        self.propagate_error(cx, Some(task), &failure);
        Ok(())
    }

    /// Removes a call from the place where it waits, because its caller is gone.
    pub fn withdraw_call(&mut self, call: CallId) {
        match self.waiters.remove(call) {
            None | Some(WaitTarget::Watch) => {}
            Some(WaitTarget::Key(key, _)) => self.store.remove_waiter(&key, call),
            Some(WaitTarget::Poll(task)) => {
                let task = self.expect_task_mut(task);
                if task.poll == Some(call) {
                    task.poll = None;
                }
            }
            Some(WaitTarget::LiveSet(set, task)) => self.withdraw_live_set_call(&set, task, call),
            Some(WaitTarget::Barrier(key, task)) => self.leave_barrier(&key, task, call),
        }
    }

    /// Handles due timers within `budget`.
    pub fn fire_timers(&mut self, cx: &mut TransitionContext<'_>, budget: &mut usize) {
        while *budget > 0
            && let Some(timer) = self.timers.pop_due(cx.now)
        {
            *budget -= 1;
            match timer {
                Timer::Heartbeat(task) => self.on_heartbeat_timer(cx, task),
                Timer::Grace(task) => self.on_grace_expired(cx, task),
                Timer::Barrier(key) => self.on_barrier_timeout(cx, &key),
            }
        }
    }

    /// Answers waiting calls with `failure`, and polls with `poll`, within `budget`.
    pub fn fail_waiting_calls(
        &mut self,
        cx: &mut TransitionContext<'_>,
        failure: &Arc<Failure>,
        poll: &Arc<Failure>,
        budget: &mut usize,
    ) {
        for (call, is_poll) in self.waiters.first_calls(*budget) {
            *budget -= 1;
            self.withdraw_call(call);
            cx.reply(call, Err(Arc::clone(if is_poll { poll } else { failure })));
        }
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
            cx.emit(EventKind::RunEnded { outcome }, reason);
        }
    }

    /// Returns whether the run has started and no task is connected.
    pub fn has_no_tasks_left(&self) -> bool {
        self.started_at.is_some() && self.connected_tasks == 0
    }
}

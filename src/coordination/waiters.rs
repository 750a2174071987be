//! All unanswered calls of one run, by number and by connection, and all answers that are decided but not sent yet.
//!
//! Until its answer is decided, a call waits in exactly one place: the slot of a barrier, the error poll of a task,
//! the queue of a key, a live-set request, or the list of calls that watch the task states. Decided answers are
//! queued, because one transition may decide the answers of all tasks of a job. `Run::run_pending_work` sends a
//! bounded number of them at a time. Begin at [`WaiterTable::insert`] and [`WaiterTable::queue_answer`].
//!
//! Invariant: A call is in these tables exactly as long as it waits in its place, or its answer is decided but not
//! sent.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier_table::BarrierKey;
use super::failure::Failure;
use super::ids::{CallId, ConnectionId, JobId, ServiceIncarnation, TaskId, Timestamp};
use super::request_reply::{CallOutcome, LiveSet, Reply, TaskSet};
use crate::cow::CowMap;

/// The place where a call waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WaitTarget {
    Barrier(BarrierKey, TaskId),
    Poll(TaskId),
    /// Waits for a key, since the given time.
    Key(Bytes, Timestamp),
    LiveSet(TaskSet, TaskId),
    Watch,
}

impl WaitTarget {
    /// Returns the task that the call names as its caller, if it names one.
    pub fn task(&self) -> Option<TaskId> {
        match self {
            Self::Barrier(_, task) | Self::Poll(task) | Self::LiveSet(_, task) => Some(*task),
            Self::Key(..) | Self::Watch => None,
        }
    }
}

/// The answer that many calls share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SharedAnswer {
    Done,
    Registered(ServiceIncarnation),
    BarrierPassed(i64),
    LiveSet(Arc<LiveSet>),
    Devices(ServiceIncarnation, Arc<Vec<Bytes>>),
    Failed(Arc<Failure>),
}

impl SharedAnswer {
    /// Returns `done` if `result` is a success, else its failure.
    pub fn done_or_failure(result: &Result<(), Arc<Failure>>, done: Self) -> Self {
        result.as_ref().err().map_or(done, |failure| Self::Failed(Arc::clone(failure)))
    }
}

impl From<SharedAnswer> for CallOutcome {
    fn from(answer: SharedAnswer) -> Self {
        Ok(match answer {
            SharedAnswer::Done => Reply::Done,
            SharedAnswer::Registered(service) => Reply::ServiceIncarnation(service),
            SharedAnswer::BarrierPassed(counter) => Reply::BarrierPassed(counter),
            SharedAnswer::LiveSet(live) => Reply::LiveSet(live),
            SharedAnswer::Devices(service, devices) => Reply::Devices(service, devices),
            SharedAnswer::Failed(failure) => return Err(failure),
        })
    }
}

/// A selection of calls with the same answer. The calls are taken one at a time, so deciding an answer costs
/// no time or memory for each call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum CallSelection {
    /// These calls, in this order.
    List(VecDeque<CallId>),
    /// These calls, ascending.
    Set(BTreeSet<CallId>),
    /// The calls of these tasks.
    OfTasks(CowMap<TaskId, BTreeSet<CallId>>),
    /// All calls on a connection, up to the call with this number.
    OnConnection(ConnectionId, CallId),
}

/// A decided answer that some of its calls have not received yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DecidedAnswer {
    calls: CallSelection,
    answer: SharedAnswer,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WaiterTable {
    by_call: CowMap<CallId, (ConnectionId, WaitTarget)>,
    by_connection: CowMap<(ConnectionId, CallId), ()>,
    /// The number of waiting calls of each connection.
    counts: CowMap<ConnectionId, usize>,
    /// The calls that wait for a change of a task's state.
    watchers: CowMap<CallId, ()>,
    /// The calls of tasks of other jobs.
    of_peer_jobs: CowMap<CallId, JobId>,
    /// The watchers whose change has come, to be answered one after the other.
    released_watchers: VecDeque<CowMap<CallId, ()>>,
    /// The decided answers, in the order of the decisions.
    queued_answers: VecDeque<DecidedAnswer>,
}

impl WaiterTable {
    pub fn insert(&mut self, call: CallId, connection: ConnectionId, place: WaitTarget) {
        if place == WaitTarget::Watch {
            self.watchers.insert(call, ());
        }
        self.by_call.insert(call, (connection, place));
        if self.by_connection.insert((connection, call), ()).is_none() {
            match self.counts.get_mut(&connection) {
                Some(count) => *count += 1,
                None => drop(self.counts.insert(connection, 1)),
            }
        }
    }

    pub fn remove(&mut self, call: CallId) -> Option<WaitTarget> {
        let (connection, place) = self.by_call.remove(&call)?;
        self.of_peer_jobs.remove(&call);
        if self.by_connection.remove(&(connection, call)).is_some()
            && let Some(count) = self.counts.get_mut(&connection)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&connection);
            }
        }
        if place == WaitTarget::Watch {
            self.remove_watcher(call);
        }
        Some(place)
    }

    fn remove_watcher(&mut self, call: CallId) {
        if self.watchers.remove(&call).is_none() {
            for calls in &mut self.released_watchers {
                if calls.remove(&call).is_some() {
                    break;
                }
            }
            self.released_watchers.retain(|calls| !calls.is_empty());
        }
    }

    /// Removes a call from the watchers, because its answer is decided and is not that of a watcher.
    pub fn stop_watching(&mut self, call: CallId) {
        if self.wait_target(call) == Some(&WaitTarget::Watch) {
            self.remove_watcher(call);
        }
    }

    /// Records that a call, if it waits, is one of a task of another job.
    pub fn mark_as_call_of_peer_job(&mut self, call: CallId, from: JobId) {
        if self.by_call.contains_key(&call) {
            self.of_peer_jobs.insert(call, from);
        }
    }

    /// Returns the waiting calls of tasks of other jobs, in order, each with the job.
    pub fn waiting_calls_of_peer_jobs(&self) -> impl Iterator<Item = (CallId, JobId)> + '_ {
        self.of_peer_jobs.iter().map(|(call, from)| (*call, *from))
    }

    /// Returns the number of waiting calls of a connection.
    pub fn count_calls_on_connection(&self, connection: ConnectionId) -> usize {
        self.counts.get(&connection).copied().unwrap_or_default()
    }

    pub fn len(&self) -> usize {
        self.by_call.len()
    }

    /// Returns the connection on which a waiting call arrived.
    pub fn connection_of(&self, call: CallId) -> Option<ConnectionId> {
        self.by_call.get(&call).map(|(connection, _)| *connection)
    }

    /// Returns the place where a call waits.
    pub fn wait_target(&self, call: CallId) -> Option<&WaitTarget> {
        self.by_call.get(&call).map(|(_, place)| place)
    }

    /// Returns the first `most` calls that wait on `connection`, in their order.
    pub fn calls_on_connection(&self, connection: ConnectionId, most: usize) -> Vec<CallId> {
        let all = self.by_connection.range_from(Bound::Included(&(connection, CallId(0))));
        let own = all.map(|(place, ())| *place).take_while(|(on, _)| *on == connection);
        own.map(|(_, call)| call).take(most).collect()
    }

    /// Returns the greatest number of a waiting call.
    pub fn greatest_waiting_call_id(&self) -> Option<CallId> {
        self.by_call.keys().next_back().copied()
    }

    /// Returns the first `most` waiting calls, in their order, each with whether it is a poll.
    pub fn first_waiting_calls(&self, most: usize) -> Vec<(CallId, bool)> {
        let all = self.by_call.iter().take(most);
        all.map(|(call, (_, place))| (*call, matches!(place, WaitTarget::Poll(_)))).collect()
    }

    /// Returns every watcher, also those whose change has come.
    pub fn watchers(&self) -> impl Iterator<Item = CallId> + '_ {
        let told = self.released_watchers.iter().flat_map(|calls| calls.keys());
        self.watchers.keys().chain(told).copied()
    }

    /// Releases all watchers to be answered, because a state has changed.
    pub fn wake_watchers(&mut self) {
        if !self.watchers.is_empty() {
            self.released_watchers.push_back(std::mem::take(&mut self.watchers));
        }
    }

    /// Returns whether released watchers wait for their answer.
    pub fn has_woken_watchers(&self) -> bool {
        !self.released_watchers.is_empty()
    }

    /// Removes and returns the next released watcher.
    pub fn pop_woken_watcher(&mut self) -> Option<CallId> {
        let (call, ()) = self.released_watchers.front()?.first_key_value()?;
        let call = *call;
        self.remove(call);
        Some(call)
    }

    /// Queues the decided answer of these calls. The caller has removed them from their places.
    pub fn queue_answer(&mut self, calls: CallSelection, answer: SharedAnswer) {
        self.queued_answers.push_back(DecidedAnswer { calls, answer });
    }

    /// Returns whether a decided answer has not reached all its calls.
    pub fn has_queued_answers(&self) -> bool {
        !self.queued_answers.is_empty()
    }

    /// Returns the next call with its decided answer. The call may have been withdrawn.
    pub fn pop_queued_answer(&mut self) -> Option<(CallId, SharedAnswer)> {
        loop {
            let decided = self.queued_answers.front_mut()?;
            let next = match &mut decided.calls {
                CallSelection::List(calls) => calls.pop_front(),
                CallSelection::Set(calls) => calls.pop_first(),
                CallSelection::OfTasks(tasks) => {
                    let first = tasks.first_key_value().map(|(task, _)| *task);
                    let next = first.and_then(|task| tasks.get_mut(&task)?.pop_first());
                    if let Some(task) = first
                        && tasks.get(&task).is_some_and(BTreeSet::is_empty)
                    {
                        tasks.remove(&task);
                    }
                    next
                }
                CallSelection::OnConnection(connection, last) => {
                    let from = (*connection, CallId(0));
                    let first = self.by_connection.range_from(Bound::Included(&from)).next();
                    first
                        .map(|(place, ())| *place)
                        .filter(|(on, call)| on == connection && call <= last)
                        .map(|(_, call)| call)
                }
            };
            match next {
                Some(call) => return Some((call, decided.answer.clone())),
                None => drop(self.queued_answers.pop_front()),
            }
        }
    }

    /// Returns every waiting call whose answer is decided.
    pub fn calls_with_decided_answer(&self) -> BTreeSet<CallId> {
        let mut all = BTreeSet::new();
        for DecidedAnswer { calls, .. } in &self.queued_answers {
            match calls {
                CallSelection::List(calls) => all.extend(calls),
                CallSelection::Set(calls) => all.extend(calls),
                CallSelection::OfTasks(tasks) => all.extend(tasks.values().flatten()),
                CallSelection::OnConnection(connection, last) => {
                    all.extend(
                        self.calls_on_connection(*connection, usize::MAX)
                            .into_iter()
                            .filter(|call| call <= last),
                    );
                }
            }
        }
        all.retain(|call| self.by_call.contains_key(call));
        all
    }

    /// Returns every call that waits for a key: its connection, the key, and the time since which it waits.
    pub fn key_waiters(&self) -> impl Iterator<Item = (ConnectionId, &Bytes, Timestamp)> {
        self.by_call.values().filter_map(|(connection, place)| match place {
            WaitTarget::Key(key, since) => Some((*connection, key, *since)),
            _ => None,
        })
    }

    /// Returns whether the tables are consistent.
    pub fn is_consistent(&self) -> bool {
        self.by_call.is_consistent()
            && self.by_connection.is_consistent()
            && self.by_call.len() == self.by_connection.len()
            && self.of_peer_jobs.is_consistent()
            && self.of_peer_jobs.keys().all(|call| self.by_call.contains_key(call))
    }

    /// Returns every waiting call, in order.
    pub fn iter(&self) -> impl Iterator<Item = (CallId, &WaitTarget)> {
        self.by_call.iter().map(|(call, (_, place))| (*call, place))
    }
}

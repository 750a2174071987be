//! Every unanswered call of one run, by its number and by its connection, and the answers that are decided and not
//! sent yet.
//!
//! A call waits at one place (a barrier's slot, a task's poll, a key's queue, a live-set request, the watchers)
//! until its answer is decided. Decided answers are queued, because one transition may decide as many as the job
//! has tasks; `Run::work` sends a bounded number at a time. Begin at [`Waiters::insert`] and [`Waiters::decide`].
//!
//! Invariant: a call is in these tables exactly as long as it waits at its place, or its answer is decided and not
//! sent.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier::BarrierKey;
use super::call::{LiveSet, Outcome, Reply, Shared, TaskSet};
use super::failure::Failure;
use super::ids::{CallId, ConnectionId, ServiceIncarnation, TaskId, Timestamp};
use crate::cow::CowMap;

/// Where a call waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    Barrier(BarrierKey, TaskId),
    Poll(TaskId),
    /// For a key, since then.
    Key(Bytes, Timestamp),
    LiveSet(TaskSet, TaskId),
    Watch,
}

impl Place {
    /// The task in whose name the call waits, if the call names one.
    pub fn task(&self) -> Option<TaskId> {
        match self {
            Self::Barrier(_, task) | Self::Poll(task) | Self::LiveSet(_, task) => Some(*task),
            Self::Key(..) | Self::Watch => None,
        }
    }
}

/// What many calls are answered alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Registered(ServiceIncarnation),
    BarrierPassed(i64),
    LiveSet(Arc<Shared<LiveSet>>),
    Devices(ServiceIncarnation, Arc<Shared<Vec<Bytes>>>),
    Failed(Arc<Failure>),
}

impl Answer {
    /// `done` if `result` is a success, else its failure.
    pub fn to(result: &Result<(), Arc<Failure>>, done: Self) -> Self {
        result.as_ref().err().map_or(done, |failure| Self::Failed(Arc::clone(failure)))
    }
}

impl From<Answer> for Outcome {
    fn from(answer: Answer) -> Self {
        Ok(match answer {
            Answer::Done => Reply::Done,
            Answer::Registered(service) => Reply::Service(service),
            Answer::BarrierPassed(counter) => Reply::BarrierPassed(counter),
            Answer::LiveSet(live) => Reply::LiveSet(live),
            Answer::Devices(service, devices) => Reply::Devices(service, devices),
            Answer::Failed(failure) => return Err(failure),
        })
    }
}

/// Calls that get the same answer. They are taken one at a time: none of these forms costs time or memory for each call when
/// the answer is decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Calls {
    /// These, in this order.
    List(VecDeque<CallId>),
    /// These, ascending.
    Set(BTreeSet<CallId>),
    /// Those of these tasks.
    OfTasks(CowMap<TaskId, BTreeSet<CallId>>),
    /// All that wait on a connection, to the call with this number.
    OnConnection(ConnectionId, CallId),
}

/// The answer of some calls that is decided and not given to all of them yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Decided {
    calls: Calls,
    answer: Answer,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Waiters {
    by_call: CowMap<CallId, (ConnectionId, Place)>,
    by_connection: CowMap<(ConnectionId, CallId), ()>,
    /// How many calls of each connection wait.
    counts: CowMap<ConnectionId, usize>,
    /// Those who wait for a change of state.
    watching: CowMap<CallId, ()>,
    /// Those among them who have waited for a change that has come, and are told of it one after the other.
    to_tell: VecDeque<CowMap<CallId, ()>>,
    /// Answers in the order in which they were decided.
    decided: VecDeque<Decided>,
}

impl Waiters {
    pub fn insert(&mut self, call: CallId, connection: ConnectionId, place: Place) {
        if place == Place::Watch {
            self.watching.insert(call, ());
        }
        self.by_call.insert(call, (connection, place));
        if self.by_connection.insert((connection, call), ()).is_none() {
            match self.counts.get_mut(&connection) {
                Some(count) => *count += 1,
                None => drop(self.counts.insert(connection, 1)),
            }
        }
    }

    pub fn remove(&mut self, call: CallId) -> Option<Place> {
        let (connection, place) = self.by_call.remove(&call)?;
        if self.by_connection.remove(&(connection, call)).is_some()
            && let Some(count) = self.counts.get_mut(&connection)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&connection);
            }
        }
        if place == Place::Watch && self.watching.remove(&call).is_none() {
            for calls in &mut self.to_tell {
                if calls.remove(&call).is_some() {
                    break;
                }
            }
            self.to_tell.retain(|calls| !calls.is_empty());
        }
        Some(place)
    }

    /// How many calls of a connection wait.
    pub fn count_on(&self, connection: ConnectionId) -> usize {
        self.counts.get(&connection).copied().unwrap_or_default()
    }

    pub fn len(&self) -> usize {
        self.by_call.len()
    }

    /// The connection that a waiting call came on.
    pub fn connection(&self, call: CallId) -> Option<ConnectionId> {
        self.by_call.get(&call).map(|(connection, _)| *connection)
    }

    /// Where a call waits.
    pub fn place(&self, call: CallId) -> Option<&Place> {
        self.by_call.get(&call).map(|(_, place)| place)
    }

    /// The first `most` calls that wait on `connection`, in their order.
    pub fn on(&self, connection: ConnectionId, most: usize) -> Vec<CallId> {
        let all = self.by_connection.range_from(Bound::Included(&(connection, CallId(0))));
        let own = all.map(|(place, ())| *place).take_while(|(on, _)| *on == connection);
        own.map(|(_, call)| call).take(most).collect()
    }

    /// The latest call of all that wait.
    pub fn last(&self) -> Option<CallId> {
        self.by_call.keys().next_back().copied()
    }

    /// The first `most` of all calls that wait, in their order, each with whether it is a poll.
    pub fn first(&self, most: usize) -> Vec<(CallId, bool)> {
        let all = self.by_call.iter().take(most);
        all.map(|(call, (_, place))| (*call, matches!(place, Place::Poll(_)))).collect()
    }

    /// Every call that waits for a change of state, also one that has come.
    pub fn watching(&self) -> impl Iterator<Item = CallId> + '_ {
        let told = self.to_tell.iter().flat_map(|calls| calls.keys());
        self.watching.keys().chain(told).copied()
    }

    /// The change has come for which calls wait: they are to be told.
    pub fn tell_watching(&mut self) {
        if !self.watching.is_empty() {
            self.to_tell.push_back(std::mem::take(&mut self.watching));
        }
    }

    /// Whether calls wait to be told of a change that has come.
    pub fn has_to_tell(&self) -> bool {
        !self.to_tell.is_empty()
    }

    /// Takes out the next call that is to be told of a change that has come.
    pub fn pop_to_tell(&mut self) -> Option<CallId> {
        let (call, ()) = self.to_tell.front()?.first_key_value()?;
        let call = *call;
        self.remove(call);
        Some(call)
    }

    /// The answer of these calls is decided. The caller has taken them from their places.
    pub fn decide(&mut self, calls: Calls, answer: Answer) {
        self.decided.push_back(Decided { calls, answer });
    }

    /// Whether an answer is decided and not given to all its calls yet.
    pub fn has_decided(&self) -> bool {
        !self.decided.is_empty()
    }

    /// The next call whose answer is decided, and that answer. The call may be gone.
    pub fn next_decided(&mut self) -> Option<(CallId, Answer)> {
        loop {
            let decided = self.decided.front_mut()?;
            let next = match &mut decided.calls {
                Calls::List(calls) => calls.pop_front(),
                Calls::Set(calls) => calls.pop_first(),
                Calls::OfTasks(tasks) => {
                    let first = tasks.first_key_value().map(|(task, _)| *task);
                    let next = first.and_then(|task| tasks.get_mut(&task)?.pop_first());
                    if let Some(task) = first
                        && tasks.get(&task).is_some_and(BTreeSet::is_empty)
                    {
                        tasks.remove(&task);
                    }
                    next
                }
                Calls::OnConnection(connection, last) => {
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
                None => drop(self.decided.pop_front()),
            }
        }
    }

    /// Every waiting call whose answer is decided.
    pub fn decided(&self) -> BTreeSet<CallId> {
        let mut all = BTreeSet::new();
        for Decided { calls, .. } in &self.decided {
            match calls {
                Calls::List(calls) => all.extend(calls),
                Calls::Set(calls) => all.extend(calls),
                Calls::OfTasks(tasks) => all.extend(tasks.values().flatten()),
                Calls::OnConnection(connection, last) => {
                    all.extend(self.on(*connection, usize::MAX).into_iter().filter(|call| call <= last));
                }
            }
        }
        all.retain(|call| self.by_call.contains_key(call));
        all
    }

    /// Every call that waits for a key: its connection, the key, and since when.
    pub fn for_keys(&self) -> impl Iterator<Item = (ConnectionId, &Bytes, Timestamp)> {
        self.by_call.values().filter_map(|(connection, place)| match place {
            Place::Key(key, since) => Some((*connection, key, *since)),
            _ => None,
        })
    }

    /// Whether the tables are in order.
    pub fn is_sound(&self) -> bool {
        self.by_call.is_sound()
            && self.by_connection.is_sound()
            && self.by_call.len() == self.by_connection.len()
    }

    /// Every waiting call, in their order.
    pub fn all(&self) -> impl Iterator<Item = (CallId, &Place)> {
        self.by_call.iter().map(|(call, (_, place))| (*call, place))
    }
}

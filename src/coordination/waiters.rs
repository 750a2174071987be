//! Who waits: every unanswered call, by its number and by its connection.
//!
//! Invariant: a call is in here exactly as long as it stands somewhere (in a barrier's slot, a task's poll, a
//! key's queue, a live-set question or among the watchers), so that whoever goes away is found there.

use std::collections::VecDeque;
use std::ops::Bound;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier::BarrierKey;
use super::call::TaskSet;
use super::ids::{CallId, ConnectionId, TaskId, Timestamp};
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

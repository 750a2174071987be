//! Who waits: every unanswered call, by its number and by its connection.
//!
//! Invariant: a call is in here exactly as long as it stands somewhere (in a barrier's slot, a task's poll, a
//! key's queue, a live-set question or among the watchers), so that whoever goes away is found there.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::barrier::BarrierKey;
use super::call::TaskSet;
use super::ids::{CallId, ConnectionId, TaskId, Timestamp};

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
    by_call: BTreeMap<CallId, (ConnectionId, Place)>,
    by_connection: BTreeSet<(ConnectionId, CallId)>,
    /// How many calls of each connection wait.
    counts: BTreeMap<ConnectionId, usize>,
    /// Those who wait for a change of state.
    watching: BTreeSet<CallId>,
}

impl Waiters {
    pub fn insert(&mut self, call: CallId, connection: ConnectionId, place: Place) {
        if place == Place::Watch {
            self.watching.insert(call);
        }
        self.by_call.insert(call, (connection, place));
        if self.by_connection.insert((connection, call)) {
            *self.counts.entry(connection).or_default() += 1;
        }
    }

    pub fn remove(&mut self, call: CallId) -> Option<Place> {
        let (connection, place) = self.by_call.remove(&call)?;
        if self.by_connection.remove(&(connection, call))
            && let Some(count) = self.counts.get_mut(&connection)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&connection);
            }
        }
        if place == Place::Watch {
            self.watching.remove(&call);
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

    /// Every call that waits on `connection`, in their order.
    pub fn on(&self, connection: ConnectionId) -> Vec<CallId> {
        let all = (connection, CallId(0))..=(connection, CallId(u64::MAX));
        self.by_connection.range(all).map(|(_, call)| *call).collect()
    }

    /// Every call that waits for a change of state, in their order.
    pub fn watching(&self) -> impl Iterator<Item = CallId> + '_ {
        self.watching.iter().copied()
    }

    /// Every call that waits for a key: its connection, the key, and since when.
    pub fn for_keys(&self) -> impl Iterator<Item = (ConnectionId, &Bytes, Timestamp)> {
        self.by_call.values().filter_map(|(connection, place)| match place {
            Place::Key(key, since) => Some((*connection, key, *since)),
            _ => None,
        })
    }

    /// Every waiting call, in their order.
    pub fn all(&self) -> impl Iterator<Item = (CallId, &Place)> {
        self.by_call.iter().map(|(call, (_, place))| (*call, place))
    }
}

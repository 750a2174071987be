//! The calls of kept connections: client connections that went on while the process died.
//!
//! The log of a kept connection says which calls waited when the process died. It lags behind the journal: a call may be
//! recorded and applied, and its answer may be decided, before the log of its connection says so. A replay of the journal
//! finds such calls and answers. Then a call that arrives again in the same stream of its connection is not applied
//! again, and a call that waits gets its answer. Begin at [`KeptConnections`] and [`ReplayedCalls`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::coordination::{CallId, CallOutcome, Code, ConnectionId, Failure, Input};

/// The streams in the log of a connection.
#[derive(Debug)]
struct KnownStreams {
    last: u32,
    /// Those of which the request is incomplete.
    incomplete: Vec<u32>,
}

/// A summary of the logs of kept connections.
#[derive(Debug, Default)]
pub struct KeptConnections {
    /// The streams in the log of each connection.
    streams: HashMap<ConnectionId, KnownStreams>,
    /// The calls that wait.
    waiting: HashSet<CallId>,
    /// The number of connections that were kept and cannot go on.
    lost: usize,
}

impl KeptConnections {
    /// Returns no connections, while `lost` were kept and cannot go on.
    #[must_use]
    pub fn without(lost: usize) -> Self {
        Self { lost, ..Self::default() }
    }

    /// Adds a connection whose log ends with the beginning of stream `last`. The requests of the streams `incomplete` have not
    /// arrived in full, and the calls `waiting` wait.
    pub fn add(
        &mut self,
        connection: ConnectionId,
        last: u32,
        incomplete: Vec<u32>,
        waiting: impl IntoIterator<Item = CallId>,
    ) {
        self.streams.insert(connection, KnownStreams { last, incomplete });
        self.waiting.extend(waiting);
    }

    /// Returns whether the log of a connection has the call of a stream, or the connection does not go on.
    fn has_call(&self, connection: ConnectionId, stream: u32) -> bool {
        let known = self.streams.get(&connection);
        known.is_none_or(|known| stream <= known.last && !known.incomplete.contains(&stream))
    }

    /// Returns the number of connections that were kept and cannot go on.
    pub(super) fn lost(&self) -> usize {
        self.lost
    }

    /// Returns the connections.
    pub(super) fn connections(&self) -> Vec<ConnectionId> {
        let mut connections: Vec<ConnectionId> = self.streams.keys().copied().collect();
        connections.sort_unstable();
        connections
    }
}

/// The calls and the answers that a replay found and that are not in the logs of their connections.
#[derive(Debug, Default)]
pub(super) struct ReplayedCalls {
    kept: Arc<KeptConnections>,
    /// The calls that the journal has and the log of their connection has not.
    by_stream: HashMap<(ConnectionId, u32), CallId>,
    /// These calls, and those that wait, as long as no connection has taken them over.
    unclaimed: HashSet<CallId>,
    /// The answers to them.
    outcomes: HashMap<CallId, CallOutcome>,
}

impl ReplayedCalls {
    pub fn new(kept: Arc<KeptConnections>) -> Self {
        let unclaimed = kept.waiting.clone();
        Self { kept, unclaimed, ..Self::default() }
    }

    pub fn kept(&self) -> &KeptConnections {
        &self.kept
    }

    /// Records a call in the journal.
    pub fn record_call(&mut self, connection: ConnectionId, stream: u32, call: CallId) {
        if !self.kept.has_call(connection, stream) {
            self.by_stream.insert((connection, stream), call);
            self.unclaimed.insert(call);
        }
    }

    /// Records an answer, if it is to one of these calls.
    pub fn record_answer(&mut self, call: CallId, outcome: CallOutcome) {
        if self.unclaimed.contains(&call) {
            self.outcomes.insert(call, outcome);
        }
    }

    /// Records that a call was withdrawn: by its deadline, as far as anybody still waits for an answer.
    pub fn record_cancelled(&mut self, call: CallId) {
        let failure =
            || Failure::without_details(Code::DeadlineExceeded, "the call's own deadline has passed");
        self.record_answer(call, Err(Arc::new(failure())));
    }

    /// Records that an input is not applied, because it ends the process.
    pub fn record_set_aside(&mut self, stream: u32, input: &Input) {
        if let Input::Call { call, caller, .. } = input {
            self.record_call(caller.connection, stream, *call);
            let text = "The coordination service failed on this call, and does not try it again.";
            self.record_answer(*call, Err(Arc::new(Failure::without_details(Code::Internal, text))));
        }
    }

    /// Returns whether no call can arrive again.
    pub fn is_empty(&self) -> bool {
        self.by_stream.is_empty()
    }

    /// Forgets the calls of a connection that has ended.
    pub fn forget_connection(&mut self, connection: ConnectionId) {
        let Self { by_stream, unclaimed, outcomes, .. } = self;
        by_stream.retain(|(on, _), call| {
            if *on == connection {
                unclaimed.remove(call);
                outcomes.remove(call);
            }
            *on != connection
        });
    }

    /// Returns whether a call of a connection can arrive again.
    pub fn has_calls_of(&self, connection: ConnectionId) -> bool {
        self.by_stream.keys().any(|(on, _)| *on == connection)
    }

    /// Takes a call that arrives again in its stream.
    pub fn take_call(&mut self, connection: ConnectionId, stream: u32) -> Option<CallId> {
        self.by_stream.remove(&(connection, stream))
    }

    /// Takes over a call: returns the answer to it; `None`: it waits.
    pub fn take_outcome(&mut self, call: CallId) -> Option<CallOutcome> {
        self.unclaimed.remove(&call);
        self.outcomes.remove(&call)
    }
}

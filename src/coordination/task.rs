//! One task of a run: its protocol state, its incarnations, its suspicion, its held error poll, and its statistics.
//!
//! It changes no state by itself: the rule files do. Begin at [`Task`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::call::WireState;
use super::failure::Failure;
use super::heartbeat_stats::HeartbeatStats;
use super::ids::{CallId, ConnectionId, TaskIncarnation, Timestamp};
use super::input::ConnectionEnd;
use super::straggler_stats::StragglerStats;

/// Where a task stands, as far as the protocol goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProtocolState {
    /// Not registered yet, or shut down. Signs of life are still taken until the moment given, since a client
    /// stops its heartbeats a little after it has left.
    Disconnected(Timestamp),
    Connected,
    Failed(Arc<Failure>),
}

/// One life of a task that is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PastIncarnation {
    pub incarnation: TaskIncarnation,
    pub peer: Option<SocketAddr>,
    pub registered_at: Timestamp,
    pub ended: String,
}

/// A connection broke, and the task may still come back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Suspicion {
    pub since: Timestamp,
    pub until: Timestamp,
    pub evidence: ConnectionEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Task {
    pub standing: ProtocolState,
    /// Since when it stands there.
    pub since: Timestamp,
    /// Its present or last life.
    pub incarnation: Option<TaskIncarnation>,
    /// Where that life registered from.
    pub peer: Option<SocketAddr>,
    pub registered_at: Timestamp,
    /// The connection that it was last heard on.
    pub connection: Option<ConnectionId>,
    pub recoverable: bool,
    /// It has been connected in this run before.
    pub was_connected: bool,
    /// It registered again in this run and has not taken part in a barrier with all its members since.
    pub unsynced: bool,
    /// It was excluded in this run, or before it, and has not registered since: nothing waits for it.
    pub is_exempt: bool,
    pub last_heartbeat: Option<Timestamp>,
    pub heartbeat_stats: HeartbeatStats,
    pub straggling: StragglerStats,
    /// A heartbeat timer stands for it.
    pub has_heartbeat_timer: bool,
    pub suspicion: Option<Suspicion>,
    /// Its held error poll.
    pub poll: Option<CallId>,
    pub past_incarnations: VecDeque<PastIncarnation>,
}

impl Task {
    pub fn new(now: Timestamp, recoverable: bool) -> Self {
        Self {
            standing: ProtocolState::Disconnected(Timestamp::default()),
            since: now,
            incarnation: None,
            peer: None,
            registered_at: now,
            connection: None,
            recoverable,
            was_connected: false,
            unsynced: false,
            is_exempt: false,
            last_heartbeat: None,
            heartbeat_stats: HeartbeatStats::default(),
            straggling: StragglerStats::default(),
            has_heartbeat_timer: false,
            suspicion: None,
            poll: None,
            past_incarnations: VecDeque::new(),
        }
    }

    pub fn is_connected(&self) -> bool {
        self.standing == ProtocolState::Connected
    }

    pub fn failure(&self) -> Option<&Arc<Failure>> {
        match &self.standing {
            ProtocolState::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// Never registered in this run, or shut down for so long that its client must know.
    pub fn is_past_disconnect_grace(&self, now: Timestamp) -> bool {
        matches!(self.standing, ProtocolState::Disconnected(until) if now > until)
    }

    /// `incarnation` is an earlier life of this task.
    pub fn has_superseded(&self, incarnation: TaskIncarnation) -> bool {
        self.incarnation != Some(incarnation)
            && self.past_incarnations.iter().any(|life| life.incarnation == incarnation)
    }

    pub fn wire_state(&self) -> WireState {
        match self.standing {
            ProtocolState::Disconnected(_) => WireState::Disconnected,
            ProtocolState::Connected => WireState::Connected,
            ProtocolState::Failed(_) => WireState::Error,
        }
    }

    /// Begins a new life: the present one, if there was one, is over for the reason given.
    pub fn begin_incarnation(
        &mut self,
        incarnation: TaskIncarnation,
        peer: Option<SocketAddr>,
        now: Timestamp,
        ended: &str,
        kept: usize,
    ) {
        if let Some(old) = self.incarnation
            && old != incarnation
        {
            let (peer, registered_at) = (self.peer, self.registered_at);
            self.past_incarnations.push_front(PastIncarnation {
                incarnation: old,
                peer,
                registered_at,
                ended: ended.to_owned(),
            });
            self.past_incarnations.truncate(kept);
        }
        self.incarnation = Some(incarnation);
        self.peer = peer;
        self.registered_at = now;
    }
}

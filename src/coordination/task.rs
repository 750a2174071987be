//! One task of a run: its protocol state, its incarnations, its suspicion, its held error poll, and its statistics.
//!
//! The rules in other files change this state. Begin at [`Task`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::heartbeat_stats::HeartbeatStats;
use super::ids::{CallId, ConnectionId, TaskIncarnation, Timestamp};
use super::input::ConnectionEnd;
use super::request_reply::ClientTaskState;
use super::straggler_stats::StragglerStats;

/// The protocol state of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProtocolState {
    /// Not registered yet, or shut down. Until the given time heartbeats are still accepted, because a client
    /// stops them a little after its shutdown.
    Disconnected(Timestamp),
    Connected,
    Failed(Arc<Failure>),
}

/// An ended incarnation of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PastIncarnation {
    pub incarnation: TaskIncarnation,
    pub peer: Option<SocketAddr>,
    pub registered_at: Timestamp,
    pub ended: String,
}

/// The suspicion after a broken connection: the task may still return.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Suspicion {
    pub since: Timestamp,
    pub until: Timestamp,
    pub evidence: ConnectionEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Task {
    pub standing: ProtocolState,
    /// The time since which it is in that state.
    pub since: Timestamp,
    /// The present or last incarnation.
    pub incarnation: Option<TaskIncarnation>,
    /// The address from which that incarnation registered.
    pub peer: Option<SocketAddr>,
    pub registered_at: Timestamp,
    /// The connection of its latest call.
    pub connection: Option<ConnectionId>,
    pub recoverable: bool,
    /// Whether it has been connected in this run before.
    pub was_connected: bool,
    /// Whether it registered again in this run and has not taken part in a barrier with all its members that are
    /// not excused since.
    pub unsynced: bool,
    /// Whether it was excluded, in this run or before it, and has not registered since: nothing waits for it.
    pub is_excused: bool,
    pub last_heartbeat: Option<Timestamp>,
    pub heartbeat_stats: HeartbeatStats,
    pub straggling: StragglerStats,
    /// Whether a heartbeat timer is set, or queued to be set.
    pub has_heartbeat_timer: bool,
    pub suspicion: Option<Suspicion>,
    /// The held error poll.
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
            is_excused: false,
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

    /// Returns whether the task never registered in this run, or shut down so long ago that its client must
    /// have stopped.
    pub fn is_past_shutdown_grace(&self, now: Timestamp) -> bool {
        matches!(self.standing, ProtocolState::Disconnected(until) if now > until)
    }

    /// Returns whether `incarnation` is an earlier incarnation of this task.
    pub fn has_superseded(&self, incarnation: TaskIncarnation) -> bool {
        self.incarnation != Some(incarnation)
            && self.past_incarnations.iter().any(|life| life.incarnation == incarnation)
    }

    pub fn state_for_clients(&self) -> ClientTaskState {
        match self.standing {
            ProtocolState::Disconnected(_) => ClientTaskState::Disconnected,
            ProtocolState::Connected => ClientTaskState::Connected,
            ProtocolState::Failed(_) => ClientTaskState::Error,
        }
    }

    /// Begins a new incarnation; the present one, if there is one, ends for the given reason.
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

//! Ends a connection gracefully by two GOAWAY frames (RFC 9113, section 6.8).
//!
//! The [`GoawayTracker`] decides which GOAWAY frame is due, and the [`Http2Sender`](super::Http2Sender) sends it.
//! Begin at [`GoawayTracker::begin_shutdown`].

use serde::{Deserialize, Serialize};

use super::frame::StreamId;

/// The payload of the ping that follows the announcing GOAWAY. When it is acknowledged, every stream that the peer
/// opened before it saw GOAWAY has arrived.
pub(super) const SHUTDOWN_PING: [u8; 8] = *b"leaving\0";

/// The progress of the server in announcing the end of the connection.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct GoawayTracker {
    state: GoawayState,
    /// The last stream that was accepted.
    last_accepted: StreamId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
enum GoawayState {
    #[default]
    No,
    /// GOAWAY is announced; streams that were on their way are still accepted.
    Announced,
    /// The final GOAWAY is sent; no further streams are accepted.
    Final,
}

impl GoawayTracker {
    /// Begins the shutdown; returns `false` if it has begun already.
    pub(super) fn begin_shutdown(&mut self) -> bool {
        let first = self.state == GoawayState::No;
        if first {
            self.state = GoawayState::Announced;
        }
        first
    }

    /// Returns whether the acknowledged ping makes the final GOAWAY due.
    pub(super) fn on_shutdown_ping_ack(&mut self, payload: &[u8]) -> bool {
        let due = self.state == GoawayState::Announced && *payload == SHUTDOWN_PING;
        if due {
            self.state = GoawayState::Final;
        }
        due
    }

    /// Records a stream that the peer opens. Streams after the final GOAWAY are not accepted.
    pub(super) fn record_opened_stream(&mut self, id: StreamId) {
        if !self.has_sent_final_goaway() {
            self.last_accepted = id;
        }
    }

    /// Returns whether no further streams are accepted.
    pub(super) fn has_sent_final_goaway(&self) -> bool {
        self.state == GoawayState::Final
    }

    pub(super) fn last_accepted_stream(&self) -> StreamId {
        self.last_accepted
    }
}

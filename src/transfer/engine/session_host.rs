//! Implements [`SessionHost`], the interface by which connections call their engine.
//!
//! The files to which this file forwards the calls do the work. Begin at the impl of [`SessionHost`].

use std::sync::Arc;
use std::time::Instant;

use muster_clock as clock;

use super::lane_reconnect::{close_lost_connection_in_background, reconnect_lane};
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::base::transport::TransportChoice;
use crate::session::connection::{Connection, SessionHost};

impl SessionHost for EngineShared {
    fn notify_connection_unused(&self) {
        self.on_connection_unused();
    }

    fn on_leave_refused(&self) {
        self.request_surplus_evictions();
    }

    fn notify_peer_kept_connection(&self, connection: &Arc<Connection>) {
        self.on_connection_kept(connection);
    }

    fn notify_connection_left(&self, connection: &Arc<Connection>) {
        self.on_connection_left(connection);
    }

    fn reconnect_lane(&self, connection: &Arc<Connection>, control: bool, how: &str) {
        reconnect_lane(self, connection, control, how);
    }

    fn notify_other_job_ended_connection(&self, connection: &Arc<Connection>, how: &str) {
        close_lost_connection_in_background(self, connection, how);
    }

    fn back_off_transport(&self, peer: MemberId, how: &str) {
        if self.config.transport == TransportChoice::Auto && self.membership().has(peer) {
            tracing::debug!(%peer, how, "other ways come first for a time");
            self.backoff.record_failure(peer, clock::monotonic());
        }
    }

    fn schedule_connection_check(&self, wanted: Instant) {
        self.schedule_check(wanted);
    }

    fn notify_connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        self.on_connection_over(connection, error);
    }
}

//! The interface of an engine for its connections.
//!
//! It forwards every call to the file that implements it.

use std::sync::Arc;
use std::time::Instant;

use muster_clock as clock;

use super::mend::mend;
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::transport::Choice;
use crate::session::connection::{Connection, SessionHost};

impl SessionHost for EngineShared {
    fn connection_is_unused(&self) {
        self.on_unused();
    }

    fn make_room(&self) {
        self.ask_to_make_room();
    }

    fn connection_stays(&self, connection: &Arc<Connection>) {
        self.on_stayed(connection);
    }

    fn connection_left(&self, connection: &Arc<Connection>) {
        self.on_left(connection);
    }

    fn mend(&self, connection: &Arc<Connection>, control: bool, how: &str) {
        mend(self, connection, control, how);
    }

    fn back_off(&self, peer: Member, how: &str) {
        if self.config.transport == Choice::Auto && self.membership().has(peer) {
            tracing::debug!(%peer, how, "other ways come first for a time");
            self.backoff.add(peer, clock::monotonic());
        }
    }

    fn look_at(&self, wanted: Instant) {
        self.plan_look(wanted);
    }

    fn connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        self.on_connection_over(connection, error);
    }
}

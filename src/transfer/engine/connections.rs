//! Hands a new connection to the requests that wait for it, asks peers to end unused connections, and ends the
//! connections whose peers have gone.
//!
//! [`clique_cache`](super::clique_cache) picks the unused connections, [`dial`](super::dial) makes connections, and
//! [`reconnect_lane`](super::lane_reconnect) dials lost lanes. After a new membership or at a shutdown, all affected
//! connections end in parallel, including those that are being made. Otherwise a slow callback of one connection
//! would delay the end of another. Begin at `EngineShared::end_connections_with`.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use muster_clock as clock;

use super::clique_cache::{CliqueKey, MakeReadyStep};
use super::shared::EngineShared;
use super::thread_pool::for_each_parallel;
use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::session::api_for_engine::ConnectionLease;
use crate::session::connection::Connection;

/// An attempt or a connection to end, because its peer has gone.
enum AttemptOrConnection {
    /// A clique that is being made.
    Attempt(CliqueKey),
    /// An existing connection.
    Connection(Arc<Connection>),
}

impl EngineShared {
    /// Serves all requests that wait for the clique of a new connection, in order.
    pub(super) fn on_clique_ready(&self, connection: &Arc<Connection>) {
        self.hand_connection_to_waiters(&ConnectionLease::take_initial_lease(connection));
        self.request_surplus_evictions();
    }

    /// Serves all requests that wait for a clique, whose connection is leased meanwhile.
    pub(super) fn hand_connection_to_waiters(&self, kept: &ConnectionLease) {
        let connection = kept.connection();
        let key = CliqueKey::new(connection.me, connection.peer);
        let replaced = loop {
            let readiness = lock(&self.cliques).make_ready(key, connection, clock::monotonic());
            match readiness {
                MakeReadyStep::NotifyWaiters(waiters) => {
                    waiters.into_iter().for_each(|waiter| waiter.notify(Ok(kept.duplicate())));
                }
                MakeReadyStep::Ready(replaced) => break replaced,
            }
        };
        if let Some(replaced) = replaced {
            let how = "another connection with it took the place of this one".to_owned();
            replaced.close(TransferError::PeerDead { member: replaced.peer, how });
        }
        // The membership may have changed, or the engine ended, while the connection was in no table.
        if self.closed.load(Ordering::Acquire) {
            connection.close(TransferError::Closed);
        } else if !self.membership.read().unwrap_or_else(PoisonError::into_inner).has(connection.peer) {
            connection.close(TransferError::of_absent_member(connection.peer, &self.membership()));
        }
        if connection.end_error().is_some() {
            lock(&self.cliques).forget(connection);
        }
    }

    /// Makes room if there are too many connections, now that one more is unused.
    pub(super) fn on_connection_unused(&self) {
        let crowded = lock(&self.cliques).is_over_capacity(self.config.cliques_max, clock::monotonic());
        if crowded {
            self.request_surplus_evictions();
        }
    }

    /// If there are too many connections, asks the peers of unused ones to end them.
    pub(super) fn request_surplus_evictions(&self) {
        // The lock is released first, because the answer takes it.
        let surplus =
            lock(&self.cliques).pick_eviction_candidates(self.config.cliques_max, clock::monotonic());
        surplus.iter().for_each(|connection| connection.request_leave());
    }

    /// Restores a connection that this side had agreed to end and the peer keeps.
    pub(super) fn on_connection_kept(&self, connection: &Arc<Connection>) {
        let mut cliques = lock(&self.cliques);
        if connection.end_error().is_none() {
            cliques.restore(connection, clock::monotonic());
        }
    }

    /// Forgets a connection that was dropped to make room, with its peer's agreement.
    pub(super) fn on_connection_left(&self, connection: &Arc<Connection>) {
        lock(&self.cliques).forget_evicted(connection);
    }

    /// Tells all requests that wait for a clique that it cannot be made.
    pub(super) fn on_clique_failed(&self, key: CliqueKey, making: Option<u64>, error: &TransferError) {
        let waiters = lock(&self.cliques).fail_attempt(key, making);
        for waiter in waiters {
            waiter.notify(Err(error.clone()));
        }
    }

    /// Ends everything with the members that have gone, in parallel, so that a slow callback of one does not
    /// delay the others.
    pub(super) fn end_connections_with(
        &self,
        gone: impl Fn(MemberId) -> bool + Copy,
        error: impl Fn(MemberId) -> TransferError,
    ) {
        let making = lock(&self.cliques).pending_cliques(gone).into_iter().map(|key| {
            let member = key.members().iter().copied().find(|member| gone(*member)).unwrap_or(self.here());
            (AttemptOrConnection::Attempt(key), error(member))
        });
        let mut lost: Vec<_> = making.collect();
        // All connections, because a new one may not be in the cache yet, or not any more.
        for connection in lock(&self.connections).iter().filter(|connection| gone(connection.peer)) {
            lost.push((AttemptOrConnection::Connection(Arc::clone(connection)), error(connection.peer)));
        }
        for_each_parallel(&lost, |(what, error)| match what {
            AttemptOrConnection::Attempt(key) => self.on_clique_failed(*key, None, error),
            AttemptOrConnection::Connection(connection) => connection.close(error.clone()),
        });
    }

    /// Forgets a connection that is over.
    pub(super) fn on_connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        tracing::debug!(peer = %connection.peer, %error, "connection over");
        if !connection.has_left() && !matches!(error, TransferError::Closed) {
            self.launch_metrics.count_connection_abort(error);
        }
        lock(&self.cliques).forget(connection);
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
    }
}

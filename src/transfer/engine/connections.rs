//! The life of an engine's connections: which requests one serves, which one is dropped to make room, and
//! their end.
//!
//! It dials nothing: [`dial`](super::dial) and [`mend`](super::mend) do. A membership or a shutdown ends all
//! affected connections in parallel, including those that are being made, because the callbacks of one may
//! take long and must not delay the others. Begin at `EngineShared::end_all`.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use muster_clock as clock;

use super::cliques::{CliqueKey, CliqueReady};
use super::shared::EngineShared;
use super::thread_pool::for_each_parallel;
use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::base::sync::lock;
use crate::session::connection::{Connection, ConnectionLease};

/// Something to end because its peer has gone.
enum Lost {
    /// A clique that is being made.
    Making(CliqueKey),
    /// An existing connection.
    Connection(Arc<Connection>),
}

impl EngineShared {
    /// Serves all requests that wait for the clique of a new connection, in order.
    pub(super) fn clique_ready(&self, connection: &Arc<Connection>) {
        self.serve(&ConnectionLease::adopt(connection));
        self.ask_to_make_room();
    }

    /// Serves all requests that wait for a clique, whose connection is leased meanwhile.
    pub(super) fn serve(&self, kept: &ConnectionLease) {
        let connection = kept.connection();
        let key = CliqueKey::new(connection.me, connection.peer);
        let replaced = loop {
            let readiness = lock(&self.cliques).make_ready(key, connection, clock::monotonic());
            match readiness {
                CliqueReady::Waited(waiters) => {
                    waiters.into_iter().for_each(|waiter| waiter.tell(Ok(kept.renew())));
                }
                CliqueReady::Ready(replaced) => break replaced,
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
            let member = connection.peer;
            let current = self.membership().member(member.task).map(|member| member.incarnation);
            connection.close(TransferError::StaleIncarnation { member, current });
        }
        if connection.over().is_some() {
            lock(&self.cliques).forget(connection);
        }
    }

    /// Makes room if there are too many connections, now that one more is unused.
    pub(super) fn on_unused(&self) {
        let crowded = lock(&self.cliques).is_crowded(self.config.cliques_max, clock::monotonic());
        if crowded {
            self.ask_to_make_room();
        }
    }

    /// If there are too many connections, asks the peers of unused ones to end them.
    pub(super) fn ask_to_make_room(&self) {
        // The lock is released first, because the answer takes it.
        let surplus = lock(&self.cliques).surplus(self.config.cliques_max, clock::monotonic());
        surplus.iter().for_each(|connection| connection.ask_to_leave());
    }

    /// Restores a connection that this side had agreed to end and the peer keeps.
    pub(super) fn on_stayed(&self, connection: &Arc<Connection>) {
        let mut cliques = lock(&self.cliques);
        if connection.over().is_none() {
            cliques.restore(connection, clock::monotonic());
        }
    }

    /// Forgets a connection that was dropped to make room, with its peer's agreement.
    pub(super) fn on_left(&self, connection: &Arc<Connection>) {
        lock(&self.cliques).evict(connection);
    }

    /// Tells all requests that wait for a clique that it cannot be made.
    pub(super) fn clique_failed(&self, key: CliqueKey, making: Option<u64>, error: &TransferError) {
        let waiters = lock(&self.cliques).give_up(key, making);
        for waiter in waiters {
            waiter.tell(Err(error.clone()));
        }
    }

    /// Ends everything with the members that have gone, in parallel, so that a slow callback of one does not
    /// delay the others.
    pub(super) fn end_all(
        &self,
        gone: impl Fn(Member) -> bool + Copy,
        error: impl Fn(Member) -> TransferError,
    ) {
        let making = lock(&self.cliques).pending(gone).into_iter().map(|key| {
            let member = key.members().iter().copied().find(|member| gone(*member)).unwrap_or(self.here());
            (Lost::Making(key), error(member))
        });
        let mut lost: Vec<_> = making.collect();
        // All connections, because a new one may not be in the cache yet, or not any more.
        for connection in lock(&self.connections).iter().filter(|connection| gone(connection.peer)) {
            lost.push((Lost::Connection(Arc::clone(connection)), error(connection.peer)));
        }
        for_each_parallel(&lost, |(what, error)| match what {
            Lost::Making(key) => self.clique_failed(*key, None, error),
            Lost::Connection(connection) => connection.close(error.clone()),
        });
    }

    /// Forgets a connection that is over.
    pub(super) fn on_connection_over(&self, connection: &Arc<Connection>, error: &TransferError) {
        tracing::debug!(peer = %connection.peer, %error, "connection over");
        if !connection.is_gone() && !matches!(error, TransferError::Closed) {
            self.meters.aborted(error);
        }
        lock(&self.cliques).forget(connection);
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
    }
}

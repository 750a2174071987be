//! The registry of the open connections of a listener. The listener tells the connections to end through their
//! mailboxes.
//!
//! Begin at [`GrpcConnections::register`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use super::mailbox::{Mailbox, MailboxGroup, MailboxMessage};
use super::server::GrpcServer;

/// The open connections of one listener.
#[derive(Default)]
pub(super) struct GrpcConnections {
    next: AtomicU64,
    present: Mutex<HashMap<u64, Arc<Mailbox>>>,
    left: Notify,
}

/// The entry of one connection in the registry, removed when it is dropped.
pub(super) struct ConnectionGuard {
    mailbox: Arc<Mailbox>,
    registry: Arc<GrpcConnections>,
    server: Arc<GrpcServer>,
    number: u64,
}

impl GrpcConnections {
    fn lock_connections(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Mailbox>>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new connection.
    pub(super) fn register(self: &Arc<Self>, server: &Arc<GrpcServer>) -> ConnectionGuard {
        let mailbox = Arc::new(Mailbox::default());
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock_connections().insert(number, Arc::clone(&mailbox));
        server.counts.shard_of_this_thread().opened.increment();
        ConnectionGuard { mailbox, registry: Arc::clone(self), server: Arc::clone(server), number }
    }

    /// Waits until the last connection has ended.
    pub(super) async fn wait_until_empty(&self) {
        loop {
            let left = self.left.notified();
            if self.lock_connections().is_empty() {
                return;
            }
            left.await;
        }
    }
}

impl MailboxGroup for GrpcConnections {
    fn post_to_all(&self, message: &dyn Fn() -> MailboxMessage) {
        // Sent outside of the lock, because a connection that receives it may remove its entry.
        let all: Vec<Arc<Mailbox>> = self.lock_connections().values().cloned().collect();
        for mailbox in all {
            mailbox.post(message());
        }
    }
}

impl ConnectionGuard {
    /// Returns the mailbox of the connection.
    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut present = self.registry.lock_connections();
        present.remove(&self.number);
        let empty = present.is_empty();
        drop(present);
        self.mailbox.close();
        self.server.connections.fetch_sub(1, Ordering::Relaxed);
        if empty {
            self.registry.left.notify_one();
        }
    }
}

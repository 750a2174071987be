//! The clique cache: the one place where connections are found, made, kept and dropped.
//!
//! A clique is a set of lives that share connections; for host memory it has two members, and its key is the two in
//! order, so that both directions share it. Whoever wants a clique that is being made waits for that making.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::connection::{Connection, Kept};
use super::error::TransferError;
use super::identity::Member;

/// The members of a clique, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CliqueKey([Member; 2]);

impl CliqueKey {
    /// Of two members in any order.
    #[must_use]
    pub fn new(a: Member, b: Member) -> Self {
        Self(if a <= b { [a, b] } else { [b, a] })
    }

    /// Its members, in order.
    #[must_use]
    pub const fn members(&self) -> &[Member; 2] {
        &self.0
    }
}

/// Called when a clique is ready, or cannot be.
pub type Waiter = Box<dyn FnOnce(Result<Kept, TransferError>) + Send>;

/// A clique.
enum Slot {
    /// It is being made. The number tells this making from others of the same clique.
    Pending { making: u64, waiters: Vec<Waiter> },
    /// It is there.
    Ready { connection: Arc<Connection>, used: Instant },
}

/// How a clique was found.
pub enum Found {
    /// It was there.
    Ready(Kept, Waiter),
    /// Somebody makes it; the waiter was taken.
    Pending,
    /// The caller is to make it, under this number; the waiter was taken.
    Make(u64),
}

/// How a clique became ready.
pub enum Settled {
    /// These waited for it.
    Waited(Vec<Waiter>),
    /// It is ready, in the place of this one.
    Ready(Option<Arc<Connection>>),
}

/// The cache. Its owner keeps it behind a lock, and calls the waiters that it returns without the lock.
#[derive(Default)]
pub struct Cliques {
    slots: HashMap<CliqueKey, Slot>,
    makings: u64,
    /// Cliques found, not found, dropped for room.
    pub hits: u64,
    /// See `hits`.
    pub misses: u64,
    /// See `hits`.
    pub evictions: u64,
}

impl Cliques {
    /// Finds a clique, or takes the waiter for when it is there.
    pub fn find(&mut self, key: CliqueKey, now: Instant, waiter: Waiter) -> Found {
        match self.slots.get_mut(&key) {
            Some(Slot::Ready { connection, used }) if connection.over().is_none() => {
                self.hits += 1;
                *used = now;
                Found::Ready(Kept::new(connection), waiter)
            }
            Some(Slot::Pending { waiters, .. }) => {
                self.hits += 1;
                waiters.push(waiter);
                Found::Pending
            }
            _ => {
                self.misses += 1;
                self.makings += 1;
                self.slots.insert(key, Slot::Pending { making: self.makings, waiters: vec![waiter] });
                Found::Make(self.makings)
            }
        }
    }

    /// The peer is making the clique, and nobody here is: whoever wants it from now on waits for the peer's.
    pub fn expect(&mut self, key: CliqueKey) -> Option<u64> {
        if self.slots.contains_key(&key) {
            return None;
        }
        self.makings += 1;
        self.slots.insert(key, Slot::Pending { making: self.makings, waiters: Vec::new() });
        Some(self.makings)
    }

    /// The connection of a clique, alive or not.
    pub fn get(&self, key: CliqueKey) -> Option<&Arc<Connection>> {
        match self.slots.get(&key)? {
            Slot::Ready { connection, .. } => Some(connection),
            Slot::Pending { .. } => None,
        }
    }

    /// Whether the clique is being made.
    pub fn is_pending(&self, key: CliqueKey) -> bool {
        matches!(self.slots.get(&key), Some(Slot::Pending { .. }))
    }

    /// Whether this making still counts: nobody was faster, and nobody gave it up.
    pub fn is_making(&self, key: CliqueKey, number: u64) -> bool {
        matches!(self.slots.get(&key), Some(Slot::Pending { making, .. }) if *making == number)
    }

    /// Whether anybody waits for this making; if not, it is given up.
    pub fn is_awaited(&mut self, key: CliqueKey, number: u64) -> bool {
        match self.slots.get(&key) {
            Some(Slot::Pending { making, waiters }) if *making == number => {
                let awaited = !waiters.is_empty();
                if !awaited {
                    self.slots.remove(&key);
                }
                awaited
            }
            _ => false,
        }
    }

    /// Waiters of a clique that is ready now. Called until it gives none; then the clique counts as ready, so those who
    /// came later are served after those who waited. A connection whose place it takes is returned, to be ended.
    pub fn settle(&mut self, key: CliqueKey, connection: &Arc<Connection>, now: Instant) -> Settled {
        if let Some(Slot::Pending { waiters, .. }) = self.slots.get_mut(&key)
            && !waiters.is_empty()
        {
            return Settled::Waited(std::mem::take(waiters));
        }
        match self.slots.insert(key, Slot::Ready { connection: Arc::clone(connection), used: now }) {
            Some(Slot::Ready { connection: old, .. }) if !Arc::ptr_eq(&old, connection) => {
                Settled::Ready(Some(old))
            }
            _ => Settled::Ready(None),
        }
    }

    /// Ends a making, whichever number it has if none is given. Its waiters are to be told.
    pub fn give_up(&mut self, key: CliqueKey, number: Option<u64>) -> Vec<Waiter> {
        match self.slots.get(&key) {
            Some(Slot::Pending { making, .. }) if number.is_none_or(|number| number == *making) => {
                match self.slots.remove(&key) {
                    Some(Slot::Pending { waiters, .. }) => waiters,
                    _ => Vec::new(),
                }
            }
            _ => Vec::new(),
        }
    }

    /// Forgets a connection that is over.
    pub fn forget(&mut self, connection: &Arc<Connection>) {
        let key = CliqueKey::new(connection.me, connection.peer);
        if self.get(key).is_some_and(|ready| Arc::ptr_eq(ready, connection)) {
            self.slots.remove(&key);
        }
    }

    /// Takes out the connections that nobody uses, the longest unused first, as many as there are too many.
    pub fn surplus(&mut self, most: usize) -> Vec<Arc<Connection>> {
        let excess = self.slots.len().saturating_sub(most);
        if excess == 0 {
            return Vec::new();
        }
        let mut idle: Vec<_> = self
            .slots
            .iter()
            .filter_map(|(key, slot)| match slot {
                Slot::Ready { connection, used } if connection.is_idle() => {
                    Some((*used, *key, Arc::clone(connection)))
                }
                _ => None,
            })
            .collect();
        idle.sort_by_key(|(used, ..)| *used);
        idle.truncate(excess);
        self.evictions += idle.len() as u64;
        idle.into_iter()
            .map(|(_, key, connection)| {
                self.slots.remove(&key);
                connection
            })
            .collect()
    }

    /// The cliques that are being made and of which a member is among the chosen.
    pub fn pending(&self, chosen: impl Fn(Member) -> bool) -> Vec<CliqueKey> {
        let pending = |(key, slot): (&CliqueKey, &Slot)| {
            let pending = matches!(slot, Slot::Pending { .. });
            (pending && key.members().iter().any(|member| chosen(*member))).then_some(*key)
        };
        self.slots.iter().filter_map(pending).collect()
    }

    /// How many cliques there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }
}

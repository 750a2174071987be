//! The clique cache: the one place where connections are found, made, kept and dropped.
//!
//! A clique is a set of incarnations that share connections; for host memory it has two members, and its key is the
//! two in order, so both directions share it. A request for a clique that is being made waits for that making. A
//! clique has one connection: a new one ends the one that it replaces, because a launch on a connection that no
//! request finds would wait for ever. Begin at [`Cliques`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::session::connection::{Connection, ConnectionLease};

/// The members of a clique, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CliqueKey([Member; 2]);

impl CliqueKey {
    /// Makes the key of two members in any order.
    #[must_use]
    pub fn new(a: Member, b: Member) -> Self {
        Self(if a <= b { [a, b] } else { [b, a] })
    }

    /// Returns its members, in order.
    #[must_use]
    pub const fn members(&self) -> &[Member; 2] {
        &self.0
    }
}

/// A request that waits for a clique: told when it is ready, or cannot be.
pub struct Waiter {
    /// Called once.
    told: Box<dyn FnOnce(Result<ConnectionLease, TransferError>) + Send>,
    /// Whether the request still exists.
    wanted: IsWanted,
}

/// Says whether something is still wanted. Asked under the lock of the cache: it only looks.
pub type IsWanted = Arc<dyn Fn() -> bool + Send + Sync>;

impl Waiter {
    /// Makes a waiter that calls `told` in the end, whatever `wanted` says.
    pub fn new(
        wanted: &IsWanted,
        told: impl FnOnce(Result<ConnectionLease, TransferError>) + Send + 'static,
    ) -> Self {
        Self { told: Box::new(told), wanted: Arc::clone(wanted) }
    }

    /// Tells it. Without the lock of the cache.
    pub fn tell(self, result: Result<ConnectionLease, TransferError>) {
        (self.told)(result);
    }
}

/// The most requests that wait for one clique.
pub const WAITERS_MAX: usize = 4096;

/// A clique.
enum Slot {
    /// It is being made. The number tells this making from others of the same clique.
    Pending { making: u64, waiters: Vec<Waiter> },
    /// It is there. It may have been asked at that time whether it may end.
    Ready { connection: Arc<Connection>, used: Instant, asked: Option<Instant> },
}

/// A peer that is asked whether a connection may end is not asked again for so long, and counts as leaving meanwhile. If it
/// has not answered by then, it counts as staying.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Connections fall out of use all the time; the whole cache is not looked through more often than this for it.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How a clique was found.
pub enum Found {
    /// It was there.
    Ready(ConnectionLease, Waiter),
    /// It is being made; the waiter was taken.
    Pending,
    /// It is being made, and too many wait for it.
    Crowded(Waiter),
    /// The caller is to make it, under this number; the waiter was taken. If there is a connection that this side agreed
    /// to end, its peer decides first whether that one stays.
    Make(u64, Option<Arc<Connection>>),
}

/// How a clique became ready.
pub enum CliqueReady {
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
    /// When it was last looked through for unused connections.
    looked: Option<Instant>,
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
        let undecided = match self.slots.get_mut(&key) {
            Some(Slot::Ready { connection, used, .. }) if connection.over().is_none() => {
                if let Some(kept) = ConnectionLease::acquire(connection) {
                    self.hits += 1;
                    *used = now;
                    return Found::Ready(kept, waiter);
                }
                Some(Arc::clone(connection))
            }
            Some(Slot::Pending { waiters, .. }) if waiters.len() >= WAITERS_MAX => {
                return Found::Crowded(waiter);
            }
            Some(Slot::Pending { waiters, .. }) => {
                self.hits += 1;
                waiters.push(waiter);
                return Found::Pending;
            }
            _ => None,
        };
        self.misses += 1;
        self.makings += 1;
        self.slots.insert(key, Slot::Pending { making: self.makings, waiters: vec![waiter] });
        Found::Make(self.makings, undecided)
    }

    /// Notes that the peer is making the clique, and this side is not: requests from now on wait for the peer's.
    pub fn expect(&mut self, key: CliqueKey) -> Option<u64> {
        if self.slots.contains_key(&key) {
            return None;
        }
        self.makings += 1;
        self.slots.insert(key, Slot::Pending { making: self.makings, waiters: Vec::new() });
        Some(self.makings)
    }

    /// Returns the connection of a clique, alive or not.
    pub fn get(&self, key: CliqueKey) -> Option<&Arc<Connection>> {
        match self.slots.get(&key)? {
            Slot::Ready { connection, .. } => Some(connection),
            Slot::Pending { .. } => None,
        }
    }

    /// Returns whether the clique is being made.
    pub fn is_pending(&self, key: CliqueKey) -> bool {
        matches!(self.slots.get(&key), Some(Slot::Pending { .. }))
    }

    /// Returns whether this making still counts: it was not overtaken, and not given up.
    pub fn is_making(&self, key: CliqueKey, number: u64) -> bool {
        matches!(self.slots.get(&key), Some(Slot::Pending { making, .. }) if *making == number)
    }

    /// Gives up a making that no request wants any more, and returns the waiters, which are to be told.
    pub fn abandon(&mut self, key: CliqueKey, number: u64) -> Option<Vec<Waiter>> {
        match self.slots.get(&key) {
            Some(Slot::Pending { making, waiters })
                if *making == number
                    && !waiters.is_empty()
                    && !waiters.iter().any(|waiter| (waiter.wanted)()) =>
            {
                Some(self.give_up(key, Some(number)))
            }
            _ => None,
        }
    }

    /// Returns whether a request waits for this making; if not, it is given up.
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

    /// Waiters of a clique that is ready now. Called until it gives none; then the clique counts as ready, so requests
    /// that came later are served after those that waited. A connection whose place it takes is returned, to be ended.
    pub fn make_ready(&mut self, key: CliqueKey, connection: &Arc<Connection>, now: Instant) -> CliqueReady {
        if let Some(Slot::Pending { waiters, .. }) = self.slots.get_mut(&key)
            && !waiters.is_empty()
        {
            return CliqueReady::Waited(std::mem::take(waiters));
        }
        let ready = Slot::Ready { connection: Arc::clone(connection), used: now, asked: None };
        match self.slots.insert(key, ready) {
            Some(Slot::Ready { connection: old, .. }) if !Arc::ptr_eq(&old, connection) => {
                CliqueReady::Ready(Some(old))
            }
            _ => CliqueReady::Ready(None),
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

    /// Takes a connection back that this side had agreed to end. Requests that wait find out themselves.
    pub fn restore(&mut self, connection: &Arc<Connection>, now: Instant) {
        let ready = Slot::Ready { connection: Arc::clone(connection), used: now, asked: None };
        self.slots.entry(CliqueKey::new(connection.me, connection.peer)).or_insert(ready);
    }

    /// Forgets a connection that made room for others.
    pub fn evict(&mut self, connection: &Arc<Connection>) {
        self.evictions += 1;
        self.forget(connection);
    }

    /// Returns whether there are too many, and that was not looked at a moment ago.
    pub fn is_crowded(&self, most: usize, now: Instant) -> bool {
        let lately = self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK_AGAIN);
        self.slots.len() > most && !lately
    }

    /// Returns the unused connections, the longest unused first, as many as there are too many: their peers are to be
    /// asked whether they may end.
    pub fn surplus(&mut self, most: usize, now: Instant) -> Vec<Arc<Connection>> {
        let mut excess = self.slots.len().saturating_sub(most);
        if excess == 0 {
            return Vec::new();
        }
        self.looked = Some(now);
        let mut unused = Vec::new();
        for slot in self.slots.values_mut() {
            let Slot::Ready { connection, used, asked } = slot else { continue };
            let recently = asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_AGAIN);
            if recently {
                excess = excess.saturating_sub(usize::from(connection.is_asked()));
            } else if connection.is_unused() && !connection.is_asked() {
                unused.push((*used, Arc::clone(connection), asked));
            }
        }
        unused.sort_by_key(|(used, ..)| *used);
        unused.truncate(excess);
        unused
            .into_iter()
            .map(|(_, connection, asked)| {
                *asked = Some(now);
                connection
            })
            .collect()
    }

    /// Returns the cliques that are being made and of which a member is among the chosen.
    pub fn pending(&self, chosen: impl Fn(Member) -> bool) -> Vec<CliqueKey> {
        let pending = |(key, slot): (&CliqueKey, &Slot)| {
            let pending = matches!(slot, Slot::Pending { .. });
            (pending && key.members().iter().any(|member| chosen(*member))).then_some(*key)
        };
        self.slots.iter().filter_map(pending).collect()
    }

    /// Returns how many cliques there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }
}

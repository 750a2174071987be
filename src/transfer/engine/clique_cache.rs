//! The clique cache: finds the connection of a clique, decides which request makes a new one, and picks unused
//! connections to end when there are too many. A clique is the two incarnations that share a connection.
//!
//! [`dial`](super::dial) makes connections, and [`connections`](super::connections) ends them. The key of a clique
//! lists its two incarnations in ascending order, so both directions have the same key. While the connection of a
//! clique is being made, further requests wait for this attempt. A clique has one connection: a new connection
//! replaces the old one, and the old one ends. If the old connection stayed, requests would use only the new one, and
//! a launch on the old one would wait for its match for ever. Begin at [`CliqueCache`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::session::api_for_engine::ConnectionLease;
use crate::session::connection::Connection;

/// The key of a clique: its members, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CliqueKey([MemberId; 2]);

impl CliqueKey {
    /// Creates the key of two members given in any order.
    #[must_use]
    pub fn new(a: MemberId, b: MemberId) -> Self {
        Self(if a <= b { [a, b] } else { [b, a] })
    }

    /// Returns the members, in order.
    #[must_use]
    pub const fn members(&self) -> &[MemberId; 2] {
        &self.0
    }
}

/// A request that waits for a clique; it is told when the clique is ready, or cannot be made.
pub struct CliqueWaiter {
    /// Called once.
    told: Box<dyn FnOnce(Result<ConnectionLease, TransferError>) + Send>,
    /// Whether the request still exists.
    wanted: IsRequestWanted,
}

/// A check whether a request still exists. It runs under the lock of the cache, so it must not block.
pub type IsRequestWanted = Arc<dyn Fn() -> bool + Send + Sync>;

impl CliqueWaiter {
    /// Creates a waiter that calls `told` in the end, whatever `wanted` returns.
    pub fn new(
        wanted: &IsRequestWanted,
        told: impl FnOnce(Result<ConnectionLease, TransferError>) + Send + 'static,
    ) -> Self {
        Self { told: Box::new(told), wanted: Arc::clone(wanted) }
    }

    /// Tells the request the result. The caller must not hold the lock of the cache.
    pub fn notify(self, result: Result<ConnectionLease, TransferError>) {
        (self.told)(result);
    }
}

/// The most requests that wait for one clique.
pub const WAITERS_MAX: usize = 4096;

/// The state of a clique.
enum CliqueState {
    /// It is being made. The number identifies this attempt among those of the same clique.
    Pending { making: u64, waiters: Vec<CliqueWaiter> },
    /// Its connection exists. `asked` is when this side last asked the peer to end it.
    Ready { connection: Arc<Connection>, used: Instant, asked: Option<Instant> },
}

/// How long after a question the peer is not asked again. Meanwhile the connection counts as leaving; after
/// that, without an answer, as staying.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// The shortest time between two searches of the whole cache for unused connections.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The result of a search for a clique.
pub enum CliqueLookup {
    /// The connection exists.
    Ready(ConnectionLease, CliqueWaiter),
    /// The clique is being made; the cache took the waiter.
    Pending,
    /// The clique is being made, and too many requests wait for it.
    Crowded(CliqueWaiter),
    /// The caller must make the clique, as the attempt with this number; the cache took the waiter. If there
    /// is a connection that this side agreed to end, its peer decides first whether that one stays.
    Make(u64, Option<Arc<Connection>>),
}

/// A step of making a clique ready.
pub enum MakeReadyStep {
    /// These requests waited for it.
    NotifyWaiters(Vec<CliqueWaiter>),
    /// The clique is ready. The connection that it replaces, if any, must be ended.
    Ready(Option<Arc<Connection>>),
}

/// The cache of cliques. Its owner keeps it behind a lock, and calls the waiters that it returns without the
/// lock.
#[derive(Default)]
pub struct CliqueCache {
    slots: HashMap<CliqueKey, CliqueState>,
    makings: u64,
    /// When the cache was last searched for unused connections.
    looked: Option<Instant>,
    /// The number of searches that found a clique.
    pub hits: u64,
    /// The number of searches that found none.
    pub misses: u64,
    /// The number of connections that were dropped to make room.
    pub evictions: u64,
}

impl CliqueCache {
    /// Searches for a clique; takes the waiter unless the clique is ready or crowded.
    pub fn find_or_begin_attempt(
        &mut self,
        key: CliqueKey,
        now: Instant,
        waiter: CliqueWaiter,
    ) -> CliqueLookup {
        let undecided = match self.slots.get_mut(&key) {
            Some(CliqueState::Ready { connection, used, .. }) if connection.end_error().is_none() => {
                if let Some(kept) = ConnectionLease::acquire(connection) {
                    self.hits += 1;
                    *used = now;
                    return CliqueLookup::Ready(kept, waiter);
                }
                Some(Arc::clone(connection))
            }
            Some(CliqueState::Pending { waiters, .. }) if waiters.len() >= WAITERS_MAX => {
                return CliqueLookup::Crowded(waiter);
            }
            Some(CliqueState::Pending { waiters, .. }) => {
                self.hits += 1;
                waiters.push(waiter);
                return CliqueLookup::Pending;
            }
            _ => None,
        };
        self.misses += 1;
        self.makings += 1;
        self.slots.insert(key, CliqueState::Pending { making: self.makings, waiters: vec![waiter] });
        CliqueLookup::Make(self.makings, undecided)
    }

    /// Records that the peer is making the clique and this side is not: requests from now on wait for the
    /// peer's connection. Returns the number of the attempt, or none if the clique is known already.
    pub fn await_peer_attempt(&mut self, key: CliqueKey) -> Option<u64> {
        if self.slots.contains_key(&key) {
            return None;
        }
        self.makings += 1;
        self.slots.insert(key, CliqueState::Pending { making: self.makings, waiters: Vec::new() });
        Some(self.makings)
    }

    /// Returns the connection of a clique, alive or not.
    pub fn get(&self, key: CliqueKey) -> Option<&Arc<Connection>> {
        match self.slots.get(&key)? {
            CliqueState::Ready { connection, .. } => Some(connection),
            CliqueState::Pending { .. } => None,
        }
    }

    /// Returns whether the clique is being made.
    pub fn is_pending(&self, key: CliqueKey) -> bool {
        matches!(self.slots.get(&key), Some(CliqueState::Pending { .. }))
    }

    /// Returns whether this attempt is current: neither replaced nor given up.
    pub fn is_current_attempt(&self, key: CliqueKey, number: u64) -> bool {
        matches!(self.slots.get(&key), Some(CliqueState::Pending { making, .. }) if *making == number)
    }

    /// Gives up an attempt that no request wants any more, and returns its waiters, which the caller must
    /// tell.
    pub fn abandon_if_unwanted(&mut self, key: CliqueKey, number: u64) -> Option<Vec<CliqueWaiter>> {
        match self.slots.get(&key) {
            Some(CliqueState::Pending { making, waiters })
                if *making == number
                    && !waiters.is_empty()
                    && !waiters.iter().any(|waiter| (waiter.wanted)()) =>
            {
                Some(self.fail_attempt(key, Some(number)))
            }
            _ => None,
        }
    }

    /// Returns whether a request waits for this attempt. If none does, the attempt is given up.
    pub fn keep_if_awaited(&mut self, key: CliqueKey, number: u64) -> bool {
        match self.slots.get(&key) {
            Some(CliqueState::Pending { making, waiters }) if *making == number => {
                let awaited = !waiters.is_empty();
                if !awaited {
                    self.slots.remove(&key);
                }
                awaited
            }
            _ => false,
        }
    }

    /// Makes a clique ready in steps. It returns the waiters first and is called again until there are none;
    /// then the clique counts as ready, so that later requests are served after those that waited. It then
    /// returns the connection that it replaces, which must be ended.
    pub fn make_ready(
        &mut self,
        key: CliqueKey,
        connection: &Arc<Connection>,
        now: Instant,
    ) -> MakeReadyStep {
        if let Some(CliqueState::Pending { waiters, .. }) = self.slots.get_mut(&key)
            && !waiters.is_empty()
        {
            return MakeReadyStep::NotifyWaiters(std::mem::take(waiters));
        }
        let ready = CliqueState::Ready { connection: Arc::clone(connection), used: now, asked: None };
        match self.slots.insert(key, ready) {
            Some(CliqueState::Ready { connection: old, .. }) if !Arc::ptr_eq(&old, connection) => {
                MakeReadyStep::Ready(Some(old))
            }
            _ => MakeReadyStep::Ready(None),
        }
    }

    /// Gives up an attempt, or any attempt if no number is given. Returns its waiters, which the caller must
    /// tell.
    pub fn fail_attempt(&mut self, key: CliqueKey, number: Option<u64>) -> Vec<CliqueWaiter> {
        match self.slots.get(&key) {
            Some(CliqueState::Pending { making, .. }) if number.is_none_or(|number| number == *making) => {
                match self.slots.remove(&key) {
                    Some(CliqueState::Pending { waiters, .. }) => waiters,
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

    /// Restores a connection that this side had agreed to end. Requests that wait for the decision learn of
    /// it by themselves.
    pub fn restore(&mut self, connection: &Arc<Connection>, now: Instant) {
        let ready = CliqueState::Ready { connection: Arc::clone(connection), used: now, asked: None };
        self.slots.entry(CliqueKey::new(connection.me, connection.peer)).or_insert(ready);
    }

    /// Forgets a connection that was dropped to make room.
    pub fn forget_evicted(&mut self, connection: &Arc<Connection>) {
        self.evictions += 1;
        self.forget(connection);
    }

    /// Returns whether there are more than `most` cliques, and the cache was not searched a moment ago.
    pub fn is_over_capacity(&self, most: usize, now: Instant) -> bool {
        let lately = self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK_AGAIN);
        self.slots.len() > most && !lately
    }

    /// Returns the unused connections, the longest unused first, as many as exceed `most`. The caller asks
    /// their peers to end them.
    pub fn pick_eviction_candidates(&mut self, most: usize, now: Instant) -> Vec<Arc<Connection>> {
        let mut excess = self.slots.len().saturating_sub(most);
        if excess == 0 {
            return Vec::new();
        }
        self.looked = Some(now);
        let mut unused = Vec::new();
        for slot in self.slots.values_mut() {
            let CliqueState::Ready { connection, used, asked } = slot else { continue };
            let recently = asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_AGAIN);
            if recently {
                excess = excess.saturating_sub(usize::from(connection.has_requested_leave()));
            } else if connection.is_unused() && !connection.has_requested_leave() {
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

    /// Returns the cliques that are being made and have a chosen member.
    pub fn pending_cliques(&self, chosen: impl Fn(MemberId) -> bool) -> Vec<CliqueKey> {
        let pending = |(key, slot): (&CliqueKey, &CliqueState)| {
            let pending = matches!(slot, CliqueState::Pending { .. });
            (pending && key.members().iter().any(|member| chosen(*member))).then_some(*key)
        };
        self.slots.iter().filter_map(pending).collect()
    }

    /// Returns the number of cliques.
    pub fn len(&self) -> usize {
        self.slots.len()
    }
}

//! The connection slots of one HTTP listener: phases, timeouts, and eviction when the listener is full.
//!
//! It accepts and serves nothing: `listen.rs` does. Begin at [`ConnectionRegistry`].
//!
//! | phase | the server waits for | ends by | may be closed to make room |
//! | --- | --- | --- | --- |
//! | `Greeting` | the first byte, the TLS handshake | the listener's own timer, counted from the accept | yes |
//! | `Head` | the end of a request's head | `head_timeout`, counted from its first byte; that of the first head from the accept | yes |
//! | `Body` | more of the body of a request | the deadlines of bodies, counted from the end of the head | yes |
//! | `Busy` | its own handler, the end of the answer | the deadline of writes | no |
//! | `Idle` | the next request | `idle_timeout`, counted from the last byte written | yes, these first |
//!
//! A new connection is never refused while others only wait: if every slot is taken, connections without a whole
//! request are closed, those of the network with the most connections first. If all are busy, the new connection
//! gets one of [`RESERVED`] further slots, in which only health probes are answered. A reserved slot is always
//! free: the oldest connection in one makes room.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::Source;
use super::listen::Limits;
use crate::clock::Clock;
use crate::coordination::Timestamp;
use crate::meter::Count;

/// Slots besides those of the limit, for probes of health while every slot of the limit is busy.
const RESERVED: usize = 8;

/// Returns how many connections are closed at once to make room: one in 32, so that to choose them costs little for each.
const fn evicted_at_once(connections: usize) -> usize {
    if connections < 32 { 1 } else { connections / 32 }
}

/// Returns how many connections that were told to close may still be open when the next one is accepted.
const fn closing_max(connections: usize) -> usize {
    2 * evicted_at_once(connections)
}

/// Returns how many file descriptors a listener of so many connections may have open at once.
#[must_use]
pub const fn descriptors(connections: usize) -> usize {
    // The last one is accepted, or the listener's own.
    connections + RESERVED + closing_max(connections) + evicted_at_once(connections) + 2
}

/// What a connection is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has not said yet what it speaks, or shakes hands.
    Greeting,
    /// The head of a request is awaited.
    Head,
    /// More of the body of a request is awaited.
    Body,
    /// A request is being answered.
    Busy,
    /// A request was answered and the next one has not begun.
    Idle,
}

impl Phase {
    const ALL: [Self; 5] = [Self::Greeting, Self::Head, Self::Body, Self::Busy, Self::Idle];
}

/// Why the server closed a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    /// Another one needed its slot.
    Evicted,
    /// The head of a request did not come in time.
    HeadTimeout,
    /// It was idle for too long.
    IdleTimeout,
}

impl Closed {
    pub const ALL: [Self; 3] = [Self::Evicted, Self::HeadTimeout, Self::IdleTimeout];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::HeadTimeout => "head-timeout",
            Self::IdleTimeout => "idle-timeout",
        }
    }
}

/// What is known of one connection. Its own task, its stream and the registry share it.
pub(super) struct Connection {
    source: Source,
    /// It has a reserved slot: only probes of health are answered.
    pub reserved: bool,
    clock: Clock,
    phase: AtomicU8,
    /// Since when it has been in its phase.
    since: AtomicU64,
    close: Notify,
}

impl Connection {
    fn phase(&self) -> Phase {
        // Nothing else is ever stored.
        Phase::ALL.get(usize::from(self.phase.load(Ordering::Relaxed))).copied().unwrap_or(Phase::Busy)
    }

    fn since(&self) -> Timestamp {
        Timestamp(self.since.load(Ordering::Relaxed))
    }

    fn touch(&self) {
        self.since.store(self.clock.now().0, Ordering::Relaxed);
    }

    fn enter(&self, phase: Phase) {
        self.touch();
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// The connection speaks plaintext HTTP: the time of its first head began with the accept.
    pub fn greeted_plain(&self) {
        self.phase.store(Phase::Head as u8, Ordering::Relaxed);
    }

    /// The TLS handshake is over.
    pub fn greeted_tls(&self) {
        self.enter(Phase::Head);
    }

    /// Bytes have come.
    pub fn received(&self) {
        if self.phase() == Phase::Idle {
            self.enter(Phase::Head);
        }
    }

    /// Bytes have left.
    pub fn sent(&self) {
        if self.phase() == Phase::Idle {
            self.touch();
        }
    }

    /// A request is complete up to its body. The connection is busy until the returned guard is dropped.
    pub fn begin(self: &Arc<Self>) -> BusyGuard {
        self.enter(Phase::Busy);
        BusyGuard(Arc::clone(self))
    }

    /// Notes whether the body of the request is awaited. The time of the whole body counts, however its bytes come.
    pub fn awaits_body(&self, awaits: bool) {
        let (from, to) = if awaits { (Phase::Busy, Phase::Body) } else { (Phase::Body, Phase::Busy) };
        // In any other phase the request was answered before its body had come.
        let _ = self.phase.compare_exchange(from as u8, to as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// When the phase must be over.
    fn deadline(&self, limits: &Limits) -> Option<(Timestamp, Closed)> {
        match self.phase() {
            Phase::Head => Some((self.since().after(limits.head_timeout), Closed::HeadTimeout)),
            Phase::Idle => Some((self.since().after(limits.idle_timeout), Closed::IdleTimeout)),
            Phase::Greeting | Phase::Body | Phase::Busy => None,
        }
    }

    /// Returns when the connection is to be closed, with the reason.
    pub async fn closed(&self, limits: &Limits) -> Closed {
        // No phase that begins after a look ends before the next one.
        let least = limits.head_timeout.min(limits.idle_timeout);
        loop {
            let now = self.clock.now();
            let left = match self.deadline(limits) {
                Some((at, why)) if at <= now => return why,
                Some((at, _)) => at.since(now).min(least),
                None => least,
            };
            // Not less than the clock can tell, so that the loop cannot spin.
            let left = left.max(Duration::from_millis(1));
            if tokio::time::timeout(left, self.close.notified()).await.is_ok() {
                return Closed::Evicted;
            }
        }
    }
}

/// A request is being answered while this lives.
pub(super) struct BusyGuard(Arc<Connection>);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.enter(Phase::Idle);
    }
}

#[derive(Default)]
struct Open {
    next: u64,
    all: HashMap<u64, Arc<Connection>>,
    by_source: HashMap<Source, usize>,
    reserved: usize,
    /// Told to close, and still open.
    closing: usize,
}

impl Open {
    /// Takes a connection out of the table.
    fn remove(&mut self, number: u64) -> Option<Arc<Connection>> {
        let connection = self.all.remove(&number)?;
        if connection.reserved {
            self.reserved -= 1;
        } else if let Some(count) = self.by_source.get_mut(&connection.source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&connection.source);
            }
        }
        Some(connection)
    }

    fn of(&self, source: Source) -> usize {
        self.by_source.get(&source).copied().unwrap_or_default()
    }

    /// Tells up to `most` of the connections that `may` go to close, in the order of `rank`. Returns how many.
    fn evict<R: Ord>(
        &mut self,
        most: usize,
        may: impl Fn(&Connection) -> bool,
        rank: impl Fn(&Connection) -> R,
    ) -> usize {
        let found = self.all.iter().filter(|(_, connection)| may(connection));
        let mut found: Vec<_> = found.map(|(number, connection)| (rank(connection), *number)).collect();
        found.sort_unstable();
        found.truncate(most);
        for (_, number) in &found {
            if let Some(connection) = self.remove(*number) {
                self.closing += 1;
                connection.close.notify_one();
            }
        }
        found.len()
    }
}

/// The connections of a listener.
pub(super) struct ConnectionRegistry {
    clock: Clock,
    limits: Limits,
    open: Mutex<Open>,
    left: Notify,
    closed: [Count; Closed::ALL.len()],
}

impl ConnectionRegistry {
    pub fn new(clock: Clock, limits: Limits) -> Self {
        let closed = std::array::from_fn(|_| Count::default());
        Self { clock, limits, open: Mutex::default(), left: Notify::new(), closed }
    }

    fn open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections have a slot.
    pub fn count(&self) -> usize {
        self.open().all.len()
    }

    /// How many were closed by the server, by reason.
    pub fn closed(&self) -> impl Iterator<Item = (Closed, u64)> {
        Closed::ALL.into_iter().zip(&self.closed).map(|(why, count)| (why, count.get()))
    }

    /// Counts a connection that the server closed.
    pub fn count_closed(&self, why: Closed) {
        if let Some(count) = self.closed.get(why as usize) {
            count.add();
        }
    }

    /// Waits until enough of the connections that were told to close have done so.
    pub async fn room(&self) {
        loop {
            let left = self.left.notified();
            if self.open().closing <= closing_max(self.limits.connections) {
                return;
            }
            left.await;
        }
    }

    /// Gives a new connection a slot; others may have to close for it.
    pub fn admit(self: &Arc<Self>, peer: SocketAddr) -> ConnectionGuard {
        let source = Source::of(peer.ip());
        let Limits { connections, connections_per_source, .. } = self.limits;
        let mut guard = self.open();
        let open = &mut *guard;
        let waits = |connection: &Connection| !connection.reserved && connection.phase() != Phase::Busy;
        // The idle ones go before those whose request is awaited, of which the slowest go first.
        let order = |connection: &Connection| (connection.phase() != Phase::Idle, connection.since());
        let mut has_slot = true;
        if open.of(source) >= connections_per_source {
            has_slot = open.evict(1, |one| waits(one) && one.source == source, order) > 0;
        }
        if has_slot && open.all.len() - open.reserved >= connections {
            let most = evicted_at_once(connections);
            let counts = open.by_source.clone();
            has_slot =
                open.evict(most, waits, |one| (Reverse(counts.get(&one.source).copied()), order(one))) > 0;
        }
        if has_slot {
            *open.by_source.entry(source).or_default() += 1;
        } else {
            if open.reserved >= RESERVED {
                open.evict(1, |one| one.reserved, Connection::since);
            }
            open.reserved += 1;
        }
        let number = open.next;
        open.next += 1;
        let connection = Arc::new(Connection {
            source,
            reserved: !has_slot,
            clock: self.clock,
            phase: AtomicU8::new(Phase::Greeting as u8),
            since: AtomicU64::new(self.clock.now().0),
            close: Notify::new(),
        });
        open.all.insert(number, Arc::clone(&connection));
        ConnectionGuard { registry: Arc::clone(self), connection, number }
    }
}

/// One connection's slot, which is free again when this is dropped.
pub(super) struct ConnectionGuard {
    registry: Arc<ConnectionRegistry>,
    pub connection: Arc<Connection>,
    number: u64,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut open = self.registry.open();
        if open.remove(self.number).is_none() {
            open.closing -= 1;
        }
        drop(open);
        self.registry.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(connections: usize, per_source: usize) -> Arc<ConnectionRegistry> {
        let limits = Limits { connections_per_source: per_source, ..Limits::new(connections) };
        Arc::new(ConnectionRegistry::new(Clock::start(), limits))
    }

    fn from(host: u8) -> SocketAddr {
        ([10, 0, 0, host], 1).into()
    }

    async fn is_told_to_close(guard: &ConnectionGuard) -> bool {
        let closed = guard.connection.closed(&guard.registry.limits);
        tokio::time::timeout(Duration::from_millis(1), closed).await.is_ok()
    }

    #[tokio::test]
    async fn who_waits_makes_room_and_the_largest_source_first() {
        let registry = registry(4, 4);
        let quiet = registry.admit(from(1));
        quiet.connection.greeted_plain();
        drop(quiet.connection.begin());
        let many: Vec<_> = (0..3).map(|_| registry.admit(from(2))).collect();
        let newcomer = registry.admit(from(3));
        assert!(!newcomer.connection.reserved);
        assert!(is_told_to_close(&many[0]).await, "the oldest of the source with the most");
        assert!(!is_told_to_close(&quiet).await, "which it is, though the other is idle");
        let next = registry.admit(from(4));
        assert!(is_told_to_close(&many[1]).await && !next.connection.reserved);
        let last = registry.admit(from(5));
        assert!(is_told_to_close(&quiet).await, "the idle one among equals");
        assert!(!last.connection.reserved);
        assert_eq!((registry.count(), registry.open().closing), (4, 3));
        drop((quiet, many, newcomer, next, last));
        let open = registry.open();
        assert_eq!((open.all.len(), open.by_source.len(), open.closing), (0, 0, 0));
    }

    #[tokio::test]
    async fn who_comes_while_all_are_busy_gets_a_reserved_slot_always() {
        let registry = registry(2, 2);
        let busy: Vec<_> = (1..3).map(|host| registry.admit(from(host))).collect();
        let _guards: Vec<_> = busy.iter().map(|guard| guard.connection.begin()).collect();
        let probes: Vec<_> = (0..=RESERVED).map(|_| registry.admit(from(9))).collect();
        assert!(probes.iter().all(|guard| guard.connection.reserved));
        assert!(is_told_to_close(&probes[0]).await, "the oldest makes room for the last");
        assert!(!is_told_to_close(&probes[RESERVED]).await && !is_told_to_close(&busy[0]).await);
        assert_eq!(registry.open().reserved, RESERVED);
    }

    #[tokio::test]
    async fn a_source_has_so_many_connections_and_no_more() {
        let registry = registry(8, 2);
        let own: Vec<_> = (0..2).map(|_| registry.admit(from(1))).collect();
        let third = registry.admit(from(1));
        assert!(is_told_to_close(&own[0]).await && !third.connection.reserved);
        let _busy = (own[1].connection.begin(), third.connection.begin());
        assert!(registry.admit(from(1)).connection.reserved, "all that it may have are busy");
        assert!(!registry.admit(from(2)).connection.reserved);
    }

    #[tokio::test]
    async fn a_head_has_one_deadline_however_its_bytes_come() {
        let limits = Limits {
            head_timeout: Duration::from_millis(60),
            idle_timeout: Duration::from_millis(200),
            ..Limits::new(4)
        };
        let registry = Arc::new(ConnectionRegistry::new(Clock::start(), limits));
        let guard = registry.admit(from(1));
        guard.connection.greeted_plain();
        let dribble = async {
            loop {
                guard.connection.received();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let why = tokio::select! {
            why = guard.connection.closed(&limits) => why,
            () = dribble => unreachable!(),
        };
        assert_eq!(why, Closed::HeadTimeout);
        drop(guard.connection.begin());
        assert_eq!(guard.connection.closed(&limits).await, Closed::IdleTimeout);
        drop(guard.connection.begin());
        guard.connection.received();
        assert_eq!(guard.connection.closed(&limits).await, Closed::HeadTimeout);
    }
}

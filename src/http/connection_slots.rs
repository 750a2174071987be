//! The connection slots of one HTTP listener: phases, timeouts, and eviction when the listener is full.
//!
//! `listener.rs` accepts and serves the connections. Begin at [`ConnectionTable`].
//!
//! | phase | the server waits for | time limit | may be closed to make room |
//! | --- | --- | --- | --- |
//! | `Handshake` | the first byte, the TLS handshake | the listener's own timer, from the accept | yes |
//! | `Head` | the end of a request's head | `head_timeout`, see below | yes |
//! | `Body` | more of the body of a request | the deadlines of bodies, from the end of the head | yes |
//! | `Busy` | the server's own handler, the end of the answer | the deadline of writes | no |
//! | `Idle` | the next request | `idle_timeout`, from the last byte written | yes, these first |
//!
//! The time of the first head of a connection counts from the accept, or with TLS from the end of the handshake. The
//! time of every later head counts from its first byte.
//!
//! If a client network has as many connections as it may have, one of its connections is closed to make room for a
//! new one. If every slot is taken, some connections are closed: first those of the client network with the most
//! connections, and among them the idle ones. A connection in the phase `Busy` is not closed. If no connection can be
//! closed, the new connection gets one of [`RESERVED`] additional slots, in which only health checks are answered. If
//! these slots are taken too, the oldest connection in them is closed.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::ClientNetwork;
use super::http_limits::HttpLimits;
use crate::clock::Clock;
use crate::coordination::Timestamp;
use crate::meter::Counter;

/// Slots beyond the limit, for health probes while every other slot is busy.
const RESERVED: usize = 8;

/// Returns how many connections are evicted at once: one in 32, so that the cost of choosing them is shared.
const fn eviction_batch_size(connections: usize) -> usize {
    if connections < 32 { 1 } else { connections / 32 }
}

/// Returns how many evicted connections may still be open when the next one is accepted.
const fn closing_connections_max(connections: usize) -> usize {
    2 * eviction_batch_size(connections)
}

/// Returns how many file descriptors a listener of this many connections may have open at once.
#[must_use]
pub const fn descriptors_needed(connections: usize) -> usize {
    // Two more: the connection that is being accepted, and the listening socket.
    connections + RESERVED + closing_connections_max(connections) + eviction_batch_size(connections) + 2
}

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    /// The protocol is not known yet, or the TLS handshake is in progress.
    Handshake,
    /// The head of a request is awaited.
    Head,
    /// More of the body of a request is awaited.
    Body,
    /// The server is answering a request.
    Busy,
    /// A response is complete and the next request has not begun.
    Idle,
}

impl ConnectionPhase {
    const ALL: [Self; 5] = [Self::Handshake, Self::Head, Self::Body, Self::Busy, Self::Idle];
}

/// The reason why the server closed a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// A new connection needed its slot.
    Evicted,
    /// The head of a request was not complete in time.
    HeadTimeout,
    /// It was idle for too long.
    IdleTimeout,
}

impl CloseReason {
    pub const ALL: [Self; 3] = [Self::Evicted, Self::HeadTimeout, Self::IdleTimeout];

    /// Returns its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::HeadTimeout => "head-timeout",
            Self::IdleTimeout => "idle-timeout",
        }
    }
}

/// The state of one connection. Its tokio task, its stream and the table share it.
pub(super) struct HttpConnectionState {
    source: ClientNetwork,
    /// The connection has a reserved slot: only health probes are answered.
    pub reserved: bool,
    clock: Clock,
    phase: AtomicU8,
    /// The time at which the phase began.
    since: AtomicU64,
    close: Notify,
}

impl HttpConnectionState {
    fn phase(&self) -> ConnectionPhase {
        // No other value is ever stored.
        ConnectionPhase::ALL
            .get(usize::from(self.phase.load(Ordering::Relaxed)))
            .copied()
            .unwrap_or(ConnectionPhase::Busy)
    }

    fn phase_since(&self) -> Timestamp {
        Timestamp(self.since.load(Ordering::Relaxed))
    }

    fn restart_phase_timer(&self) {
        self.since.store(self.clock.now().0, Ordering::Relaxed);
    }

    fn enter_phase(&self, phase: ConnectionPhase) {
        self.restart_phase_timer();
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Records that the connection speaks plaintext HTTP. The timeout of its first head counts from the
    /// accept.
    pub fn mark_plaintext(&self) {
        self.phase.store(ConnectionPhase::Head as u8, Ordering::Relaxed);
    }

    /// Records the end of the TLS handshake.
    pub fn mark_tls(&self) {
        self.enter_phase(ConnectionPhase::Head);
    }

    /// Records that bytes were received.
    pub fn record_received(&self) {
        if self.phase() == ConnectionPhase::Idle {
            self.enter_phase(ConnectionPhase::Head);
        }
    }

    /// Records that bytes were sent.
    pub fn record_sent(&self) {
        if self.phase() == ConnectionPhase::Idle {
            self.restart_phase_timer();
        }
    }

    /// Records that the head of a request is complete. The connection is busy until the returned guard is
    /// dropped.
    pub fn begin_request(self: &Arc<Self>) -> BusyGuard {
        self.enter_phase(ConnectionPhase::Busy);
        BusyGuard(Arc::clone(self))
    }

    /// Records whether more of the body is awaited. The time of the whole body counts, however its bytes
    /// arrive.
    pub fn record_body_wait(&self, awaits: bool) {
        let (from, to) = if awaits {
            (ConnectionPhase::Busy, ConnectionPhase::Body)
        } else {
            (ConnectionPhase::Body, ConnectionPhase::Busy)
        };
        // In any other phase the response came before the end of the body.
        let _ = self.phase.compare_exchange(from as u8, to as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the deadline of the phase.
    fn phase_deadline(&self, limits: &HttpLimits) -> Option<(Timestamp, CloseReason)> {
        match self.phase() {
            ConnectionPhase::Head => {
                Some((self.phase_since().after(limits.head_timeout), CloseReason::HeadTimeout))
            }
            ConnectionPhase::Idle => {
                Some((self.phase_since().after(limits.idle_timeout), CloseReason::IdleTimeout))
            }
            ConnectionPhase::Handshake | ConnectionPhase::Body | ConnectionPhase::Busy => None,
        }
    }

    /// Waits until the connection must be closed, and returns the reason.
    pub async fn wait_for_close_reason(&self, limits: &HttpLimits) -> CloseReason {
        // A phase that begins after a check cannot end before the next check.
        let least = limits.head_timeout.min(limits.idle_timeout);
        loop {
            let now = self.clock.now();
            let left = match self.phase_deadline(limits) {
                Some((at, why)) if at <= now => return why,
                Some((at, _)) => at.since(now).min(least),
                None => least,
            };
            // At least the resolution of the clock, so that the loop cannot spin.
            let left = left.max(Duration::from_millis(1));
            if tokio::time::timeout(left, self.close.notified()).await.is_ok() {
                return CloseReason::Evicted;
            }
        }
    }
}

/// Marks a connection as busy while it exists.
pub(super) struct BusyGuard(Arc<HttpConnectionState>);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.enter_phase(ConnectionPhase::Idle);
    }
}

#[derive(Default)]
struct OpenConnections {
    next: u64,
    all: HashMap<u64, Arc<HttpConnectionState>>,
    by_source: HashMap<ClientNetwork, usize>,
    reserved: usize,
    /// Evicted connections that are still open.
    closing: usize,
}

impl OpenConnections {
    /// Removes a connection from the table.
    fn remove_connection_from_table(&mut self, number: u64) -> Option<Arc<HttpConnectionState>> {
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

    fn connection_count_of_network(&self, source: ClientNetwork) -> usize {
        self.by_source.get(&source).copied().unwrap_or_default()
    }

    /// Evicts up to `most` of the connections for which `may` holds, in the order of `rank`. Returns their
    /// number.
    fn evict_connections<R: Ord>(
        &mut self,
        most: usize,
        may: impl Fn(&HttpConnectionState) -> bool,
        rank: impl Fn(&HttpConnectionState) -> R,
    ) -> usize {
        let found = self.all.iter().filter(|(_, connection)| may(connection));
        let mut found: Vec<_> = found.map(|(number, connection)| (rank(connection), *number)).collect();
        found.sort_unstable();
        found.truncate(most);
        for (_, number) in &found {
            if let Some(connection) = self.remove_connection_from_table(*number) {
                self.closing += 1;
                connection.close.notify_one();
            }
        }
        found.len()
    }
}

/// The connections of a listener.
pub(super) struct ConnectionTable {
    clock: Clock,
    limits: HttpLimits,
    open: Mutex<OpenConnections>,
    slot_freed: Notify,
    closed: [Counter; CloseReason::ALL.len()],
}

impl ConnectionTable {
    pub fn new(clock: Clock, limits: HttpLimits) -> Self {
        let closed = std::array::from_fn(|_| Counter::default());
        Self { clock, limits, open: Mutex::default(), slot_freed: Notify::new(), closed }
    }

    fn lock_open_connections(&self) -> std::sync::MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many connections have a slot.
    pub fn open_connection_count(&self) -> usize {
        self.lock_open_connections().all.len()
    }

    /// Returns how many connections the server closed, by reason.
    pub fn closed_counts(&self) -> impl Iterator<Item = (CloseReason, u64)> {
        CloseReason::ALL.into_iter().zip(&self.closed).map(|(why, count)| (why, count.get()))
    }

    /// Counts a connection that the server closed.
    pub fn record_closed(&self, why: CloseReason) {
        if let Some(count) = self.closed.get(why as usize) {
            count.increment();
        }
    }

    /// Waits until enough of the evicted connections are closed.
    pub async fn wait_for_capacity(&self) {
        loop {
            let left = self.slot_freed.notified();
            if self.lock_open_connections().closing <= closing_connections_max(self.limits.connections) {
                return;
            }
            left.await;
        }
    }

    /// Gives a new connection a slot. Evicts others if necessary.
    pub fn assign_slot(self: &Arc<Self>, peer: SocketAddr) -> SlotGuard {
        let source = ClientNetwork::of_address(peer.ip());
        let HttpLimits { connections, connections_per_source, .. } = self.limits;
        let mut guard = self.lock_open_connections();
        let open = &mut *guard;
        let waits = |connection: &HttpConnectionState| {
            !connection.reserved && connection.phase() != ConnectionPhase::Busy
        };
        // Idle connections are evicted first, then those whose request is awaited, the slowest first.
        let order = |connection: &HttpConnectionState| {
            (connection.phase() != ConnectionPhase::Idle, connection.phase_since())
        };
        let mut has_slot = true;
        if open.connection_count_of_network(source) >= connections_per_source {
            has_slot = open.evict_connections(1, |one| waits(one) && one.source == source, order) > 0;
        }
        if has_slot && open.all.len() - open.reserved >= connections {
            let most = eviction_batch_size(connections);
            let counts = open.by_source.clone();
            has_slot = open.evict_connections(most, waits, |one| {
                (Reverse(counts.get(&one.source).copied()), order(one))
            }) > 0;
        }
        if has_slot {
            *open.by_source.entry(source).or_default() += 1;
        } else {
            if open.reserved >= RESERVED {
                open.evict_connections(1, |one| one.reserved, HttpConnectionState::phase_since);
            }
            open.reserved += 1;
        }
        let number = open.next;
        open.next += 1;
        let connection = Arc::new(HttpConnectionState {
            source,
            reserved: !has_slot,
            clock: self.clock,
            phase: AtomicU8::new(ConnectionPhase::Handshake as u8),
            since: AtomicU64::new(self.clock.now().0),
            close: Notify::new(),
        });
        open.all.insert(number, Arc::clone(&connection));
        SlotGuard { registry: Arc::clone(self), connection, number }
    }
}

/// The slot of one connection, which is released on drop.
pub(super) struct SlotGuard {
    registry: Arc<ConnectionTable>,
    pub connection: Arc<HttpConnectionState>,
    number: u64,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let mut open = self.registry.lock_open_connections();
        if open.remove_connection_from_table(self.number).is_none() {
            open.closing -= 1;
        }
        drop(open);
        self.registry.slot_freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection_table(connections: usize, per_source: usize) -> Arc<ConnectionTable> {
        let limits = HttpLimits { connections_per_source: per_source, ..HttpLimits::new(connections) };
        Arc::new(ConnectionTable::new(Clock::start(), limits))
    }

    fn address_of_host_number(host: u8) -> SocketAddr {
        ([10, 0, 0, host], 1).into()
    }

    async fn is_evicted(guard: &SlotGuard) -> bool {
        let closed = guard.connection.wait_for_close_reason(&guard.registry.limits);
        tokio::time::timeout(Duration::from_millis(1), closed).await.is_ok()
    }

    #[tokio::test]
    async fn waiting_connections_are_evicted_from_the_largest_network_first() {
        let connection_table = connection_table(4, 4);
        let quiet = connection_table.assign_slot(address_of_host_number(1));
        quiet.connection.mark_plaintext();
        drop(quiet.connection.begin_request());
        let many: Vec<_> = (0..3).map(|_| connection_table.assign_slot(address_of_host_number(2))).collect();
        let newcomer = connection_table.assign_slot(address_of_host_number(3));
        assert!(!newcomer.connection.reserved);
        assert!(is_evicted(&many[0]).await, "the oldest of the source with the most");
        assert!(!is_evicted(&quiet).await, "which it is, though the other is idle");
        let next = connection_table.assign_slot(address_of_host_number(4));
        assert!(is_evicted(&many[1]).await && !next.connection.reserved);
        let last = connection_table.assign_slot(address_of_host_number(5));
        assert!(is_evicted(&quiet).await, "the idle one among equals");
        assert!(!last.connection.reserved);
        assert_eq!(
            (connection_table.open_connection_count(), connection_table.lock_open_connections().closing),
            (4, 3)
        );
        drop((quiet, many, newcomer, next, last));
        let open = connection_table.lock_open_connections();
        assert_eq!((open.all.len(), open.by_source.len(), open.closing), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_new_connection_gets_a_reserved_slot_when_all_are_busy() {
        let connection_table = connection_table(2, 2);
        let busy: Vec<_> =
            (1..3).map(|host| connection_table.assign_slot(address_of_host_number(host))).collect();
        let _guards: Vec<_> = busy.iter().map(|guard| guard.connection.begin_request()).collect();
        let probes: Vec<_> =
            (0..=RESERVED).map(|_| connection_table.assign_slot(address_of_host_number(9))).collect();
        assert!(probes.iter().all(|guard| guard.connection.reserved));
        assert!(is_evicted(&probes[0]).await, "the oldest makes room for the last");
        assert!(!is_evicted(&probes[RESERVED]).await && !is_evicted(&busy[0]).await);
        assert_eq!(connection_table.lock_open_connections().reserved, RESERVED);
    }

    #[tokio::test]
    async fn a_source_has_so_many_connections_and_no_more() {
        let connection_table = connection_table(8, 2);
        let own: Vec<_> = (0..2).map(|_| connection_table.assign_slot(address_of_host_number(1))).collect();
        let third = connection_table.assign_slot(address_of_host_number(1));
        assert!(is_evicted(&own[0]).await && !third.connection.reserved);
        let _busy = (own[1].connection.begin_request(), third.connection.begin_request());
        assert!(
            connection_table.assign_slot(address_of_host_number(1)).connection.reserved,
            "all that it may have are busy"
        );
        assert!(!connection_table.assign_slot(address_of_host_number(2)).connection.reserved);
    }

    #[tokio::test]
    async fn a_head_has_one_deadline_however_its_bytes_come() {
        let limits = HttpLimits {
            head_timeout: Duration::from_millis(60),
            idle_timeout: Duration::from_millis(200),
            ..HttpLimits::new(4)
        };
        let connection_table = Arc::new(ConnectionTable::new(Clock::start(), limits));
        let guard = connection_table.assign_slot(address_of_host_number(1));
        guard.connection.mark_plaintext();
        let dribble = async {
            loop {
                guard.connection.record_received();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let why = tokio::select! {
            why = guard.connection.wait_for_close_reason(&limits) => why,
            () = dribble => unreachable!(),
        };
        assert_eq!(why, CloseReason::HeadTimeout);
        drop(guard.connection.begin_request());
        assert_eq!(guard.connection.wait_for_close_reason(&limits).await, CloseReason::IdleTimeout);
        drop(guard.connection.begin_request());
        guard.connection.record_received();
        assert_eq!(guard.connection.wait_for_close_reason(&limits).await, CloseReason::HeadTimeout);
    }
}

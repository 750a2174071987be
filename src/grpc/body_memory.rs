//! The bounds on the memory of request bodies: a [`MemoryPool`] for the server, a [`ConnectionQuota`] for each
//! connection, and a [`MemoryPermit`] for each body. This module only counts bytes; `request_body.rs` allocates
//! them. Begin at [`MemoryPermit::try_grow`].
//!
//! The permit of a body grows with the bytes that have arrived, so an announced length alone takes no memory from
//! other bodies. One half of the pool is for this growth. All bodies of one connection together may take a
//! sixteenth of this half. While most of this half is free, a short body gets all its memory at once
//! (`PREALLOCATED_MAX`).
//!
//! The other half of the pool is the reserve. If the first half has no room for a body, the body waits until the
//! reserve has room for all of its missing bytes. The reserve serves the waiting body with the fewest missing bytes
//! first. Among equal bodies it serves the one that has waited longest. In each connection, only one body at a time
//! has the turn at the reserve: it waits for the reserve, or holds a part of it. The other bodies of the connection
//! wait for the turn, and get it in the order in which they began to wait for it.
//!
//! A body that holds a part of the reserve never waits for memory again, so no two bodies wait for each other. While
//! other bodies wait, the bytes of a body that holds a part of the reserve must keep arriving
//! ([`RequestBody::is_too_slow`](super::request_body::RequestBody::is_too_slow)).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// The fraction of the half for growth that one connection may take: one part in this number.
const CONNECTION_SHARE: usize = 16;
/// The least and the greatest step by which a body's permit grows; in between it grows by as much as has
/// arrived.
const GROWTH_STEP: (usize, usize) = (64 << 10, 32 << 20);
/// The length up to which a body gets its memory at once while more than half of the memory for growth is
/// free. It also bounds the bytes of one connection that are taken and have not arrived.
const PREALLOCATED_MAX: usize = 4 << 20;
/// The number of waiters from which on cancelled ones are removed.
const GONE_WAITERS_MAX: usize = 64;

struct PoolState {
    growth: usize,
    reserve: usize,
    /// The waiters for the reserve, by the number of missing bytes and then by age.
    waiters: BTreeMap<(usize, u64), oneshot::Sender<ReservePermit>>,
    next: u64,
    sweep_at: usize,
}

/// The pool of memory for the request bodies of all connections.
pub(super) struct MemoryPool {
    state: Mutex<PoolState>,
    growth: usize,
    reserve: usize,
}

/// A part of the reserve, returned when it is dropped.
struct ReservePermit {
    pool: Arc<MemoryPool>,
    bytes: usize,
}

impl Drop for ReservePermit {
    fn drop(&mut self) {
        self.pool.lock().reserve += std::mem::take(&mut self.bytes);
        self.pool.grant_waiters();
    }
}

impl MemoryPool {
    /// Returns a pool of `bytes`.
    pub(super) fn new(bytes: usize) -> Arc<Self> {
        let growth = bytes / 2;
        let reserve = bytes - growth;
        let state =
            PoolState { growth, reserve, waiters: BTreeMap::new(), next: 0, sweep_at: GONE_WAITERS_MAX };
        Arc::new(Self { state: Mutex::new(state), growth, reserve })
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of taken bytes.
    pub(super) fn taken_bytes(&self) -> usize {
        let state = self.lock();
        self.growth + self.reserve - state.growth - state.reserve
    }

    /// Returns whether a body waits for the reserve.
    pub(super) fn has_waiting_body(&self) -> bool {
        self.lock().waiters.values().any(|waiter| !waiter.is_closed())
    }

    fn wait_for_reserve(self: &Arc<Self>, bytes: usize) -> oneshot::Receiver<ReservePermit> {
        let (served, wait) = oneshot::channel();
        let mut state = self.lock();
        if state.waiters.len() >= state.sweep_at {
            state.waiters.retain(|_, waiter| !waiter.is_closed());
            state.sweep_at = 2 * state.waiters.len() + GONE_WAITERS_MAX;
        }
        let number = state.next;
        state.next += 1;
        // A body larger than the reserve waits for all of it.
        state.waiters.insert((bytes.min(self.reserve), number), served);
        drop(state);
        self.grant_waiters();
        wait
    }

    /// Grants parts of the reserve to waiters, as far as there is room.
    fn grant_waiters(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            let room = state.reserve;
            let Some(first) = state.waiters.first_entry().filter(|first| first.key().0 <= room) else {
                return;
            };
            let bytes = first.key().0;
            let served = first.remove();
            if served.is_closed() {
                continue;
            }
            state.reserve -= bytes;
            drop(state);
            // If the waiter is cancelled meanwhile, the part is dropped here and goes to the next one.
            drop(served.send(ReservePermit { pool: Arc::clone(self), bytes }));
        }
    }
}

/// The memory taken by the bodies of one connection.
#[derive(Default)]
struct QuotaUsage {
    growth: AtomicUsize,
    /// The taken bytes that have not arrived, of bodies that got their memory at once.
    ahead: AtomicUsize,
    /// The number of bodies that wait for the connection's turn at the reserve.
    waiting: AtomicUsize,
}

/// A guard that counts a body among those that wait for their connection's turn.
struct ReserveTurnWaitGuard(Arc<QuotaUsage>);

impl ReserveTurnWaitGuard {
    fn new(taken: &Arc<QuotaUsage>) -> Self {
        taken.waiting.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(taken))
    }
}

impl Drop for ReserveTurnWaitGuard {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The part of the pool that one connection may use.
pub(super) struct ConnectionQuota {
    pool: Arc<MemoryPool>,
    taken: Arc<QuotaUsage>,
    /// The turn at the reserve, which one body of the connection has at a time.
    turn: Option<Arc<Semaphore>>,
}

impl ConnectionQuota {
    pub(super) fn new(pool: &Arc<MemoryPool>) -> Self {
        Self { pool: Arc::clone(pool), taken: Arc::default(), turn: None }
    }

    /// Returns whether a body waits for the reserve, or another body of this connection for its turn.
    pub(super) fn has_waiting_body(&self) -> bool {
        self.taken.waiting.load(Ordering::Relaxed) > 0 || self.pool.has_waiting_body()
    }

    /// Returns a permit for no bytes, which can grow.
    pub(super) fn empty_permit(&self) -> MemoryPermit {
        let (pool, taken) = (Arc::clone(&self.pool), Arc::clone(&self.taken));
        MemoryPermit { pool, taken, growth: 0, ahead: 0, reserved: None }
    }

    /// Grows a permit to `bytes` from the reserve, once there is room.
    pub(super) fn grow_from_reserve(
        &mut self,
        mut permit: MemoryPermit,
        bytes: usize,
    ) -> impl Future<Output = Option<MemoryPermit>> + Send + use<> {
        let turn = Arc::clone(self.turn.get_or_insert_with(|| Arc::new(Semaphore::new(1))));
        let pool = Arc::clone(&self.pool);
        let wait = ReserveTurnWaitGuard::new(&self.taken);
        async move {
            let turn = turn.acquire_owned().await.ok()?;
            drop(wait);
            let reserved = pool.wait_for_reserve(bytes.saturating_sub(permit.growth)).await.ok()?;
            permit.reserved = Some((bytes, reserved, turn));
            Some(permit)
        }
    }
}

/// A permit for the memory of one body, returned when it is dropped.
pub(super) struct MemoryPermit {
    pool: Arc<MemoryPool>,
    taken: Arc<QuotaUsage>,
    growth: usize,
    /// The bytes that were granted in advance and have not arrived.
    ahead: usize,
    /// The permitted bytes, the part of the reserve among them, and the connection's turn.
    reserved: Option<(usize, ReservePermit, OwnedSemaphorePermit)>,
}

impl MemoryPermit {
    /// Returns the number of permitted bytes.
    pub(super) fn bytes(&self) -> usize {
        self.reserved.as_ref().map_or(self.growth, |(bytes, ..)| *bytes)
    }

    /// Returns whether it holds a part of the reserve.
    pub(super) fn holds_reserve_memory(&self) -> bool {
        self.reserved.is_some()
    }

    /// Grows to `needed` bytes, or a step further, but not beyond `all`; returns `false` if there is no room.
    pub(super) fn try_grow(&mut self, needed: usize, all: usize) -> bool {
        let have = self.bytes();
        if needed <= have {
            return true;
        }
        let share = self.pool.growth / CONNECTION_SHARE;
        let used = self.taken.growth.load(Ordering::Relaxed);
        let step =
            needed.clamp(GROWTH_STEP.0, GROWTH_STEP.1).max(needed - have).min(all.saturating_sub(have));
        let mut state = self.pool.lock();
        let ahead = self.taken.ahead.load(Ordering::Relaxed);
        let at_once = all - needed;
        let (bytes, ahead) = if have == 0
            && all <= PREALLOCATED_MAX
            && ahead + at_once <= PREALLOCATED_MAX
            && state.growth > self.pool.growth / 2 + all
            && used + all <= share
        {
            (all, at_once)
        } else if used + step <= share && step <= state.growth {
            (step, 0)
        } else if used + (needed - have) <= share && needed - have <= state.growth {
            (needed - have, 0)
        } else {
            return false;
        };
        state.growth -= bytes;
        drop(state);
        self.growth += bytes;
        self.ahead = ahead;
        self.taken.growth.fetch_add(bytes, Ordering::Relaxed);
        self.taken.ahead.fetch_add(ahead, Ordering::Relaxed);
        true
    }

    /// Records that the whole body has arrived.
    pub(super) fn record_body_arrived(&mut self) {
        self.taken.ahead.fetch_sub(std::mem::take(&mut self.ahead), Ordering::Relaxed);
    }
}

impl Drop for MemoryPermit {
    fn drop(&mut self) {
        self.record_body_arrived();
        self.taken.growth.fetch_sub(self.growth, Ordering::Relaxed);
        self.pool.lock().growth += self.growth;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const MIB: usize = 1 << 20;

    fn poll_once<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn an_announcement_takes_next_to_nothing() {
        let pool = MemoryPool::new(1 << 30);
        let mut kept = Vec::new();
        for _ in 0..2000 {
            let quota = ConnectionQuota::new(&pool);
            let mut permit = quota.empty_permit();
            assert!(permit.try_grow(1000, 476 * MIB));
            kept.push((quota, permit));
        }
        assert!(pool.taken_bytes() < 256 * MIB, "{}", pool.taken_bytes());
        let honest = ConnectionQuota::new(&pool);
        let mut permit = honest.empty_permit();
        assert!((1..=20).all(|arrived| permit.try_grow(arrived * MIB, 20 * MIB)));
        drop((kept, permit));
        assert_eq!(pool.taken_bytes(), 0);
        for _ in 0..10_000 {
            let quota = ConnectionQuota::new(&pool);
            let mut permit = quota.empty_permit();
            assert!(permit.try_grow(1, 4 * MIB));
            assert_only_first_preallocated(permit, &quota);
        }
        assert_eq!(pool.taken_bytes(), 0);
    }

    /// Checks that of many bodies of one connection only the first gets its memory at once.
    fn assert_only_first_preallocated(first: MemoryPermit, quota: &ConnectionQuota) {
        let mut second = quota.empty_permit();
        assert!(second.try_grow(1, 4 * MIB));
        assert_eq!((first.bytes(), second.bytes()), (4 * MIB, GROWTH_STEP.0));
    }

    #[tokio::test]
    async fn the_smallest_request_gets_the_reserve_first_one_per_connection() {
        let pool = MemoryPool::new(64 * MIB);
        let mut quotas: Vec<_> = (0..4).map(|_| ConnectionQuota::new(&pool)).collect();
        let [a, b, c, d] = &mut quotas[..] else { panic!("four of them") };
        let permits = [a.empty_permit(), b.empty_permit(), c.empty_permit(), d.empty_permit()];
        let [pa, pb, pc, pd] = permits;
        let second_of_a = a.empty_permit();
        let mut all = pin!(a.grow_from_reserve(pa, 500 * MIB));
        let Poll::Ready(Some(whole)) = poll_once(all.as_mut()) else {
            panic!("it is larger than all, and alone")
        };
        let mut second = pin!(a.grow_from_reserve(second_of_a, MIB));
        let mut large = pin!(b.grow_from_reserve(pb, 30 * MIB));
        let mut small = pin!(c.grow_from_reserve(pc, 20 * MIB));
        assert!(poll_once(second.as_mut()).is_pending() && poll_once(large.as_mut()).is_pending());
        assert!(poll_once(small.as_mut()).is_pending() && pool.has_waiting_body());
        drop(whole);
        let Poll::Ready(Some(small)) = poll_once(small.as_mut()) else {
            panic!("the smaller one comes first")
        };
        assert!(poll_once(large.as_mut()).is_pending());
        let Poll::Ready(Some(second)) = poll_once(second.as_mut()) else { panic!("it has its turn") };
        // A cancelled waiter delays no other.
        {
            let mut gone = pin!(d.grow_from_reserve(pd, 12 * MIB));
            assert!(poll_once(gone.as_mut()).is_pending());
        }
        drop((small, second));
        let Poll::Ready(Some(large)) = poll_once(large.as_mut()) else { panic!("there is room") };
        assert_eq!(
            (pool.taken_bytes(), large.bytes(), large.holds_reserve_memory()),
            (30 * MIB, 30 * MIB, true)
        );
        drop(large);
        assert_eq!(pool.taken_bytes(), 0);
        assert!(!pool.has_waiting_body());
    }
}

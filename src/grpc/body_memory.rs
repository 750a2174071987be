//! The memory for request bodies: a [`MemoryPool`] for the server, a [`ConnectionQuota`] for each connection, a
//! [`MemoryPermit`] for each body. It counts bytes and allocates none. Begin at [`MemoryPermit::grow`].
//!
//! The permit of a body grows with the bytes that have arrived, so an announced length takes nothing from other
//! bodies. One half of the pool is for growth, and one connection may take a sixteenth of that half. A body that
//! finds no room there waits for all of its missing bytes from the other half, the reserve. The reserve goes to the
//! body that misses the fewest bytes, and to one body of each connection at a time, in the order in which they
//! began to wait. A body that was served never waits again, so no two bodies wait for each other; and while others
//! wait, it must keep arriving ([`Body::is_too_slow`](super::request_body::RequestBody::is_too_slow)).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// The part of the half for growth that one connection may take.
const CONNECTION_SHARE: usize = 16;
/// A body's memory grows by as much as has arrived of it, but by no less and no more than this.
const GROWTH_STEP: (usize, usize) = (64 << 10, 32 << 20);
/// A body up to this length gets its memory at once while more than half of the memory for growth is free. One connection
/// may have so much that has not arrived.
const PREALLOCATED_MAX: usize = 4 << 20;
/// So many waiters may have gone before they are swept out.
const GONE_WAITERS_MAX: usize = 64;

struct PoolState {
    growth: usize,
    reserve: usize,
    /// Who waits for the reserve, by how much.
    waiters: BTreeMap<(usize, u64), oneshot::Sender<ReservePermit>>,
    next: u64,
    sweep_at: usize,
}

/// The memory that all connections share.
pub(super) struct MemoryPool {
    state: Mutex<PoolState>,
    growth: usize,
    reserve: usize,
}

/// A part of the reserve.
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
    /// A pool of `bytes`.
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

    /// Bytes that are taken.
    pub(super) fn taken(&self) -> usize {
        let state = self.lock();
        self.growth + self.reserve - state.growth - state.reserve
    }

    /// Whether somebody waits for the reserve.
    pub(super) fn is_contended(&self) -> bool {
        self.lock().waiters.values().any(|waiter| !waiter.is_closed())
    }

    fn wait(self: &Arc<Self>, bytes: usize) -> oneshot::Receiver<ReservePermit> {
        let (served, wait) = oneshot::channel();
        let mut state = self.lock();
        if state.waiters.len() >= state.sweep_at {
            state.waiters.retain(|_, waiter| !waiter.is_closed());
            state.sweep_at = 2 * state.waiters.len() + GONE_WAITERS_MAX;
        }
        let number = state.next;
        state.next += 1;
        // What is larger than all there is waits for all of it.
        state.waiters.insert((bytes.min(self.reserve), number), served);
        drop(state);
        self.grant_waiters();
        wait
    }

    /// Serves those who wait, as far as there is room.
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
            // If it has gone meanwhile, this comes back and serves the next one.
            drop(served.send(ReservePermit { pool: Arc::clone(self), bytes }));
        }
    }
}

/// What the bodies of one connection have taken together.
#[derive(Default)]
struct QuotaUsage {
    growth: AtomicUsize,
    /// What of it has not arrived, of bodies that got their memory at once.
    ahead: AtomicUsize,
    /// Bodies that wait for the connection's turn at the reserve.
    waiting: AtomicUsize,
}

/// A body that waits for its connection's turn, while this lives.
struct TurnWait(Arc<QuotaUsage>);

impl TurnWait {
    fn new(taken: &Arc<QuotaUsage>) -> Self {
        taken.waiting.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(taken))
    }
}

impl Drop for TurnWait {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The part of a pool that one connection may use.
pub(super) struct ConnectionQuota {
    pool: Arc<MemoryPool>,
    taken: Arc<QuotaUsage>,
    /// One body of the connection at a time has its turn at the reserve.
    turn: Option<Arc<Semaphore>>,
}

impl ConnectionQuota {
    pub(super) fn new(pool: &Arc<MemoryPool>) -> Self {
        Self { pool: Arc::clone(pool), taken: Arc::default(), turn: None }
    }

    /// Whether a body waits for the reserve, or another one of this connection for the connection's turn at it.
    pub(super) fn is_contended(&self) -> bool {
        self.taken.waiting.load(Ordering::Relaxed) > 0 || self.pool.is_contended()
    }

    /// A permit for nothing, which grows.
    pub(super) fn permit(&self) -> MemoryPermit {
        let (pool, taken) = (Arc::clone(&self.pool), Arc::clone(&self.taken));
        MemoryPermit { pool, taken, growth: 0, ahead: 0, reserved: None }
    }

    /// Lets a permit grow to `bytes`, once there is room.
    pub(super) fn wait(
        &mut self,
        mut permit: MemoryPermit,
        bytes: usize,
    ) -> impl Future<Output = Option<MemoryPermit>> + Send + use<> {
        let turn = Arc::clone(self.turn.get_or_insert_with(|| Arc::new(Semaphore::new(1))));
        let pool = Arc::clone(&self.pool);
        let wait = TurnWait::new(&self.taken);
        async move {
            let turn = turn.acquire_owned().await.ok()?;
            drop(wait);
            let reserved = pool.wait(bytes.saturating_sub(permit.growth)).await.ok()?;
            permit.reserved = Some((bytes, reserved, turn));
            Some(permit)
        }
    }
}

/// Memory that a body may use, given back when it is dropped.
pub(super) struct MemoryPermit {
    pool: Arc<MemoryPool>,
    taken: Arc<QuotaUsage>,
    growth: usize,
    /// The bytes that were given at once and have not arrived.
    ahead: usize,
    /// Bytes up to this many, the part of the reserve for them, and the connection's turn.
    reserved: Option<(usize, ReservePermit, OwnedSemaphorePermit)>,
}

impl MemoryPermit {
    /// How many bytes it is for.
    pub(super) fn bytes(&self) -> usize {
        self.reserved.as_ref().map_or(self.growth, |(bytes, ..)| *bytes)
    }

    /// Whether it holds a part of the reserve.
    pub(super) fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// Grows to `needed` bytes, or a step further, but not beyond `all`; `false` if there is no room.
    pub(super) fn grow(&mut self, needed: usize, all: usize) -> bool {
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

    /// Notes that everything has arrived.
    pub(super) fn arrived(&mut self) {
        self.taken.ahead.fetch_sub(std::mem::take(&mut self.ahead), Ordering::Relaxed);
    }
}

impl Drop for MemoryPermit {
    fn drop(&mut self) {
        self.arrived();
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

    fn now<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn an_announcement_takes_next_to_nothing() {
        let pool = MemoryPool::new(1 << 30);
        let mut kept = Vec::new();
        for _ in 0..2000 {
            let quota = ConnectionQuota::new(&pool);
            let mut permit = quota.permit();
            assert!(permit.grow(1000, 476 * MIB));
            kept.push((quota, permit));
        }
        assert!(pool.taken() < 256 * MIB, "{}", pool.taken());
        let honest = ConnectionQuota::new(&pool);
        let mut permit = honest.permit();
        assert!((1..=20).all(|arrived| permit.grow(arrived * MIB, 20 * MIB)));
        drop((kept, permit));
        assert_eq!(pool.taken(), 0);
        for _ in 0..10_000 {
            let quota = ConnectionQuota::new(&pool);
            let mut permit = quota.permit();
            assert!(permit.grow(1, 4 * MIB));
            kept_small(permit, &quota);
        }
        assert_eq!(pool.taken(), 0);
    }

    /// Of many bodies of one connection, one alone gets its memory at once.
    fn kept_small(first: MemoryPermit, quota: &ConnectionQuota) {
        let mut second = quota.permit();
        assert!(second.grow(1, 4 * MIB));
        assert_eq!((first.bytes(), second.bytes()), (4 * MIB, GROWTH_STEP.0));
    }

    #[tokio::test]
    async fn the_smallest_request_gets_the_reserve_first_one_per_connection() {
        let pool = MemoryPool::new(64 * MIB);
        let mut quotas: Vec<_> = (0..4).map(|_| ConnectionQuota::new(&pool)).collect();
        let [a, b, c, d] = &mut quotas[..] else { panic!("four of them") };
        let permits = [a.permit(), b.permit(), c.permit(), d.permit()];
        let [pa, pb, pc, pd] = permits;
        let second_of_a = a.permit();
        let mut all = pin!(a.wait(pa, 500 * MIB));
        let Poll::Ready(Some(whole)) = now(all.as_mut()) else { panic!("it is larger than all, and alone") };
        let mut second = pin!(a.wait(second_of_a, MIB));
        let mut large = pin!(b.wait(pb, 30 * MIB));
        let mut small = pin!(c.wait(pc, 20 * MIB));
        assert!(now(second.as_mut()).is_pending() && now(large.as_mut()).is_pending());
        assert!(now(small.as_mut()).is_pending() && pool.is_contended());
        drop(whole);
        let Poll::Ready(Some(small)) = now(small.as_mut()) else { panic!("the smaller one comes first") };
        assert!(now(large.as_mut()).is_pending());
        let Poll::Ready(Some(second)) = now(second.as_mut()) else { panic!("it has its turn") };
        // Who goes while waiting holds up nobody.
        {
            let mut gone = pin!(d.wait(pd, 12 * MIB));
            assert!(now(gone.as_mut()).is_pending());
        }
        drop((small, second));
        let Poll::Ready(Some(large)) = now(large.as_mut()) else { panic!("there is room") };
        assert_eq!((pool.taken(), large.bytes(), large.is_reserved()), (30 * MIB, 30 * MIB, true));
        drop(large);
        assert_eq!(pool.taken(), 0);
        assert!(!pool.is_contended());
    }
}

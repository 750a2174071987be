//! The measuring types of a build with the cargo feature `metrics`. They consist of atomics and take no locks.
//!
//! [`Sharded`] gives each group of threads a value of its own, so fewer threads write the same cache line. The
//! caller passes a [`Moment`], so one reading of the clock can serve several measurements. Begin at
//! [`Sharded::shard_of_this_thread`].

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{BOUNDS, FIRST_BOUND_NS, HistogramSnapshot};
use crate::clock::{Clock, Timestamp};

/// Whether this build counts anything.
pub const ENABLED: bool = true;

/// The number of uses of a lock of which one is timed: to read the clock costs 20 ns, to use the lock about 1
/// µs. It is odd, so that no kind of use in a regular series of uses is always or never the timed one.
const SAMPLE_INTERVAL: u32 = 63;

/// The number of shards, each for some of the threads.
const SHARDS: usize = 8;

/// One `T` for each group of threads: a write to a cache line that another core has just written costs more
/// than all other work of counting a call.
#[derive(Debug, Default)]
pub struct Sharded<T>([CacheLinePadded<T>; SHARDS]);

/// A value that shares no cache line, and no pair of adjacent lines, with its neighbours.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CacheLinePadded<T>(T);

impl<T> Sharded<T> {
    /// Returns the shard of this thread.
    pub fn shard_of_this_thread(&self) -> &T {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
        }
        let CacheLinePadded(mine) = &self.0[SHARD.with(|shard| *shard)];
        mine
    }

    /// Returns all shards.
    pub fn all_shards(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|CacheLinePadded(shard)| shard)
    }
}

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn increment(&self) {
        self.add_many(1);
    }

    /// Adds `many`.
    pub fn add_many(&self, many: u64) {
        self.0.fetch_add(many, Ordering::Relaxed);
    }

    /// Returns the count; 0 in a build that counts nothing.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A moment of a [`Clock`], to measure intervals.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Moment(u64);

impl Moment {
    /// Returns the current moment.
    #[must_use]
    pub fn now(clock: &Clock) -> Self {
        Self(clock.elapsed_nanos())
    }
}

/// A histogram of times that threads add to.
#[derive(Debug)]
pub struct Histogram {
    counts: [AtomicU64; BOUNDS + 1],
    sum_ns: AtomicU64,
    longest_ns: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        let counts = std::array::from_fn(|_| AtomicU64::new(0));
        Self { counts, sum_ns: AtomicU64::new(0), longest_ns: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Adds the time between two moments.
    pub fn add_interval(&self, from: Moment, to: Moment) {
        let took = to.0.saturating_sub(from.0);
        self.counts[bucket_of_nanos(took)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(took, Ordering::Relaxed);
        if took > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.fetch_max(took, Ordering::Relaxed);
        }
    }

    /// Adds the time between two moments. Only one thread at a time may call this, as the holder of a lock: it saves the
    /// atomic additions, which cost more than the rest of a short use of the lock.
    fn add_interval_as_only_writer(&self, from: Moment, to: Moment) {
        let add =
            |to: &AtomicU64, more| to.store(to.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        let took = to.0.saturating_sub(from.0);
        add(&self.counts[bucket_of_nanos(took)], 1);
        add(&self.sum_ns, took);
        if took > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.store(took, Ordering::Relaxed);
        }
    }

    /// Returns the longest time, in nanoseconds.
    #[must_use]
    pub fn longest_ns(&self) -> u64 {
        self.longest_ns.load(Ordering::Relaxed)
    }

    /// Resets the longest time to zero.
    pub fn reset_longest(&self) {
        self.longest_ns.store(0, Ordering::Relaxed);
    }

    /// Returns the histogram; an empty one in a build that counts nothing.
    #[must_use]
    pub fn snapshot(&self) -> HistogramSnapshot {
        let counts = std::array::from_fn(|place| self.counts[place].load(Ordering::Relaxed));
        HistogramSnapshot { counts, sum_ns: self.sum_ns.load(Ordering::Relaxed) }
    }
}

/// Returns the index of the first bound that is not shorter: the logarithm to the base of four, rounded up.
fn bucket_of_nanos(nanos: u64) -> usize {
    let least = nanos.div_ceil(FIRST_BOUND_NS).saturating_sub(1);
    let bits = u64::BITS - least.leading_zeros();
    bits.div_ceil(2).min(BOUNDS as u32) as usize
}

/// The times for which threads wait for a lock, and for which they hold it. Only the holder of the lock adds times.
#[derive(Debug, Default)]
pub struct LockTimes {
    /// The times from the attempt to lock until the lock is held.
    pub waited: Histogram,
    /// The times from locking to unlocking.
    pub held: Histogram,
}

impl LockTimes {
    /// Marks the begin of an attempt to lock. One in many is timed on each thread, the wait and the hold.
    pub fn begin_sampled_wait<'a>(&'a self, clock: &'a Clock) -> LockWait<'a> {
        let since = is_sampled().then(|| Moment::now(clock));
        LockWait { of: self, clock, is_hold_timed: since.is_some(), since }
    }

    /// Marks the begin of an attempt to lock. Every hold is timed, and the wait of one in many.
    pub fn begin_wait_for_timed_hold<'a>(&'a self, clock: &'a Clock) -> LockWait<'a> {
        let since = is_sampled().then(|| Moment::now(clock));
        LockWait { of: self, clock, is_hold_timed: true, since }
    }

    /// Marks the begin of an attempt to lock, of which the wait and the hold are timed.
    pub fn begin_timed_wait<'a>(&'a self, clock: &'a Clock) -> LockWait<'a> {
        LockWait { of: self, clock, is_hold_timed: true, since: Some(Moment::now(clock)) }
    }
}

/// Returns whether this use of a lock is the one in many of its thread that is timed.
fn is_sampled() -> bool {
    thread_local! {
        static USES: Cell<u32> = const { Cell::new(0) };
    }
    let uses = USES.get();
    USES.set(uses.wrapping_add(1));
    uses.is_multiple_of(SAMPLE_INTERVAL)
}

#[derive(Debug)]
struct TimedLockUse<'a> {
    of: &'a LockTimes,
    clock: &'a Clock,
    since: Moment,
}

/// An attempt to lock that waits.
#[derive(Debug)]
pub struct LockWait<'a> {
    of: &'a LockTimes,
    clock: &'a Clock,
    /// The begin of the wait, if it is timed.
    since: Option<Moment>,
    is_hold_timed: bool,
}

impl<'a> LockWait<'a> {
    /// Marks the end of the wait: the caller holds the lock.
    #[must_use]
    pub fn begin_hold(self) -> LockHold<'a> {
        let Self { of, clock, since: waited_since, is_hold_timed } = self;
        LockHold(is_hold_timed.then(|| {
            let since = Moment::now(clock);
            if let Some(waited_since) = waited_since {
                of.waited.add_interval_as_only_writer(waited_since, since);
            }
            TimedLockUse { of, clock, since }
        }))
    }
}

/// The use of a lock that is held. The caller drops it right before the lock.
#[derive(Debug)]
pub struct LockHold<'a>(Option<TimedLockUse<'a>>);

impl LockHold<'_> {
    /// Returns the time at which the lock was taken, if it was read then: it saves another reading of the clock.
    #[must_use]
    pub fn began_at(&self) -> Option<Timestamp> {
        self.0.as_ref().map(|held| held.clock.at_elapsed_nanos(held.since.0))
    }
}

impl Drop for LockHold<'_> {
    fn drop(&mut self) {
        if let Some(held) = &self.0 {
            held.of.held.add_interval_as_only_writer(held.since, Moment::now(held.clock));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_counted_under_the_first_bound_that_is_not_shorter() {
        let bounds: Vec<u64> = HistogramSnapshot::bounds_ns().collect();
        assert_eq!((bounds[0], bounds[1], bounds[BOUNDS - 1]), (250, 1_000, 4_294_967_296_000));
        for (number, bound) in bounds.into_iter().enumerate() {
            assert_eq!(
                (bucket_of_nanos(bound), bucket_of_nanos(bound + 1)),
                (number, number + 1),
                "{bound} ns"
            );
        }
        assert_eq!((bucket_of_nanos(0), bucket_of_nanos(u64::MAX)), (0, BOUNDS));
    }

    #[test]
    fn a_use_of_a_lock_in_many_is_timed_from_the_wish_to_the_end() {
        let (lock, clock) = (LockTimes::default(), Clock::start());
        for _ in 0..SAMPLE_INTERVAL * 3 {
            drop(lock.begin_sampled_wait(&clock).begin_hold());
        }
        let waiting = lock.begin_timed_wait(&clock);
        std::thread::sleep(std::time::Duration::from_millis(2));
        let holding = waiting.begin_hold();
        assert_eq!(lock.held.snapshot().counts.iter().sum::<u64>(), 3, "it is held still");
        drop(holding);
        let (waited, held) = (lock.waited.snapshot(), lock.held.snapshot());
        assert_eq!((waited.counts.iter().sum::<u64>(), held.counts.iter().sum::<u64>()), (4, 4));
        assert!(waited.sum_ns >= 2_000_000, "{waited:?}");
    }
}

//! Decides how long a thread that waits for a small transfer within the host polls before it sleeps.
//!
//! Waking a thread takes some microseconds if its processor is awake, and tens of microseconds if the kernel or the
//! hypervisor has put the processor to sleep. Everything else that a small message needs takes less time. So a
//! waiting thread spins for about as long as a wake-up takes (50 us by default; `EngineConfig::spin`, `--spin`), and
//! then sleeps. After three unsuccessful spins in a row, threads sleep at once for a number of waits. This number
//! doubles with each further failure, up to a bound. By default, no thread spins if the host has only one processor.
//! The caller decides which waits may spin: only launches of at most 64 KiB do. Begin at [`SpinWait::spin_until`].

use std::hint::spin_loop;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_clock as clock;

use crate::base::sync::AtomicU32;

/// After so many looks in a row that were in vain, threads do not look for a while.
const VAIN: u32 = 3;
/// The number of waits of the first pause; each further unsuccessful spin doubles it.
const REST: u32 = 16;
/// The longest pause, in waits.
const REST_MAX: u32 = 1024;
/// The number of checks between two readings of the clock.
const BETWEEN: usize = if cfg!(all(test, loom)) { 1 } else { 16 };

/// Decides how long the waiting thread of a connection spins; there is one at a time.
#[derive(Debug)]
pub struct SpinWait {
    limit: Duration,
    vain: AtomicU32,
    rest: AtomicU32,
}

impl SpinWait {
    /// Creates one that spins for at most `limit`; never if that is zero.
    pub fn new(limit: Duration) -> Self {
        Self { limit, vain: AtomicU32::new(0), rest: AtomicU32::new(0) }
    }

    /// Spins until `ready`, but not longer than the limit or `time`. Returns whether it is ready.
    pub fn spin_until(&self, time: Duration, ready: impl Fn() -> bool) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        if rest > 0 || self.limit.is_zero() {
            self.rest.store(rest.saturating_sub(1), Ordering::Relaxed);
            return false;
        }
        let began = clock::monotonic();
        loop {
            for _ in 0..BETWEEN {
                if ready() {
                    self.vain.store(0, Ordering::Relaxed);
                    return true;
                }
                spin_loop();
            }
            let looked = clock::monotonic().saturating_duration_since(began);
            if looked >= self.limit {
                break;
            }
            // The spin was too short to count as unsuccessful.
            if looked >= time {
                return false;
            }
        }
        let vain = self.vain.load(Ordering::Relaxed).saturating_add(1);
        self.vain.store(vain, Ordering::Relaxed);
        if let Some(further) = vain.checked_sub(VAIN) {
            self.rest.store((REST << further.min(16)).min(REST_MAX), Ordering::Relaxed);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Returns how many of `waits` waits spun, if nothing ever arrives.
    fn count_waits_that_spun(spin_wait: &SpinWait, waits: u32) -> u32 {
        (0..waits)
            .filter(|_| {
                let looked = Cell::new(false);
                let ready = || {
                    looked.set(true);
                    false
                };
                assert!(!spin_wait.spin_until(Duration::MAX, ready));
                looked.get()
            })
            .count() as u32
    }

    #[test]
    fn what_is_in_vain_is_done_less_and_less_and_what_helps_always() {
        let spin_wait = SpinWait::new(Duration::from_nanos(1));
        assert_eq!(count_waits_that_spun(&spin_wait, 3), 3);
        assert_eq!(count_waits_that_spun(&spin_wait, 16), 0);
        assert_eq!(count_waits_that_spun(&spin_wait, 1), 1);
        assert_eq!(count_waits_that_spun(&spin_wait, 32), 0);
        // In the long run one in `REST_MAX + 1` waits spins.
        count_waits_that_spun(&spin_wait, 4 * REST_MAX);
        assert_eq!(count_waits_that_spun(&spin_wait, 10 * (REST_MAX + 1)), 10);
        // After one success the pauses begin again at their shortest.
        while !spin_wait.spin_until(Duration::MAX, || true) {}
        assert!((0..100).all(|_| spin_wait.spin_until(Duration::MAX, || true)));
        assert_eq!(count_waits_that_spun(&spin_wait, 3 + 16), 3);
    }

    #[test]
    fn who_has_no_time_looks_no_longer_than_that_and_it_says_nothing_of_looking() {
        let spin_wait = SpinWait::new(Duration::from_secs(3600));
        for _ in 0..10 {
            assert!(!spin_wait.spin_until(Duration::from_micros(1), || false));
        }
        assert!(spin_wait.spin_until(Duration::ZERO, || true), "it looks as before");
    }

    #[test]
    fn nobody_looks_for_no_time() {
        let spin_wait = SpinWait::new(Duration::ZERO);
        assert_eq!(count_waits_that_spun(&spin_wait, 100), 0);
        assert!(!spin_wait.spin_until(Duration::MAX, || true));
    }
}

//! Moments on the clock that all processes of a machine share, and functions that wait for a condition.

use std::fmt;
use std::ops::Sub;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The timeout of everything that must happen. It is generous for a machine that compiles meanwhile.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which a condition is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A moment of CLOCK_MONOTONIC, as Python's `time.monotonic()` shows it.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct TestInstant(pub f64);

impl TestInstant {
    /// Returns the present moment.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        let nanos = u32::try_from(now.tv_nsec).expect("less than a second");
        Self(
            f64::from(u32::try_from(now.tv_sec).expect("a machine that was started this century"))
                + f64::from(nanos) / 1e9,
        )
    }

    /// Returns the time since this moment.
    pub fn elapsed(self) -> Duration {
        Duration::from_secs_f64((Self::now() - self).max(0.0))
    }
}

/// Returns the difference in seconds, negative if `other` is later.
impl Sub for TestInstant {
    type Output = f64;

    fn sub(self, other: Self) -> f64 {
        self.0 - other.0
    }
}

impl fmt::Display for TestInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}", self.0)
    }
}

/// Calls `look` until it returns something, which must happen within [`PATIENCE`].
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = TestInstant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a condition holds.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()));
}

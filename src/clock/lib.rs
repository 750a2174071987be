//! The only crate that reads clocks and draws randomness; a lint forbids both readings of the clock elsewhere.
//!
//! It knows no other crate of Muster. Begin at [`Clock`], [`monotonic`] and [`random_bytes`].

mod timestamp;

use std::num::NonZeroU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use timestamp::Timestamp;

/// A clock that shows the time of day but never goes backwards and never jumps: the wall clock is
/// read once, after that the monotonic clock carries it on.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
    epoch: Duration,
}

impl Clock {
    /// Starts a clock at the present wall time.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), epoch }
    }

    /// Returns the time now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::default().after(self.epoch + self.started.elapsed())
    }

    /// Nanoseconds since this clock was started: for times between two moments.
    #[must_use]
    pub fn elapsed_nanos(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the moment of the monotonic clock that shows `at`.
    #[must_use]
    pub fn instant(&self, at: Timestamp) -> Instant {
        let start = Timestamp::default().after(self.epoch);
        self.started + at.since(start)
    }
}

/// Draws a number that nobody can guess and that is never 0, which means "none" on the wire.
///
/// # Panics
/// If the operating system has no entropy to give, without which no identity is safe.
#[must_use]
pub fn random_nonzero() -> NonZeroU64 {
    loop {
        if let Some(number) = NonZeroU64::new(random_u64()) {
            return number;
        }
    }
}

/// Reads the time of day as the host has it at this moment: it may jump, and be wrong.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn wall_time() -> Timestamp {
    Timestamp::default().after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Reads the monotonic clock.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn monotonic() -> Instant {
    Instant::now()
}

/// Reads the monotonic clock in nanoseconds: the same for all processes of a host, which [`Instant`] hides.
#[must_use]
pub fn monotonic_nanoseconds() -> u64 {
    nanoseconds(rustix::time::ClockId::Monotonic)
}

/// Reads how long processors have worked for this process, all of its threads, in nanoseconds.
#[must_use]
pub fn process_nanoseconds() -> u64 {
    nanoseconds(rustix::time::ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: rustix::time::ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Draws a number that cannot be guessed.
///
/// # Panics
/// If the operating system has no entropy to give, without which no secret is one.
#[must_use]
pub fn random_u64() -> u64 {
    u64::from_ne_bytes(random_bytes())
}

/// Draws bytes that cannot be guessed.
///
/// # Panics
/// If the operating system has no entropy to give, without which no secret is one.
#[must_use]
#[expect(clippy::expect_used, reason = "there is no meaning in going on without entropy")]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the operating system gives entropy");
    bytes
}

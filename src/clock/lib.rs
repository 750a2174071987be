//! Reads the system's clocks, draws random numbers, and defines the type of timestamps.
//!
//! A lint forbids all other code, except some tests, to call `Instant::now` and `SystemTime::now`. Timeouts of async
//! code use tokio's clock, not this crate. This crate depends on no other crate of Muster. Begin at [`Clock`],
//! [`monotonic`] and [`random_bytes`].
#![warn(clippy::too_many_lines)]

mod timestamp;

use std::num::NonZeroU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use timestamp::Timestamp;

/// A clock that shows the time of day but never goes backwards and never jumps: it reads the wall clock once,
/// and adds the time that passes on the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
    epoch: Duration,
}

impl Clock {
    /// Starts a clock at the current wall time.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), epoch }
    }

    /// Starts a clock at the current wall time, or at `earliest` if the wall time is before it. Such a clock runs ahead of the
    /// wall clock, so that a state that was restored sees no time twice.
    #[must_use]
    pub fn start_not_before(earliest: Timestamp) -> Self {
        let mut clock = Self::start();
        clock.epoch = clock.epoch.max(Duration::from_micros(earliest.0));
        clock
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::default().after(self.epoch + self.started.elapsed())
    }

    /// Returns the nanoseconds since this clock was started, to measure intervals.
    #[must_use]
    pub fn elapsed_nanos(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the time at which [`Self::elapsed_nanos`] returned `nanos`.
    #[must_use]
    pub fn at_elapsed_nanos(&self, nanos: u64) -> Timestamp {
        Timestamp::default().after(self.epoch + Duration::from_nanos(nanos))
    }

    /// Returns the moment of the monotonic clock at which this clock shows `at`.
    #[must_use]
    pub fn instant_at(&self, at: Timestamp) -> Instant {
        let start = Timestamp::default().after(self.epoch);
        self.started + at.since(start)
    }
}

/// Draws a random number that cannot be guessed and is never 0, which means "none" on the wire.
///
/// # Panics
/// If the operating system provides no entropy: no identity would be safe without it.
#[must_use]
pub fn random_nonzero() -> NonZeroU64 {
    loop {
        if let Some(number) = NonZeroU64::new(random_u64()) {
            return number;
        }
    }
}

/// Returns the time of the host's wall clock, which may jump and may be wrong.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn wall_time() -> Timestamp {
    Timestamp::default().after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Returns the current moment of the monotonic clock.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn monotonic() -> Instant {
    Instant::now()
}

/// Returns the monotonic clock in nanoseconds. All processes of a host share this scale, which [`Instant`]
/// hides.
#[must_use]
pub fn monotonic_nanoseconds() -> u64 {
    read_clock_nanoseconds(rustix::time::ClockId::Monotonic)
}

/// Returns the processor time of this process, all threads together, in nanoseconds.
#[must_use]
pub fn process_cpu_nanoseconds() -> u64 {
    read_clock_nanoseconds(rustix::time::ClockId::ProcessCPUTime)
}

fn read_clock_nanoseconds(clock: rustix::time::ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Draws a random number that cannot be guessed.
///
/// # Panics
/// If the operating system provides no entropy: no secret would be safe without it.
#[must_use]
pub fn random_u64() -> u64 {
    u64::from_ne_bytes(random_bytes())
}

/// Draws random bytes that cannot be guessed.
///
/// # Panics
/// If the operating system provides no entropy: no secret would be safe without it.
#[must_use]
#[expect(clippy::expect_used, reason = "there is no meaning in going on without entropy")]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the operating system gives entropy");
    bytes
}

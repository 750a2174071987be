//! A moment on the time line that all of Muster shares.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A moment, in microseconds since the Unix epoch.
///
/// The state machine never reads a clock: the driver hands it the time with every input. Times
/// never go backwards within one life of the state; the driver sees to it across restarts too.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
pub struct Timestamp(pub u64);

impl fmt::Display for Timestamp {
    /// Writes the moment in UTC, to the second, as people do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Beyond the year 9999 there is no such form, and no such clock.
        const LAST: u64 = 253_402_300_799;
        let at = Duration::from_secs((self.0 / 1_000_000).min(LAST));
        humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + at).fmt(f)
    }
}

impl Timestamp {
    /// Returns the moment `by` later, or the end of time.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        let micros = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// Returns how long ago `earlier` was; zero if it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

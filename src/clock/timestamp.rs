//! The type of timestamps that the crates of Muster share. The crate root reads the clocks.
//!
//! Begin at [`Timestamp`].

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A moment, in microseconds since the Unix epoch.
///
/// The state machine never reads a clock: the driver passes the time with every input. The driver guarantees
/// that times never go backwards within one life of the state, not even across restarts.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
pub struct Timestamp(pub u64);

impl fmt::Display for Timestamp {
    /// Writes the moment in UTC, to the second (RFC 3339).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // RFC 3339 has no form for years after 9999.
        const LAST: u64 = 253_402_300_799;
        let at = Duration::from_secs((self.0 / 1_000_000).min(LAST));
        humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + at).fmt(f)
    }
}

impl Timestamp {
    /// Returns the moment `by` later; saturates at the largest timestamp.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        let micros = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// Returns the moment in UTC, to the millisecond (RFC 3339): `2026-03-01T03:12:07.250Z`.
    #[must_use]
    pub fn to_text_with_milliseconds(self) -> String {
        let seconds = self.to_string();
        format!("{}.{:03}Z", seconds.trim_end_matches('Z'), self.0 / 1000 % 1000)
    }

    /// Returns the duration from `earlier` to this moment; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

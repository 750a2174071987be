//! How often a thread asks the driver again for what only a query tells. Begin at [`pause_before_next_query`].

use std::time::Duration;

/// The rounds in which a thread asks again at once. A copy of a few MiB ends within them, and a program that copies again and
/// again finds the thread awake.
pub(crate) const ROUNDS_AWAKE: u32 = 64;
/// The shortest and the longest pause between two queries after that.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_micros(500);

/// Returns how long to sleep after so many rounds in which nothing has ended: the more, the longer. None for the first rounds, after which
/// a thread only yields.
#[must_use]
pub fn pause_before_next_query(idle_rounds: u32) -> Option<Duration> {
    let asleep = idle_rounds.checked_sub(ROUNDS_AWAKE)?;
    Some(PAUSE_MAX.min(PAUSE_MIN * (1 + asleep / 64)))
}

//! The totals of a rank over windows of time, in which ranks are compared for a slow one.
//!
//! The windows of all ranks begin at the same moments of the service's clock, so that the ranks differ and not the times.
//! Begin at [`RankTotals`].

use std::time::Duration;

use crate::coordination::Timestamp;

/// The length of a window.
pub(super) const WINDOW: Duration = Duration::from_secs(30);

/// The collectives of a rank that ended with known times, and their time on the GPU in nanoseconds.
type Totals = (u64, u64);

/// The totals of a rank at the begin of a window, and over the last whole one.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankTotals {
    /// The number of the window.
    window: u64,
    at_begin: Totals,
    /// The rank was heard at the begin of the window, and its process has asked for times since then.
    is_whole: bool,
    last: Option<(u64, Totals)>,
}

impl RankTotals {
    /// Returns those of a rank that is heard for the first time.
    pub fn start(totals: Totals, now: Timestamp) -> Self {
        Self { window: window_at(now), at_begin: totals, is_whole: false, last: None }
    }

    /// Counts a report.
    pub fn update(&mut self, (timed, gpu_ns): Totals, is_timed: bool, now: Timestamp) {
        self.is_whole &= is_timed;
        let window = window_at(now);
        if window == self.window {
            return;
        }
        let over = (timed.saturating_sub(self.at_begin.0), gpu_ns.saturating_sub(self.at_begin.1));
        self.last = (self.is_whole && window == self.window + 1).then_some((self.window, over));
        (self.window, self.at_begin, self.is_whole) = (window, (timed, gpu_ns), is_timed);
    }

    /// Returns the number of the last window and the totals over it, if the rank was heard and timed throughout.
    pub fn last_window(&self) -> Option<(u64, Totals)> {
        self.last
    }
}

fn window_at(now: Timestamp) -> u64 {
    now.0 / u64::try_from(WINDOW.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(3_000_000_000 + seconds * 1_000_000)
    }

    #[test]
    fn only_windows_that_were_timed_throughout_count() {
        let mut rank = RankTotals::start((0, 0), at(10));
        rank.update((100, 1_000), true, at(29));
        rank.update((110, 1_100), true, at(30));
        assert_eq!(rank.last_window(), None, "the first window has no begin");
        rank.update((200, 2_000), true, at(45));
        rank.update((410, 4_100), true, at(61));
        assert_eq!(rank.last_window(), Some((101, (300, 3_000))));
        rank.update((410, 4_100), false, at(75));
        rank.update((500, 5_000), true, at(91));
        assert_eq!(rank.last_window(), None, "times were off in between");
        rank.update((600, 6_000), true, at(121));
        assert_eq!(rank.last_window(), Some((103, (100, 1_000))));
        rank.update((700, 7_000), true, at(200));
        assert_eq!(rank.last_window(), None, "it was not heard for a whole window");
    }
}

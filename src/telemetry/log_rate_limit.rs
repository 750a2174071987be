//! Limits the rate of log lines that clients can cause. For each kind of line, the first lines are written at once (a
//! burst). After the burst, one line a second is written. Each of these lines reports how many lines of its kind were
//! suppressed before it.
//!
//! The caller defines the kinds. Begin at `LogRateLimit::admit`.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

/// The number of lines of one kind that may be written at once.
pub const BURST: u32 = 50;
/// The time after which one more line may be written.
pub const REFILL_INTERVAL: Duration = Duration::from_secs(1);

struct LogBudget {
    lines: u32,
    refilled: Duration,
    suppressed: u64,
}

/// The limits of all kinds.
pub struct LogRateLimit<K>(HashMap<K, LogBudget>);

impl<K> Default for LogRateLimit<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl LogBudget {
    fn refill(&mut self, now: Duration) {
        let periods = u32::try_from(now.saturating_sub(self.refilled).as_secs()).unwrap_or(BURST);
        if periods > 0 {
            self.lines = self.lines.saturating_add(periods).min(BURST);
            self.refilled = now;
        }
    }
}

impl<K: Eq + Hash + Clone> LogRateLimit<K> {
    /// Returns whether a line of this kind may be written: `Some` with the number of lines suppressed before
    /// it, or `None`. `now` counts from any fixed time.
    pub fn admit(&mut self, kind: &K, now: Duration) -> Option<u64> {
        if !self.0.contains_key(kind) {
            self.0.insert(kind.clone(), LogBudget { lines: BURST, refilled: now, suppressed: 0 });
        }
        let allowance = self.0.get_mut(kind)?;
        allowance.refill(now);
        if let Some(lines) = allowance.lines.checked_sub(1) {
            allowance.lines = lines;
            return Some(std::mem::take(&mut allowance.suppressed));
        }
        allowance.suppressed += 1;
        None
    }

    /// Returns whether suppressed lines are unreported.
    #[must_use]
    pub fn has_suppressed(&self) -> bool {
        self.0.values().any(|allowance| allowance.suppressed > 0)
    }

    /// Returns the kinds with suppressed lines that may be reported now, and their numbers.
    pub fn take_suppressed(&mut self, now: Duration) -> Vec<(K, u64)> {
        let mut all = Vec::new();
        for (kind, allowance) in &mut self.0 {
            allowance.refill(now);
            if allowance.suppressed > 0
                && let Some(lines) = allowance.lines.checked_sub(1)
            {
                allowance.lines = lines;
                all.push((kind.clone(), std::mem::take(&mut allowance.suppressed)));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_second_and_every_line_of_it_is_counted() {
        let mut limit = LogRateLimit::default();
        let (mut written, mut counted) = (0_u64, 0);
        for millisecond in 0..20_000 {
            for _ in 0..2 {
                if let Some(left_out) = limit.admit(&"flood", Duration::from_millis(millisecond)) {
                    written += 1;
                    counted += left_out;
                }
            }
            if millisecond % 5_000 == 0 {
                assert_eq!(limit.admit(&"calm", Duration::from_millis(millisecond)), Some(0));
            }
        }
        assert_eq!(written, u64::from(BURST) + 19);
        assert!(limit.has_suppressed());
        let left_out = limit.take_suppressed(Duration::from_secs(21));
        assert_eq!(left_out.len(), 1);
        assert_eq!(written + counted + left_out[0].1, 40_000);
        assert!(!limit.has_suppressed());
    }
}

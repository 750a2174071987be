//! Bytes over time: a point for each of the last ten minutes' seconds.

use crate::coordination::Timestamp;

/// How many seconds are kept.
pub const POINTS: usize = 600;
/// What a report tells of is spread over the time since the one before, but not over more than this: a worker that
/// was silent for longer was not moving bytes evenly.
const SPREAD_US: u64 = 60_000_000;
const SECOND_US: u64 = 1_000_000;

/// Bytes of each second, for the last [`POINTS`] of them.
#[derive(Debug, Clone)]
pub struct Ring {
    /// The newest second with a point, since the Unix epoch.
    newest: u64,
    points: Box<[u64; POINTS]>,
}

impl Default for Ring {
    fn default() -> Self {
        Self { newest: 0, points: Box::new([0; POINTS]) }
    }
}

fn place(second: u64) -> usize {
    (second % POINTS as u64) as usize
}

impl Ring {
    /// Adds bytes that moved evenly between two moments.
    pub fn add(&mut self, from: Timestamp, until: Timestamp, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.advance(until.0 / SECOND_US);
        let from = from.0.max(until.0.saturating_sub(SPREAD_US)).min(until.0);
        let whole = until.0 - from;
        let mut left = bytes;
        let mut at = from;
        // What rounding leaves falls to the last second.
        while at / SECOND_US < until.0 / SECOND_US {
            let end = (at / SECOND_US + 1) * SECOND_US;
            let part = u128::from(bytes) * u128::from(end - at) / u128::from(whole.max(1));
            let part = u64::try_from(part).unwrap_or(u64::MAX).min(left);
            self.put(at / SECOND_US, part);
            left -= part;
            at = end;
        }
        self.put(until.0 / SECOND_US, left);
    }

    /// The points of the `count` seconds up to `last`, the oldest first.
    #[must_use]
    pub fn window(&self, last: u64, count: usize) -> Vec<u64> {
        let count = count.min(POINTS) as u64;
        let first = (last + 1).saturating_sub(count);
        (first..=last).map(|second| if self.has(second) { self.points[place(second)] } else { 0 }).collect()
    }

    fn has(&self, second: u64) -> bool {
        second <= self.newest && self.newest - second < POINTS as u64
    }

    fn put(&mut self, second: u64, bytes: u64) {
        if self.has(second) {
            let point = &mut self.points[place(second)];
            *point = point.saturating_add(bytes);
        }
    }

    fn advance(&mut self, second: u64) {
        if second <= self.newest {
            return;
        }
        if second - self.newest >= POINTS as u64 {
            self.points.fill(0);
        } else {
            for gone in self.newest + 1..=second {
                self.points[place(gone)] = 0;
            }
        }
        self.newest = second;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1000)
    }

    #[test]
    fn bytes_are_spread_over_the_time_in_which_they_moved_and_none_is_lost() {
        let mut ring = Ring::default();
        ring.add(at(10_500), at(12_500), 1001);
        assert_eq!(ring.window(13, 5), [0, 250, 500, 251, 0]);
        ring.add(at(12_500), at(12_600), 9);
        assert_eq!(ring.window(12, 1), [260]);
        // Two reports in one moment.
        ring.add(at(12_600), at(12_600), 1);
        assert_eq!(ring.window(12, 1), [261]);
    }

    #[test]
    fn what_is_older_than_ten_minutes_is_forgotten_and_nothing_is_said_of_the_future() {
        let mut ring = Ring::default();
        ring.add(at(1_000_000), at(1_000_900), 7);
        ring.add(at(1_599_000), at(1_599_900), 8);
        assert_eq!(ring.window(1599, POINTS)[0], 7);
        ring.add(at(1_600_000), at(1_600_900), 9);
        let window = ring.window(1600, 9999);
        assert_eq!((window.len(), window[0], window[POINTS - 2], window[POINTS - 1]), (POINTS, 0, 8, 9));
        assert_eq!(ring.window(1605, 3), [0, 0, 0]);
        ring.add(at(9_000_000), at(9_000_500), u64::MAX);
        ring.add(at(9_000_500), at(9_000_600), 5);
        assert_eq!(ring.window(9000, POINTS).iter().rev().take(2).collect::<Vec<_>>(), [&u64::MAX, &0]);
    }

    #[test]
    fn a_long_silence_is_not_smeared_over_all_of_it() {
        let mut ring = Ring::default();
        ring.add(at(0), at(500_000), 600);
        let window = ring.window(500, POINTS);
        assert_eq!(window.iter().sum::<u64>(), 600);
        assert_eq!(window.iter().filter(|point| **point > 0).count(), 60);
    }
}

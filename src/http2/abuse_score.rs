//! The abuse score of a connection. Frames that neither open a request nor carry data raise the score: pings,
//! settings, window updates, resets, empty data, refused headers, and others.
//!
//! Each such frame adds points. Answers that the server sends, and time, remove points. The score of a normal client
//! stays near zero, however long its connection lasts. A peer that sends such frames at a high rate exceeds the limit
//! and receives ENHANCE_YOUR_CALM. `Http2Sender::check_abuse` reports the violation, and `grpc::connection` closes
//! the connection. Begin at [`AbuseScore`].

use std::time::Duration;

/// The score beyond which the connection ends. A client may still cancel all of its 16,384 calls at once.
const LIMIT: u32 = 20_000;
/// The points removed for each second.
const DECAY_PER_SECOND: u32 = 2_000;
/// The score below which the clock is not read.
const CLOCK_CHECK_MIN: u32 = 2_000;

/// The points that each kind of frame adds.
pub(super) mod points {
    /// A window update, a priority, a frame of an unknown kind, a continuation, a reset.
    pub const FRAME: u32 = 1;
    /// A ping, and empty data that does not end its stream.
    pub const EMPTY: u32 = 2;
    /// A stream beyond the permitted number.
    pub const REFUSED: u32 = 4;
    /// Settings, and data on a closed stream.
    pub const SETTINGS: u32 = 10;
    /// A header list that is malformed or too long.
    pub const BAD_HEADERS: u32 = 100;
}

/// The score of one peer.
#[derive(Debug, Default)]
pub(super) struct AbuseScore {
    points: u32,
    /// The time at which the score was last updated.
    seen: Option<Duration>,
}

impl AbuseScore {
    /// Returns a score of `points`.
    pub(super) fn with_points(points: u32) -> Self {
        Self { points, seen: None }
    }

    /// Returns the points.
    pub(super) fn present_points(&self) -> u32 {
        self.points
    }

    pub(super) fn add_points(&mut self, points: u32) {
        self.points = self.points.saturating_add(points);
    }

    /// Removes points for useful traffic.
    pub(super) fn remove_points(&mut self, points: u32) {
        self.points = self.points.saturating_sub(points);
    }

    /// Returns whether the score is high enough to read the clock.
    pub(super) fn needs_clock_check(&self) -> bool {
        self.points >= CLOCK_CHECK_MIN
    }

    /// Removes the points for the elapsed time; returns whether the score is still beyond the limit. `now`
    /// counts from any fixed moment.
    pub(super) fn exceeds_limit(&mut self, now: Duration) -> bool {
        if let Some(seen) = self.seen {
            let millis = u32::try_from(now.saturating_sub(seen).as_millis()).unwrap_or(u32::MAX);
            let redeemed = millis.saturating_mul(DECAY_PER_SECOND / 1000);
            if redeemed > 0 {
                self.remove_points(redeemed);
                self.seen = Some(now);
            }
        } else {
            self.seen = Some(now);
        }
        self.points > LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_client_stays_below_and_a_flood_does_not() {
        let mut steady = AbuseScore::default();
        for second in 0..100_000 {
            // A thousand pings a second, and frequent settings.
            steady.add_points(900 * points::EMPTY + 10 * points::SETTINGS);
            assert!(!steady.exceeds_limit(Duration::from_secs(second)), "in second {second}");
        }
        let mut flood = AbuseScore::default();
        let floods = (0..1000).any(|millisecond| {
            flood.add_points(100 * points::EMPTY);
            flood.needs_clock_check() && flood.exceeds_limit(Duration::from_millis(millisecond))
        });
        assert!(floods);
        let mut gives_up_everything = AbuseScore::default();
        gives_up_everything.add_points(16_384 * points::FRAME);
        assert!(!gives_up_everything.exceeds_limit(Duration::ZERO));
    }
}

//! The part of a run's time that a picture shows, and the marks of its axis. Begin at [`TimeWindow::new`].

use super::live_page::TimelinePageQuery;
use crate::coordination::Timestamp;
use crate::service::RunStates;
use crate::text::format_micros;

/// The number of columns in which states are counted.
pub(super) const COLUMNS: usize = 500;
/// The width of a column, in units of the picture.
pub(super) const COLUMN_WIDTH: usize = 2;
/// The number of steps in which a run that goes on grows over the picture.
const STEPS_OF_NOW: u64 = 100;
/// The length of a day, in microseconds.
const DAY_US: u64 = 86_400_000_000;
/// The width of the longest text of a mark, in units of the picture.
const MARK_WIDTH: usize = 120;
/// The least length of the shown time, in microseconds.
pub(super) const SHORTEST_US: u64 = 1_000;

/// The time that a picture shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TimeWindow {
    pub from: u64,
    pub until: u64,
    /// The time from which on, and up to which, states are known.
    pub known_from: u64,
    pub known_until: u64,
    /// The whole time of which it is a part.
    pub whole: (u64, u64),
}

impl TimeWindow {
    /// Returns the part of a run that a query selects, or the whole run.
    pub fn new(states: &RunStates, query: &TimelinePageQuery) -> Self {
        let (begin, length) =
            (states.opened_at.0, states.until.0.saturating_sub(states.opened_at.0).max(SHORTEST_US));
        // The picture of a run that goes on has room at its end, so that it stays the same for a while.
        let whole_length = if states.goes_on { round_up_length(length) } else { length };
        let whole = (begin, begin + whole_length);
        let bound = |text: &str| text.trim().parse::<u64>().ok();
        let from = bound(&query.from).unwrap_or(whole.0).clamp(whole.0, whole.1 - SHORTEST_US);
        let until = bound(&query.until).unwrap_or(whole.1).clamp(from + SHORTEST_US, whole.1);
        let step = (until - from) / STEPS_OF_NOW;
        let known_until = match states.goes_on {
            true => states.until.0 - states.until.0.saturating_sub(begin) % step.max(1),
            false => states.until.0,
        };
        Self {
            from,
            until,
            known_from: states.known_since.map_or(begin, |at| at.0),
            known_until: known_until.clamp(from, until),
            whole,
        }
    }

    /// Returns the beginning and the end, or how far the states are known if the run goes on.
    pub fn bounds(self) -> (Timestamp, Timestamp) {
        (Timestamp(self.from), Timestamp(self.until.min(self.known_until)))
    }

    pub fn length(self) -> u64 {
        self.until - self.from
    }

    pub fn is_whole(self) -> bool {
        (self.from, self.until) == self.whole
    }

    /// Returns the column of a time, or the nearest one.
    pub fn column_of(self, at: u64) -> usize {
        let after = u128::from(at.clamp(self.from, self.until) - self.from);
        let column = after * COLUMNS as u128 / u128::from(self.length());
        usize::try_from(column).unwrap_or(COLUMNS).min(COLUMNS - 1)
    }

    pub fn includes(self, at: u64) -> bool {
        (self.from..=self.until).contains(&at)
    }

    /// Returns the part that begins at `from` and has this length, moved into the whole.
    pub fn moved(self, from: u64, length: u64) -> (u64, u64) {
        let length = length.clamp(SHORTEST_US, self.whole.1 - self.whole.0);
        let from = from.clamp(self.whole.0, self.whole.1 - length);
        (from, from + length)
    }

    /// Returns marks at round times of day.
    pub fn marks(self) -> Vec<AxisMark> {
        const STEPS_S: [u64; 19] = [
            1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400,
            604_800, 2_592_000,
        ];
        const MARKS: u64 = 8;
        let least = self.length().div_ceil(MARKS);
        if least < 1_000_000 {
            // Shorter than a second: marks are lengths after the beginning.
            let places = (0..=4).map(|part| self.length() * part / 4);
            return places
                .map(|after| AxisMark {
                    x: self.place_of(self.from + after),
                    time: None,
                    text: format!("+{}", format_micros(after)),
                })
                .collect();
        }
        let step =
            STEPS_S.into_iter().find(|step| step * 1_000_000 >= least).unwrap_or(31_104_000) * 1_000_000;
        let first = self.from.div_ceil(step);
        let times = (first..).map(|mark| mark * step).take_while(|at| *at <= self.until).take(32);
        // A mark shows its date where the day changes. Only the zone of the reader tells where that is, so each mark names the
        // one before. The first mark of a long axis names a time long ago.
        let mut before = (self.length() > DAY_US).then_some(0);
        let mark = |at| AxisMark {
            x: self.place_of(at),
            time: Some(MarkTime {
                at: Timestamp(at),
                before: Timestamp(before.replace(at).unwrap_or(at)),
                is_whole_minute: step % 60_000_000 == 0,
            }),
            text: String::new(),
        };
        times.map(mark).collect()
    }

    pub fn place_of(self, at: u64) -> usize {
        self.column_of(at) * COLUMN_WIDTH
    }
}

/// Returns a round length that is a little longer.
fn round_up_length(length: u64) -> u64 {
    const FACTORS: [u64; 10] = [100, 125, 150, 200, 250, 300, 400, 500, 600, 800];
    let unit = 10_u64.pow(length.max(1).ilog10());
    let lengths = FACTORS.map(|factor| (unit / 100).max(1).saturating_mul(factor));
    lengths.into_iter().find(|round| *round >= length).unwrap_or(unit.saturating_mul(10)).max(SHORTEST_US)
}

/// A mark of the time axis.
#[derive(Debug)]
pub(super) struct AxisMark {
    pub x: usize,
    /// The time that it shows, or else its text.
    pub time: Option<MarkTime>,
    pub text: String,
}

impl AxisMark {
    /// Returns whether its text is so near to the end of the picture that it must end at the mark.
    pub fn is_at_end(&self) -> bool {
        self.x > COLUMNS * COLUMN_WIDTH - MARK_WIDTH / 2
    }
}

/// The time of a mark.
#[derive(Debug)]
pub(super) struct MarkTime {
    pub at: Timestamp,
    /// The time of the mark before. The text has a date if its date is another one.
    pub before: Timestamp,
    pub is_whole_minute: bool,
}

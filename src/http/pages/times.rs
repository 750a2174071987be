//! Formats times and durations for pages.
//!
//! In a fragment, each time is a `<time>` element with the absolute time and without a text. `page_times.rs` writes the
//! texts when a page is sent, as its reader has chosen. From then on the script updates them. A fragment therefore
//! does not change merely because time passes, and it has the same bytes for all viewers. Begin at [`ago`].

use std::fmt;
use std::time::Duration;

use askama::filters::Safe;

use crate::coordination::Timestamp;
use crate::http::page_times::TIME_MARK;

/// The wording of a time. The examples are relative times; a reader may have chosen absolute ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimeForm {
    /// `3 s ago`
    Ago,
    /// `3 s`
    For,
    /// `in 3 s`
    In,
    /// `03:12:07`, always: the time of day in the zone that is named beside it.
    Clock,
    /// `03:12:07`, or `2026-03-01 03:12:07` if this other time has another date.
    ClockWithDate(Timestamp),
}

/// A time in a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageTime(Timestamp, TimeForm);

/// Returns a time shown as how long ago it was.
pub(super) fn ago(at: &Timestamp) -> Safe<PageTime> {
    Safe(PageTime(*at, TimeForm::Ago))
}

/// Returns a time shown as how long it has lasted.
pub(super) fn lasting(at: &Timestamp) -> Safe<PageTime> {
    Safe(PageTime(*at, TimeForm::For))
}

/// Returns a time shown as how long it is until then.
pub(super) fn until(at: &Timestamp) -> Safe<PageTime> {
    Safe(PageTime(*at, TimeForm::In))
}

/// Returns a time shown as the time of day, to the second. [`zone`] names its zone.
pub(super) fn clock(at: &Timestamp) -> Safe<PageTime> {
    Safe(PageTime(*at, TimeForm::Clock))
}

/// Returns a time shown as the time of day, after its date if that is not the date of `other`. Readers in other zones
/// may see other dates.
pub(super) fn clock_with_date(at: &Timestamp, other: &Timestamp) -> Safe<PageTime> {
    Safe(PageTime(*at, TimeForm::ClockWithDate(*other)))
}

/// Returns the last attribute of the SVG text of a mark on an axis of time. The text shows the time of day, to the minute
/// if `is_whole_minute`, after its date if that is not the date of `other`.
pub(super) fn mark_attribute(at: &Timestamp, other: &Timestamp, is_whole_minute: &bool) -> Safe<String> {
    let form = if *is_whole_minute { "minute" } else { "clock" };
    Safe(format!("{TIME_MARK}{form}:{}:{}\"", at.0, other.0))
}

/// Returns the name of the zone of the times of day on a page.
pub(super) fn zone() -> Safe<&'static str> {
    Safe("<span data-zone>UTC</span>")
}

impl fmt::Display for PageTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.1 {
            TimeForm::Ago => "ago",
            TimeForm::For => "for",
            TimeForm::In => "in",
            TimeForm::Clock | TimeForm::ClockWithDate(_) => "clock",
        };
        let other = match self.1 {
            TimeForm::ClockWithDate(other) => format!(":{}", other.0),
            _ => String::new(),
        };
        let stamp = self.0.to_text_with_milliseconds();
        let shown = stamp.replace('T', " ").replace('Z', " UTC");
        write!(
            f,
            "<time datetime=\"{stamp}\" title=\"{shown}\"{TIME_MARK}{form}:{}{other}\"></time>",
            self.0.0
        )
    }
}

/// Returns whether a deadline is so far away that it counts as none.
pub(super) fn has_no_timeout(deadline: &Timestamp, now: Timestamp) -> bool {
    const YEAR_SECONDS: u64 = 366 * 24 * 60 * 60;
    deadline.since(now).as_secs() > YEAR_SECONDS
}

/// Returns a duration as text.
pub(super) fn duration_text(duration: &Duration) -> String {
    crate::text::format_approximate_duration(*duration)
}

/// Returns an interval, given in microseconds, as text; of one near whole seconds, these.
pub(super) fn interval_text(us: &u64) -> String {
    let seconds = us.saturating_add(500_000) / 1_000_000;
    let is_near = seconds > 0 && us.abs_diff(seconds.saturating_mul(1_000_000)) <= us / 20;
    if is_near && seconds < 60 { format!("{seconds} s") } else { crate::text::format_micros(*us) }
}

/// Returns a short duration, given in microseconds, as text with a suitable unit.
pub(super) fn microseconds_text(us: &u64) -> String {
    crate::text::format_micros(*us)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::page_times::{TimeStyle, fill_times};

    #[test]
    fn an_interval_near_whole_seconds_is_rounded() {
        let texts =
            [5_040_000, 4_960_000, 50_260_000, 1_400_000, 20_000, 0].map(|us: u64| interval_text(&us));
        assert_eq!(texts, ["5 s", "5 s", "50 s", "1.40 s", "20 ms", "0 µs"]);
        interval_text(&u64::MAX);
    }

    #[test]
    fn a_part_is_the_same_at_every_moment_until_its_times_are_written() {
        let at = Timestamp(1_000_000);
        let part = format!("<b>{}</b>{}", ago(&at), until(&Timestamp(9_000_000)));
        let filled = fill_times(&part, Timestamp(4_500_000), TimeStyle::Relative);
        assert!(filled.contains(">3 s ago</time></b>") && filled.ends_with(">in 4 s</time>"), "{filled}");
        assert!(part.contains("datetime=\"1970-01-01T00:00:01.000Z\" title=\"1970-01-01 00:00:01.000 UTC\""));
    }
}

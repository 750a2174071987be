//! Formats times and durations for pages.
//!
//! In a fragment, each time is a `<time>` element with the absolute time. When a page is rendered,
//! [`fill_relative_times`] inserts the relative times. From then on the script updates them. A fragment therefore
//! does not change merely because time passes, and it has the same bytes for all viewers. Begin at
//! [`fill_relative_times`].

use std::fmt;
use std::time::Duration;

use askama::filters::Safe;

use crate::coordination::Timestamp;

/// The mark at which [`fill_relative_times`] inserts relative times. Escaped text cannot contain it, because quotes
/// are escaped.
const TIME_MARK: &str = " data-rel=\"";

/// The wording of a relative time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RelativeForm {
    /// `3 s ago`
    Ago,
    /// `3 s`
    For,
    /// `in 3 s`
    In,
}

/// A time in a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct RelativeTime(Timestamp, RelativeForm);

/// Returns a time shown as how long ago it was.
pub(super) fn ago(at: &Timestamp) -> Safe<RelativeTime> {
    Safe(RelativeTime(*at, RelativeForm::Ago))
}

/// Returns a time shown as how long it has lasted.
pub(super) fn lasting(at: &Timestamp) -> Safe<RelativeTime> {
    Safe(RelativeTime(*at, RelativeForm::For))
}

/// Returns a time shown as how long it is until then.
pub(super) fn until(at: &Timestamp) -> Safe<RelativeTime> {
    Safe(RelativeTime(*at, RelativeForm::In))
}

/// Returns the time of day, to the second: `03:12:07`.
pub(super) fn time_of_day_text(at: &Timestamp) -> String {
    at.to_string().split_once('T').map_or_else(String::new, |(_, time)| time.chars().take(8).collect())
}

impl fmt::Display for RelativeTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.1 {
            RelativeForm::Ago => "ago",
            RelativeForm::For => "for",
            RelativeForm::In => "in",
        };
        let stamp = self.0.to_string();
        let shown = stamp.replace('T', " ").replace('Z', " UTC");
        write!(f, "<time datetime=\"{stamp}\" title=\"{shown}\"{TIME_MARK}{form}:{}\"></time>", self.0.0)
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

/// Returns a short duration, given in microseconds, as text with a suitable unit.
pub(super) fn microseconds_text(us: &u64) -> String {
    crate::text::format_micros(*us)
}

/// Writes the relative time, seen from `now`, into every time of a page.
pub(super) fn fill_relative_times(html: &str, now: Timestamp) -> String {
    let mut filled = String::with_capacity(html.len() + html.len() / 16);
    let mut rest = html;
    while let Some(at) = rest.find(TIME_MARK) {
        let (before, marked) = rest.split_at(at + TIME_MARK.len());
        filled.push_str(before);
        let Some((what, after)) = marked.split_once("\">") else {
            rest = marked;
            continue;
        };
        filled.push_str(what);
        filled.push_str("\">");
        filled.push_str(&relative_text(what, now));
        rest = after;
    }
    filled.push_str(rest);
    filled
}

fn relative_text(what: &str, now: Timestamp) -> String {
    let Some((form, at)) = what.split_once(':') else { return String::new() };
    let at = Timestamp(at.parse().unwrap_or_default());
    // Whole seconds, from which the script counts on.
    let whole = |duration: Duration| match duration.as_secs() {
        seconds @ 0..10 => format!("{seconds} s"),
        _ => duration_text(&duration),
    };
    match form {
        "ago" if now.since(at).as_secs() == 0 => "just now".into(),
        "ago" => format!("{} ago", whole(now.since(at))),
        "in" if at <= now => "now".into(),
        "in" => format!("in {}", whole(at.since(now))),
        _ => whole(now.since(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_same_at_every_moment_until_it_is_filled_in() {
        let at = Timestamp(1_000_000);
        let part = format!("<b>{}</b>{}", ago(&at), until(&Timestamp(9_000_000)));
        let filled = fill_relative_times(&part, Timestamp(4_500_000));
        assert!(filled.contains(">3 s ago</time></b>") && filled.ends_with(">in 4 s</time>"), "{filled}");
        assert_eq!(fill_relative_times("nothing here", at), "nothing here");
    }
}

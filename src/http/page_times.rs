//! Writes the times of a page, as its reader has chosen: relative to now, or in UTC. The choice is a cookie.
//!
//! A page and its fragments contain each time as a `<time>` element with the absolute time and without a text
//! (`pages/times.rs`). The texts are written last, by [`write_times_of_page`]. Therefore a fragment has the same bytes
//! and the same digest for all readers and at every moment. The script of the pages writes the same texts, and local
//! times, for which it knows the zone of the browser. Begin at [`TimeStyle`], then [`fill_times`].

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use serde::Deserialize;

use super::access::cookie_value;
use crate::coordination::Timestamp;

/// The mark at which [`fill_times`] inserts the text of a time. Escaped text cannot contain it, because quotes are
/// escaped.
pub(super) const TIME_MARK: &str = " data-rel=\"";

/// The name of the cookie.
const COOKIE: &str = "muster-times";
/// The lifetime of the cookie in seconds: a year.
const COOKIE_SECONDS: u32 = 365 * 24 * 60 * 60;

/// How pages show times.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum TimeStyle {
    /// `3 s ago`
    #[default]
    Relative,
    /// In the zone of the browser. Only the script of the pages knows it; without the script, times are in UTC.
    Local,
    /// `03:12:07.250 UTC`
    Utc,
}

impl TimeStyle {
    /// All styles, as the switch lists them.
    pub const ALL: [Self; 3] = [Self::Relative, Self::Local, Self::Utc];

    /// Returns its name in addresses and in the cookie.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relative => "relative",
            Self::Local => "local",
            Self::Utc => "utc",
        }
    }

    /// Returns its name for people.
    pub fn label(self) -> &'static str {
        match self {
            Self::Relative => "Relative",
            Self::Local => "Local",
            Self::Utc => "UTC",
        }
    }

    /// Returns the style that the reader of a request has chosen.
    pub fn of_request(headers: &HeaderMap) -> Self {
        let chosen = cookie_value(headers, COOKIE);
        Self::ALL.into_iter().find(|style| Some(style.name()) == chosen).unwrap_or_default()
    }

    /// Returns the `Set-Cookie` value that keeps the choice.
    pub fn set_cookie_header(self, secure: bool) -> Option<HeaderValue> {
        let secure = if secure { "; Secure" } else { "" };
        let name = self.name();
        format!("{COOKIE}={name}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; SameSite=Lax{secure}")
            .parse()
            .ok()
    }
}

/// The moment as of which the texts of a page are written.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageClock {
    pub now: Timestamp,
    /// The end of the run that the page shows, if a later run has opened: the states on the page lasted until then.
    pub run_ended_at: Option<Timestamp>,
}

impl PageClock {
    /// Returns how long a state that began at this time has lasted, or had lasted when its run ended.
    fn duration_since(self, at: Timestamp) -> Duration {
        self.run_ended_at.map_or(self.now, |end| end.min(self.now)).since(at)
    }
}

impl From<Timestamp> for PageClock {
    fn from(now: Timestamp) -> Self {
        Self { now, run_ended_at: None }
    }
}

/// A rendered page without the texts of its times. A handler puts it into the extensions of its response.
#[derive(Clone)]
pub(super) struct PageWithoutTimes {
    pub html: Arc<str>,
    pub clock: PageClock,
}

/// Writes the times of a page, as the reader of the request has chosen.
pub(super) async fn write_times_of_page(request: Request, next: Next) -> Response {
    let style = TimeStyle::of_request(request.headers());
    let mut response = next.run(request).await;
    if let Some(page) = response.extensions_mut().remove::<PageWithoutTimes>() {
        *response.body_mut() = Body::from(fill_times(&page.html, page.clock, style));
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}

/// Writes the text of every time into a page or a part of one. Relative times are as of `clock`.
pub(super) fn fill_times(html: &str, clock: impl Into<PageClock>, style: TimeStyle) -> String {
    let clock = clock.into();
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
        filled.push_str(&time_text(what, clock, style));
        rest = after;
    }
    filled.push_str(rest);
    filled
}

/// Returns the text of a time: its form, a colon, and the time in microseconds since 1970. `muster.js` has the same
/// rules.
fn time_text(what: &str, page: PageClock, style: TimeStyle) -> String {
    let mut parts = what.split(':');
    let form = parts.next().unwrap_or_default();
    let mut time = || parts.next().and_then(|at| at.parse().ok()).map(Timestamp);
    let Some(at) = time() else { return String::new() };
    let (other, now) = (time(), page.now);
    // Whole seconds, from which the script counts on.
    let whole = |duration: Duration| match duration.as_secs() {
        seconds @ 0..10 => format!("{seconds} s"),
        _ => crate::text::format_approximate_duration(duration),
    };
    let clock = || utc_text(at, now);
    match (form, style) {
        ("clock" | "minute", _) => clock_text(form, at, other),
        ("ago", TimeStyle::Relative) if now.since(at).as_secs() == 0 => "just now".into(),
        ("ago", TimeStyle::Relative) => format!("{} ago", whole(now.since(at))),
        ("ago", _) => clock(),
        ("in", TimeStyle::Relative) if at <= now => "now".into(),
        ("in", TimeStyle::Relative) => format!("in {}", whole(at.since(now))),
        ("in", _) => format!("at {}", clock()),
        (_, TimeStyle::Relative) => whole(page.duration_since(at)),
        _ => format!("{}, since {}", whole(page.duration_since(at)), clock()),
    }
}

/// Returns a time in UTC to the millisecond, with its date unless that is the date of `now`.
fn utc_text(at: Timestamp, now: Timestamp) -> String {
    let text = at.to_text_with_milliseconds();
    let Some((date, time)) = text.trim_end_matches('Z').split_once('T') else { return text };
    if now.to_string().starts_with(date) { format!("{time} UTC") } else { format!("{date} {time} UTC") }
}

/// Returns the time of day in UTC, to the second or to the minute. If `other` is a time of another date, the text begins
/// with the date, which has no year before a time to the minute: that is for the narrow marks of an axis.
fn clock_text(form: &str, at: Timestamp, other: Option<Timestamp>) -> String {
    let text = at.to_string();
    let Some((date, time)) = text.trim_end_matches('Z').split_once('T') else { return text };
    let is_other_date = other.is_some_and(|other| !other.to_string().starts_with(date));
    let (date, time) = match form {
        "minute" => (date.split_once('-').map_or(date, |(_, day)| day), time.get(..5).unwrap_or(time)),
        _ => (date, time),
    };
    if is_other_date { format!("{date} {time}") } else { time.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: &str = "1772334727250000"; // 2026-03-01T03:12:07.250Z

    fn text_after(form: &str, seconds: u64, style: TimeStyle) -> String {
        let now = Timestamp(AT.parse::<u64>().unwrap() + seconds * 1_000_000);
        let filled = fill_times(&format!("<time{TIME_MARK}{form}:{AT}\"></time>"), now, style);
        filled.split_once("\">").unwrap().1.trim_end_matches("</time>").to_owned()
    }

    #[test]
    fn a_time_is_written_as_the_reader_has_chosen() {
        assert_eq!(text_after("ago", 0, TimeStyle::Relative), "just now");
        assert_eq!(text_after("ago", 3, TimeStyle::Relative), "3 s ago");
        assert_eq!(text_after("for", 3, TimeStyle::Relative), "3 s");
        assert_eq!(text_after("in", 3, TimeStyle::Relative), "now");
        // Without the script the zone of the browser is not known.
        for style in [TimeStyle::Utc, TimeStyle::Local] {
            assert_eq!(text_after("ago", 3, style), "03:12:07.250 UTC");
            assert_eq!(text_after("ago", 86_400, style), "2026-03-01 03:12:07.250 UTC");
            assert_eq!(text_after("for", 3, style), "3 s, since 03:12:07.250 UTC");
            assert_eq!(text_after("in", 3, style), "at 03:12:07.250 UTC");
        }
        for style in TimeStyle::ALL {
            assert_eq!(text_after("clock", 3, style), "03:12:07");
            assert_eq!(time_text(&format!("clock:{AT}:{AT}"), Timestamp(0).into(), style), "03:12:07");
            assert_eq!(
                time_text(&format!("clock:{AT}:0"), Timestamp(0).into(), style),
                "2026-03-01 03:12:07"
            );
            assert_eq!(time_text(&format!("minute:{AT}:{AT}"), Timestamp(0).into(), style), "03:12");
            assert_eq!(time_text(&format!("minute:{AT}:0"), Timestamp(0).into(), style), "03-01 03:12");
        }
        assert_eq!(fill_times("nothing here", Timestamp(1), TimeStyle::Utc), "nothing here");
    }

    #[test]
    fn a_state_of_an_ended_run_lasted_until_the_run_ended() {
        let at: u64 = AT.parse().unwrap();
        let second = |second: u64| Timestamp(at + second * 1_000_000);
        let text = |form: &str, run_ended_at, style| {
            let clock = PageClock { now: second(7_200), run_ended_at };
            fill_times(&format!("{TIME_MARK}{form}:{at}\">"), clock, style)
                .split_once("\">")
                .unwrap()
                .1
                .to_owned()
        };
        assert_eq!(text("for", None, TimeStyle::Relative), "2 h 0 min");
        assert_eq!(text("for", Some(second(3)), TimeStyle::Relative), "3 s");
        assert_eq!(text("for", Some(second(3)), TimeStyle::Utc), "3 s, since 03:12:07.250 UTC");
        assert_eq!(
            text("ago", Some(second(3)), TimeStyle::Relative),
            "2 h 0 min ago",
            "the present is meant"
        );
        let before = Timestamp(at - 1);
        assert_eq!(text("for", Some(before), TimeStyle::Relative), "0 s", "it began after the end");
    }

    #[test]
    fn the_choice_is_kept_in_a_cookie_and_an_unknown_one_is_none() {
        let chosen = |cookie: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::COOKIE, cookie.parse().unwrap());
            TimeStyle::of_request(&headers)
        };
        for style in TimeStyle::ALL {
            let set = style.set_cookie_header(true).unwrap();
            let set = set.to_str().unwrap();
            assert!(set.contains("HttpOnly") && set.ends_with("; Secure"), "{set}");
            assert_eq!(chosen(set.split(';').next().unwrap()), style);
        }
        assert_eq!(chosen("muster-times=mars"), TimeStyle::Relative);
        assert_eq!(TimeStyle::of_request(&HeaderMap::new()), TimeStyle::Relative);
    }
}

//! Makes text from outside safe to show, and formats durations and numbers for people.
//!
//! [`is_hidden_character`] is the only list of hidden characters: those that are invisible, control a terminal, or
//! change the direction of text. Every output escapes the characters of this list: the command line
//! ([`escape_to_one_line`]), the log (`telemetry::log`), pages (`http::pages::HtmlEscaper`) and JSON on a terminal
//! ([`escape_json`]). Only this module formats durations and numbers for people ([`format_approximate_duration`],
//! [`format_micros`], [`format_bytes`], [`format_ranges`]). Begin at [`escape_to_one_line`] and [`UntrustedText`].

mod duration;
mod numbers;

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

pub use duration::{format_exact_duration, micros_to_seconds, parse_duration, parse_positive_duration};
pub use numbers::{format_bytes, format_count_with_noun, format_grouped, format_ranges};

/// Returns the text on one line, with every hidden character escaped, so that a client's text can neither
/// forge a second line nor steer a terminal, and texts that look alike are alike. A line break becomes ` | `.
#[must_use]
pub fn escape_to_one_line(text: &str) -> Cow<'_, str> {
    escape_hidden_characters(text, |c| match c {
        '\n' => Some(" | "),
        '\t' => Some(" "),
        _ => None,
    })
}

/// Returns the text with every hidden character escaped except line breaks and tabs, for places that show
/// many lines.
#[must_use]
pub fn escape_keeping_lines(text: &str) -> Cow<'_, str> {
    escape_hidden_characters(text, |c| match c {
        '\n' => Some("\n"),
        '\t' => Some("\t"),
        _ => None,
    })
}

/// Text from outside that is shown on one line. `Display` and `Debug` are the only ways to read it, and both
/// escape it.
#[derive(Clone, PartialEq, Eq)]
pub struct UntrustedText(String);

impl UntrustedText {
    /// Wraps text from outside.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl<T: Into<String>> From<T> for UntrustedText {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

impl fmt::Display for UntrustedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&escape_to_one_line(&self.0))
    }
}

impl fmt::Debug for UntrustedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

fn escape_hidden_characters(text: &str, instead: impl Fn(char) -> Option<&'static str>) -> Cow<'_, str> {
    if !text.contains(is_hidden_character) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match instead(c) {
            Some(other) => shown.push_str(other),
            // Writing to a string cannot fail.
            None if is_hidden_character(c) => _ = write!(shown, "{}", c.escape_default()),
            None => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Returns equal JSON in which hidden characters are escaped. Line breaks between values stay.
#[must_use]
pub fn escape_json(text: &str) -> Cow<'_, str> {
    let raw = |c: char| c != '\n' && is_hidden_character(c);
    if !text.contains(raw) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if raw(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Returns whether a text has neither line breaks nor characters that steer what shows it, as a reason or a
/// name must not.
#[must_use]
pub fn is_safe_single_line(text: &str) -> bool {
    !text.contains(|c: char| c.is_control() || is_bidi_control(c) || matches!(c, '\u{2028}' | '\u{2029}'))
}

/// Returns whether a character is invisible or changes how others are shown: control characters (C0, DEL,
/// C1), characters that change the writing direction, line separators, and all that Unicode calls ignorable
/// by default.
#[must_use]
pub fn is_hidden_character(c: char) -> bool {
    // The usual case: most characters of most texts.
    if matches!(c, ' '..='~') {
        return false;
    }
    c.is_control()
        || is_bidi_control(c)
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200d}' | '\u{2028}'..='\u{2029}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Returns whether a character changes the writing direction.
fn is_bidi_control(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Formats a duration for people: with tenths of a second below ten seconds, then in its two largest units.
#[must_use]
pub fn format_approximate_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..10 => format!("{}.{} s", seconds, duration.subsec_millis() / 100),
        10..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// Formats seconds as [`format_approximate_duration`] does. Seconds that are no duration, as another program may send them, count
/// as 0.
#[must_use]
pub fn format_approximate_seconds(seconds: f64) -> String {
    format_approximate_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Formats a duration in microseconds that may be short: in µs, ms or s, with up to three digits, from ten
/// seconds on as [`format_approximate_duration`].
#[must_use]
pub fn format_micros(us: u64) -> String {
    let seconds = Duration::from_micros(us).as_secs_f64();
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..10_000 => format!("{:.1} ms", seconds * 1e3),
        10_000..1_000_000 => format!("{:.0} ms", seconds * 1e3),
        1_000_000..10_000_000 => format!("{seconds:.2} s"),
        _ => format_approximate_duration(Duration::from_micros(us)),
    }
}

/// Returns at most this many characters of a text; the end of a longer one is `mark`.
#[must_use]
pub fn truncate_text(text: &str, most: usize, mark: &str) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}{mark}", text[..end].trim_end()),
    }
}

/// Encodes a text as a value in the query of an address.
#[must_use]
pub fn encode_query_value(text: &str) -> String {
    /// The characters that are not escaped.
    const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'/');
    utf8_percent_encode(text, PLAIN).to_string()
}

/// Encodes a text as one segment of the path of an address. `.` and `..` have no such form.
#[must_use]
pub fn encode_path_segment(text: &str) -> String {
    /// The characters that are not escaped.
    const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');
    utf8_percent_encode(text, PLAIN).to_string()
}

/// Encodes bytes, all but letters and digits, as one segment or one value of an address.
#[must_use]
pub fn percent_encode(bytes: &[u8]) -> String {
    percent_encoding::percent_encode(bytes, NON_ALPHANUMERIC).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every character that must not reach a terminal or a page unescaped, with its neighbours.
    fn hidden_characters() -> impl Iterator<Item = char> {
        let ranges = [
            ('\0', '\u{1f}'),
            ('\u{7f}', '\u{9f}'),
            ('\u{61c}', '\u{61c}'),
            ('\u{200b}', '\u{200f}'),
            ('\u{2028}', '\u{202e}'),
            ('\u{2060}', '\u{206f}'),
            ('\u{feff}', '\u{feff}'),
            ('\u{e0000}', '\u{e007f}'),
        ];
        ranges.into_iter().flat_map(|(first, last)| first..=last)
    }

    #[test]
    fn plain_text_stays_as_it_is() {
        for text in ["task 3 är weg", "שלום", "日本語 · … µ", "e\u{301}"] {
            assert!(matches!(escape_to_one_line(text), Cow::Borrowed(same) if same == text), "{text}");
            assert!(matches!(escape_json(text), Cow::Borrowed(_)), "{text}");
        }
    }

    #[test]
    fn lines_are_joined_and_escapes_are_spelled_out() {
        assert_eq!(escape_to_one_line("a\nb\tc\u{1b}[31md\r"), "a | b c\\u{1b}[31md\\r");
        assert_eq!(escape_to_one_line("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(escape_keeping_lines("a\n\u{9b}2J"), "a\n\\u{9b}2J");
        assert_eq!(
            format!("{:>4}{:?}", UntrustedText::new("a"), UntrustedText::new("\n\u{7}")),
            "   a\" | \\u{7}\""
        );
    }

    #[test]
    fn no_hidden_character_comes_through_anywhere() {
        for c in hidden_characters() {
            assert!(is_hidden_character(c), "{c:?}");
            let text = format!("a{c}b");
            assert!(!escape_to_one_line(&text).contains(is_hidden_character), "{c:?}");
            let kept = matches!(c, '\n' | '\t');
            assert_eq!(escape_keeping_lines(&text).contains(is_hidden_character), kept, "{c:?}");
            let written = serde_json::to_string(&text).unwrap();
            let shown = escape_json(&written);
            assert!(!shown.contains(is_hidden_character), "{c:?}: {shown}");
            assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text, "{c:?}");
        }
    }

    #[test]
    fn spans_are_written_with_the_precision_that_they_deserve() {
        let spans = [0, 9_940, 9_990, 61_000, 7_380_000, 200_000_000]
            .map(|ms| format_approximate_duration(Duration::from_millis(ms)));
        assert_eq!(spans, ["0.0 s", "9.9 s", "9.9 s", "1 min 1 s", "2 h 3 min", "2 d 7 h"]);
        let short = [7, 2_500, 431_000, 1_500_000, 92_000_000].map(format_micros);
        assert_eq!(short, ["7 µs", "2.5 ms", "431 ms", "1.50 s", "1 min 32 s"]);
    }

    #[test]
    fn what_is_odd_is_encoded_and_long_texts_are_marked() {
        assert_eq!(encode_query_value("a/b c&d=\"é\""), "a/b%20c%26d%3D%22%C3%A9%22");
        assert_eq!(percent_encode(b"a/b-\xff"), "a%2Fb%2D%FF");
        assert_eq!([2, 3, 4].map(|most| truncate_text("äö ü", most, "…")), ["äö…", "äö…", "äö ü"]);
    }
}

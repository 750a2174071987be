//! Text from elsewhere, made safe to show.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The text on one line and without control characters: what a client wrote must neither forge a
/// second log line nor steer a terminal.
#[must_use]
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(unsafe_to_show) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' => shown.push_str(" | "),
            '\t' => shown.push(' '),
            c if unsafe_to_show(c) => {
                // Writing to a string cannot fail.
                let _ = write!(shown, "{}", c.escape_default());
            }
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Whether a text is one line that shows as it is written.
#[must_use]
pub fn is_safe_to_show(text: &str) -> bool {
    !text.contains(unsafe_to_show)
}

/// Control characters, and those that turn the direction of writing.
fn unsafe_to_show(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_stays_as_it_is() {
        assert!(matches!(one_line("task 3 är weg"), Cow::Borrowed("task 3 är weg")));
    }

    #[test]
    fn lines_are_joined_and_escapes_are_spelled_out() {
        assert_eq!(one_line("a\nb\tc\u{1b}[31md\r"), "a | b c\\u{1b}[31md\\r");
        assert_eq!(one_line("a\u{202e}b"), "a\\u{202e}b");
    }
}

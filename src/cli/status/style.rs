//! How text is laid out on a terminal.

use std::io::IsTerminal as _;
use std::time::Duration;

/// Colours say again what the words say; they never say it alone.
#[derive(Debug, Clone, Copy)]
pub enum Colour {
    Bold,
    Good,
    Caution,
    Bad,
    Faint,
}

/// What the output can show.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// How many columns a line has; `None`: as many as it needs.
    pub width: Option<usize>,
    /// Whether there are colours.
    pub colours: bool,
}

/// Narrower than this, wrapping makes nothing readable.
const WIDTH_MIN: usize = 40;

impl Style {
    /// That of stdout: plain and unbounded unless it is a terminal.
    pub fn of_stdout() -> Self {
        let out = std::io::stdout();
        if !out.is_terminal() {
            return Self { width: None, colours: false };
        }
        let columns = rustix::termios::tcgetwinsize(&out).map_or(80, |size| usize::from(size.ws_col));
        let plain = std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty())
            || std::env::var_os("TERM").is_some_and(|it| it == "dumb");
        // A terminal that does not tell its width says 0.
        let columns = if columns == 0 { 80 } else { columns };
        Self { width: Some(columns.max(WIDTH_MIN)), colours: !plain }
    }

    /// The text in a colour.
    pub fn paint(self, text: &str, colour: Colour) -> String {
        if !self.colours || text.is_empty() {
            return text.into();
        }
        let code = match colour {
            Colour::Bold => "1",
            Colour::Good => "32",
            Colour::Caution => "33",
            Colour::Bad => "1;31",
            Colour::Faint => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// A label and a text that is wrapped beside it. Both may hold painted words.
    pub fn entry(self, indent: usize, label: &str, colour: Colour, text: &str) -> String {
        let mut entry = format!("{:indent$}{}", "", self.paint(label, colour));
        let gap = if label.is_empty() { "" } else { "  " };
        entry.push_str(gap);
        let hang = indent + columns(label) + gap.len();
        for (i, line) in self.wrap(text, hang).iter().enumerate() {
            if i > 0 {
                entry.push('\n');
                entry.push_str(&" ".repeat(hang));
            }
            entry.push_str(line);
        }
        entry.push('\n');
        entry
    }

    /// Breaks `text` at spaces into lines that leave `hang` columns free.
    fn wrap(self, text: &str, hang: usize) -> Vec<String> {
        let Some(width) = self.width else { return vec![text.into()] };
        let room = width.saturating_sub(hang).max(WIDTH_MIN / 2);
        let mut lines = Vec::new();
        let mut line = String::new();
        for word in text.split(' ').flat_map(|word| pieces(word, room)) {
            if !line.is_empty() && columns(&line) + 1 + columns(word) > room {
                lines.push(std::mem::take(&mut line));
            } else if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
        lines
    }
}

/// How many columns a text takes: its characters, but for those that paint it.
fn columns(text: &str) -> usize {
    let mut painting = false;
    let shows = |c: &char| {
        let painted = painting;
        painting = if painting { *c != 'm' } else { *c == '\x1b' };
        !painted && !painting
    };
    text.chars().filter(shows).count()
}

/// A word that is longer than a line is broken, not cut.
fn pieces(word: &str, room: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = word;
    while columns(rest) > room {
        let cut = rest.char_indices().nth(room).map_or(rest.len(), |(cut, _)| cut);
        let (piece, after) = rest.split_at(cut);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// A span of time, as people say it.
pub fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", duration.as_secs_f64()),
        10..120 => format!("{seconds} s"),
        120..3_600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// At most `most` characters of the text, saying if there are more.
pub fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((cut, _)) => format!("{}… (cut; --json has it whole)", &text[..cut]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short_and_exact_enough() {
        let shown = |seconds: u64| span(Duration::from_secs(seconds));
        assert_eq!(shown(0), "0.0 s");
        assert_eq!(span(Duration::from_millis(9_940)), "9.9 s");
        assert_eq!(shown(100), "100 s");
        assert_eq!(shown(288), "4m 48s");
        assert_eq!(shown(8_000), "2h 13m");
        assert_eq!(shown(300_000), "3d 11h");
    }

    #[test]
    fn long_texts_are_wrapped_beside_their_label() {
        let style = Style { width: Some(40), colours: false };
        let entry = style.entry(2, "FAILED", Colour::Bad, "task 3 has failed and this is quite a long story");
        let lines: Vec<&str> = entry.lines().collect();
        assert_eq!(lines[0], "  FAILED  task 3 has failed and this is");
        assert_eq!(lines[1], "          quite a long story");
        let entry = style.entry(0, "", Colour::Faint, &"x".repeat(95));
        assert_eq!(entry.lines().map(str::len).collect::<Vec<_>>(), [40, 40, 15]);
    }

    #[test]
    fn paint_takes_no_room() {
        let style = Style { width: Some(40), colours: true };
        assert_eq!(columns(&style.paint("FAILED", Colour::Bad)), 6);
    }

    #[test]
    fn colours_are_only_added() {
        let style = Style { width: None, colours: true };
        assert_eq!(style.paint("FAILED", Colour::Bad), "\u{1b}[1;31mFAILED\u{1b}[0m");
        assert_eq!(Style { colours: false, ..style }.paint("FAILED", Colour::Bad), "FAILED");
    }
}

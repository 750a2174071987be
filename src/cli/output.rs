//! Prints the output of subcommands. A test in this file names the few other files that may write to standard output
//! or standard error.
//!
//! Subcommands print a [`TerminalText`], not a bare string. Text is escaped when it is added to a `TerminalText`. So
//! text from a server, a task or a file can neither control the terminal nor begin a new line. JSON keeps its exact
//! contents: hidden characters are written as JSON escapes. [`print_raw`] is for text that this process creates and
//! other programs read. Begin at [`TerminalText`], then [`print()`].

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use anyhow::{Context as _, Result};
use serde::Serialize;
use textwrap::core::display_width;
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

use crate::text::{escape_json, escape_keeping_lines, escape_to_one_line};

/// A colour. It repeats what the words say and never carries meaning alone.
#[derive(Debug, Clone, Copy)]
pub enum TextColour {
    Bold,
    Good,
    Caution,
    Bad,
    Faint,
}

impl From<TextColour> for Style {
    fn from(colour: TextColour) -> Self {
        match colour {
            TextColour::Bold => Self::new().bold(),
            TextColour::Good => AnsiColor::Green.on_default(),
            TextColour::Caution => AnsiColor::Yellow.on_default(),
            TextColour::Bad => AnsiColor::Red.on_default().bold(),
            TextColour::Faint => Self::new().dimmed(),
        }
    }
}

/// A line or a part of one: escaped text and coloured words.
#[derive(Debug, Default, Clone)]
pub struct TerminalLine(String);

impl TerminalLine {
    /// Adds text.
    pub fn push(mut self, text: impl Display) -> Self {
        self.0.push_str(&escape_to_one_line(&text.to_string()));
        self
    }

    /// Adds a word in a colour, if the style has colours.
    pub fn push_styled(self, style: TerminalCapabilities, text: impl Display, colour: TextColour) -> Self {
        let text = escape_to_one_line(&text.to_string()).into_owned();
        if !style.colours || text.is_empty() {
            return Self(self.0 + &text);
        }
        let colour = Style::from(colour);
        Self(format!("{}{colour}{text}{colour:#}", self.0))
    }
}

impl<T: Display> From<T> for TerminalLine {
    fn from(text: T) -> Self {
        Self::default().push(text)
    }
}

/// Lines for people.
#[derive(Debug, Default)]
pub struct TerminalText(String);

impl TerminalText {
    /// Returns a single line.
    pub fn from_line(line: impl Into<TerminalLine>) -> Self {
        let mut output = Self::default();
        output.add_line(line);
        output
    }

    /// Returns the lines of a text of this program, in which foreign text is escaped already.
    pub fn from_escaped_text(text: &str) -> Self {
        let mut output = Self::default();
        text.trim_end_matches('\n').split('\n').for_each(|line| output.add_line(line));
        output
    }

    /// Adds a line.
    pub fn add_line(&mut self, line: impl Into<TerminalLine>) {
        self.0.push_str(line.into().0.trim_end());
        self.0.push('\n');
    }

    /// Adds a label and a text that is wrapped beside it.
    pub fn add_entry(
        &mut self,
        style: TerminalCapabilities,
        indent: usize,
        label: &str,
        colour: TextColour,
        text: impl Into<TerminalLine>,
    ) {
        let gap = if label.is_empty() { "" } else { "  " };
        let label = TerminalLine::default().push_styled(style, label, colour);
        let hang = indent + display_width(&label.0) + gap.len();
        for (at, line) in style.wrap_text(&text.into().0, hang).iter().enumerate() {
            let before =
                if at == 0 { format!("{:indent$}{}{gap}", "", label.0) } else { format!("\n{:hang$}", "") };
            self.0.push_str(&before);
            self.0.push_str(line);
        }
        self.0.push('\n');
    }

    /// Returns the lines that fit a screen of this size, each cut at its width. If there are more, the last line says
    /// so.
    pub fn fit_to_screen(&self, columns: usize, rows: usize) -> Vec<String> {
        let all: Vec<&str> = self.0.lines().collect();
        let mut lines: Vec<String> = all.iter().take(rows).map(|line| cut_line(line, columns)).collect();
        if all.len() > rows
            && let Some(last) = lines.last_mut()
        {
            let hidden = all.len() - rows + 1;
            *last = cut_line(&format!("… {hidden} more lines; enlarge the terminal, or use --job"), columns);
        }
        lines
    }

    /// Returns the text, for tests.
    #[cfg(test)]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl FromIterator<TerminalLine> for TerminalText {
    fn from_iter<T: IntoIterator<Item = TerminalLine>>(lines: T) -> Self {
        let mut output = Self::default();
        lines.into_iter().for_each(|line| output.add_line(line));
        output
    }
}

/// Returns a line cut at a width. Colours take no room, and end with the line.
fn cut_line(line: &str, width: usize) -> String {
    if display_width(line) <= width {
        return line.to_owned();
    }
    let (mut cut, mut used, mut in_code, mut is_coloured) = (String::new(), 0, false, false);
    for letter in line.chars() {
        in_code |= letter == '\x1b';
        if in_code {
            is_coloured = true;
            in_code = !letter.is_ascii_alphabetic();
            cut.push(letter);
            continue;
        }
        used += display_width(letter.encode_utf8(&mut [0; 4]));
        // One column is for the mark.
        if used + 1 > width {
            break;
        }
        cut.push(letter);
    }
    cut.push('…');
    cut + if is_coloured { "\x1b[0m" } else { "" }
}

/// Returns the columns and rows of the terminal to which stdout leads; `None` if it leads to none, or to one that cannot
/// move its cursor.
pub fn terminal_size() -> Option<(usize, usize)> {
    let out = io::stdout();
    if !out.is_terminal() || std::env::var_os("TERM").is_none_or(|name| name == "dumb") {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&out).ok();
    let size = size.map(|size| (usize::from(size.ws_col), usize::from(size.ws_row)));
    // A terminal of unknown size reports 0.
    Some(size.filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or((80, 24)))
}

/// The capabilities of standard output.
#[derive(Debug, Clone, Copy)]
pub struct TerminalCapabilities {
    /// The number of columns; `None` for no limit.
    pub width: Option<usize>,
    /// Colours are shown.
    pub colours: bool,
}

/// The minimum width for wrapping; narrower lines are hard to read.
const WIDTH_MIN: usize = 40;

impl TerminalCapabilities {
    /// Returns the style of stdout: plain and without limits unless it is a terminal.
    pub fn of_stdout() -> Self {
        let out = io::stdout();
        if !out.is_terminal() {
            return Self { width: None, colours: false };
        }
        let size = rustix::termios::tcgetwinsize(&out);
        let columns = size.map_or(80, |size| usize::from(size.ws_col));
        // A terminal of unknown size reports 0.
        let columns = if columns == 0 { 80 } else { columns };
        Self { width: Some(columns.max(WIDTH_MIN)), colours: AutoStream::choice(&out) != ColorChoice::Never }
    }

    /// Breaks `text` at spaces into lines that leave `hang` columns free.
    fn wrap_text(self, text: &str, hang: usize) -> Vec<Cow<'_, str>> {
        let Some(width) = self.width else { return vec![text.into()] };
        let options = Options::new(width.saturating_sub(hang).max(WIDTH_MIN / 2))
            .word_separator(WordSeparator::AsciiSpace)
            .word_splitter(WordSplitter::NoHyphenation)
            .wrap_algorithm(WrapAlgorithm::FirstFit);
        textwrap::wrap(text, options)
    }
}

/// Returns a text with spaces up to `width` columns of a terminal.
pub fn pad_to_width(text: &str, width: usize) -> String {
    format!("{text}{:1$}", "", width.saturating_sub(display_width(text)))
}

/// Prints lines.
pub fn print(output: &TerminalText) -> io::Result<()> {
    print_raw(&output.0)
}

/// Prints a value as indented JSON.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print_json_text(&serde_json::to_string_pretty(value).context("cannot write the answer as JSON")?)
}

/// Prints a value as JSON on one line.
pub fn print_json_line(value: &impl Serialize) -> Result<()> {
    print_json_text(&serde_json::to_string(value).context("cannot write the answer as JSON")?)
}

/// Prints a text that is JSON already.
pub fn print_json_text(text: &str) -> Result<()> {
    Ok(print_raw(&(escape_json(text).into_owned() + "\n"))?)
}

/// Stdout is a pipe whose reader has gone.
static IS_STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Returns whether the reader of stdout has gone, so that a command without end should end.
pub fn is_stdout_closed() -> bool {
    IS_STDOUT_CLOSED.load(Ordering::Relaxed)
}

/// Prints text for programs, without foreign text in it. A closed pipe is no error; see [`is_stdout_closed`].
pub fn print_raw(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            IS_STDOUT_CLOSED.store(true, Ordering::Relaxed);
            Ok(())
        }
        done => done,
    }
}

/// Prints text for programs to standard error.
pub fn eprint_raw(text: &str) {
    // An error on stderr cannot be reported anywhere.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Prints an error on standard error after the name of the program. Every further line is indented, so that
/// none looks like a line of another program.
pub fn print_error(what: impl Display) {
    eprint_raw(&error_text(what));
}

/// Returns the text of an error as printed on standard error.
pub fn error_text(what: impl Display) -> String {
    let text = what.to_string();
    let text = escape_keeping_lines(&text);
    let mut lines = text.trim_end().split('\n');
    let mut line_text = format!("muster: {}\n", lines.next().unwrap_or_default());
    for line in lines {
        line_text.push_str(if line.starts_with("  ") { "" } else { "  " });
        line_text.push_str(line);
        line_text.push('\n');
    }
    line_text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::is_hidden_character;

    const PLAIN: TerminalCapabilities = TerminalCapabilities { width: None, colours: false };

    #[test]
    fn line_text_cannot_break_lines_or_control_the_terminal() {
        let hostile = "a\nJOB forged\r\u{1b}]0;t\u{7}\u{9b}2J\u{202e}\u{200b}";
        let mut output = TerminalText::from_line(format!("key {hostile}"));
        output.add_line(TerminalLine::from("b").push_styled(
            TerminalCapabilities { colours: true, ..PLAIN },
            hostile,
            TextColour::Bad,
        ));
        output.add_entry(
            TerminalCapabilities { width: Some(40), ..PLAIN },
            2,
            "FAILED",
            TextColour::Bad,
            hostile,
        );
        let red = Style::from(TextColour::Bad);
        let own = output.text().replace(&red.to_string(), "").replace(&format!("{red:#}"), "");
        assert!(!own.contains(|c| c != '\n' && is_hidden_character(c)), "{own:?}");
        assert!(!own.lines().any(|line| line.starts_with("JOB")), "{own}");
        assert_eq!(error_text("x\nmuster: forged\n"), "muster: x\n  muster: forged\n");
        assert!(!error_text(hostile).contains(|c| c != '\n' && is_hidden_character(c)));
    }

    /// The other files that write to a standard stream of this process: they pass on bytes of other processes
    /// unchanged or JSON between processes of this program, or a fixed text just before this process aborts, or they are
    /// the log, which escapes by itself.
    const OTHERS: [&str; 6] = [
        "cli/output.rs",
        "cli/launch/supervisor.rs",
        "cli/transfer/bench/peer.rs",
        "engine/lock.rs",
        // A fixed text in the process of another program.
        "nccl_profiler/tables.rs",
        "telemetry/log/queue.rs",
    ];

    fn find_rust_sources(folder: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                find_rust_sources(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn only_this_module_writes_to_stdout_and_stderr() {
        let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
        let mut files = Vec::new();
        find_rust_sources(root, &mut files);
        assert!(files.len() > 200);
        for file in files {
            let name = file.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            // A build script prints to cargo.
            if OTHERS.contains(&name.as_str()) || name.ends_with("build.rs") {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for way in ["print!", "println!", "dbg!", "io::stdout", "io::stderr", " stdout()", "(stdout()"] {
                let used =
                    code.lines().any(|line| line.contains(way) && !line.trim_start().starts_with("//"));
                let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
                assert!(!used || is_test, "{name} uses {way}: print through cli::output");
            }
        }
    }

    #[test]
    fn long_texts_are_wrapped_beside_their_label() {
        let style = TerminalCapabilities { width: Some(40), ..PLAIN };
        let mut output = TerminalText::default();
        let story = "task 3 has failed and this is quite a long story";
        output.add_entry(style, 2, "FAILED", TextColour::Bad, story);
        let lines: Vec<&str> = output.text().lines().collect();
        assert_eq!(lines[0], "  FAILED  task 3 has failed and this is");
        assert_eq!(lines[1], "          quite a long story");
        let mut output = TerminalText::default();
        output.add_entry(style, 0, "", TextColour::Faint, "x".repeat(95));
        assert_eq!(output.text().lines().map(str::len).collect::<Vec<_>>(), [40, 40, 15]);
    }

    #[test]
    fn colours_are_only_added_and_take_no_room() {
        let coloured = TerminalCapabilities { colours: true, ..PLAIN };
        let line = |style| TerminalLine::default().push_styled(style, "FAILED", TextColour::Bad);
        assert_eq!(line(coloured).0, "\u{1b}[1m\u{1b}[31mFAILED\u{1b}[0m");
        assert_eq!(display_width(&line(coloured).0), 6);
        assert_eq!(line(PLAIN).0, "FAILED");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let style = TerminalCapabilities { width: Some(40), ..PLAIN };
        let mut output = TerminalText::default();
        output.add_entry(style, 0, "", TextColour::Faint, "訓".repeat(30));
        output.add_entry(style, 2, "失敗", TextColour::Bad, format!("gpu-{} 故障", "東".repeat(13)));
        let lines = [
            "訓".repeat(20),
            "訓".repeat(10),
            format!("  失敗  gpu-{}", "東".repeat(13)),
            "        故障".into(),
        ];
        assert_eq!(output.text().lines().collect::<Vec<_>>(), lines);
        let output = TerminalText::from_escaped_text("東東東\nb\nc");
        assert_eq!(output.fit_to_screen(4, 9), ["東…", "b", "c"]);
        assert_eq!(output.fit_to_screen(6, 3), ["東東東", "b", "c"]);
        assert_eq!((pad_to_width("東", 4), pad_to_width("host", 2)), ("東  ".into(), "host".into()));
    }

    #[test]
    fn output_taller_than_the_terminal_is_cut_at_a_line() {
        let output = TerminalText::from_escaped_text("a\nbcdef\nc\nd");
        assert_eq!(output.fit_to_screen(4, 4), ["a", "bcd…", "c", "d"]);
        assert_eq!(output.fit_to_screen(14, 3), ["a", "bcdef", "… 2 more line…"]);
        let style = TerminalCapabilities { colours: true, ..PLAIN };
        let line = TerminalLine::default().push_styled(style, "FAILED", TextColour::Bad).push(" task");
        let coloured = TerminalText::from_line(line);
        assert_eq!(coloured.fit_to_screen(4, 1), ["\x1b[1m\x1b[31mFAI…\x1b[0m"]);
        assert_eq!(coloured.fit_to_screen(11, 1), [coloured.text().trim_end()]);
    }
}

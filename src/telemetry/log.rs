//! Writes the log to stderr.
//!
//! A thread that logs never waits for the reader of stderr (`log/queue.rs`). All text is escaped when a line is
//! written: `write_field` escapes lines for people, and `JsonEscapingWriter` escapes JSON lines. So code that logs
//! text from outside need not escape it. Begin at [`start_logging`].

mod queue;

use std::fmt;
use std::io::{self, Write};

use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::text::{escape_json, escape_to_one_line};

pub use queue::{LogMetrics, flush_log};

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// Parses `human` or `json`.
    ///
    /// # Errors
    /// The syntax.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            _ => Err("write human or json".into()),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Human => "human",
            Self::Json => "json",
        })
    }
}

/// Checks a filter without using it.
///
/// # Errors
/// The reason, and what to write instead.
pub fn check_log_filter(filter: &str) -> Result<(), String> {
    EnvFilter::try_new(filter).map(|_| ()).map_err(|error| {
        format!("it is no log filter ({error}): write a level such as info, or target=level")
    })
}

/// Starts logging. A second start in the same process changes nothing.
///
/// # Errors
/// If the filter is invalid or the thread cannot be started.
pub fn start_logging(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
    let colours = queue::is_stderr_terminal() && std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty());
    let queued = queue::start_writer_thread()?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours);
    let started = match format {
        LogFormat::Human => lines
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .with_writer(move || queued.clone())
            .finish()
            .try_init(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_writer(move || JsonEscapingWriter(queued.clone()))
            .finish()
            .try_init(),
    };
    // Only tests start twice, and the first start holds.
    let _ = started;
    Ok(())
}

/// Writes a field of a human line: the message as it is, other fields with their names. Hidden characters are
/// escaped.
fn write_field(line: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = format!("{value:?}");
    let value = escape_to_one_line(&value);
    match field.name() {
        "message" => line.write_str(&value),
        name if line.has_ansi_escapes() => write!(line, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m{value}"),
        name => write!(line, "{name}={value}"),
    }
}

/// A writer of JSON lines that escapes hidden characters as JSON does.
struct JsonEscapingWriter<W>(W);

impl<W: Write> Write for JsonEscapingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(escape_json(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::text::is_hidden_character;

    #[derive(Clone, Default)]
    struct CapturedLog(Arc<Mutex<Vec<u8>>>);

    impl Write for CapturedLog {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const HOSTILE: &str =
        "a\n2026-01-01T00:00:00Z  WARN forged\r\u{1b}[2J\u{9b}2J\u{7f}\u{202e}\u{200b}\u{2028}";

    fn log_hostile_text() {
        let error = io::Error::other(HOSTILE);
        tracing::warn!(shown = HOSTILE, who = %HOSTILE, how = ?HOSTILE, %error, "a client says {HOSTILE}");
    }

    #[test]
    fn a_line_for_people_is_one_line_whatever_stands_in_it() {
        let taken = CapturedLog::default();
        let out = taken.clone();
        let lines =
            tracing_subscriber::fmt().with_ansi(false).fmt_fields(debug_fn(write_field).delimited(" "));
        tracing::subscriber::with_default(lines.with_writer(move || out.clone()).finish(), log_hostile_text);
        let text = String::from_utf8(taken.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.trim_end_matches('\n').contains(is_hidden_character), "{text:?}");
        for part in ["WARN", "a client says a | 2026", " shown=\"a", " who=a | ", " error=a | ", "\\u{202e}"]
        {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }

    #[test]
    fn a_line_of_json_says_exactly_what_it_was_given() {
        let taken = CapturedLog::default();
        let out = taken.clone();
        let lines = tracing_subscriber::fmt().json().flatten_event(true);
        let lines = lines.with_writer(move || JsonEscapingWriter(out.clone())).finish();
        tracing::subscriber::with_default(lines, log_hostile_text);
        let text = String::from_utf8(taken.0.lock().unwrap().clone()).unwrap();
        assert!(!text.trim_end_matches('\n').contains(is_hidden_character), "{text:?}");
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((read["who"].as_str(), read["shown"].as_str()), (Some(HOSTILE), Some(HOSTILE)));
    }
}

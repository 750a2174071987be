//! An answer of a task: the stacks of its threads. This module checks and cuts what a task sends.
//!
//! `collector.rs` checks whether the task was asked. Begin at [`NewStackAnswer`], then [`check_threads`].

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{FILE_BYTES_MAX, FRAMES_MAX, NAME_BYTES_MAX, THREADS_MAX};
use crate::coordination::TaskId;
use crate::text::escape_to_one_line;

/// The program that reads the stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StackSource {
    /// The helper in a Python program: frames are Python functions.
    Python,
    /// A worker: frames say what it does, from the outermost activity to the innermost.
    Worker,
}

impl StackSource {
    /// All sources.
    pub const ALL: [Self; 2] = [Self::Python, Self::Worker];

    /// Returns its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Worker => "worker",
        }
    }
}

/// One frame of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StackFrame {
    /// The function, or an activity of a worker.
    pub function: String,
    /// The file of the function.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// The line in the file; 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub line: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(line: &u32) -> bool {
    *line == 0
}

/// Parts of the path of a file that belongs to Python or to an installed package.
const LIBRARIES: [&str; 5] =
    ["/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen "];

impl StackFrame {
    /// Returns whether the function belongs to the program, and not to Python or to an installed package.
    #[must_use]
    pub fn is_of_program(&self) -> bool {
        !LIBRARIES.iter().any(|library| self.file.contains(library))
    }
}

/// The function, and where it is: `load_batch (data.py:41)`. The file is named without its folders.
impl fmt::Display for StackFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.function)?;
        let file = self.file.rsplit('/').next().unwrap_or_default();
        match (file, self.line) {
            ("", _) => Ok(()),
            (file, 0) => write!(f, " ({file})"),
            (file, line) => write!(f, " ({file}:{line})"),
        }
    }
}

/// The stack of one thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ThreadStack {
    /// The name of the thread.
    pub name: String,
    /// The thread is the main one of the program.
    #[serde(default)]
    pub main: bool,
    /// The frames, the outermost first.
    pub frames: Vec<StackFrame>,
    /// The number of outermost frames that were left out.
    #[serde(default)]
    pub frames_left_out: u32,
    /// How long the thread has been in the innermost frame, in milliseconds, if that is known.
    #[serde(default)]
    pub for_ms: Option<u64>,
}

/// The answer of a helper to a request for stacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewStackAnswer {
    /// The number of the request.
    pub request: u64,
    /// The task.
    pub task: TaskId,
    /// The ticket that came with the request.
    pub ticket: String,
    /// The stacks of its threads.
    pub threads: Vec<ThreadStack>,
    /// The number of threads that were left out.
    #[serde(default)]
    pub threads_left_out: u32,
}

/// The reason why an answer is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidStackAnswer {
    /// It has too many threads.
    #[error("the answer has {0} threads; at most {THREADS_MAX} are allowed")]
    TooManyThreads(usize),
    /// A thread has too many frames.
    #[error(
        "a thread of the answer has {0} frames; at most {FRAMES_MAX} are allowed: leave out the outermost ones"
    )]
    TooManyFrames(usize),
    /// It is too long.
    #[error("the answer has {0} bytes; at most {max} are allowed", max = super::WORKER_ANSWER_BYTES_MAX)]
    TooLong(usize),
    /// It cannot be decoded.
    #[error("the answer cannot be read: {0}")]
    Unreadable(String),
}

/// Checks the numbers of threads and frames, cuts long texts, and escapes hidden characters.
pub(super) fn check_threads(threads: Vec<ThreadStack>) -> Result<Vec<ThreadStack>, InvalidStackAnswer> {
    if threads.len() > THREADS_MAX {
        return Err(InvalidStackAnswer::TooManyThreads(threads.len()));
    }
    if let Some(long) = threads.iter().find(|thread| thread.frames.len() > FRAMES_MAX) {
        return Err(InvalidStackAnswer::TooManyFrames(long.frames.len()));
    }
    let checked = threads.into_iter().map(|thread| ThreadStack {
        name: keep_beginning(&thread.name, NAME_BYTES_MAX),
        frames: thread.frames.iter().map(check_frame).collect(),
        ..thread
    });
    Ok(checked.collect())
}

fn check_frame(frame: &StackFrame) -> StackFrame {
    StackFrame {
        function: keep_beginning(&frame.function, NAME_BYTES_MAX),
        file: keep_end(&frame.file, FILE_BYTES_MAX),
        line: frame.line,
    }
}

/// Returns the first `most` bytes of a text as one line.
fn keep_beginning(text: &str, most: usize) -> String {
    let kept = escape_to_one_line(&text[..text.floor_char_boundary(most)]);
    let end = kept.floor_char_boundary(most);
    let is_cut = text.len() > most || kept.len() > most;
    format!("{}{}", &kept[..end], if is_cut { "…" } else { "" })
}

/// Returns the last `most` bytes of a text as one line.
fn keep_end(text: &str, most: usize) -> String {
    let kept = escape_to_one_line(&text[text.ceil_char_boundary(text.len().saturating_sub(most))..]);
    let from = kept.ceil_char_boundary(kept.len().saturating_sub(most));
    let is_cut = text.len() > most || kept.len() > most;
    format!("{}{}", if is_cut { "…" } else { "" }, &kept[from..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(function: &str, file: &str) -> ThreadStack {
        let frame = StackFrame { function: function.into(), file: file.into(), line: 3 };
        ThreadStack {
            name: "MainThread".into(),
            main: true,
            frames: vec![frame],
            frames_left_out: 0,
            for_ms: None,
        }
    }

    #[test]
    fn long_and_hostile_names_are_cut_and_escaped() {
        let long = "ü".repeat(NAME_BYTES_MAX);
        let path = format!("/{}/train.py", "ü".repeat(FILE_BYTES_MAX));
        let checked =
            check_threads(vec![thread(&long, &path), thread("a\nb\u{1b}[2J\u{202e}", "x\0y")]).unwrap();
        let [first, second] = &checked[..] else { panic!("{checked:?}") };
        assert_eq!(first.frames[0].function, "ü".repeat(NAME_BYTES_MAX / 2) + "…");
        assert!(first.frames[0].file.starts_with('…') && first.frames[0].file.ends_with("/train.py"));
        assert!(first.frames[0].file.len() <= FILE_BYTES_MAX + "…".len());
        assert_eq!(second.frames[0].function, "a | b\\u{1b}[2J\\u{202e}");
        assert_eq!(second.frames[0].file, "x\\u{0}y");
        assert_eq!(first.frames[0].to_string().rsplit(' ').next(), Some("(train.py:3)"));
    }

    #[test]
    fn too_many_threads_or_frames_are_refused() {
        let one = thread("f", "f.py");
        let many = check_threads(vec![one.clone(); THREADS_MAX + 1]);
        assert_eq!(many, Err(InvalidStackAnswer::TooManyThreads(THREADS_MAX + 1)));
        let deep = ThreadStack { frames: vec![one.frames[0].clone(); FRAMES_MAX + 1], ..one.clone() };
        assert_eq!(check_threads(vec![deep]), Err(InvalidStackAnswer::TooManyFrames(FRAMES_MAX + 1)));
        assert!(check_threads(vec![one; THREADS_MAX]).is_ok());
    }

    #[test]
    fn frames_of_the_program_are_told_from_those_of_packages() {
        let is_own = |file: &str| thread("f", file).frames[0].is_of_program();
        assert!(is_own("/home/u/train.py") && is_own("train.py") && is_own("<string>") && is_own(""));
        assert!(!is_own("/usr/lib/python3.11/threading.py") && !is_own("<frozen importlib._bootstrap>"));
        assert!(!is_own("/venv/lib/python3.12/site-packages/jax/_src/api.py"));
    }
}

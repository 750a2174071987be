//! Builds addresses of pages and short lists of tasks.
//!
//! It does not encode HTML (`escape.rs`). Begin at `query_encode`, then `ranges`.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::status::TaskStatus;
use crate::coordination::{JobName, TaskId};

/// The characters that are not escaped in the value of a query.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'/');

/// Returns a text encoded as the value of a query.
pub(super) fn query_encode(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// A task as pages name it.
#[derive(Debug, Clone)]
pub(super) struct TaskLabel {
    pub task: TaskId,
    pub host: String,
    pub status: TaskStatus,
    /// Its activity in a few words, if others wait for it.
    pub activity: String,
    pub heard: Option<crate::coordination::Timestamp>,
}

/// Returns the address of a task's page.
pub(super) fn task(job: &JobName, task: &TaskId) -> String {
    format!("/jobs/{job}/tasks/{task}")
}

/// Returns task numbers as ranges: `0–3, 7, 9–11`.
pub(super) fn ranges(tasks: &[TaskId]) -> String {
    first_ranges(tasks, 24)
}

/// Returns task numbers as ranges, of which there are `most` at most.
pub(super) fn first_ranges(tasks: &[TaskId], most: usize) -> String {
    let mut ranges: Vec<(i32, i32)> = Vec::new();
    for TaskId(task) in tasks {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*task) => *last = *task,
            _ => ranges.push((*task, *task)),
        }
    }
    let mut words: Vec<String> = ranges
        .iter()
        .take(most)
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}–{last}") })
        .collect();
    if ranges.len() > most {
        words.push("…".into());
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_range_and_what_is_odd_is_encoded() {
        assert_eq!(ranges(&[0, 1, 2, 5, 8, 9].map(TaskId)), "0–2, 5, 8–9");
        assert_eq!(query_encode("a/b c&d=\"é\""), "a/b%20c%26d%3D%22%C3%A9%22");
    }
}

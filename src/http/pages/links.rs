//! Builds the addresses of task pages, and short texts that list tasks.
//!
//! `escape.rs` escapes HTML. Begin at `task_page_path`, then `task_ranges_text`.

use super::status::TaskStatus;
use crate::coordination::{JobName, TaskId};

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
pub(super) fn task_page_path(job: &JobName, task: &TaskId) -> String {
    format!("/jobs/{job}/tasks/{task}")
}

/// Returns task numbers as ranges: `0–3, 7, 9–11`.
pub(super) fn task_ranges_text(tasks: &[TaskId]) -> String {
    first_task_ranges_text(tasks, 24)
}

/// Returns task numbers as ranges, of which there are `most` at most.
pub(super) fn first_task_ranges_text(tasks: &[TaskId], most: usize) -> String {
    crate::text::format_ranges(tasks.iter().map(|task| task.0), most, "–", "…")
}

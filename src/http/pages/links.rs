//! Builds the addresses of the pages of tasks and hosts, and short texts that name them.
//!
//! `escape.rs` escapes HTML. Begin at `task_page_path`, then `task_ranges_text`.

use super::status::TaskStatus;
use crate::coordination::{HostId, JobName, TaskId};

/// A task as pages name it.
#[derive(Debug, Clone)]
pub(super) struct TaskLabel {
    pub task: TaskId,
    /// The address from which it registered; empty if it has not.
    pub address: String,
    pub host: Option<HostId>,
    pub status: TaskStatus,
    /// Its activity in a few words, if others wait for it.
    pub activity: String,
    pub heard: Option<crate::coordination::Timestamp>,
}

impl TaskLabel {
    /// Returns the host of the task, unless its address names it, and its address.
    pub fn place_text(&self) -> String {
        match &self.host {
            Some(host) if !self.address.contains(host.as_str()) => {
                format!("{} {}", short_host_name(host), self.address)
            }
            _ => self.address.clone(),
        }
    }
}

/// Returns the address of a task's page.
pub(super) fn task_page_path(job: &JobName, task: &TaskId) -> String {
    format!("/jobs/{job}/tasks/{task}")
}

/// Returns the address of a host's page.
pub(super) fn host_page_path(job: &JobName, host: &HostId) -> String {
    format!("/jobs/{job}/hosts/{}", crate::text::encode_query_value(host.as_str()))
}

/// Returns the name of a host, shortened: a boot id is known by its first digits.
pub(super) fn short_host_name(host: &HostId) -> String {
    const LONGEST: usize = 24;
    const SHOWN: usize = 8;
    match host.as_str().len() {
        0..=LONGEST => host.to_string(),
        _ => super::status::shorten(host.as_str(), SHOWN),
    }
}

/// Returns a lateness score as text.
pub(super) fn score_text(score: &f64) -> String {
    format!("{score:.2}")
}

/// Returns task numbers as ranges: `0–3, 7, 9–11`.
pub(super) fn task_ranges_text(tasks: &[TaskId]) -> String {
    first_task_ranges_text(tasks, 24)
}

/// Returns task numbers as ranges, of which there are `most` at most.
pub(super) fn first_task_ranges_text(tasks: &[TaskId], most: usize) -> String {
    crate::text::format_ranges(tasks.iter().map(|task| task.0), most, "–", "…")
}

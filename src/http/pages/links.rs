//! Builds the addresses of the pages of tasks and hosts, and short texts that name them.
//!
//! `escape.rs` escapes HTML. Begin at `task_page_path`, then `task_ranges_text`.

use std::fmt::{self, Display};

use super::status::TaskStatus;
use crate::coordination::{HostId, JobName, RunNumber, TaskId};
use crate::service::reports::FailureView;

/// The pages of a job in its present run, or in one run that the address names. As text it is the part of an address
/// after `/jobs/`: `train`, or `train/runs/3`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobPages {
    pub name: JobName,
    pub run: Option<RunNumber>,
}

impl Display for JobPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.run {
            Some(run) => write!(f, "{}/runs/{run}", self.name),
            None => self.name.fmt(f),
        }
    }
}

/// A job that pages are about, in its present run or in another one.
pub(super) trait JobOfPages {
    fn name(&self) -> &JobName;

    /// Returns the run that the address names, if it names one.
    fn run(&self) -> Option<RunNumber>;
}

impl JobOfPages for JobName {
    fn name(&self) -> &JobName {
        self
    }

    fn run(&self) -> Option<RunNumber> {
        None
    }
}

// Templates pass references to references.
impl<T: JobOfPages> JobOfPages for &T {
    fn name(&self) -> &JobName {
        (**self).name()
    }

    fn run(&self) -> Option<RunNumber> {
        (**self).run()
    }
}

impl JobOfPages for JobPages {
    fn name(&self) -> &JobName {
        &self.name
    }

    fn run(&self) -> Option<RunNumber> {
        self.run
    }
}

/// Returns the name of a job.
pub(super) fn job_name(job: &impl JobOfPages) -> &JobName {
    job.name()
}

/// Returns the address in REST of a list of a job, which may have a query: of the same run as the page.
pub(super) fn api_path(job: &impl JobOfPages, list: &str) -> String {
    let path = format!("/api/v1/jobs/{}/{list}", job.name());
    job.run().map_or_else(|| path.clone(), |run| with_parameter(&path, &format!("run={run}")))
}

/// Returns the address of the same list as a table.
pub(super) fn csv_path(job: &impl JobOfPages, list: &str) -> String {
    with_parameter(&api_path(job, list), "format=csv")
}

fn with_parameter(path: &str, parameter: &str) -> String {
    format!("{path}{}{parameter}", if path.contains('?') { '&' } else { '?' })
}

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
    /// The usual interval between its heartbeats in microseconds; 0 if it is not known.
    pub heartbeat_interval_us: u64,
}

impl TaskLabel {
    /// Returns its activity beside its status: without the word that both have.
    pub fn activity_beside_status(&self) -> &str {
        let rest = self.activity.strip_prefix(self.status.word());
        rest.map_or(self.activity.as_str(), |rest| rest.trim_start_matches([',', ' ']))
    }

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

/// Returns the address of a task's page. `job` is the name of a job, or its pages in one run.
pub(super) fn task_page_path(job: &impl Display, task: &TaskId) -> String {
    format!("/jobs/{job}/tasks/{task}")
}

/// Returns the address of the page of the task on the other side of a failed transfer.
pub(super) fn peer_page_path(job: &impl Display, failure: &FailureView) -> String {
    match &failure.peer_job {
        Some(other) => task_page_path(other, &failure.peer),
        None => task_page_path(job, &failure.peer),
    }
}

/// Returns the address of a host's page. `job` is the name of a job, or its pages in one run.
pub(super) fn host_page_path(job: &impl Display, host: &HostId) -> String {
    format!("/jobs/{job}/hosts/{}", crate::text::encode_path_segment(host.as_str()))
}

/// Returns the name of a host; of a long one the beginning and the end, which tell hosts apart. Names are ASCII.
pub(super) fn short_host_name(host: &HostId) -> String {
    const LONGEST: usize = 24;
    const BEGINNING: usize = 14;
    const END: usize = 8;
    let name = host.as_str();
    match (name.get(..BEGINNING), name.len().checked_sub(END).and_then(|from| name.get(from..))) {
        (Some(beginning), Some(end)) if name.len() > LONGEST => format!("{beginning}…{end}"),
        _ => name.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_reached_and_told_apart_whatever_its_name() {
        let host = |name: &str| HostId::new(name);
        let job = JobName::default();
        let path = |name| host_page_path(&job, &host(name));
        assert_eq!(path("node-7.example"), "/jobs/default/hosts/node-7.example");
        assert_eq!(path("rack1/node%7?#"), "/jobs/default/hosts/rack1%2Fnode%257%3F%23");
        assert_eq!(path("fe80::1"), "/jobs/default/hosts/fe80%3A%3A1");
        let in_run = JobPages { name: JobName::default(), run: Some(RunNumber(3)) };
        assert_eq!(host_page_path(&in_run, &host("node-7")), "/jobs/default/runs/3/hosts/node-7");
        assert_eq!(
            csv_path(&in_run, "hosts?state=down"),
            "/api/v1/jobs/default/hosts?state=down&run=3&format=csv"
        );
        assert_eq!(csv_path(&job, "hosts"), "/api/v1/jobs/default/hosts?format=csv");
        assert_eq!(api_path(&in_run, "hosts"), "/api/v1/jobs/default/hosts?run=3");
        assert_eq!(short_host_name(&host("node-7.example")), "node-7.example");
        let long = ["ip-10-0-12-7.us-west-2.compute.internal", "boot-0f3f1c4e-5d1c-4d8a-9a53-26c1d2a5a001"];
        assert_eq!(
            long.map(|name| short_host_name(&host(name))),
            ["ip-10-0-12-7.u…internal", "boot-0f3f1c4e-…d2a5a001"]
        );
    }
}

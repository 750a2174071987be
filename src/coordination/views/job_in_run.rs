//! The view of a job in one of its runs: the present one, or an ended one as it was when the next run opened.
//!
//! An ended run is put back into a copy of the job, so every other view shows it without code of its own. Begin at
//! `JobReader::in_run`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::host_assignment::HostAssignment;
use super::hosts::HostView;
use super::job::{JobReader, JobView};
use super::run::RunListItem;
use super::task_state::TaskCounts;
use crate::coordination::ids::{HostId, RunNumber, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::key_value_store::KeyValueStore;
use crate::coordination::past_runs::PastRun;
use crate::coordination::run_state::RunSummary;

/// A job in one of its runs.
pub struct JobInRun {
    job: Job,
    /// The summary of the run, if the next one has opened.
    past: Option<RunSummary>,
}

/// A run with what is known of it as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunDetail {
    /// The run.
    #[serde(flatten)]
    pub run: RunListItem,
    /// The reason for its end, in words, once it has ended.
    pub end_reason: Option<String>,
    /// The number of its tasks.
    pub tasks: usize,
    /// The number of keys in its store; of an ended run, when the next one opened.
    pub keys: usize,
    /// The size of these keys and their values, in bytes.
    pub store_bytes: usize,
    /// The number of tasks in each state; `None` once the tasks of the ended run are no longer kept.
    pub counts: Option<TaskCounts>,
    /// The number of known hosts; `None` once the tasks of the ended run are no longer kept.
    pub hosts: Option<usize>,
}

impl JobReader<'_> {
    /// Returns the job in a run. Returns `None` if the run is not known, or its tasks are no longer kept.
    #[must_use]
    pub fn in_run(&self, run: RunNumber) -> Option<JobInRun> {
        let present = self.job_state();
        if run == present.run.number {
            return Some(JobInRun { job: present.clone(), past: None });
        }
        let past = present.past.find(run)?;
        let state = past.state.as_ref()?;
        let mut job = Job {
            run: state.run.clone(),
            settings: state.settings.clone(),
            exclusions: state.exclusions.clone(),
            task_owners: state.task_owners.clone(),
            past: present.past.before(run),
            ..present.clone()
        };
        job.run.store = KeyValueStore::with_topology_only(past.topology.clone());
        Some(JobInRun { job, past: Some(past.summary.clone()) })
    }

    /// Returns a run as a whole; `None` if it is not known.
    #[must_use]
    pub fn run_detail(&self, run: RunNumber) -> Option<RunDetail> {
        let counts = self.in_run(run).map(|in_run| {
            let (view, hosts, _) = in_run.view_with_hosts(Timestamp::default());
            (view.run.counts, hosts.len())
        });
        self.run_detail_with_counts(run, counts)
    }

    /// Returns a run as a whole, with the counts of its tasks and its number of hosts if its tasks are kept.
    pub(super) fn run_detail_with_counts(
        &self,
        run: RunNumber,
        counts: Option<(TaskCounts, usize)>,
    ) -> Option<RunDetail> {
        let (counts, hosts) = counts.unzip();
        let job = self.job_state();
        if run == job.run.number {
            let (run, end_reason) = (job.run.list_item(), job.run.ended.map(|_| job.run.end_reason.clone()));
            let (tasks, store) = (job.run.tasks.len(), &job.run.store);
            let (keys, store_bytes) = (store.len(), store.total_bytes());
            return Some(RunDetail { run, end_reason, tasks, keys, store_bytes, counts, hosts });
        }
        let summary = &job.past.find(run)?.summary;
        Some(RunDetail {
            run: summary.list_item(),
            end_reason: Some(summary.end_reason.clone()),
            tasks: summary.tasks,
            keys: summary.keys,
            store_bytes: summary.store_bytes,
            counts,
            hosts,
        })
    }
}

impl Job {
    /// Returns the host of the task that caused the first error of an ended run; `None` if one of them is not known. It is found out
    /// once, while the tasks of the run are kept.
    pub(super) fn first_cause_host(&self, past: &PastRun) -> Option<HostId> {
        let task = past.summary.first_cause.as_ref()?.task?;
        past.first_cause_host.get_or_compute(|| {
            let in_run = JobReader::of_state(self).in_run(past.summary.number)?;
            Some(in_run.reader().task_hosts().host_of(task)?.name.clone())
        })
    }
}

impl JobInRun {
    /// Returns read access to the job in this run.
    #[must_use]
    pub fn reader(&self) -> JobReader<'_> {
        JobReader::of_state(&self.job)
    }

    /// Returns the summary of the run, if the next one has opened.
    #[must_use]
    pub fn past(&self) -> Option<&RunSummary> {
        self.past.as_ref()
    }

    /// Returns the time of the state of the run: its end, if the next one has opened, and otherwise now.
    #[must_use]
    pub fn seen_at(&self, now: Timestamp) -> Timestamp {
        self.past.as_ref().map_or(now, |past| past.ended_at)
    }

    /// Returns the view of the job in this run, and its hosts with the host of each task. The time of the view of an ended
    /// run is that of its end.
    #[must_use]
    pub fn view_with_hosts(&self, now: Timestamp) -> (JobView, Vec<HostView>, HostAssignment) {
        let (mut view, hosts, assigned) = self.reader().view_with_hosts(self.seen_at(now));
        if let Some(past) = &self.past {
            (view.run.keys, view.run.store_bytes) = (past.keys, past.store_bytes);
        }
        (view, hosts, assigned)
    }
}

//! The transfer reports of all jobs: one [`JobReports`] for each run of a job, within bounds.
//!
//! `parse.rs` checks the syntax of reports. Begin at [`TransferReportStore`].
//!
//! | item | bound |
//! | --- | --- |
//! | rows of pairs | [`PAIRS_KEPT`] for each job, shared evenly among its tasks |
//! | single connections | [`CONNECTIONS_KEPT`] for each job, shared evenly among its tasks |
//! | pairs over time | one series for each of the first [`SERIES_KEPT`] pairs that move bytes; one for all others |
//! | single failures of a task | [`TASK_FAILURES_KEPT`] |
//! | earlier runs | [`EARLIER_RUNS_KEPT`], if they have no more than [`EARLIER_ROWS_KEPT`] rows |
//! | single failures for a reason | the first and [`REASON_FAILURES_KEPT`] more |
//!
//! Ten thousand tasks have a hundred million pairs, so the number of rows is bounded. Each task has an equal share of
//! the rows, so a task that reports many pairs takes no rows from others. The totals of a job are exact: they come
//! from counters that include every pair and every connection.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::job_reports::JobReports;
#[cfg(doc)]
use super::job_reports::{
    CONNECTIONS_KEPT, PAIRS_KEPT, REASON_FAILURES_KEPT, SERIES_KEPT, TASK_FAILURES_KEPT,
};
use super::parse::{CheckedReport, ReportError};
use crate::coordination::{JobId, RunNumber, TaskId, TaskIncarnation, TransferFailure};
use crate::engine::Engine;

/// The most earlier runs of a job whose reports are kept.
const EARLIER_RUNS_KEPT: usize = 8;
/// The most rows of earlier runs that are kept; those of the newest of them stay, however many they are.
const EARLIER_ROWS_KEPT: usize = 16_384;
/// The report interval of a worker in a small job, in milliseconds, and the number of tasks up to which a job
/// is small.
const INTERVAL_MS: usize = 1000;
const TASKS_PER_INTERVAL: usize = 1000;

/// A report that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptedReport {
    /// The task that reported.
    pub task: TaskId,
    /// Its incarnation.
    pub incarnation: TaskIncarnation,
    /// The time until the next report, in milliseconds.
    pub interval_ms: u32,
}

/// Returns the report interval for this many tasks, in milliseconds. In a large job it is longer, so that all
/// tasks together send about a thousand reports a second.
#[must_use]
pub fn report_interval_ms(tasks: usize) -> u32 {
    let times = tasks.div_ceil(TASKS_PER_INTERVAL).max(1);
    u32::try_from(INTERVAL_MS * times).unwrap_or(u32::MAX)
}

/// The reports of a job by run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReportsByRun {
    pub latest: JobReports,
    /// The reports of earlier runs, the newest first.
    pub earlier: VecDeque<JobReports>,
}

impl ReportsByRun {
    pub fn new(latest: JobReports) -> Self {
        Self { latest, earlier: VecDeque::new() }
    }

    fn find(&self, run: RunNumber) -> Option<&JobReports> {
        std::iter::once(&self.latest).chain(&self.earlier).find(|of_run| of_run.run == run)
    }

    /// Makes this run the latest one, and keeps the reports of earlier runs within the bounds.
    pub fn begin_run(&mut self, run: RunNumber) {
        let mut ended = std::mem::replace(&mut self.latest, JobReports::new(run));
        // The present state of its tasks is over; connections are many.
        for task in ended.tasks.values_mut() {
            task.drop_present_state();
        }
        self.earlier.push_front(ended);
        self.drop_excess_runs();
    }

    /// Keeps as many earlier runs as the bounds allow.
    pub fn drop_excess_runs(&mut self) {
        let mut rows = 0;
        let kept = self.earlier.iter().take(EARLIER_RUNS_KEPT).take_while(|of_run| {
            let is_newest = rows == 0;
            rows +=
                of_run.tasks.values().map(|task| 1 + task.rows.len() + task.peer_jobs.len()).sum::<usize>();
            is_newest || rows <= EARLIER_ROWS_KEPT
        });
        let kept = kept.count();
        self.earlier.truncate(kept);
    }
}

/// The reports of all jobs.
#[derive(Debug, Default)]
pub struct TransferReportStore {
    jobs: Mutex<BTreeMap<JobId, Arc<Mutex<ReportsByRun>>>>,
}

impl TransferReportStore {
    pub(super) fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, Arc<Mutex<ReportsByRun>>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the reports of a run of a job, if they are kept.
    pub(super) fn with_run_reports<T>(
        &self,
        job: JobId,
        run: RunNumber,
        look: impl FnOnce(&JobReports) -> T,
    ) -> Option<T> {
        let of_job = self.lock_jobs().get(&job).cloned()?;
        let of_job = of_job.lock().unwrap_or_else(PoisonError::into_inner);
        of_job.find(run).map(look)
    }

    /// Replaces the reports of a job.
    #[cfg(test)]
    pub(super) fn replace_reports(&self, job: JobId, of_job: JobReports) {
        self.lock_jobs().insert(job, Arc::new(Mutex::new(ReportsByRun::new(of_job))));
    }

    /// Returns whether any task of the job has ever reported.
    #[must_use]
    pub fn has_reports(&self, job: JobId) -> bool {
        self.lock_jobs().contains_key(&job)
    }

    /// Drops deleted jobs and reports suppressed failures.
    pub fn retain_jobs_and_flush_failures(&self, engine: &Engine, there: impl Fn(JobId) -> bool) {
        let jobs: Vec<(JobId, Arc<Mutex<ReportsByRun>>)> = {
            let mut jobs = self.lock_jobs();
            jobs.retain(|job, _| there(*job));
            jobs.iter().map(|(job, of_job)| (*job, Arc::clone(of_job))).collect()
        };
        let now = engine.clock().now();
        for (job, of_job) in jobs {
            let mut of_job = of_job.lock().unwrap_or_else(PoisonError::into_inner);
            let notes = of_job.latest.flush_failure_bursts(now);
            drop(of_job);
            notes.into_iter().for_each(|note| engine.record_transfer_failure(job, note));
        }
    }

    /// Accepts a report and reports its failures as events.
    ///
    /// # Errors
    /// If the report is invalid or not from the present life; then nothing has changed.
    pub fn accept_report(
        &self,
        engine: &Engine,
        job: JobId,
        bytes: &[u8],
    ) -> Result<AcceptedReport, ReportError> {
        let tasks = engine.read_under_lock(|core| core.job(job).map(|look| look.task_count()));
        let tasks = tasks.ok_or(ReportError::NoSuchJob)?;
        let taken = CheckedReport::parse(bytes, tasks).and_then(|report| {
            let of = (report.task, report.incarnation);
            Ok((of, self.store_report(engine, job, report)?))
        });
        match taken {
            Ok(((task, incarnation), notes)) => {
                notes.into_iter().for_each(|note| engine.record_transfer_failure(job, note));
                Ok(AcceptedReport { task, incarnation, interval_ms: report_interval_ms(tasks) })
            }
            Err(refusal) => {
                if let Some(of_job) = self.lock_jobs().get(&job).cloned() {
                    of_job.lock().unwrap_or_else(PoisonError::into_inner).latest.rejected += 1;
                }
                Err(refusal)
            }
        }
    }

    fn store_report(
        &self,
        engine: &Engine,
        job: JobId,
        report: CheckedReport,
    ) -> Result<Vec<TransferFailure>, ReportError> {
        let (task, given) = (report.task, report.incarnation);
        let stands = || {
            let life =
                engine.read_under_lock(|core| core.job(job).map(|look| look.current_incarnation(task)));
            let life = life.ok_or(ReportError::NoSuchJob)?;
            match life.incarnation {
                Some(known) if known == given => Ok(life),
                Some(known) => Err(ReportError::StaleIncarnation { task, given, known }),
                None => Err(ReportError::NotConnected(task)),
            }
        };
        let run = stands()?.run;
        let of_job = {
            let mut jobs = self.lock_jobs();
            let fresh = || Arc::new(Mutex::new(ReportsByRun::new(JobReports::new(run))));
            Arc::clone(jobs.entry(job).or_insert_with(fresh))
        };
        let mut of_job = of_job.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked again under the lock: a report of a life that has ended meanwhile must not follow one of
        // the next life.
        let life = stands()?;
        if of_job.latest.run != life.run {
            of_job.begin_run(life.run);
        }
        Ok(of_job.latest.accept_report(report, life.opened_at, life.tasks, engine.clock().now()))
    }
}

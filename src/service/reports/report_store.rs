//! The transfer reports of all jobs: one [`JobReports`] for each job, within bounds.
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
use std::time::Duration;

use super::byte_series::{SecondSeries, TenSecondSeries};
use super::parse::{
    CheckedReport, ClockReading, HostChecksView, PeerJobPair, ReportError, ReportedConnection,
    ReportedFailure, ReportedTotals, TransportConnectionCounts,
};
use super::vocabulary::{ReportedTransport, TransferOutcome};
use crate::coordination::{JobId, RunNumber, TaskId, TaskIncarnation, Timestamp, TransferFailure};
use crate::engine::Engine;

/// The maximum number of pair rows of a job.
pub const PAIRS_KEPT: usize = 65_536;
/// The maximum number of single connections of a job.
pub const CONNECTIONS_KEPT: usize = 65_536;
/// The maximum number of pairs of a job with a series over time.
pub const SERIES_KEPT: usize = 64;
/// The maximum number of failures kept for each task.
pub const TASK_FAILURES_KEPT: usize = 4;
/// The maximum number of failures kept for each reason, beside the first.
pub const REASON_FAILURES_KEPT: usize = 8;
/// The most earlier runs of a job whose reports are kept.
const EARLIER_RUNS_KEPT: usize = 8;
/// The most rows of earlier runs that are kept; those of the newest of them stay, however many they are.
const EARLIER_ROWS_KEPT: usize = 16_384;
/// The minimum share of rows of a task, however many tasks the job has.
const SHARE_MIN: usize = 4;
/// The time within which failures for one reason are one event and a count.
const BURST_WINDOW: Duration = Duration::from_secs(30);
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

/// Returns the share of one task in a bound on all tasks.
fn per_task_limit(all: usize, tasks: usize) -> usize {
    (all / tasks.max(1)).max(SHARE_MIN)
}

/// A stored failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredTransferFailure {
    pub task: TaskId,
    pub failed: ReportedFailure,
}

/// Bytes between one task and one peer over one transport: sent, received.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct PairTraffic {
    earlier: [u64; 2],
    life: [u64; 2],
    /// The same over time, for bytes whose time is known.
    pub steps: [TenSecondSeries; 2],
}

impl PairTraffic {
    pub fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way: usize| self.earlier[way].saturating_add(self.life[way]))
    }
}

/// The present state of one life of a task. It is dropped when the life ends.
#[derive(Debug, Default)]
pub(super) struct TaskGauges {
    pub links: [TransportConnectionCounts; ReportedTransport::ALL.len()],
    pub connections: Vec<ReportedConnection>,
    pub cliques: u64,
    pub registered_bytes: u64,
    pub registered_device_bytes: u64,
    /// Bytes that are still to move, by class in order of urgency.
    pub in_flight: [u64; 3],
    /// The offset of its clock, once it is reported.
    pub clock: Option<ClockReading>,
}

/// The reports of one task.
#[derive(Debug)]
pub(super) struct TaskReports {
    pub incarnation: TaskIncarnation,
    sequence: Option<u64>,
    /// The time of the last report.
    pub at: Timestamp,
    pub lives: u32,
    earlier: ReportedTotals,
    life: ReportedTotals,
    pub rows: BTreeMap<(TaskId, ReportedTransport), PairTraffic>,
    /// Bytes with tasks of other jobs, as many rows as a task may have.
    pub peer_jobs: BTreeMap<PeerJobPair, PairTraffic>,
    /// Bytes over time with all peers: sent, received.
    pub steps: [TenSecondSeries; 2],
    gauges: TaskGauges,
    pub failures: VecDeque<ReportedFailure>,
    /// The checks of its host, once they are reported.
    pub host_checks: Option<HostChecksView>,
}

impl TaskReports {
    fn new(incarnation: TaskIncarnation, at: Timestamp) -> Self {
        Self {
            incarnation,
            sequence: None,
            at,
            lives: 1,
            earlier: ReportedTotals::default(),
            life: ReportedTotals::default(),
            rows: BTreeMap::new(),
            peer_jobs: BTreeMap::new(),
            steps: Default::default(),
            gauges: TaskGauges::default(),
            failures: VecDeque::new(),
            host_checks: None,
        }
    }

    /// Returns the counters of all lives in this run.
    pub fn totals(&self) -> ReportedTotals {
        let mut totals = self.earlier.clone();
        totals.add(&self.life);
        totals
    }

    /// Returns the present state; `None` if `present` is another life.
    pub fn gauges_if_incarnation_is_present(&self, present: Option<TaskIncarnation>) -> Option<&TaskGauges> {
        (present == Some(self.incarnation)).then_some(&self.gauges)
    }

    /// Begins a new life: the counters of the former life are added to the sums, and its present state is
    /// dropped.
    fn begin_incarnation(&mut self, incarnation: TaskIncarnation) {
        self.incarnation = incarnation;
        self.sequence = None;
        self.lives = self.lives.saturating_add(1);
        self.earlier.add(&std::mem::take(&mut self.life));
        for row in self.rows.values_mut().chain(self.peer_jobs.values_mut()) {
            *row = PairTraffic { earlier: row.bytes(), life: [0; 2], steps: row.steps };
        }
        self.gauges = TaskGauges::default();
        self.host_checks = None;
    }

    /// Updates the rows of tasks of other jobs; the first that move anything are kept.
    fn update_peer_job_pairs(&mut self, pairs: BTreeMap<PeerJobPair, [u64; 2]>, most: usize) {
        for (key, bytes) in pairs {
            if self.peer_jobs.len() >= most && !self.peer_jobs.contains_key(&key) {
                continue;
            }
            let row = self.peer_jobs.entry(key).or_default();
            row.life = [0, 1].map(|way: usize| row.life[way].max(bytes[way]));
        }
    }

    /// Updates the rows. `moved` is called with the bytes that each pair has sent since the last report.
    fn update_pairs(
        &mut self,
        pairs: BTreeMap<(TaskId, ReportedTransport), [u64; 2]>,
        most: usize,
        since: Option<Timestamp>,
        mut moved: impl FnMut(TaskId, ReportedTransport, u64),
    ) {
        let now = self.at;
        let mut rise = |row: &mut PairTraffic, key: (TaskId, ReportedTransport), bytes: [u64; 2]| {
            for (way, bytes) in bytes.into_iter().enumerate() {
                let more = bytes.saturating_sub(row.life[way]);
                row.life[way] = row.life[way].max(bytes);
                let Some(since) = since.filter(|_| more > 0) else { continue };
                row.steps[way].add_bytes_between(since, now, more);
                if way == 0 {
                    moved(key.0, key.1, more);
                }
            }
        };
        let mut fresh = Vec::new();
        for (key, bytes) in pairs {
            match self.rows.get_mut(&key) {
                Some(row) => rise(row, key, bytes),
                None => fresh.push((key, bytes)),
            }
        }
        // If there is no room for all rows, those with the most bytes are kept.
        let room = most.saturating_sub(self.rows.len());
        if fresh.len() > room {
            fresh.sort_by_key(|(_, bytes)| std::cmp::Reverse(bytes[0].saturating_add(bytes[1])));
            fresh.truncate(room);
        }
        for (key, bytes) in fresh {
            rise(self.rows.entry(key).or_default(), key, bytes);
        }
    }
}

/// The failures for one reason.
#[derive(Debug, Default)]
pub(super) struct FailureGroup {
    pub told: u64,
    pub first: Option<StoredTransferFailure>,
    /// The newest failures, the latest last.
    pub newest: VecDeque<StoredTransferFailure>,
    burst: Option<FailureBurst>,
}

/// Failures for one reason that are reported as one event.
#[derive(Debug)]
struct FailureBurst {
    since: Timestamp,
    more: u64,
    last: StoredTransferFailure,
}

/// The reports of one job in one run.
#[derive(Debug)]
pub(super) struct JobReports {
    pub run: RunNumber,
    pub tasks: BTreeMap<TaskId, TaskReports>,
    /// The time of the first report.
    pub since: Timestamp,
    /// The time of the last report.
    pub at: Timestamp,
    /// Bytes sent, by transport.
    pub series: [Box<SecondSeries>; ReportedTransport::ALL.len()],
    /// Bytes sent by single pairs.
    pub pairs: BTreeMap<(TaskId, TaskId, ReportedTransport), Box<SecondSeries>>,
    /// Bytes sent by all other pairs.
    pub others: Box<SecondSeries>,
    pub reasons: BTreeMap<TransferOutcome, FailureGroup>,
    pub taken: u64,
    pub repeated: u64,
    pub rejected: u64,
}

impl JobReports {
    pub(super) fn new(run: RunNumber) -> Self {
        Self {
            run,
            tasks: BTreeMap::new(),
            since: Timestamp(u64::MAX),
            at: Timestamp(0),
            series: Default::default(),
            pairs: BTreeMap::new(),
            others: Box::default(),
            reasons: BTreeMap::new(),
            taken: 0,
            repeated: 0,
            rejected: 0,
        }
    }

    /// Accepts a report of the present life. Returns the failures to report as events.
    pub(super) fn accept_report(
        &mut self,
        report: CheckedReport,
        opened: Timestamp,
        tasks: usize,
        now: Timestamp,
    ) -> Vec<TransferFailure> {
        let CheckedReport { task, incarnation, .. } = report;
        let of_task = self.tasks.entry(task).or_insert_with(|| TaskReports::new(incarnation, now));
        if of_task.incarnation != incarnation {
            of_task.begin_incarnation(incarnation);
        } else if of_task.sequence.is_some_and(|last| report.sequence <= last) {
            self.repeated += 1;
            return Vec::new();
        }
        // The first report of a life says how much has moved, but not since when.
        let before = of_task.sequence.map(|_| of_task.at);
        of_task.sequence = Some(report.sequence);
        of_task.at = now;
        self.at = now;
        self.since = self.since.min(now);
        self.taken += 1;
        if let Some(before) = before {
            for (ring, (new, old)) in
                self.series.iter_mut().zip(report.totals.bytes.iter().zip(&of_task.life.bytes))
            {
                ring.add_bytes_between(before, now, new[0].saturating_sub(old[0]));
                for (way, steps) in of_task.steps.iter_mut().enumerate() {
                    steps.add_bytes_between(before, now, new[way].saturating_sub(old[way]));
                }
            }
        }
        of_task.life.raise_counters_to(&report.totals);
        of_task.host_checks = report.host_checks.or(of_task.host_checks.take());
        let mut connections = report.connections;
        connections.sort_by_key(|link| std::cmp::Reverse((link.launches, link.lanes)));
        connections.truncate(per_task_limit(CONNECTIONS_KEPT, tasks));
        connections.shrink_to_fit();
        of_task.gauges = TaskGauges {
            links: report.links,
            connections,
            cliques: report.cliques,
            registered_bytes: report.registered_bytes,
            registered_device_bytes: report.registered_device_bytes,
            in_flight: report.in_flight,
            clock: report.clock,
        };
        of_task.update_peer_job_pairs(report.peer_jobs, per_task_limit(PAIRS_KEPT, tasks));
        let (followed, others) = (&mut self.pairs, &mut self.others);
        of_task.update_pairs(
            report.pairs,
            per_task_limit(PAIRS_KEPT, tasks),
            before,
            |peer, transport, bytes| {
                let key = (task, peer, transport);
                let from = before.unwrap_or(now);
                if followed.len() < SERIES_KEPT || followed.contains_key(&key) {
                    followed.entry(key).or_default().add_bytes_between(from, now, bytes);
                } else {
                    others.add_bytes_between(from, now, bytes);
                }
            },
        );
        for failed in &report.failures {
            of_task.failures.push_back(ReportedFailure {
                at: clamp_time_to_run(failed.at, opened, now),
                ..failed.clone()
            });
            if of_task.failures.len() > TASK_FAILURES_KEPT {
                of_task.failures.pop_front();
            }
        }
        let mut notes = self.flush_failure_bursts(now);
        for failed in report.failures {
            let failed = ReportedFailure { at: clamp_time_to_run(failed.at, opened, now), ..failed };
            notes.extend(self.record_failure(StoredTransferFailure { task, failed }, now));
        }
        notes
    }

    /// Stores a failure. Returns the event to report, unless one for the same reason was reported a moment
    /// ago.
    fn record_failure(&mut self, failure: StoredTransferFailure, now: Timestamp) -> Option<TransferFailure> {
        let reason = self.reasons.entry(failure.failed.reason).or_default();
        reason.told += 1;
        if reason.first.as_ref().is_none_or(|first| failure.failed.at < first.failed.at) {
            reason.first = Some(failure.clone());
        }
        reason.newest.push_back(failure.clone());
        if reason.newest.len() > REASON_FAILURES_KEPT {
            reason.newest.pop_front();
        }
        if let Some(storm) = &mut reason.burst {
            storm.more += 1;
            storm.last = failure;
            return None;
        }
        let note = transfer_failure_event(&failure, 1);
        reason.burst = Some(FailureBurst { since: now, more: 0, last: failure });
        Some(note)
    }

    /// Returns the events for suppressed failures whose burst window is over.
    fn flush_failure_bursts(&mut self, now: Timestamp) -> Vec<TransferFailure> {
        let mut notes = Vec::new();
        for reason in self.reasons.values_mut() {
            let Some(storm) = reason.burst.take_if(|storm| now.since(storm.since) >= BURST_WINDOW) else {
                continue;
            };
            if storm.more > 0 {
                notes.push(transfer_failure_event(&storm.last, storm.more));
                reason.burst = Some(FailureBurst { since: now, more: 0, ..storm });
            }
        }
        notes
    }
}

/// Returns the time of a worker, moved into the run if the worker's clock is off.
fn clamp_time_to_run(at: Timestamp, opened: Timestamp, now: Timestamp) -> Timestamp {
    if at < opened { now } else { at.min(now) }
}

fn transfer_failure_event(failure: &StoredTransferFailure, count: u64) -> TransferFailure {
    let StoredTransferFailure { task, failed } = failure;
    let name = failed.reason.name();
    let of_job = failed.peer_job.as_ref().map_or_else(String::new, |job| format!(" of job {job}"));
    let whose = match failed.peer_job.is_none() && failed.peer == *task {
        true => format!("within task {task}"),
        false => format!("of task {task} with task {}{of_job}", failed.peer),
    };
    let what = match count {
        1 => format!("a transfer {whose} failed ({name})"),
        more => format!(
            "{more} more transfers failed ({name}) within {} s, the last of them {whose}",
            BURST_WINDOW.as_secs()
        ),
    };
    let text = if failed.text.is_empty() { failed.reason.description() } else { &failed.text };
    TransferFailure {
        task: *task,
        // A task of another job has no page here.
        with: if failed.peer_job.is_some() { *task } else { failed.peer },
        error: name.into(),
        count,
        reason: format!("{what}: {text}"),
    }
}

/// The reports of a job by run.
#[derive(Debug)]
pub(super) struct ReportsByRun {
    pub latest: JobReports,
    /// The reports of earlier runs, the newest first.
    earlier: VecDeque<JobReports>,
}

impl ReportsByRun {
    pub fn new(latest: JobReports) -> Self {
        Self { latest, earlier: VecDeque::new() }
    }

    fn find(&self, run: RunNumber) -> Option<&JobReports> {
        std::iter::once(&self.latest).chain(&self.earlier).find(|of_run| of_run.run == run)
    }

    /// Makes this run the latest one, and keeps the reports of earlier runs within the bounds.
    fn begin_run(&mut self, run: RunNumber) {
        let mut ended = std::mem::replace(&mut self.latest, JobReports::new(run));
        // The present state of its tasks is over; connections are many.
        for task in ended.tasks.values_mut() {
            (task.gauges, task.host_checks) = (TaskGauges::default(), None);
        }
        self.earlier.push_front(ended);
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
    fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, Arc<Mutex<ReportsByRun>>>> {
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

//! The reports of all jobs: a board for each job, within bounds.
//!
//! It checks no syntax: `parse.rs` does. Begin at [`ReportStore`].
//!
//! | what | bound |
//! | --- | --- |
//! | rows of pairs | [`PAIRS_KEPT`] a job, shared out evenly among its tasks; the rest is in the sums |
//! | connections, one by one | [`CONNECTIONS_KEPT`] a job, likewise; the sums are of all |
//! | pairs followed over time | the first [`SERIES_KEPT`] that move anything; the rest as one |
//! | failures, one by one | [`TASK_FAILURES_KEPT`] a task, [`REASON_FAILURES_KEPT`] a reason, and the first of each |
//!
//! Ten thousand tasks have a hundred million pairs, so each task has an even share of the rows: a task that reports
//! many takes no room from others. Sums are exact.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::byte_series::{SecondSeries, StepSeries};
use super::parse::{
    ClockReading, LifeTotals, Report, ReportError, ReportedConnection, ReportedFailure, TransportTotals,
};
use super::vocabulary::{ReportedTransport, TransferOutcome};
use crate::coordination::{JobId, RunNumber, TaskId, TaskIncarnation, Timestamp, TransferFailure};
use crate::engine::Engine;

/// Rows of pairs that a job keeps.
pub const PAIRS_KEPT: usize = 65_536;
/// Connections that a job keeps one by one.
pub const CONNECTIONS_KEPT: usize = 65_536;
/// Pairs that a job follows over time.
pub const SERIES_KEPT: usize = 64;
/// Failures that are kept of a task.
pub const TASK_FAILURES_KEPT: usize = 4;
/// Failures that are kept of a reason, beside the first.
pub const REASON_FAILURES_KEPT: usize = 8;
/// However many tasks a job has, each may have so many rows.
const SHARE_MIN: usize = 4;
/// Failures for one reason within this time are one event and a count.
const BURST_WINDOW: Duration = Duration::from_secs(30);
/// How often a worker of a small job reports, in milliseconds; and for how many tasks that is small.
const INTERVAL_MS: usize = 1000;
const TASKS_PER_INTERVAL: usize = 1000;

/// How often each of so many tasks should report, in milliseconds: so that a thousand reports come in a second.
#[must_use]
pub fn interval_ms(tasks: usize) -> u32 {
    let times = tasks.div_ceil(TASKS_PER_INTERVAL).max(1);
    u32::try_from(INTERVAL_MS * times).unwrap_or(u32::MAX)
}

/// One task's part of a bound on all of them.
fn per_task_limit(all: usize, tasks: usize) -> usize {
    (all / tasks.max(1)).max(SHARE_MIN)
}

/// A failure that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TaskFailure {
    pub task: TaskId,
    pub failed: ReportedFailure,
}

/// The bytes of one task with one peer by one transport: sent, received.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct PairRow {
    earlier: [u64; 2],
    life: [u64; 2],
    /// The same over time, as far as it is known when it moved.
    pub steps: [StepSeries; 2],
}

impl PairRow {
    pub fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way: usize| self.earlier[way].saturating_add(self.life[way]))
    }
}

/// What one life of a task holds at present. It is gone when the life is over.
#[derive(Debug, Default)]
pub(super) struct Gauges {
    pub links: [TransportTotals; ReportedTransport::ALL.len()],
    pub connections: Vec<ReportedConnection>,
    pub cliques: u64,
    pub registered_bytes: u64,
    /// Bytes that are still to move, by class in the order of urgency.
    pub in_flight: [u64; 3],
    /// Its clock beside the service's, once it has told.
    pub clock: Option<ClockReading>,
}

/// What one task has reported.
#[derive(Debug)]
pub(super) struct TaskReports {
    pub incarnation: TaskIncarnation,
    sequence: Option<u64>,
    /// When the last report came.
    pub at: Timestamp,
    pub lives: u32,
    earlier: LifeTotals,
    life: LifeTotals,
    pub rows: BTreeMap<(TaskId, ReportedTransport), PairRow>,
    /// Bytes over time with all peers together: sent, received.
    pub steps: [StepSeries; 2],
    gauges: Gauges,
    pub failures: VecDeque<ReportedFailure>,
}

impl TaskReports {
    fn new(incarnation: TaskIncarnation, at: Timestamp) -> Self {
        Self {
            incarnation,
            sequence: None,
            at,
            lives: 1,
            earlier: LifeTotals::default(),
            life: LifeTotals::default(),
            rows: BTreeMap::new(),
            steps: Default::default(),
            gauges: Gauges::default(),
            failures: VecDeque::new(),
        }
    }

    /// All of this run.
    pub fn totals(&self) -> LifeTotals {
        let mut totals = self.earlier.clone();
        totals.add(&self.life);
        totals
    }

    /// What it holds at present; nothing if another life of the task counts, or none.
    pub fn gauges(&self, present: Option<TaskIncarnation>) -> Option<&Gauges> {
        (present == Some(self.incarnation)).then_some(&self.gauges)
    }

    /// A new life begins to report: what the one before counted stays counted, what it had is gone.
    fn begin(&mut self, incarnation: TaskIncarnation) {
        self.incarnation = incarnation;
        self.sequence = None;
        self.lives = self.lives.saturating_add(1);
        self.earlier.add(&std::mem::take(&mut self.life));
        for row in self.rows.values_mut() {
            *row = PairRow { earlier: row.bytes(), life: [0; 2], steps: row.steps };
        }
        self.gauges = Gauges::default();
    }

    /// Takes in the rows; `moved` hears what each pair has sent since the report before.
    fn take_pairs(
        &mut self,
        pairs: BTreeMap<(TaskId, ReportedTransport), [u64; 2]>,
        most: usize,
        since: Option<Timestamp>,
        mut moved: impl FnMut(TaskId, ReportedTransport, u64),
    ) {
        let now = self.at;
        let mut rise = |row: &mut PairRow, key: (TaskId, ReportedTransport), bytes: [u64; 2]| {
            for (way, bytes) in bytes.into_iter().enumerate() {
                let more = bytes.saturating_sub(row.life[way]);
                row.life[way] = row.life[way].max(bytes);
                let Some(since) = since.filter(|_| more > 0) else { continue };
                row.steps[way].add(since, now, more);
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
        // Where not all can be kept, those that have moved most are.
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
    pub first: Option<TaskFailure>,
    /// The newest last.
    pub newest: VecDeque<TaskFailure>,
    burst: Option<FailureBurst>,
}

/// Failures for one reason that are told of together.
#[derive(Debug)]
struct FailureBurst {
    since: Timestamp,
    more: u64,
    last: TaskFailure,
}

/// What the workers of one job have reported in its present run.
#[derive(Debug)]
pub(super) struct JobReports {
    pub run: RunNumber,
    pub tasks: BTreeMap<TaskId, TaskReports>,
    /// When the first report came.
    pub since: Timestamp,
    /// When the last report came.
    pub at: Timestamp,
    /// Bytes sent, by transport.
    pub series: [Box<SecondSeries>; ReportedTransport::ALL.len()],
    /// The same of single pairs.
    pub pairs: BTreeMap<(TaskId, TaskId, ReportedTransport), Box<SecondSeries>>,
    /// The same of all other pairs.
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

    /// Takes in a report of the life that counts; what is to be told of it.
    pub(super) fn accept(
        &mut self,
        report: Report,
        opened: Timestamp,
        tasks: usize,
        now: Timestamp,
    ) -> Vec<TransferFailure> {
        let Report { task, incarnation, .. } = report;
        let of_task = self.tasks.entry(task).or_insert_with(|| TaskReports::new(incarnation, now));
        if of_task.incarnation != incarnation {
            of_task.begin(incarnation);
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
                ring.add(before, now, new[0].saturating_sub(old[0]));
                for (way, steps) in of_task.steps.iter_mut().enumerate() {
                    steps.add(before, now, new[way].saturating_sub(old[way]));
                }
            }
        }
        of_task.life.rise_to(&report.totals);
        let mut connections = report.connections;
        connections.sort_by_key(|link| std::cmp::Reverse((link.launches, link.lanes)));
        connections.truncate(per_task_limit(CONNECTIONS_KEPT, tasks));
        connections.shrink_to_fit();
        of_task.gauges = Gauges {
            links: report.links,
            connections,
            cliques: report.cliques,
            registered_bytes: report.registered_bytes,
            in_flight: report.in_flight,
            clock: report.clock,
        };
        let (followed, others) = (&mut self.pairs, &mut self.others);
        of_task.take_pairs(
            report.pairs,
            per_task_limit(PAIRS_KEPT, tasks),
            before,
            |peer, transport, bytes| {
                let key = (task, peer, transport);
                let from = before.unwrap_or(now);
                if followed.len() < SERIES_KEPT || followed.contains_key(&key) {
                    followed.entry(key).or_default().add(from, now, bytes);
                } else {
                    others.add(from, now, bytes);
                }
            },
        );
        for failed in &report.failures {
            of_task
                .failures
                .push_back(ReportedFailure { at: within(failed.at, opened, now), ..failed.clone() });
            if of_task.failures.len() > TASK_FAILURES_KEPT {
                of_task.failures.pop_front();
            }
        }
        let mut notes = self.flush_bursts(now);
        for failed in report.failures {
            let failed = ReportedFailure { at: within(failed.at, opened, now), ..failed };
            notes.extend(self.fail(TaskFailure { task, failed }, now));
        }
        notes
    }

    /// Keeps a failure; it is told of unless others for the same reason were a moment ago.
    fn fail(&mut self, failure: TaskFailure, now: Timestamp) -> Option<TransferFailure> {
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
        let note = note(&failure, 1);
        reason.burst = Some(FailureBurst { since: now, more: 0, last: failure });
        Some(note)
    }

    /// Tells of what came while nobody was told, once that has lasted long enough.
    fn flush_bursts(&mut self, now: Timestamp) -> Vec<TransferFailure> {
        let mut notes = Vec::new();
        for reason in self.reasons.values_mut() {
            let Some(storm) = reason.burst.take_if(|storm| now.since(storm.since) >= BURST_WINDOW) else {
                continue;
            };
            if storm.more > 0 {
                notes.push(note(&storm.last, storm.more));
                reason.burst = Some(FailureBurst { since: now, more: 0, ..storm });
            }
        }
        notes
    }
}

/// A worker's moment, moved into the run if its clock is wrong.
fn within(at: Timestamp, opened: Timestamp, now: Timestamp) -> Timestamp {
    if at < opened { now } else { at.min(now) }
}

fn note(failure: &TaskFailure, count: u64) -> TransferFailure {
    let TaskFailure { task, failed } = failure;
    let name = failed.reason.name();
    let what = match count {
        1 => format!("a transfer of task {task} with task {} failed ({name})", failed.peer),
        more => format!(
            "{more} more transfers failed ({name}) within {} s, the last of them of task {task} with task {}",
            BURST_WINDOW.as_secs(),
            failed.peer
        ),
    };
    let text = if failed.text.is_empty() { failed.reason.means() } else { &failed.text };
    TransferFailure {
        task: *task,
        with: failed.peer,
        error: name.into(),
        count,
        reason: format!("{what}: {text}"),
    }
}

/// The reports of every job.
#[derive(Debug, Default)]
pub struct ReportStore {
    jobs: Mutex<BTreeMap<JobId, Arc<Mutex<JobReports>>>>,
}

impl ReportStore {
    fn jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, Arc<Mutex<JobReports>>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at what a job's workers have reported in this run.
    pub(super) fn with<T>(
        &self,
        job: JobId,
        run: RunNumber,
        look: impl FnOnce(&JobReports) -> T,
    ) -> Option<T> {
        let of_job = self.jobs().get(&job).cloned()?;
        let of_job = of_job.lock().unwrap_or_else(PoisonError::into_inner);
        (of_job.run == run).then(|| look(&of_job))
    }

    /// Makes this what a job's workers have reported.
    #[cfg(test)]
    pub(super) fn complete_interval(&self, job: JobId, of_job: JobReports) {
        self.jobs().insert(job, Arc::new(Mutex::new(of_job)));
    }

    /// Whether any task of the job has ever reported.
    #[must_use]
    pub fn has_reports(&self, job: JobId) -> bool {
        self.jobs().contains_key(&job)
    }

    /// Forgets jobs that are there no more, and tells of failures that nobody was told of yet.
    pub fn retain_jobs(&self, engine: &Engine, there: impl Fn(JobId) -> bool) {
        let jobs: Vec<(JobId, Arc<Mutex<JobReports>>)> = {
            let mut jobs = self.jobs();
            jobs.retain(|job, _| there(*job));
            jobs.iter().map(|(job, of_job)| (*job, Arc::clone(of_job))).collect()
        };
        let now = engine.clock().now();
        for (job, of_job) in jobs {
            let notes = of_job.lock().unwrap_or_else(PoisonError::into_inner).flush_bursts(now);
            notes.into_iter().for_each(|note| engine.record_transfer_failure(job, note));
        }
    }

    /// Takes a report, and tells of the failures in it. Returns after how many milliseconds the next should come.
    ///
    /// # Errors
    /// If it is no report of the life that counts; then nothing has changed.
    pub fn accept(&self, engine: &Engine, job: JobId, bytes: &[u8]) -> Result<u32, ReportError> {
        let tasks = engine.read_under_lock(|core| core.job(job).map(|look| look.task_count()));
        let tasks = tasks.ok_or(ReportError::NoSuchJob)?;
        let taken = Report::read(bytes, tasks).and_then(|report| self.put(engine, job, report));
        match taken {
            Ok(notes) => {
                notes.into_iter().for_each(|note| engine.record_transfer_failure(job, note));
                Ok(interval_ms(tasks))
            }
            Err(refusal) => {
                if let Some(of_job) = self.jobs().get(&job).cloned() {
                    of_job.lock().unwrap_or_else(PoisonError::into_inner).rejected += 1;
                }
                Err(refusal)
            }
        }
    }

    fn put(&self, engine: &Engine, job: JobId, report: Report) -> Result<Vec<TransferFailure>, ReportError> {
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
            let mut jobs = self.jobs();
            Arc::clone(jobs.entry(job).or_insert_with(|| Arc::new(Mutex::new(JobReports::new(run)))))
        };
        let mut of_job = of_job.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked again under the lock: a report of a life that has ended meanwhile must not come after the next one's.
        let life = stands()?;
        if of_job.run != life.run {
            *of_job = JobReports::new(life.run);
        }
        Ok(of_job.accept(report, life.opened_at, life.tasks, engine.clock().now()))
    }
}

//! The transfer reports of one job in one run ([`JobReports`]), and of each of its tasks.
//!
//! `report_store.rs` has the table of all bounds. Begin at [`JobReports::accept_report`].

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::byte_series::{SecondSeries, TenSecondSeries};
use super::parse::{
    CheckedReport, ClockReading, HostChecksView, LostGpuView, PeerJobPair, ReportedConnection,
    ReportedFailure, ReportedTotals, TransportConnectionCounts,
};
use super::vocabulary::{ReportedTransport, TransferOutcome};
use crate::coordination::{RunNumber, TaskId, TaskIncarnation, Timestamp, TransferFailure};

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
/// The minimum share of rows of a task, however many tasks the job has.
const SHARE_MIN: usize = 4;
/// The time within which failures for one reason are one event and a count.
const BURST_WINDOW: Duration = Duration::from_secs(30);

/// Returns the share of one task in a bound on all tasks.
fn per_task_limit(all: usize, tasks: usize) -> usize {
    (all / tasks.max(1)).max(SHARE_MIN)
}

/// A stored failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredTransferFailure {
    pub task: TaskId,
    pub failed: ReportedFailure,
}

/// Bytes between one task and one peer over one transport: sent, received.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
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
    pub lost_gpus: Vec<LostGpuView>,
}

impl TaskGauges {
    /// Returns the GPUs of a new report, with the times at which they were first reported.
    fn with_first_times(&self, lost_gpus: Vec<(u32, String)>, now: Timestamp) -> Vec<LostGpuView> {
        let first_time = |gpu: u32| {
            self.lost_gpus.iter().find(|lost| lost.gpu == gpu).map_or(now, |lost| lost.reported_at)
        };
        let view = |(gpu, error)| LostGpuView { gpu, error, reported_at: first_time(gpu) };
        lost_gpus.into_iter().map(view).collect()
    }
}

/// The reports of one task.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TaskReports {
    pub incarnation: TaskIncarnation,
    sequence: Option<u64>,
    /// The time of the last report.
    pub at: Timestamp,
    pub lives: u32,
    earlier: ReportedTotals,
    life: ReportedTotals,
    #[serde(with = "super::serialised_forms::entries")]
    pub rows: BTreeMap<(TaskId, ReportedTransport), PairTraffic>,
    /// Bytes with tasks of other jobs, as many rows as a task may have.
    #[serde(with = "super::serialised_forms::entries")]
    pub peer_jobs: BTreeMap<PeerJobPair, PairTraffic>,
    /// Bytes over time with all peers: sent, received.
    pub steps: [TenSecondSeries; 2],
    #[serde(skip)]
    gauges: TaskGauges,
    pub failures: VecDeque<ReportedFailure>,
    /// The checks of its host, once they are reported.
    #[serde(skip)]
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
        self.drop_present_state();
    }

    /// Drops what is true only while the task lives.
    pub fn drop_present_state(&mut self) {
        (self.gauges, self.host_checks) = (TaskGauges::default(), None);
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
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct FailureGroup {
    pub told: u64,
    pub first: Option<StoredTransferFailure>,
    /// The newest failures, the latest last.
    pub newest: VecDeque<StoredTransferFailure>,
    #[serde(skip)]
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
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct JobReports {
    pub run: RunNumber,
    pub tasks: BTreeMap<TaskId, TaskReports>,
    /// The time of the first report.
    pub since: Timestamp,
    /// The time of the last report.
    pub at: Timestamp,
    /// Bytes sent, by transport.
    #[serde(with = "super::serialised_forms::by_transport")]
    pub series: [Box<SecondSeries>; ReportedTransport::ALL.len()],
    /// Bytes sent by single pairs.
    #[serde(with = "super::serialised_forms::entries")]
    pub pairs: BTreeMap<(TaskId, TaskId, ReportedTransport), Box<SecondSeries>>,
    /// Bytes sent by all other pairs.
    pub others: Box<SecondSeries>,
    #[serde(with = "super::serialised_forms::entries")]
    pub reasons: BTreeMap<TransferOutcome, FailureGroup>,
    pub taken: u64,
    pub repeated: u64,
    pub rejected: u64,
    /// Whether the journal has all of it.
    #[serde(skip)]
    pub is_in_journal: bool,
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
            is_in_journal: false,
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
        self.is_in_journal = false;
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
            lost_gpus: of_task.gauges.with_first_times(report.lost_gpus, now),
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
    pub fn flush_failure_bursts(&mut self, now: Timestamp) -> Vec<TransferFailure> {
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

//! The reports of all jobs: the latest one of each process, within bounds. Begin at [`CollectiveReports`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_collectives::CollectiveFunction;

use super::analysis::{RankReport, RankWindow, find_wait};
use super::clique_key::CliqueIndex;
use super::parse::{CollectiveReportError, ProcessCollectives, ReportedCommunicator};
use super::{ALL_BYTES_MAX, DROPPED_AFTER, PROCESSES_PER_TASK, SILENT_AFTER, STUCK_AFTER};
use crate::coordination::{JobId, Timestamp};
use crate::engine::Engine;
use crate::service::reports::report_interval_ms;

/// The time for which NCCL is asked for times after a clique has looked stuck.
const TIMING_KEPT: Duration = Duration::from_secs(60);
/// The shortest time between two readings of a job's cliques.
const INDEX_INTERVAL: Duration = Duration::from_secs(1);
/// The time over which ranks are compared for a slow one.
const WINDOW: Duration = Duration::from_secs(30);
/// The number of collectives before the one that is waited for that ranks are asked for, and the wait after which they are.
const CONTEXT: u64 = 8;
const WANTED_AFTER: Duration = Duration::from_secs(1);
/// The shortest time between two looks for cliques that wait.
const JUDGE_INTERVAL: Duration = Duration::from_millis(500);
/// The number of processes up to which this interval holds.
const PROCESSES_PER_INTERVAL: usize = 1000;

/// The collectives that the next report of a process should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedCollectives {
    /// The clique.
    pub hash: u64,
    /// The rank.
    pub rank: u32,
    /// The number of the first collective.
    pub first: u64,
}

/// The answer to a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveAnswer {
    /// The time until the next report, in milliseconds.
    pub interval_ms: u32,
    /// Whether NCCL should be asked for the times on the GPU.
    pub is_timed: bool,
    /// The collectives that the next report should have.
    pub wanted: Vec<WantedCollectives>,
}

/// The totals of a rank at the begin of a window, and over the last whole window.
#[derive(Debug, Clone, Copy)]
struct WindowStart {
    at: Timestamp,
    collectives: u64,
    gpu_ns: u64,
    last: Option<(u64, u64)>,
}

/// The latest report of a process.
#[derive(Debug)]
pub(super) struct ProcessReport {
    pub report: ProcessCollectives,
    pub heard_at: Timestamp,
    /// By clique and rank.
    windows: BTreeMap<(u64, u32), WindowStart>,
    bytes: usize,
}

/// The totals of a function over all processes that ever reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FunctionCounts {
    pub operations: u64,
    pub bytes: u64,
    pub gpu_ns: u64,
}

/// The reports of a job. A copy shares the reports, so that they are analysed without the lock.
#[derive(Debug, Default, Clone)]
pub(super) struct JobCollectives {
    pub processes: BTreeMap<u64, Arc<ProcessReport>>,
    pub index: Arc<CliqueIndex>,
    indexed_at: Option<Timestamp>,
    pub functions: BTreeMap<CollectiveFunction, FunctionCounts>,
    /// Until when NCCL is asked for times.
    timed_until: Timestamp,
    /// The cliques that wait, with the number of the collective and for how long; and when that was found.
    waits: BTreeMap<u64, (u64, Duration)>,
    judged_at: Option<Timestamp>,
    /// The memory of the reports.
    bytes: usize,
    pub accepted: u64,
    pub refused: u64,
}

/// One clique, as its ranks report it.
#[derive(Debug)]
pub(super) struct ReportedClique<'a> {
    pub hash: u64,
    /// The number of ranks that its members say.
    pub ranks: u32,
    pub members: BTreeMap<u32, RankReport<'a>>,
}

impl JobCollectives {
    /// Returns the cliques by their hashes. Those of which no rank is heard any more are left out.
    pub fn cliques(&self, now: Timestamp, silent_after: Duration) -> Vec<ReportedClique<'_>> {
        let mut cliques: BTreeMap<u64, ReportedClique<'_>> = BTreeMap::new();
        for (process, found) in &self.processes {
            let is_silent = now.since(found.heard_at) > silent_after;
            for communicator in &found.report.communicators {
                let ReportedCommunicator { hash, rank, ranks, .. } = *communicator;
                let clique = cliques.entry(hash).or_insert_with(|| ReportedClique {
                    hash,
                    ranks,
                    members: BTreeMap::new(),
                });
                // A report of another size is of no use beside the others.
                if clique.ranks != ranks {
                    continue;
                }
                let report =
                    RankReport { process: *process, communicator, heard_at: found.heard_at, is_silent };
                let is_newer = |known: &RankReport<'_>| known.heard_at < report.heard_at;
                if clique.members.get(&rank).is_none_or(is_newer) {
                    clique.members.insert(rank, report);
                }
            }
        }
        let is_heard = |clique: &ReportedClique<'_>| clique.members.values().any(|it| !it.is_silent);
        cliques.into_values().filter(is_heard).collect()
    }

    /// Returns what each rank of a clique did over the last whole window.
    pub fn windows_of(&self, clique: &ReportedClique<'_>) -> Vec<RankWindow> {
        let of_member = |(rank, report): (&u32, &RankReport<'_>)| {
            let start = self.processes.get(&report.process)?.windows.get(&(clique.hash, *rank))?;
            start.last.map(|(collectives, gpu_ns)| RankWindow { rank: *rank, collectives, gpu_ns })
        };
        let windows: Vec<RankWindow> = clique.members.iter().filter_map(of_member).collect();
        if windows.len() == clique.members.len() { windows } else { Vec::new() }
    }

    fn accept(&mut self, report: ProcessCollectives, now: Timestamp) {
        self.accepted += 1;
        let known = self.processes.get(&report.process);
        if known.is_some_and(|known| known.report.sequence >= report.sequence) {
            return;
        }
        for communicator in &report.communicators {
            let before = known.and_then(|known| {
                let same =
                    |it: &&ReportedCommunicator| (it.hash, it.rank) == (communicator.hash, communicator.rank);
                known.report.communicators.iter().find(same)
            });
            for row in &communicator.functions {
                let former =
                    before.and_then(|it| it.functions.iter().find(|old| old.function == row.function));
                let counts = self.functions.entry(row.function).or_default();
                let more = |new: u64, old: Option<u64>| new.saturating_sub(old.unwrap_or_default());
                counts.operations += more(row.enqueued, former.map(|old| old.enqueued));
                counts.bytes = counts.bytes.saturating_add(more(row.bytes, former.map(|old| old.bytes)));
                counts.gpu_ns = counts.gpu_ns.saturating_add(more(row.gpu_ns, former.map(|old| old.gpu_ns)));
            }
        }
        let mut windows = self.remove(report.process).map(|known| known.windows.clone()).unwrap_or_default();
        let totals: BTreeMap<(u64, u32), (u64, u64)> = report
            .communicators
            .iter()
            .map(|it| {
                let gpu_ns = it.functions.iter().map(|row| row.gpu_ns).fold(0, u64::saturating_add);
                ((it.hash, it.rank), (it.collectives, gpu_ns))
            })
            .collect();
        windows.retain(|key, _| totals.contains_key(key));
        for (key, (collectives, gpu_ns)) in totals {
            let fresh = WindowStart { at: now, collectives, gpu_ns, last: None };
            let start = windows.entry(key).or_insert(fresh);
            if now.since(start.at) >= WINDOW {
                let last =
                    (collectives.saturating_sub(start.collectives), gpu_ns.saturating_sub(start.gpu_ns));
                *start = WindowStart { at: now, collectives, gpu_ns, last: Some(last) };
            }
        }
        let bytes = memory_of(&report);
        self.bytes += bytes;
        let process = report.process;
        let stored = ProcessReport { report, heard_at: now, windows, bytes };
        self.processes.insert(process, Arc::new(stored));
    }

    fn remove(&mut self, process: u64) -> Option<Arc<ProcessReport>> {
        let removed = self.processes.remove(&process)?;
        self.bytes -= removed.bytes;
        Some(removed)
    }

    /// Removes processes that have been silent for long; and the oldest silent one, if there is no room for another process.
    fn make_room(
        &mut self,
        most: usize,
        silent_after: Duration,
        now: Timestamp,
    ) -> Result<(), CollectiveReportError> {
        let silence = |known: &ProcessReport| now.since(known.heard_at);
        let over: Vec<u64> = self
            .processes
            .iter()
            .filter(|(_, known)| silence(known) > DROPPED_AFTER)
            .map(|(process, _)| *process)
            .collect();
        for process in over {
            self.remove(process);
        }
        if self.processes.len() >= most {
            let oldest = self.processes.iter().min_by_key(|(_, known)| known.heard_at);
            let oldest = oldest.filter(|(_, known)| silence(known) > silent_after);
            let oldest = *oldest.ok_or(CollectiveReportError::NoRoom)?.0;
            self.remove(oldest);
        }
        Ok(())
    }

    /// Finds the cliques that wait, at most once a second.
    fn judge(&mut self, stuck_after: Duration, silent_after: Duration, now: Timestamp) {
        // In large jobs it takes longer, and is done less often.
        let times = u32::try_from(self.processes.len() / PROCESSES_PER_INTERVAL + 1).unwrap_or(u32::MAX);
        if self.judged_at.is_some_and(|at| now.since(at) < JUDGE_INTERVAL * times) {
            return;
        }
        let find = |clique: &ReportedClique<'_>| {
            let wait = find_wait(clique.ranks, &clique.members)?;
            Some((clique.hash, (wait.number, wait.lasted(now))))
        };
        self.waits = self.cliques(now, silent_after).iter().filter_map(find).collect();
        self.judged_at = Some(now);
        if self.waits.values().any(|(_, lasted)| *lasted >= stuck_after / 4) {
            self.timed_until = now.after(TIMING_KEPT);
        }
    }

    /// Returns the collectives that a process should report.
    fn wanted_of(&self, process: u64) -> Vec<WantedCollectives> {
        let Some(known) = self.processes.get(&process) else { return Vec::new() };
        let wanted = known.report.communicators.iter().filter_map(|communicator| {
            let (number, lasted) = self.waits.get(&communicator.hash)?;
            (*lasted >= WANTED_AFTER).then_some(WantedCollectives {
                hash: communicator.hash,
                rank: communicator.rank,
                first: number.saturating_sub(CONTEXT),
            })
        });
        wanted.collect()
    }

    /// Reads the cliques of the key-value store if a process reports one that is not known.
    fn refresh_index(&mut self, engine: &Engine, job: JobId, now: Timestamp) {
        if self.indexed_at.is_some_and(|at| now.since(at) < INDEX_INTERVAL) {
            return;
        }
        let is_unknown = |process: &Arc<ProcessReport>| {
            process.report.communicators.iter().any(|it| self.index.get(it.hash).is_none())
        };
        let has_unknown = self.processes.values().any(is_unknown);
        self.indexed_at = Some(now);
        engine.read(|core, _| {
            let Some(reader) = core.job(job) else { return };
            let run = reader.summary().run;
            if has_unknown || !self.index.is_of_run(run) {
                Arc::make_mut(&mut self.index).refresh(&reader, run);
            }
        });
    }
}

/// Returns about the memory of a report.
fn memory_of(report: &ProcessCollectives) -> usize {
    let of_communicator = |it: &ReportedCommunicator| {
        size_of::<ReportedCommunicator>()
            + it.name.len()
            + it.functions.len() * size_of::<super::parse::ReportedFunction>()
            + it.operations.len() * size_of::<super::parse::ReportedCollective>()
    };
    size_of::<ProcessReport>()
        + report.host.len()
        + report.communicators.iter().map(of_communicator).sum::<usize>()
}

/// The reports of all jobs.
#[derive(Debug)]
pub struct CollectiveReports {
    jobs: Mutex<BTreeMap<JobId, JobCollectives>>,
    /// The wait from which there is a finding, in milliseconds.
    stuck_after_ms: AtomicU64,
}

impl Default for CollectiveReports {
    fn default() -> Self {
        let reports = Self { jobs: Mutex::default(), stuck_after_ms: AtomicU64::new(0) };
        reports.set_stuck_after(STUCK_AFTER);
        reports
    }
}

impl CollectiveReports {
    pub(super) fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, JobCollectives>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the wait from which there is a finding.
    pub fn set_stuck_after(&self, wait: Duration) {
        self.stuck_after_ms.store(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the wait from which there is a finding.
    #[must_use]
    pub fn stuck_after(&self) -> Duration {
        Duration::from_millis(self.stuck_after_ms.load(Ordering::Relaxed))
    }

    /// Accepts the report in `message`.
    ///
    /// # Errors
    /// If it is invalid, the job is gone, or there is no room for another process.
    pub fn accept_report(
        &self,
        engine: &Engine,
        job: JobId,
        message: &[u8],
    ) -> Result<CollectiveAnswer, CollectiveReportError> {
        let now = engine.clock().now();
        let tasks = engine.read_under_lock(|core| core.job(job).map(|look| look.task_count()));
        let tasks = tasks.ok_or(CollectiveReportError::NoSuchJob)?;
        let parsed = ProcessCollectives::parse(message, now);
        let mut jobs = self.lock_jobs();
        let all_bytes: usize = jobs.values().map(|of_job| of_job.bytes).sum();
        let of_job = jobs.entry(job).or_default();
        let silent_after = silent_after(tasks);
        let accepted = parsed.and_then(|report| {
            let process = report.process;
            if !of_job.processes.contains_key(&process) {
                let most = tasks.saturating_mul(PROCESSES_PER_TASK).max(PROCESSES_PER_TASK);
                of_job.make_room(most, silent_after, now)?;
            }
            if all_bytes + memory_of(&report) > ALL_BYTES_MAX {
                return Err(CollectiveReportError::NoRoom);
            }
            of_job.accept(report, now);
            Ok(process)
        });
        let process = accepted.inspect_err(|_| of_job.refused += 1)?;
        of_job.judge(self.stuck_after(), silent_after, now);
        Ok(CollectiveAnswer {
            interval_ms: report_interval_ms(tasks),
            is_timed: of_job.timed_until > now,
            wanted: of_job.wanted_of(process),
        })
    }

    /// Calls `look` with a copy of the reports of a job, after it has read the cliques of the key-value store; `None` if no
    /// process of it has reported.
    pub(super) fn look<T>(
        &self,
        engine: &Engine,
        job: JobId,
        look: impl FnOnce(&JobCollectives, Timestamp) -> T,
    ) -> Option<T> {
        let now = engine.clock().now();
        let mut jobs = self.lock_jobs();
        let of_job = jobs.get_mut(&job).filter(|of_job| !of_job.processes.is_empty())?;
        of_job.refresh_index(engine, job, now);
        let copy = of_job.clone();
        drop(jobs);
        Some(look(&copy, now))
    }

    /// Returns the totals of every function of a job, and the numbers of accepted and refused reports.
    pub(super) fn counts(&self, job: JobId) -> (Vec<(CollectiveFunction, FunctionCounts)>, [u64; 2]) {
        let jobs = self.lock_jobs();
        let Some(of_job) = jobs.get(&job) else { return (Vec::new(), [0; 2]) };
        let functions = of_job.functions.iter().map(|(function, counts)| (*function, *counts));
        (functions.collect(), [of_job.accepted, of_job.refused])
    }

    /// Drops the reports of deleted jobs.
    pub fn retain_jobs(&self, exists: impl Fn(JobId) -> bool) {
        self.lock_jobs().retain(|job, _| exists(*job));
    }

    /// Returns the memory of all reports, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lock_jobs().values().map(|of_job| of_job.bytes).sum()
    }
}

/// Returns the silence after which a process of a job counts as not heard: three reports are missing.
pub(super) fn silent_after(tasks: usize) -> Duration {
    SILENT_AFTER.max(Duration::from_millis(u64::from(report_interval_ms(tasks)) * 3))
}

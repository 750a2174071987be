//! The reports of all jobs: the latest one of each process, within bounds. Begin at [`CollectiveReports`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_collectives::CollectiveFunction;

use super::analysis::{RankReport, RankWindow, find_wait};
use super::clique_key::CliqueIndex;
use super::parse::{CollectiveReportError, ProcessCollectives, ReportedCommunicator, ReportedRas};
use super::rank_windows::RankTotals;
use super::ras_questions::RasQuestions;
use super::{ALL_BYTES_MAX, DROPPED_AFTER, JOB_BYTES_MAX, PROCESSES_PER_TASK, SILENT_AFTER, STUCK_AFTER};
use crate::coordination::{JobId, Timestamp};
use crate::engine::Engine;
use crate::service::reports::report_interval_ms;

/// The time for which NCCL is asked for times after a clique has looked stuck.
const TIMING_KEPT: Duration = Duration::from_secs(60);
/// The shortest time between two readings of a job's cliques, and the time between two of which the first found no key for the
/// same communicators.
const INDEX_INTERVAL: Duration = Duration::from_secs(1);
const INDEX_RETRY_INTERVAL: Duration = Duration::from_secs(30);
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
    /// The communicators of which the process should ask RAS.
    pub ras: Vec<u64>,
}

/// The latest report of a process.
#[derive(Debug)]
pub(super) struct ProcessReport {
    pub report: ProcessCollectives,
    pub heard_at: Timestamp,
    /// By clique and rank.
    windows: BTreeMap<(u64, u32), RankTotals>,
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
    /// The communicators that had no key when the index was read.
    without_key: BTreeSet<u64>,
    pub functions: BTreeMap<CollectiveFunction, FunctionCounts>,
    /// Until when NCCL is asked for times.
    timed_until: Timestamp,
    /// The cliques that wait, with the number of the collective and for how long; and when that was found.
    waits: BTreeMap<u64, (u64, Duration)>,
    judged_at: Option<Timestamp>,
    /// Since when cliques lack the reports of some of their ranks.
    incomplete_since: BTreeMap<u64, Timestamp>,
    pub ras: RasQuestions,
    /// When a report came last, and when the first one came after none had come for long.
    accepted_at: Option<Timestamp>,
    pub resumed_at: Timestamp,
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

impl ReportedClique<'_> {
    /// Returns the number of ranks that are heard.
    pub fn heard_count(&self) -> usize {
        self.members.values().filter(|report| !report.is_silent).count()
    }
}

impl JobCollectives {
    /// Returns the cliques by their hashes. Those of which no rank is heard any more are left out.
    pub fn cliques(&self, now: Timestamp, silent_after: Duration) -> Vec<ReportedClique<'_>> {
        let mut cliques: BTreeMap<u64, ReportedClique<'_>> = self.clique_sizes().into_iter().collect();
        for (process, found) in &self.processes {
            let is_silent = now.since(found.heard_at) > silent_after;
            for communicator in &found.report.communicators {
                let ReportedCommunicator { hash, rank, ranks, .. } = *communicator;
                // A report of another size is of no use beside the others.
                let Some(clique) = cliques.get_mut(&hash).filter(|clique| clique.ranks == ranks) else {
                    continue;
                };
                let report =
                    RankReport { process: *process, communicator, heard_at: found.heard_at, is_silent };
                let is_newer = |known: &RankReport<'_>| known.heard_at < report.heard_at;
                if clique.members.get(&rank).is_none_or(is_newer) {
                    clique.members.insert(rank, report);
                }
            }
        }
        cliques.into_values().filter(|clique| clique.heard_count() > 0).collect()
    }

    /// Returns the cliques without members. The size of a clique is that of its key, or else the one that most processes report.
    fn clique_sizes<'a>(&self) -> impl IntoIterator<Item = (u64, ReportedClique<'a>)> {
        let mut sizes: BTreeMap<u64, BTreeMap<u32, usize>> = BTreeMap::new();
        for found in self.processes.values() {
            // A process counts once for a size, however many ranks it reports.
            let told: BTreeSet<(u64, u32)> =
                found.report.communicators.iter().map(|it| (it.hash, it.ranks)).collect();
            for (hash, ranks) in told {
                *sizes.entry(hash).or_default().entry(ranks).or_default() += 1;
            }
        }
        sizes.into_iter().filter_map(|(hash, reported)| {
            let by_key = self.index.get(hash).and_then(|key| u32::try_from(key.devices.len()).ok());
            let by_key = by_key.filter(|ranks| reported.contains_key(ranks));
            let by_most = reported.iter().max_by_key(|(_, processes)| **processes).map(|(ranks, _)| *ranks);
            let ranks = by_key.or(by_most)?;
            Some((hash, ReportedClique { hash, ranks, members: BTreeMap::new() }))
        })
    }

    /// Returns what each rank of a clique did over the last whole window; nothing if the windows of ranks differ.
    pub fn windows_of(&self, clique: &ReportedClique<'_>) -> Vec<RankWindow> {
        let of_member = |(rank, report): (&u32, &RankReport<'_>)| {
            self.processes.get(&report.process)?.windows.get(&(clique.hash, *rank))?.last_window()
        };
        let windows: Option<Vec<_>> = clique.members.iter().map(of_member).collect();
        let windows = windows.unwrap_or_default();
        let Some((first, _)) = windows.first() else { return Vec::new() };
        if windows.iter().any(|(number, _)| number != first) {
            return Vec::new();
        }
        let of_rank = |(rank, (_, (collectives, gpu_ns))): (&u32, &(u64, (u64, u64)))| RankWindow {
            rank: *rank,
            collectives: *collectives,
            gpu_ns: *gpu_ns,
        };
        clique.members.keys().zip(&windows).map(of_rank).collect()
    }

    /// Keeps a report in place of the former one of its process. `silent_after` is the silence after which a process counts as
    /// not heard.
    pub fn accept(&mut self, mut report: ProcessCollectives, silent_after: Duration, now: Timestamp) {
        self.accepted += 1;
        if self.accepted_at.is_none_or(|at| now.since(at) > silent_after) {
            self.resumed_at = now;
        }
        self.accepted_at = Some(now);
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
                let operations = more(row.enqueued, former.map(|old| old.enqueued));
                counts.operations = counts.operations.saturating_add(operations);
                counts.bytes = counts.bytes.saturating_add(more(row.bytes, former.map(|old| old.bytes)));
                counts.gpu_ns = counts.gpu_ns.saturating_add(more(row.gpu_ns, former.map(|old| old.gpu_ns)));
            }
        }
        let mut windows = self.remove(report.process).map(|known| known.windows.clone()).unwrap_or_default();
        let reported: BTreeSet<(u64, u32)> =
            report.communicators.iter().map(|it| (it.hash, it.rank)).collect();
        windows.retain(|key, _| reported.contains(key));
        for communicator in &report.communicators {
            let key = (communicator.hash, communicator.rank);
            let collectives = communicator.functions.iter().filter(|it| !it.function.is_point_to_point());
            let totals = collectives.fold((0_u64, 0_u64), |(timed, ns), row| {
                (timed.saturating_add(row.timed), ns.saturating_add(row.gpu_ns))
            });
            let of_rank = windows.entry(key).or_insert_with(|| RankTotals::start(totals, now));
            of_rank.update(totals, report.is_timed, now);
        }
        if let Some(answer) = report.ras.take() {
            self.bytes -= self.ras.bytes();
            self.ras.keep_answer(answer, now);
            self.bytes += self.ras.bytes();
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

    /// Removes processes that have been silent for long. The totals of the job stay.
    fn remove_silent(&mut self, now: Timestamp) {
        let is_over = |known: &Arc<ProcessReport>| now.since(known.heard_at) > DROPPED_AFTER;
        let over: Vec<u64> =
            self.processes.iter().filter(|(_, known)| is_over(known)).map(|(process, _)| *process).collect();
        for process in over {
            self.remove(process);
        }
        if self.processes.is_empty() {
            (self.index, self.indexed_at) = (Arc::default(), None);
            self.without_key.clear();
            self.incomplete_since.clear();
            self.waits.clear();
            self.bytes -= self.ras.bytes();
            self.ras.forget_answer();
        }
    }

    /// Removes processes that have been silent for long; and the oldest silent one, if there is no room for another process.
    fn make_room(
        &mut self,
        most: usize,
        silent_after: Duration,
        now: Timestamp,
    ) -> Result<(), CollectiveReportError> {
        self.remove_silent(now);
        let silence = |known: &ProcessReport| now.since(known.heard_at);
        if self.processes.len() >= most {
            let oldest = self.processes.iter().min_by_key(|(_, known)| known.heard_at);
            let oldest = oldest.filter(|(_, known)| silence(known) > silent_after);
            let oldest = *oldest.ok_or(CollectiveReportError::NoRoom)?.0;
            self.remove(oldest);
        }
        Ok(())
    }

    /// Returns a copy to judge, at most once an interval.
    fn copy_to_judge(&mut self, now: Timestamp) -> Option<Self> {
        // In large jobs it takes longer, and is done less often.
        let times = u32::try_from(self.processes.len() / PROCESSES_PER_INTERVAL + 1).unwrap_or(u32::MAX);
        if self.judged_at.is_some_and(|at| now.since(at) < JUDGE_INTERVAL * times) {
            return None;
        }
        self.judged_at = Some(now);
        Some(self.clone())
    }

    /// Finds the cliques that wait.
    pub fn judge(&mut self, stuck_after: Duration, silent_after: Duration, now: Timestamp) {
        let find = |clique: &ReportedClique<'_>| {
            let wait = find_wait(clique.ranks, &clique.members)?;
            Some((clique.hash, (wait.number, wait.lasted(now))))
        };
        let cliques = self.cliques(now, silent_after);
        let waits = cliques.iter().filter_map(find).collect();
        let incomplete = cliques.iter().filter(|clique| clique.heard_count() < clique.ranks as usize);
        let since = |hash: u64| self.incomplete_since.get(&hash).copied().unwrap_or(now);
        let incomplete_since = incomplete.map(|it| (it.hash, since(it.hash))).collect();
        (self.waits, self.incomplete_since) = (waits, incomplete_since);
        let stuck = self.waits.iter().filter(|(_, (_, lasted))| *lasted >= stuck_after / 4);
        let stuck: Vec<u64> = stuck.map(|(hash, _)| *hash).collect();
        // If some ranks should have reported by now, a wait for them looks without times as if all ranks were level.
        let lacking = self.incomplete_since.iter().filter(|(_, since)| now.since(**since) >= silent_after);
        let lacking: Vec<u64> = lacking.map(|(hash, _)| *hash).collect();
        if !stuck.is_empty() || !lacking.is_empty() {
            self.timed_until = now.after(TIMING_KEPT);
        }
        self.ras.set_subjects(&stuck, &lacking);
    }

    /// Returns whether NCCL should be asked for the times on the GPU.
    pub fn is_timed(&self, now: Timestamp) -> bool {
        self.timed_until > now
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

    /// Returns the communicators of which a process should ask RAS now. One process is asked at a time.
    fn questions_for(&mut self, process: u64, now: Timestamp) -> Vec<u64> {
        let Some(known) = self.processes.get(&process) else { return Vec::new() };
        let is_member = |hash: u64| known.report.communicators.iter().any(|it| it.hash == hash);
        self.ras.ask(self.processes.len(), is_member, now)
    }

    /// Notes that the keys of communicators are being read.
    pub fn note_look_up(&mut self, now: Timestamp, unknown: &BTreeSet<u64>) {
        self.indexed_at = Some(now);
        self.without_key.clone_from(unknown);
    }

    /// Reads the cliques of the key-value store, if communicators have no key yet or the job is in another run.
    fn refresh_index(&mut self, engine: &Engine, job: JobId, unknown: &BTreeSet<u64>) {
        engine.read(|core, _| {
            let Some(reader) = core.job(job) else { return };
            let run = reader.summary().run;
            if !unknown.is_empty() || !self.index.is_of_run(run) {
                let mut index = CliqueIndex::default();
                index.refresh(&reader, run);
                self.index = Arc::new(index);
            }
        });
    }

    /// Returns the communicators without a key, if the cliques of the key-value store are to be read now.
    pub fn hashes_to_look_up(&mut self, now: Timestamp) -> Option<BTreeSet<u64>> {
        let age = self.indexed_at.map(|at| now.since(at));
        if age.is_some_and(|age| age < INDEX_INTERVAL) {
            return None;
        }
        let hashes = self.processes.values().flat_map(|it| &it.report.communicators).map(|it| it.hash);
        let unknown: BTreeSet<u64> = hashes.filter(|hash| self.index.get(*hash).is_none()).collect();
        // Communicators that were split off another one never get a key.
        let is_retry = age.is_none_or(|age| age >= INDEX_RETRY_INTERVAL);
        let has_new = !unknown.is_subset(&self.without_key);
        (has_new || is_retry).then_some(unknown)
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
    // A map needs about as much again beside its keys and values.
    let windows = report.communicators.len() * 2 * size_of::<((u64, u32), RankTotals)>();
    size_of::<ProcessReport>()
        + windows
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
            let former = of_job.processes.get(&process).map_or(0, |known| known.bytes);
            let more = memory_of(&report) + report.ras.as_ref().map_or(0, ReportedRas::bytes);
            if all_bytes - former + more > ALL_BYTES_MAX || of_job.bytes - former + more > JOB_BYTES_MAX {
                return Err(CollectiveReportError::NoRoom);
            }
            of_job.accept(report, silent_after, now);
            Ok(process)
        });
        let process = accepted.inspect_err(|_| of_job.refused += 1)?;
        if let Some(mut copy) = of_job.copy_to_judge(now) {
            // Other reports do not wait for the judgement.
            drop(jobs);
            copy.judge(self.stuck_after(), silent_after, now);
            jobs = self.lock_jobs();
            let of_job = jobs.entry(job).or_default();
            (of_job.waits, of_job.incomplete_since) = (copy.waits, copy.incomplete_since);
            of_job.timed_until = of_job.timed_until.max(copy.timed_until);
            of_job.ras.take_subjects(copy.ras);
        }
        let of_job = jobs.entry(job).or_default();
        Ok(CollectiveAnswer {
            interval_ms: report_interval_ms(tasks),
            is_timed: of_job.is_timed(now),
            wanted: of_job.wanted_of(process),
            ras: of_job.questions_for(process, now),
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
        let to_look_up = of_job.hashes_to_look_up(now);
        if let Some(unknown) = &to_look_up {
            of_job.note_look_up(now, unknown);
        }
        let mut copy = of_job.clone();
        drop(jobs);
        // Keys are read without the lock, so that reports do not wait.
        if let Some(unknown) = to_look_up {
            copy.refresh_index(engine, job, &unknown);
            if let Some(of_job) = self.lock_jobs().get_mut(&job) {
                of_job.index = Arc::clone(&copy.index);
            }
        }
        Some(look(&copy, now))
    }

    /// Returns the totals of every function of a job, and the numbers of accepted and refused reports.
    pub(super) fn counts(&self, job: JobId) -> (Vec<(CollectiveFunction, FunctionCounts)>, [u64; 2]) {
        let jobs = self.lock_jobs();
        let Some(of_job) = jobs.get(&job) else { return (Vec::new(), [0; 2]) };
        let functions = of_job.functions.iter().map(|(function, counts)| (*function, *counts));
        (functions.collect(), [of_job.accepted, of_job.refused])
    }

    /// Returns the numbers of questions to RAS that were answered, and of those that failed.
    pub(super) fn ras_counts(&self, job: JobId) -> [u64; 2] {
        self.lock_jobs().get(&job).map_or([0; 2], |of_job| [of_job.ras.answered, of_job.ras.failed])
    }

    /// Drops the reports of deleted jobs, and those of processes that have been silent for long.
    pub fn retain_jobs(&self, now: Timestamp, exists: impl Fn(JobId) -> bool) {
        let mut jobs = self.lock_jobs();
        jobs.retain(|job, _| exists(*job));
        jobs.values_mut().for_each(|of_job| of_job.remove_silent(now));
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

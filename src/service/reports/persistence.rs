//! Keeps the reports over a restart of the service: snapshots have the reports of all runs, and the reports of a run that
//! ended are a note in the engine's journal.
//!
//! Both are JSON with the names of transports and outcomes, and lists of counters and stages that may get longer, so that a
//! version with more of them reads what another one wrote. The present state of tasks is not kept: workers report it again within seconds. Begin at the implementation of
//! [`PersistentObserver`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use super::job_reports::{JobReports, PAIRS_KEPT, SERIES_KEPT};
use super::report_store::{ReportsByRun, TransferReportStore};
use crate::coordination::{BarrierRecordWithArrivals, JobEvent, JobId};
use crate::engine::{ContentsSerialiser, Engine, Observer, PersistentObserver};

/// A longer note of an ended run is not recorded: only snapshots have it. A run of 10,000 tasks takes about a third.
const NOTE_BYTES_MAX: usize = 32 << 20;

/// A run that has ended is recorded once no task has reported for this long.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// The note of a run that ended.
#[derive(Serialize, Deserialize)]
struct EndedRun<Reports> {
    job: JobId,
    reports: Reports,
}

fn lock(of_job: &Mutex<ReportsByRun>) -> MutexGuard<'_, ReportsByRun> {
    of_job.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reports of a job, which are locked only while they are serialised.
struct LockedToSerialise(Arc<Mutex<ReportsByRun>>);

impl Serialize for LockedToSerialise {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        lock(&self.0).serialize(serializer)
    }
}

impl ReportsByRun {
    /// Puts the reports of a run, which the journal has, in the place of those that are there.
    fn put(&mut self, reports: JobReports) {
        let reports = JobReports { is_in_journal: true, ..reports };
        if reports.run > self.latest.run {
            self.begin_run(reports.run);
        }
        if reports.run == self.latest.run {
            self.latest = reports;
            return;
        }
        let place = self.earlier.partition_point(|of_run| of_run.run > reports.run);
        match self.earlier.get_mut(place).filter(|of_run| of_run.run == reports.run) {
            Some(of_run) => *of_run = reports,
            None => self.earlier.insert(place, reports),
        }
        self.drop_excess_runs();
    }

    /// Returns whether the contents are within the bounds of the store.
    fn is_within_bounds(&self) -> bool {
        let of_run = |of_run: &JobReports| {
            of_run.pairs.len() <= SERIES_KEPT
                && of_run.tasks.values().all(|task| task.rows.len().max(task.peer_jobs.len()) <= PAIRS_KEPT)
        };
        let runs = || std::iter::once(&self.latest).chain(&self.earlier);
        runs().all(of_run) && runs().zip(runs().skip(1)).all(|(newer, older)| newer.run > older.run)
    }
}

impl TransferReportStore {
    /// Records the reports of runs that have ended in the journal, if there is one: of each job at most one run in a call. Serialising
    /// may take long.
    pub fn record_ended_runs(&self, engine: &Engine) {
        if engine.journal_state().is_none() {
            return;
        }
        let jobs: Vec<_> = self.lock_jobs().iter().map(|(job, of_job)| (*job, Arc::clone(of_job))).collect();
        let now = engine.clock().now();
        for (job, of_job) in jobs {
            let present = engine.read_under_lock(|core| core.job(job).map(|job| job.run_interval()));
            let Some((run, _, end)) = present else { continue };
            // The tasks of a run that has ended may report once more.
            let is_over =
                |of_run: &JobReports| of_run.run < run || end.is_some() && now.since(of_run.at) >= QUIET_TIME;
            let note = {
                let mut of_job = lock(&of_job);
                let ReportsByRun { latest, earlier } = &mut *of_job;
                let mut runs = std::iter::once(latest).chain(earlier);
                let Some(reports) = runs.find(|of_run| !of_run.is_in_journal && is_over(of_run)) else {
                    continue;
                };
                reports.is_in_journal = true;
                serde_json::to_vec(&EndedRun { job, reports: &*reports })
            };
            match note {
                Ok(note) if note.len() <= NOTE_BYTES_MAX => engine.record_note(self.name(), &note),
                Ok(_) => {
                    tracing::debug!(job = job.0, "the transfers of an ended run are too many for a note")
                }
                Err(error) => tracing::warn!(job = job.0, %error, "transfers cannot be serialised"),
            }
        }
    }
}

// Reports come from workers, not from events.
impl Observer for TransferReportStore {
    fn on_event(&self, _: &JobEvent) {}

    fn on_barrier_ended(&self, _: &Arc<BarrierRecordWithArrivals>) {}
}

impl PersistentObserver for TransferReportStore {
    fn name(&self) -> &'static str {
        "transfers"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        // The reports of a job are locked while the engine's lock is taken, so they are not locked here. Their
        // growth until they are serialised does no harm: a counter does not go back.
        let jobs = self.lock_jobs().clone();
        let jobs: BTreeMap<JobId, LockedToSerialise> =
            jobs.into_iter().map(|(job, of_job)| (job, LockedToSerialise(of_job))).collect();
        Box::new(move || serde_json::to_vec(&jobs).expect("reports can be serialised"))
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let jobs: BTreeMap<JobId, ReportsByRun> =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if let Some((job, _)) = jobs.iter().find(|(_, of_job)| !of_job.is_within_bounds()) {
            return Err(format!("The contents of the job with number {} are not valid.", job.0));
        }
        let with_lock = |(job, mut of_job): (JobId, ReportsByRun)| {
            let ReportsByRun { latest, earlier } = &mut of_job;
            std::iter::once(latest).chain(earlier).for_each(|of_run| of_run.is_in_journal = true);
            (job, Arc::new(Mutex::new(of_job)))
        };
        *self.lock_jobs() = jobs.into_iter().map(with_lock).collect();
        Ok(())
    }

    fn restore_note(&self, bytes: &[u8]) -> Result<(), String> {
        let EndedRun::<JobReports> { job, reports } =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let fresh = JobReports::new(reports.run);
        let mut jobs = self.lock_jobs();
        let of_job = jobs.entry(job).or_insert_with(|| Arc::new(Mutex::new(ReportsByRun::new(fresh))));
        lock(of_job).put(reports);
        Ok(())
    }
}

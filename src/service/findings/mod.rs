//! Findings: conclusions from measurements, for people and for automatic exclusion.
//!
//! Each detector (`detector.rs`) is a pure function of [`DetectorInput`], in a file of its own.
//! [`run_detectors_periodically`] runs all detectors once a second on a copy of the measurements. [`FindingStore`]
//! holds open and closed findings. This module performs no command on a job. If the settings of a job permit an
//! automatic exclusion, `automatic_exclusion.rs` returns an [`AutomaticExclusion`]. `service::AuditedOperations`
//! performs it like the exclusion of an operator, with the same audit and the same refusals. Begin at
//! [`run_detectors_periodically`], then [`CATALOGUE`].
//!
//! | file | finding |
//! | --- | --- |
//! | `missing_at_registration.rs` | a run cannot start because tasks have not registered |
//! | `barrier_stuck.rs` | a barrier takes far longer than its recent instances |
//! | `stalled_task.rs` | a few connected tasks have not reached a barrier at which all other members wait |
//! | `chronic_straggler.rs` | a task arrives late at nearly every barrier |
//! | `heartbeat_gaps.rs` | gaps between heartbeats come close to the heartbeat timeout |
//! | `restart_storm.rs` | tasks restart again and again within one run |
//! | `repeated_run_failures.rs` | several runs fail in a row |
//! | `bound_nearly_reached.rs` | a job has nearly reached one of its bounds |
//! | `worker_clock_off.rs` | the clock of a host differs from the service's clock |
//! | `fatal_gpu_error.rs` | a GPU is lost to its process |
//! | `collective_stuck.rs` | a collective waits too long |
//! | `collective_slow_rank.rs` | the GPUs of all others wait for one task in most collectives |
//!
//! `awaited_heartbeats.rs` has the text about heartbeats that findings and pages share.

mod automatic_exclusion;
mod awaited_heartbeats;
mod barrier_stuck;
mod bound_nearly_reached;
mod chronic_straggler;
mod collective_slow_rank;
mod collective_stuck;
mod detector;
mod fatal_gpu_error;
mod finding_store;
mod heartbeat_gaps;
mod journal_not_written;
mod metrics;
mod missing_at_registration;
mod recent_lateness;
mod repeated_run_failures;
mod restart_storm;
mod stalled_task;
#[cfg(test)]
mod tests;
mod worker_clock_off;

use std::sync::Arc;
use std::time::Duration;

pub use automatic_exclusion::AutomaticExclusion;
pub use awaited_heartbeats::{AwaitedHeartbeat, awaited_heartbeats_text};
pub use detector::{Detection, Detector, DetectorInput, Evidence, Severity};
pub use finding_store::{Finding, FindingStore, FindingTransition};
pub use metrics::FindingMetrics;
pub use recent_lateness::{LateArrivals, RecentLateness, count_late_arrivals};
pub use restart_storm::{RESTART_WINDOW, restart_count_text};

use crate::coordination::{
    FindingChange, JobId, JobObservation, TaskId, TaskIncarnations, TaskObservation, TaskPhase,
};
use crate::engine::Engine;
use crate::service::collectives::{CollectiveReports, CollectiveTroubles};
use crate::service::reports::{ClockReading, LostGpuView, TransferReportStore};

/// All detectors.
pub static CATALOGUE: &[&Detector] = &[
    &missing_at_registration::DETECTOR,
    &barrier_stuck::DETECTOR,
    &stalled_task::DETECTOR,
    &chronic_straggler::DETECTOR,
    &heartbeat_gaps::DETECTOR,
    &restart_storm::DETECTOR,
    &repeated_run_failures::DETECTOR,
    &bound_nearly_reached::DETECTOR,
    &worker_clock_off::DETECTOR,
    &journal_not_written::DETECTOR,
    &fatal_gpu_error::DETECTOR,
    &collective_stuck::DETECTOR,
    &collective_slow_rank::DETECTOR,
];

/// Returns the names of every kind of finding, as in events, metrics and addresses.
pub fn finding_ids() -> impl Iterator<Item = &'static str> {
    CATALOGUE.iter().map(|detector| detector.id)
}

/// The interval between two detections.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs all detectors on a job.
#[must_use]
pub fn run_detectors(seen: DetectorInput<'_>) -> Vec<(&'static Detector, Detection)> {
    CATALOGUE.iter().filter_map(|detector| Some((*detector, (detector.detect)(seen)?))).collect()
}

/// The reports of processes about themselves, beside the measurements of the service.
#[derive(Debug, Clone, Default)]
pub struct WorkerReports {
    /// The transfer reports of native workers.
    pub transfers: Arc<TransferReportStore>,
    /// The collectives that NCCL's profiler plug-in reports.
    pub collectives: Arc<CollectiveReports>,
}

/// The summary of the reports about one job.
struct JobReportSummary {
    clocks: Vec<(TaskId, ClockReading)>,
    lost_gpus: Vec<(TaskId, LostGpuView)>,
    collectives: CollectiveTroubles,
    journal_trouble: Option<String>,
}

impl JobReportSummary {
    fn new(engine: &Engine, reports: &WorkerReports, seen: &JobObservation) -> Self {
        let transfers = &reports.transfers;
        let (clocks, lost_gpus) = match incarnations_if_reported(engine, transfers, seen) {
            Some(roster) => {
                (transfers.worker_clocks(seen.job, &roster), transfers.lost_gpus(seen.job, &roster))
            }
            None => Default::default(),
        };
        Self {
            clocks,
            lost_gpus,
            collectives: reports.collectives.find_troubles(engine, seen.job, seen.tasks.len()),
            journal_trouble: journal_trouble(engine),
        }
    }

    fn input<'a>(&'a self, job: &'a JobObservation) -> DetectorInput<'a> {
        DetectorInput {
            job,
            clocks: &self.clocks,
            lost_gpus: &self.lost_gpus,
            stuck_cliques: &self.collectives.stuck,
            slow_ranks: &self.collectives.slow,
            journal_trouble: self.journal_trouble.as_deref(),
        }
    }
}

/// Runs the detectors once a second for as long as it is polled, and passes the resulting remedies to
/// `apply`.
pub async fn run_detectors_periodically(
    engine: Arc<Engine>,
    reports: WorkerReports,
    board: Arc<FindingStore>,
    apply: impl Fn(AutomaticExclusion) + Send,
) {
    loop {
        for remedy in run_detectors_on_all_jobs(&engine, &reports, &board) {
            apply(remedy);
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Runs the detectors once on every job. Returns the remedies that the settings of jobs ask for.
pub fn run_detectors_on_all_jobs(
    engine: &Engine,
    reports: &WorkerReports,
    board: &FindingStore,
) -> Vec<AutomaticExclusion> {
    let mut remedies = Vec::new();
    let jobs: Vec<JobId> = engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
    board.retain_jobs(|job| jobs.contains(&job));
    reports.collectives.retain_jobs(engine.clock().now(), |job| jobs.contains(&job));
    for job in jobs {
        let Some(seen) = engine.read(|core, now| core.observe_job(job, now)) else { continue };
        let summary = JobReportSummary::new(engine, reports, &seen);
        for transition in board.update_with_detections(&seen, run_detectors(summary.input(&seen))) {
            let (open, finding) = match transition {
                FindingTransition::Opened(finding) => (true, finding),
                FindingTransition::Closed(finding) => (false, finding),
            };
            if open {
                remedies.extend(automatic_exclusion::automatic_exclusion_for_finding(engine, job, &finding));
            }
            let (title, summary) = (&finding.title, &finding.summary);
            let reason = match open {
                true => format!("{title}: {summary}"),
                false => format!("{}: {title}: {summary}", finding_end_text(&seen, &finding)),
            };
            engine.record_finding(
                job,
                FindingChange { finding: finding.id.clone(), open, tasks: finding.tasks, reason },
            );
        }
    }
    board.record_check_time(engine.clock().now());
    remedies
}

/// Returns how a finding ended. A condition of a task does not hold any more once the task has failed, which is no recovery.
fn finding_end_text(seen: &JobObservation, finding: &Finding) -> String {
    if finding.has_ended_with_run(seen) {
        return format!("ended with run {}", finding.run);
    }
    let is_lost = |task: &TaskObservation| {
        let has_restarted = !task.past_registrations.is_empty()
            && finding.closed_at.is_some_and(|end| task.registered_at > end);
        // Tasks that had failed before the finding opened did not end it.
        (task.standing == TaskPhase::Failed && task.since >= finding.opened_at) || has_restarted
    };
    let lost = finding.tasks.iter().filter_map(|id| seen.task(*id)).filter(|task| is_lost(task)).count();
    // A finding lists only the first of its tasks.
    match (lost, finding.task_count) {
        (0, _) => "ended".to_owned(),
        (1, 1) => "ended because its task has failed".to_owned(),
        (lost, all) if lost == all => format!("ended because its {all} tasks have failed"),
        (1, all) if all == finding.tasks.len() => format!("ended; of its {all} tasks, 1 has failed"),
        (lost, all) if all == finding.tasks.len() => format!("ended; of its {all} tasks, {lost} have failed"),
        (lost, all) => format!("ended; of its {all} tasks, {lost} or more have failed"),
    }
}

/// Returns the open findings of a job that hold now, by severity and with present values, and those that have
/// ended, the latest first.
///
/// A finding stays open for ten seconds after its last detection, so that a flickering condition is one
/// finding. This function runs the detectors again and counts a finding that does not hold at this moment as
/// ended, so that no page shows a condition that is over, and none loses one.
#[must_use]
pub fn open_and_closed_findings(
    engine: &Engine,
    reports: &WorkerReports,
    board: &FindingStore,
    job: JobId,
) -> (Vec<Finding>, Vec<Finding>) {
    let seen =
        if board.has_open_findings(job) { engine.read(|core, now| core.observe_job(job, now)) } else { None };
    let (held, seen_at) = seen.map_or_else(Default::default, |seen| {
        (open_findings_that_hold(engine, reports, board, &seen), seen.seen_at)
    });
    let ended = board.ended_findings(job, &held, seen_at);
    (held, ended)
}

/// Returns the open findings of a job that hold in the state `seen`. The detectors run only if the job has open
/// findings.
#[must_use]
pub fn open_findings_that_hold(
    engine: &Engine,
    reports: &WorkerReports,
    board: &FindingStore,
    seen: &JobObservation,
) -> Vec<Finding> {
    if !board.has_open_findings(seen.job) {
        return Vec::new();
    }
    let summary = JobReportSummary::new(engine, reports, seen);
    board.open_findings_among(seen, run_detectors(summary.input(seen)))
}

/// Returns the reason for which the journal cannot be written, if it cannot.
fn journal_trouble(engine: &Engine) -> Option<String> {
    engine.journal_state().and_then(|journal| journal.files.trouble)
}

/// Returns the present incarnations of a job's tasks if any worker has reported in this run.
fn incarnations_if_reported(
    engine: &Engine,
    reports: &TransferReportStore,
    seen: &JobObservation,
) -> Option<TaskIncarnations> {
    if !reports.has_run_reports(seen.job, seen.run) {
        return None;
    }
    engine.read(|core, _| core.job(seen.job).map(|job| job.task_incarnations()))
}

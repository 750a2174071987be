//! The views of transfer reports that pages, REST and metrics share. This file has the totals of a job and of a
//! task.
//!
//! `view/` has the parts of these totals, and the lists of pairs and connections. Begin at [`TransfersView`].

mod connections;
mod failures;
mod rates;
mod totals;
mod traffic;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::byte_series::STEP_SECONDS;
use super::job_reports::{JobReports, StoredTransferFailure, TaskGauges, TaskReports};
use super::parse::{ClockReading, HostChecksView, LostGpuView, ReportedTotals, TransportConnectionCounts};
use super::report_store::{TransferReportStore, report_interval_ms};
use super::vocabulary::ReportedTransport;
use crate::coordination::{JobId, RunNumber, TaskId, TaskIncarnations, Timestamp};

pub use connections::{ConnectionView, LinksView};
pub use failures::{FailureView, ReasonView};
pub(crate) use rates::rate_window;
pub use totals::{AbortView, DurationView, OutcomeView, StageView, TotalsView, TransferBytes};
pub use traffic::{PairSeries, PairView, PeerJobView, Series, Throughput};

use connections::{connections_by_transport, gauges_of_present_incarnations};
use failures::failures_by_reason;
use rates::RateWindow;

/// The reported transfers of one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskTransfers {
    /// The task.
    pub task: TaskId,
    /// The incarnation of the last report, in hexadecimal.
    pub incarnation: String,
    /// The number of lives that have reported in this run.
    pub lives: u32,
    /// The time of the last report.
    pub reported_at: Timestamp,
    /// The reporting life has ended: it failed, left or restarted. Its counts stay.
    pub stale: bool,
    /// Its counters in this run.
    pub totals: TotalsView,
    /// Bytes sent a second, over the ten seconds before `rate_until` of the summary.
    pub sent_rate: u64,
    /// Bytes received a second.
    pub received_rate: u64,
    /// The end of the ten seconds over which its rates are measured.
    #[serde(default)]
    pub rate_until: Timestamp,
    /// Its connections, by kind.
    pub links: Vec<LinksView>,
    /// Cliques in its cache; none if the life has ended.
    pub cliques: u64,
    /// Host memory registered for transfers, in bytes; none if the life has ended.
    pub registered_bytes: u64,
    /// Memory of GPUs registered for transfers, in bytes; none if the life has ended.
    #[serde(default)]
    pub registered_device_bytes: u64,
    /// Bytes that launches in progress still have to move, by class: latency, normal, bulk.
    pub in_flight_bytes: [u64; 3],
    /// The offset of its clock; none before it is reported, and none if the life has ended.
    pub clock: Option<ClockReading>,
    /// Its last failures, the latest first.
    pub failures: Vec<FailureView>,
    /// The GPUs that the driver has lost to its process; none if the life has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost_gpus: Vec<LostGpuView>,
    /// The checks of its host for fast transfers; none before they are reported, and none if the life has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_checks: Option<HostChecksView>,
}

impl TaskTransfers {
    fn from_reports(
        task: TaskId,
        of_task: &TaskReports,
        roster: &TaskIncarnations,
        window: RateWindow,
    ) -> Self {
        let failures = of_task.failures.iter().rev();
        let gauges = of_task.gauges_if_incarnation_is_present(roster.incarnation_of(task));
        let held = |gauge: fn(&TaskGauges) -> u64| gauges.map_or(0, gauge);
        Self {
            task,
            incarnation: of_task.incarnation.to_string(),
            lives: of_task.lives,
            reported_at: of_task.at,
            stale: gauges.is_none(),
            totals: TotalsView::from_counters(&of_task.totals()),
            sent_rate: window.rate_of(&of_task.steps[0]),
            received_rate: window.rate_of(&of_task.steps[1]),
            rate_until: window.end(),
            links: gauges.map_or_else(Vec::new, |gauges| connections_by_transport(&gauges.links)),
            cliques: held(|gauges| gauges.cliques),
            registered_bytes: held(|gauges| gauges.registered_bytes),
            registered_device_bytes: held(|gauges| gauges.registered_device_bytes),
            in_flight_bytes: gauges.map_or([0; 3], |gauges| gauges.in_flight),
            clock: gauges.and_then(|gauges| gauges.clock),
            lost_gpus: gauges.map_or_else(Vec::new, |gauges| gauges.lost_gpus.clone()),
            host_checks: gauges.and_then(|_| of_task.host_checks.clone()),
            failures: failures
                .map(|failed| {
                    FailureView::from_failure(&StoredTransferFailure { task, failed: failed.clone() })
                })
                .collect(),
        }
    }

    /// Returns the number of launches in progress.
    #[must_use]
    pub fn launches_in_flight(&self) -> u64 {
        self.links.iter().map(|links| links.launches).sum()
    }

    /// Returns the number of its connections.
    #[must_use]
    pub fn connection_count(&self) -> u64 {
        self.links.iter().map(|links| links.connections).sum()
    }
}

/// The totals of the transfers in a job's present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransfersView {
    /// The time of this view.
    pub seen_at: Timestamp,
    /// The run.
    pub run: RunNumber,
    /// The number of tasks of the job.
    pub tasks: usize,
    /// The number of tasks whose present life has reported.
    pub reporting: usize,
    /// The number of tasks whose reporting life has ended.
    pub stale: usize,
    /// The time of the last report; none without a report.
    pub reported_at: Option<Timestamp>,
    /// The interval between reports of one task, in milliseconds.
    pub interval_ms: u32,
    /// The number of accepted reports.
    pub taken: u64,
    /// The number of reports without news.
    pub repeated: u64,
    /// The number of refused reports.
    pub refused: u64,
    /// The counters of all tasks.
    pub totals: TotalsView,
    /// Bytes sent a second by all tasks, over the last complete ten seconds that all have reported. The rates
    /// of the tasks add up to it, and so do those of the pairs if all pairs are kept.
    pub rate: u64,
    /// The end of the ten seconds over which every rate is measured; none without a report.
    #[serde(default)]
    pub rate_until: Option<Timestamp>,
    /// The present connections, by kind.
    pub links: Vec<LinksView>,
    /// Cliques in the caches of the tasks.
    pub cliques: u64,
    /// Host memory registered by the tasks for transfers, in bytes.
    pub registered_bytes: u64,
    /// Memory of GPUs registered by the tasks for transfers, in bytes.
    #[serde(default)]
    pub registered_device_bytes: u64,
    /// Bytes that launches in progress still have to move, as both sides count them, by class: latency,
    /// normal, bulk.
    pub in_flight_bytes: [u64; 3],
    /// The reported clock that is furthest from the service's.
    pub clock: Option<ClockReading>,
    /// Failures by reason; the reason that occurred first in the run comes first.
    pub failures: Vec<ReasonView>,
}

impl TransfersView {
    fn empty(roster: &TaskIncarnations, now: Timestamp) -> Self {
        Self {
            seen_at: now,
            run: roster.run,
            tasks: roster.incarnations.len(),
            reporting: 0,
            stale: 0,
            reported_at: None,
            interval_ms: report_interval_ms(roster.incarnations.len()),
            taken: 0,
            repeated: 0,
            refused: 0,
            totals: TotalsView::from_counters(&ReportedTotals::default()),
            rate: 0,
            rate_until: None,
            links: Vec::new(),
            cliques: 0,
            registered_bytes: 0,
            registered_device_bytes: 0,
            in_flight_bytes: [0; 3],
            clock: None,
            failures: Vec::new(),
        }
    }

    fn from_reports(of_job: &JobReports, roster: &TaskIncarnations, now: Timestamp) -> Self {
        let mut view = Self::empty(roster, now);
        let mut totals = ReportedTotals::default();
        let mut links = [TransportConnectionCounts::default(); ReportedTransport::ALL.len()];
        for (task, of_task) in &of_job.tasks {
            totals.add(&of_task.totals());
            let Some(gauges) = of_task.gauges_if_incarnation_is_present(roster.incarnation_of(*task)) else {
                view.stale += 1;
                continue;
            };
            view.reporting += 1;
            for (sum, links) in links.iter_mut().zip(&gauges.links) {
                sum.add(links);
            }
            view.cliques = view.cliques.saturating_add(gauges.cliques);
            view.registered_bytes = view.registered_bytes.saturating_add(gauges.registered_bytes);
            view.registered_device_bytes =
                view.registered_device_bytes.saturating_add(gauges.registered_device_bytes);
            for (sum, bytes) in view.in_flight_bytes.iter_mut().zip(gauges.in_flight) {
                *sum = sum.saturating_add(bytes);
            }
            view.clock = ClockReading::furthest_from_service(view.clock.into_iter().chain(gauges.clock));
        }
        let window = RateWindow::of_reports(of_job, roster);
        let moved = of_job.tasks.values().map(|of_task| of_task.steps[0].bytes_of_step(window.0));
        view.rate = moved.fold(0, u64::saturating_add) / STEP_SECONDS;
        view.rate_until = Some(window.end()).filter(|_| of_job.at.0 > 0);
        view.reported_at = Some(of_job.at).filter(|at| at.0 > 0);
        (view.taken, view.repeated, view.refused) = (of_job.taken, of_job.repeated, of_job.rejected);
        view.totals = TotalsView::from_counters(&totals);
        view.links = connections_by_transport(&links);
        view.failures = failures_by_reason(of_job, &view.totals);
        view
    }

    /// Returns the times between which every rate is measured.
    #[must_use]
    pub fn rate_window(&self) -> Option<(Timestamp, Timestamp)> {
        self.rate_until.map(rate_window)
    }

    /// Returns the number of present connections.
    #[must_use]
    pub fn connection_count(&self) -> u64 {
        self.links.iter().map(|links| links.connections).sum()
    }

    /// Returns the number of launches in progress.
    #[must_use]
    pub fn launches_in_flight(&self) -> u64 {
        self.links.iter().map(|links| links.launches).sum()
    }

    /// Returns the bytes that launches in progress still have to move.
    #[must_use]
    pub fn bytes_in_flight(&self) -> u64 {
        self.in_flight_bytes.iter().copied().fold(0, u64::saturating_add)
    }
}

impl TransferReportStore {
    /// Returns whether any task of the job has reported in this run.
    #[must_use]
    pub fn has_run_reports(&self, job: JobId, run: RunNumber) -> bool {
        self.with_run_reports(job, run, |of_job| !of_job.tasks.is_empty()).unwrap_or_default()
    }

    /// Returns the summary of a job's transfers.
    #[must_use]
    pub fn transfers_summary(&self, job: JobId, roster: &TaskIncarnations, now: Timestamp) -> TransfersView {
        let seen =
            self.with_run_reports(job, roster.run, |of_job| TransfersView::from_reports(of_job, roster, now));
        seen.unwrap_or_else(|| TransfersView::empty(roster, now))
    }

    /// Returns the transfers of every task that has reported, by number.
    #[must_use]
    pub fn task_transfers(&self, job: JobId, roster: &TaskIncarnations) -> Vec<TaskTransfers> {
        self.transfers_of_tasks(job, roster, |_| true)
    }

    /// Returns the transfers of the tasks that have reported in the run and for which `is_wanted` holds, by number.
    #[must_use]
    pub fn transfers_of_tasks(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        is_wanted: impl Fn(TaskId) -> bool,
    ) -> Vec<TaskTransfers> {
        let view = |of_job: &JobReports| {
            let tasks = of_job.tasks.iter().filter(|(task, _)| is_wanted(**task));
            let window = RateWindow::of_reports(of_job, roster);
            let view = |(task, of_task): (&TaskId, &TaskReports)| {
                TaskTransfers::from_reports(*task, of_task, roster, window)
            };
            tasks.map(view).collect()
        };
        self.with_run_reports(job, roster.run, view).unwrap_or_default()
    }

    /// Returns what the present state of tasks has, of those whose life is present and whose state has it.
    fn list_from_present_state<T>(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        find: impl Fn(&TaskGauges) -> Option<T>,
    ) -> Vec<(TaskId, T)> {
        let view = |of_job: &JobReports| {
            gauges_of_present_incarnations(of_job, roster)
                .filter_map(|(task, gauges)| Some((task, find(gauges)?)))
                .collect()
        };
        self.with_run_reports(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the lost GPU of each task whose life is present: the one that was reported first.
    #[must_use]
    pub fn lost_gpus(&self, job: JobId, roster: &TaskIncarnations) -> Vec<(TaskId, LostGpuView)> {
        self.list_from_present_state(job, roster, |gauges| {
            gauges.lost_gpus.iter().min_by_key(|lost| lost.reported_at).cloned()
        })
    }

    /// Returns the reported clocks of tasks whose life is present.
    #[must_use]
    pub fn worker_clocks(&self, job: JobId, roster: &TaskIncarnations) -> Vec<(TaskId, ClockReading)> {
        self.list_from_present_state(job, roster, |gauges| gauges.clock)
    }

    /// Returns the transfers of one task, if it has reported.
    #[must_use]
    pub fn transfers_of_task(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: TaskId,
    ) -> Option<TaskTransfers> {
        let view = |of_job: &JobReports| {
            let of_task = of_job.tasks.get(&task)?;
            Some(TaskTransfers::from_reports(task, of_task, roster, RateWindow::of_reports(of_job, roster)))
        };
        self.with_run_reports(job, roster.run, view).flatten()
    }
}

//! Writes transfer reports as metrics.
//!
//! `report_store.rs` holds the reports. A job without reports has no time series, because all of them would be zero.
//! A worker sends its first report within its first second, so a scrape misses hardly any increase. Begin at
//! [`TransferReportMetrics`].

use std::sync::Arc;

use super::{
    ReportedTransport, TaskTransfers, TotalsView, TransferOutcome, TransferReportStore, TransfersView,
};
use crate::coordination::JobObservation;
use crate::engine::Engine;
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};
use crate::transfer::PriorityClass;

/// The metrics of the transfer reports of every job.
pub struct TransferReportMetrics {
    /// The state: which incarnation of a task counts.
    pub engine: Arc<Engine>,
    /// The reports.
    pub reports: Arc<TransferReportStore>,
    /// Jobs with more tasks have no metrics for each of them.
    pub tasks_max: usize,
}

impl MetricSource for TransferReportMetrics {
    fn write_samples(&self, _page: &mut ScrapeOutput) {}

    fn write_job_samples(&self, seen: &JobObservation, page: &mut ScrapeOutput) {
        if !self.reports.has_run_reports(seen.job, seen.run) {
            return;
        }
        let roster = self.engine.read(|core, _| core.job(seen.job).map(|look| look.task_incarnations()));
        let Some(roster) = roster else { return };
        let view = self.reports.transfers_summary(seen.job, &roster, seen.seen_at);
        let job = seen.name.as_str();
        write_transfer_samples_of_job(job, &view, page);
        if seen.tasks.len() <= self.tasks_max {
            write_task_samples(job, &self.reports.task_transfers(seen.job, &roster), page);
        }
    }
}

/// Bytes by transport and direction; those that moved nothing are 0, so that the first shows as a rise.
fn bytes_by_transport(totals: &TotalsView) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
    ReportedTransport::ALL.into_iter().flat_map(|transport| {
        let of = totals.bytes.iter().find(|of| of.transport == transport);
        let (sent, received) = of.map_or((0, 0), |of| (of.sent, of.received));
        [(transport.name(), "sent", sent), (transport.name(), "received", received)]
    })
}

/// Writes the sums over the tasks of a job.
fn write_transfer_samples_of_job(job: &str, view: &TransfersView, page: &mut ScrapeOutput) {
    for (result, count) in [("taken", view.taken), ("repeated", view.repeated), ("refused", view.refused)] {
        page.add_integer_sample(&metric::TRANSFER_REPORTS, &[job, result], count);
    }
    page.add_usize_sample(&metric::TRANSFER_TASKS, &[job], view.reporting);
    let totals = &view.totals;
    for (transport, direction, bytes) in bytes_by_transport(totals) {
        page.add_integer_sample(&metric::TRANSFER_BYTES, &[job, transport, direction], bytes);
    }
    for outcome in TransferOutcome::all() {
        page.add_integer_sample(
            &metric::TRANSFER_LAUNCHES,
            &[job, outcome.name()],
            totals.launches_with_outcome(outcome),
        );
    }
    page.add_integer_sample(&metric::TRANSFER_IN_FLIGHT, &[job], view.launches_in_flight());
    for transport in ReportedTransport::ALL {
        let links = view.links.iter().find(|links| links.transport == transport);
        let connections = links.map_or(0, |links| links.connections);
        page.add_integer_sample(&metric::TRANSFER_CONNECTIONS, &[job, transport.name()], connections);
    }
    for (event, count) in
        [("hit", totals.cache_hits), ("miss", totals.cache_misses), ("eviction", totals.cache_evictions)]
    {
        page.add_integer_sample(&metric::TRANSFER_CACHE, &[job, event], count);
    }
    for (metric, count) in [
        (&metric::TRANSFER_CLIQUES, view.cliques),
        (&metric::TRANSFER_FENCED, totals.fenced_frames),
        (&metric::TRANSFER_DAMAGED, totals.damaged_chunks),
        (&metric::TRANSFER_LANES_LOST, totals.lanes_lost),
        (&metric::TRANSFER_LANES_MADE, totals.lanes_made),
        (&metric::TRANSFER_FALLBACKS, totals.fetch_fallbacks),
        (&metric::TRANSFER_REGISTERED, view.registered_bytes),
        (&metric::TRANSFER_REGISTERED_DEVICE, view.registered_device_bytes),
    ] {
        page.add_integer_sample(metric, &[job], count);
    }
    for of in &totals.stages {
        page.add_transfer_engine_histogram(
            &metric::TRANSFER_STAGES,
            &[job, &of.stage],
            &of.counts,
            of.sum_us,
        );
    }
    for of in &totals.durations {
        let labels = [job, of.transport.name(), &of.size_class];
        page.add_transfer_engine_histogram(&metric::TRANSFER_DURATIONS, &labels, &of.counts, of.sum_us);
    }
    for reason in TransferOutcome::all().filter(|outcome| *outcome != TransferOutcome::COMPLETED) {
        let found = totals.aborts.iter().find(|of| of.reason == reason);
        page.add_integer_sample(
            &metric::TRANSFER_ABORTS,
            &[job, reason.name()],
            found.map_or(0, |of| of.connections),
        );
    }
    for (class, bytes) in PriorityClass::ALL.into_iter().zip(view.in_flight_bytes) {
        page.add_integer_sample(&metric::TRANSFER_IN_FLIGHT_BYTES, &[job, class.name()], bytes);
    }
    if let Some(clock) = view.clock {
        page.add_sample(&metric::CLOCK_WORST, &[job], clock.ahead_seconds());
    }
}

/// Writes the metrics of single tasks.
fn write_task_samples(job: &str, tasks: &[TaskTransfers], page: &mut ScrapeOutput) {
    for of_task in tasks {
        let task = of_task.task.to_string();
        for (transport, direction, bytes) in
            bytes_by_transport(&of_task.totals).filter(|(.., bytes)| *bytes > 0)
        {
            page.add_integer_sample(&metric::TRANSFER_TASK_BYTES, &[job, &task, transport, direction], bytes);
        }
        page.add_integer_sample(
            &metric::TRANSFER_TASK_FAILED,
            &[job, &task],
            of_task.totals.failed_launches(),
        );
        if let Some(clock) = of_task.clock {
            page.add_sample(&metric::CLOCK_OFFSET, &[job, &task], clock.ahead_seconds());
        }
    }
}

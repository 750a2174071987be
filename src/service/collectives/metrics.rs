//! Writes collectives as metrics. `report_store.rs` counts. Begin at [`CollectiveMetrics`].

use std::sync::Arc;

use muster_collectives::ras::RasRankState;

use super::analysis::WaitKind;
use super::{ALL_BYTES_MAX, CollectiveReports};
use crate::coordination::JobObservation;
use crate::engine::Engine;
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The metrics of the collectives of every job.
pub struct CollectiveMetrics {
    reports: Arc<CollectiveReports>,
    /// It has the cliques.
    engine: Arc<Engine>,
}

impl CollectiveMetrics {
    /// Returns the source of these metrics.
    #[must_use]
    pub fn source(reports: &Arc<CollectiveReports>, engine: &Arc<Engine>) -> Arc<dyn MetricSource> {
        Arc::new(Self { reports: Arc::clone(reports), engine: Arc::clone(engine) })
    }
}

impl MetricSource for CollectiveMetrics {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_usize_sample(&metric::COLLECTIVE_REPORT_BYTES, &[], self.reports.bytes());
        page.add_usize_sample(&metric::COLLECTIVE_REPORT_BYTES_LIMIT, &[], ALL_BYTES_MAX);
    }

    fn write_job_samples(&self, seen: &JobObservation, page: &mut ScrapeOutput) {
        let job = seen.name.as_str();
        let view = self.reports.view(&self.engine, seen.job, seen.tasks.len());
        let (counts, [accepted, refused]) = self.reports.counts(seen.job);
        for (result, count) in [("accepted", accepted), ("refused", refused)] {
            page.add_integer_sample(&metric::COLLECTIVE_REPORTS, &[job, result], count);
        }
        page.add_usize_sample(&metric::COLLECTIVE_PROCESSES, &[job], view.processes);
        page.add_usize_sample(&metric::COLLECTIVE_PROCESSES_TIMED, &[job], view.timed_processes);
        page.add_usize_sample(&metric::COLLECTIVE_CLIQUES, &[job], view.clique_count);
        let waits = || view.cliques.iter().filter_map(|clique| clique.wait.as_ref());
        for kind in WaitKind::ALL {
            let count = waits().filter(|wait| wait.kind == kind).count();
            page.add_usize_sample(&metric::COLLECTIVE_CLIQUES_WAITING, &[job, kind.name()], count);
        }
        let longest = waits().map(|wait| wait.waited_s).fold(0.0, f64::max);
        page.add_sample(&metric::COLLECTIVE_WAIT_SECONDS, &[job], longest);
        let [answered, failed] = self.reports.ras_counts(seen.job);
        for (result, count) in [("answered", answered), ("failed", failed)] {
            page.add_integer_sample(&metric::COLLECTIVE_RAS_QUESTIONS, &[job, result], count);
        }
        let told =
            || view.cliques.iter().filter_map(|clique| clique.ras.as_ref()).flat_map(|ras| &ras.notable);
        for state in RasRankState::TROUBLE_NAMES {
            let count = told().filter(|rank| rank.state == state).count();
            page.add_usize_sample(&metric::COLLECTIVE_RAS_RANKS, &[job, state], count);
        }
        for (function, count) in counts {
            let labels = [job, function.name()];
            page.add_integer_sample(&metric::COLLECTIVE_OPERATIONS, &labels, count.operations);
            page.add_integer_sample(&metric::COLLECTIVE_BYTES, &labels, count.bytes);
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            page.add_sample(&metric::COLLECTIVE_GPU_SECONDS, &labels, count.gpu_ns as f64 / 1e9);
        }
    }
}

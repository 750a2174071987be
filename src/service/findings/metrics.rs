//! Writes the open findings as metrics.
//!
//! `telemetry::metrics::EventCounters` counts how often findings are opened. Begin at [`FindingMetrics`].

use std::sync::Arc;

use super::{CATALOGUE, FindingStore, WorkerReports, open_findings_that_hold};
use crate::coordination::JobObservation;
use crate::engine::Engine;
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The metrics of the findings of every job.
pub struct FindingMetrics {
    /// The state.
    pub engine: Arc<Engine>,
    /// The reports on which some findings rest.
    pub reports: WorkerReports,
    /// The findings.
    pub findings: Arc<FindingStore>,
}

impl MetricSource for FindingMetrics {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_timestamp_sample(&metric::FINDINGS_LOOKED, &[], self.findings.last_checked_at());
    }

    fn write_job_samples(&self, seen: &JobObservation, page: &mut ScrapeOutput) {
        let open = open_findings_that_hold(&self.engine, &self.reports, &self.findings, seen);
        for finding in CATALOGUE {
            let found = open.iter().find(|open| *open.id == *finding.id);
            let severity = found.map_or(finding.severity, |found| found.severity).name();
            let labels = [seen.name.as_str(), finding.id, severity];
            page.add_integer_sample(&metric::FINDINGS, &labels, u64::from(found.is_some()));
        }
    }
}

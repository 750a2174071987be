//! Writes the open findings as metrics.
//!
//! It does not count how often a finding was opened: `telemetry::metrics::EventCounters` does. Begin at
//! [`FindingMetrics`].

use std::sync::Arc;

use super::{CATALOGUE, FindingStore, hold};
use crate::coordination::JobObservation;
use crate::engine::Engine;
use crate::reports::ReportStore;
use crate::telemetry::metrics::{MetricSource, Scrape, catalogue as metric};

/// The metrics of the findings of every job.
pub struct FindingMetrics {
    /// The state.
    pub engine: Arc<Engine>,
    /// The reports on which some findings rest.
    pub reports: Arc<ReportStore>,
    /// The findings.
    pub findings: Arc<FindingStore>,
}

impl MetricSource for FindingMetrics {
    fn show(&self, page: &mut Scrape) {
        page.write_timestamp(&metric::FINDINGS_LOOKED, &[], self.findings.looked_at());
    }

    fn show_job(&self, seen: &JobObservation, page: &mut Scrape) {
        let open = if self.findings.has_open(seen.job) {
            hold(&self.engine, &self.reports, &self.findings, seen)
        } else {
            Vec::new()
        };
        for finding in CATALOGUE {
            let holds = open.iter().any(|open| *open.id == *finding.id);
            page.count(&metric::FINDINGS, &[seen.name.as_str(), finding.id], u64::from(holds));
        }
    }
}

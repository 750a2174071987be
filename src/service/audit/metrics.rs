//! Writes the metrics of the audit log.
//!
//! `AuditLog::stats` returns the counts. Begin at `AuditLog::write_samples`.

use super::{AuditLog, AuditOutcome};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

impl MetricSource for AuditLog {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        let figures = self.stats();
        for outcome in [AuditOutcome::Done, AuditOutcome::Refused] {
            page.add_integer_sample(&metric::AUDIT_LINES, &[outcome.name()], figures.lines[outcome as usize]);
        }
        page.add_usize_sample(&metric::AUDIT_KEPT, &[], figures.kept);
        page.add_usize_sample(&metric::AUDIT_LIMIT, &[], figures.kept_max);
        page.add_integer_sample(&metric::AUDIT_DROPPED, &[], figures.dropped);
        page.add_integer_sample(&metric::AUDIT_LOST, &[], figures.file.lost);
        page.add_usize_sample(&metric::AUDIT_QUEUED, &[], figures.file.queued);
        page.add_sample(&metric::AUDIT_WAITS, &[], figures.file.waits.as_secs_f64());
        page.add_integer_sample(&metric::AUDIT_GATHERED, &[], figures.gathered);
    }
}

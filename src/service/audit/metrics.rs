//! Writes the metrics of the audit log.
//!
//! It counts nothing itself: `AuditLog::stats` does. Begin at `AuditLog::show`.

use super::{AuditLog, AuditOutcome};
use crate::telemetry::metrics::{MetricSource, Scrape, catalogue as metric};

impl MetricSource for AuditLog {
    fn show(&self, page: &mut Scrape) {
        let figures = self.stats();
        for outcome in [AuditOutcome::Done, AuditOutcome::Refused] {
            page.count(&metric::AUDIT_LINES, &[outcome.name()], figures.lines[outcome as usize]);
        }
        page.size(&metric::AUDIT_KEPT, &[], figures.kept);
        page.size(&metric::AUDIT_LIMIT, &[], figures.kept_max);
        page.count(&metric::AUDIT_DROPPED, &[], figures.dropped);
        page.count(&metric::AUDIT_LOST, &[], figures.file.lost);
        page.size(&metric::AUDIT_QUEUED, &[], figures.file.queued);
        page.write_sample(&metric::AUDIT_WAITS, &[], figures.file.waits.as_secs_f64());
        page.count(&metric::AUDIT_GATHERED, &[], figures.gathered);
    }
}

//! Serves `GET /metrics` of the server.
//!
//! Every part of the server writes its own samples (`Shows`). Begin at `scrape`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::{Audit, AuditOutcome, Problem, Readiness, Site, Streams};
use crate::telemetry::metrics::{Page, Shows, TEXT_FORMAT, catalogue as metric};

/// `GET /metrics`
pub(super) async fn scrape(State(site): State<Site>) -> Result<impl IntoResponse, Problem> {
    let text = site.metrics.scrape().ok_or_else(Problem::unmeasured)?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text))
}

impl Shows for Readiness {
    fn show(&self, page: &mut Page) {
        page.count(&metric::READY, &[], u64::from(self.reason().is_none()));
    }
}

impl Shows for Streams {
    fn show(&self, page: &mut Page) {
        let (open, most) = self.open();
        page.size(&metric::STREAMS, &[], open);
        page.size(&metric::STREAMS_LIMIT, &[], most);
    }
}

impl Shows for Audit {
    fn show(&self, page: &mut Page) {
        let figures = self.figures();
        for outcome in [AuditOutcome::Done, AuditOutcome::Refused] {
            page.count(&metric::AUDIT_LINES, &[outcome.name()], figures.lines[outcome as usize]);
        }
        page.size(&metric::AUDIT_KEPT, &[], figures.kept);
        page.size(&metric::AUDIT_LIMIT, &[], figures.kept_max);
        page.count(&metric::AUDIT_DROPPED, &[], figures.dropped);
        page.count(&metric::AUDIT_LOST, &[], figures.file.lost);
        page.size(&metric::AUDIT_QUEUED, &[], figures.file.queued);
        page.put(&metric::AUDIT_WAITS, &[], figures.file.waits.as_secs_f64());
        page.count(&metric::AUDIT_GATHERED, &[], figures.gathered);
    }
}

//! Serves `GET /metrics` of the server.
//!
//! Every part of the server writes its own samples (`MetricSource`). Begin at `scrape`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::{AppState, AuditLog, AuditOutcome, EventStreamLimiter, Problem, ServerReadiness};
use crate::telemetry::metrics::{MetricSource, Scrape, TEXT_FORMAT, catalogue as metric};

/// Serves `GET /metrics`.
pub(super) async fn scrape(State(site): State<AppState>) -> Result<impl IntoResponse, Problem> {
    let text = site.metrics.scrape().ok_or_else(Problem::unmeasured)?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text))
}

impl MetricSource for ServerReadiness {
    fn show(&self, page: &mut Scrape) {
        page.count(&metric::READY, &[], u64::from(self.reason().is_none()));
    }
}

impl MetricSource for EventStreamLimiter {
    fn show(&self, page: &mut Scrape) {
        let (open, most) = self.open();
        page.size(&metric::STREAMS, &[], open);
        page.size(&metric::STREAMS_LIMIT, &[], most);
    }
}

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

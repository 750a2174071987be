//! Serves `GET /metrics` of the server.
//!
//! Every part of the server writes its own samples (`MetricSource`). Begin at `scrape`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::{AppState, EventStreamLimiter, Problem, ServerReadiness};
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

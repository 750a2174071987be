//! Serves `GET /metrics` of the server.
//!
//! Every part of the server writes its own samples through the trait `MetricSource`. Begin at `serve_metrics`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::{AppState, EventStreamLimiter, Problem, ServerReadiness};
use crate::telemetry::metrics::{MetricSource, ScrapeSamples, TEXT_FORMAT, catalogue as metric};

/// Serves `GET /metrics`.
pub(super) async fn serve_metrics(State(site): State<AppState>) -> Result<impl IntoResponse, Problem> {
    let text = site.metrics.scrape().ok_or_else(Problem::no_metrics)?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text))
}

impl MetricSource for ServerReadiness {
    fn write_samples(&self, page: &mut ScrapeSamples) {
        page.add_integer_sample(&metric::READY, &[], u64::from(self.not_ready_reason().is_none()));
    }
}

impl MetricSource for EventStreamLimiter {
    fn write_samples(&self, page: &mut ScrapeSamples) {
        let (open, most) = self.open_and_maximum();
        page.add_usize_sample(&metric::STREAMS, &[], open);
        page.add_usize_sample(&metric::STREAMS_LIMIT, &[], most);
    }
}

//! Serves `GET /metrics` of the server.
//!
//! Every part of the server writes its own samples through the trait `MetricSource`. Begin at `serve_metrics`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::{AppState, Problem};
use crate::telemetry::metrics::TEXT_FORMAT;

/// Serves `GET /metrics`.
pub(super) async fn serve_metrics(State(site): State<AppState>) -> Result<impl IntoResponse, Problem> {
    let text = site.metrics.scrape().ok_or_else(Problem::metrics_not_built)?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text))
}

//! Metrics.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

use super::Site;
use crate::telemetry::metrics::TEXT_FORMAT;

/// `GET /metrics`
pub(super) async fn scrape(State(site): State<Site>) -> impl IntoResponse {
    ([(CONTENT_TYPE, TEXT_FORMAT)], site.metrics.scrape())
}

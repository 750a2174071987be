//! The list of routes.

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::get;

use super::{Site, about, findings, health, jobs, metrics, problem};

/// How long a request's body may be, in bytes. Nothing that is served here takes one yet.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Every page and answer of the web edge.
pub fn router(site: Site) -> Router {
    Router::new()
        .route("/healthz/live", get(health::live))
        .route("/healthz/ready", get(health::ready))
        .route("/version", get(about::version))
        .route("/api/v1/server", get(about::server))
        .route("/api/v1/jobs", get(jobs::list))
        .route("/api/v1/jobs/{job}", get(jobs::show))
        .route("/api/v1/jobs/{job}/events", get(jobs::events))
        .route("/api/v1/jobs/{job}/findings", get(findings::of_job))
        .route("/api/v1/findings", get(findings::all))
        .route("/metrics", get(metrics::scrape))
        .fallback(problem::no_such_page)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn(problem::finish))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(site)
}

/// The pages of a listener that is for metrics alone.
pub fn metrics_router(site: Site) -> Router {
    Router::new()
        .route("/metrics", get(metrics::scrape))
        .fallback(problem::no_such_page)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn(problem::finish))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(site)
}

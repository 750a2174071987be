//! The list of routes.
//!
//! What stands under `/api/v1` says its method and path itself, in the annotation from which its description is made:
//! a route that is not described, or a description without a route, cannot be.

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::get;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::openapi::{self, Document};
use super::{
    Site, about, audit, drain, etag, events, exclusions, findings, health, jobs, keys, metrics, pages,
    problem, runs,
};

/// How long a request's body may be, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// The REST API, with its description.
fn api() -> (Router<Site>, Document) {
    let router = OpenApiRouter::with_openapi(openapi::head())
        .routes(routes!(about::server))
        .routes(routes!(openapi::show))
        .routes(routes!(audit::list))
        .routes(routes!(jobs::list, jobs::create))
        .routes(routes!(jobs::show, jobs::change, jobs::delete))
        .routes(routes!(events::list))
        .routes(routes!(exclusions::list, exclusions::create))
        .routes(routes!(exclusions::show, exclusions::lift))
        .routes(routes!(drain::show, drain::create))
        .routes(routes!(runs::runs))
        .routes(routes!(runs::tasks))
        .routes(routes!(runs::task))
        .routes(routes!(runs::barriers))
        .routes(routes!(runs::live))
        .routes(routes!(runs::devices))
        .routes(routes!(runs::device_map))
        .routes(routes!(findings::of_job))
        .routes(routes!(findings::all))
        .routes(routes!(keys::list))
        .routes(routes!(keys::show, keys::put, keys::remove));
    let (router, described) = router.split_for_parts();
    (router, Document::new(&described))
}

/// Every page and answer of the web edge.
pub fn router(site: Site) -> Router {
    let (api, document) = api();
    let pages = pages::router().layer(axum::Extension(document.clone()));
    let api = api.layer(axum::Extension(document)).layer(middleware::from_fn(etag::tag));
    Router::new()
        .route("/healthz/live", get(health::live))
        .route("/healthz/ready", get(health::ready))
        .route("/version", get(about::version))
        .route("/metrics", get(metrics::scrape))
        .merge(api)
        .merge(pages)
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

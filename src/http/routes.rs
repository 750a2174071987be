//! Registers every route with what it requires of its callers, and builds the routers of the listeners.
//!
//! It holds no handler. A route under `/api/v1` takes its method and path from the annotation that also makes its
//! OpenAPI description, so a route without a description, or a description without a route, cannot exist. Begin at
//! [`router`], then [`ROUTE_ACCESS`].

use axum::Router;
use axum::http::Method;
use axum::middleware;
use axum::routing::{get, post};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::access::{self, Access, login};
use super::openapi::{self, OpenApiDocument};
use super::{
    AppState, about, audit, drain, etag, events, exclusions, findings, health, jobs, keys, metrics, pages,
    problem, runs, transfers,
};
use crate::service::Role;

/// The access that each route requires, by row. One test compares the rows with the routes, another calls
/// every route. A change on a route without a row, which the tests exclude, is for admins.
pub static ROUTE_ACCESS: &[(Access, &str, &[&str])] = &[
    // Probes have no tokens, and a client that logs in has not sent its token yet.
    (
        Access::Public,
        "GET",
        &["/healthz/live", "/healthz/ready", "/version", "/login", "/static/{file}", "/favicon.ico"],
    ),
    (Access::Public, "POST", &["/login"]),
    (Access::Role(Role::Viewer), "POST", &["/logout"]),
    (
        Access::Role(Role::Viewer),
        "GET",
        &[
            "/metrics",
            "/api/v1/server",
            "/api/v1/handshakes",
            "/api/v1/openapi.json",
            "/api/v1/audit",
            "/api/v1/findings",
            "/api/v1/jobs",
            "/api/v1/jobs/{job}",
            "/api/v1/jobs/{job}/events",
            "/api/v1/jobs/{job}/exclusions",
            "/api/v1/jobs/{job}/exclusions/{id}",
            "/api/v1/jobs/{job}/drain",
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/{job}/tasks",
            "/api/v1/jobs/{job}/tasks/{task}",
            "/api/v1/jobs/{job}/barriers",
            "/api/v1/jobs/{job}/live",
            "/api/v1/jobs/{job}/devices",
            "/api/v1/jobs/{job}/devices/map",
            "/api/v1/jobs/{job}/transfers",
            "/api/v1/jobs/{job}/transfers/tasks",
            "/api/v1/jobs/{job}/findings",
            "/api/v1/jobs/{job}/keys",
            "/",
            "/live",
            "/jobs",
            "/jobs/{job}",
            "/jobs/{job}/live",
            "/jobs/{job}/timeline",
            "/jobs/{job}/barriers",
            "/jobs/{job}/tasks/{task}",
            "/jobs/{job}/devices",
            "/jobs/{job}/transfers",
            "/jobs/{job}/keys",
            "/jobs/{job}/drain",
            "/jobs/{job}/exclusions",
            "/transfers",
            "/audit",
            "/search",
            "/api",
            "/guide",
            "/guide/{page}",
        ],
    ),
    // Tasks find and trust one another by values: addresses, and the ids that admit a process to a
    // communicator.
    (Access::Role(Role::Operator), "GET", &["/api/v1/jobs/{job}/keys/{*key}", "/jobs/{job}/keys/value"]),
    (Access::Role(Role::Operator), "PUT", &["/api/v1/jobs/{job}/keys/{*key}"]),
    (
        Access::Role(Role::Operator),
        "DELETE",
        &["/api/v1/jobs/{job}/keys/{*key}", "/api/v1/jobs/{job}/exclusions/{id}"],
    ),
    (
        Access::Role(Role::Operator),
        "POST",
        &[
            "/api/v1/jobs/{job}/exclusions",
            "/api/v1/jobs/{job}/drain",
            "/jobs/{job}/exclusions",
            "/jobs/{job}/exclusions/{id}/lift",
            "/jobs/{job}/drain",
        ],
    ),
    (Access::Role(Role::Admin), "POST", &["/api/v1/jobs"]),
    (Access::Role(Role::Admin), "PATCH", &["/api/v1/jobs/{job}"]),
    (Access::Role(Role::Admin), "DELETE", &["/api/v1/jobs/{job}"]),
];

/// Returns the access that the route at this path requires.
fn need(method: &Method, path: Option<&str>) -> Access {
    let looks = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let method = if looks { "GET" } else { method.as_str() };
    let row = ROUTE_ACCESS
        .iter()
        .find(|(_, of, paths)| *of == method && path.is_some_and(|path| paths.contains(&path)));
    let otherwise = if looks { Role::Viewer } else { Role::Admin };
    row.map_or(Access::Role(otherwise), |(need, ..)| *need)
}

/// Returns the REST routes and their description.
fn api() -> (Router<AppState>, OpenApiDocument) {
    let router = OpenApiRouter::with_openapi(openapi::head())
        .routes(routes!(about::server))
        .routes(routes!(about::handshakes))
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
        .routes(routes!(transfers::show))
        .routes(routes!(transfers::tasks))
        .routes(routes!(findings::of_job))
        .routes(routes!(findings::all))
        .routes(routes!(keys::list))
        .routes(routes!(keys::show, keys::put, keys::remove));
    let (router, described) = router.split_for_parts();
    (router, OpenApiDocument::new(described))
}

/// Returns the router of all pages and REST routes.
pub fn router(site: AppState) -> Router {
    let (api, document) = api();
    let pages = pages::router().layer(axum::Extension(document.clone()));
    let api = api.layer(axum::Extension(document)).layer(middleware::from_fn(etag::add_etag));
    Router::new()
        .route("/healthz/live", get(health::live))
        .route("/healthz/ready", get(health::ready))
        .route("/version", get(about::version))
        .route("/login", get(login::show).post(login::log_in))
        .route("/logout", post(login::log_out))
        .route("/metrics", get(metrics::scrape))
        .merge(api)
        .merge(pages)
        .fallback(problem::no_such_page)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn_with_state(
            access::AccessLayerState { site: site.clone(), access: need },
            access::authorize,
        ))
        .layer(middleware::from_fn(problem::render_problems))
        .with_state(site)
}

/// Returns the router of a listener for metrics alone.
pub fn metrics_router(site: AppState) -> Router {
    Router::new()
        .route("/metrics", get(metrics::scrape))
        .fallback(problem::no_such_page)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn_with_state(
            access::AccessLayerState { site: site.clone(), access: need },
            access::authorize,
        ))
        .layer(middleware::from_fn(problem::render_problems))
        .with_state(site)
}

/// Returns the router of a listener for health probes alone. It reads no bodies and requires no tokens.
pub fn health_router(site: AppState) -> Router {
    Router::new()
        .route("/healthz/live", get(health::live))
        .route("/healthz/ready", get(health::ready))
        .fallback(problem::no_such_page)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn(problem::render_problems))
        .with_state(site)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use http_body_util::BodyExt as _;
    use serde_json::Value;
    use tower_service::Service as _;

    use super::*;
    use crate::clock::Clock;
    use crate::coordination::JobSettings;
    use crate::engine::Engine;
    use crate::http::{ServerInfo, Version};

    fn site() -> AppState {
        let engine = Engine::new(Clock::start());
        engine.declare("a".parse().unwrap(), JobSettings::new(1)).unwrap();
        let about =
            ServerInfo { version: Version::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        AppState::new(engine, Arc::default(), Arc::new(about))
    }

    async fn ask(router: &mut Router, method: &str, path: &str) -> (StatusCode, Value) {
        ask_with(router, method, path, ("accept", "*/*")).await
    }

    async fn ask_with(
        router: &mut Router,
        method: &str,
        path: &str,
        (name, value): (&str, &str),
    ) -> (StatusCode, Value) {
        let request = Request::builder().method(method).uri(path).header(name, value);
        let request = request.header("host", "localhost").header("content-type", "application/json");
        let request = request.body(Body::empty()).unwrap();
        let (head, body) = router.call(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (head.status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Returns every operation of the description: method, path, and the operation itself.
    async fn described(router: &mut Router) -> Vec<(String, String, Value)> {
        let (status, document) = ask(router, "GET", "/api/v1/openapi.json").await;
        assert_eq!(status, StatusCode::OK);
        let mut operations = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                operations.push((method.to_uppercase(), path.clone(), operation.clone()));
            }
        }
        operations
    }

    /// Returns a path of the description with values for its placeholders.
    fn filled(path: &str) -> String {
        let path = path.replace("{job}", "a").replace("{id}", "1").replace("{task}", "0");
        path.replace("{key}", "k")
    }

    #[tokio::test]
    async fn every_route_is_described_and_every_description_has_its_route() {
        let mut router = router(site());
        let operations = described(&mut router).await;
        for (method, path, _) in &operations {
            let (status, problem) = ask(&mut router, method, &filled(path)).await;
            assert_ne!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            assert_ne!(problem["type"], "/problems/no-such-page", "{method} {path}");
        }
        // Conversely, the routes are counted in the source text.
        let source = include_str!("routes.rs");
        let source = &source[..source.find("#[cfg(test)]").unwrap()];
        let lists = source.split("routes!(").skip(1).filter_map(|rest| rest.split_once(')'));
        let handlers: usize = lists.map(|(list, _)| list.split(',').count()).sum();
        assert_eq!(handlers, operations.len());
        let plain: Vec<&str> =
            source.split(".route(\"").skip(1).filter_map(|r| r.split('"').next()).collect();
        assert!(plain.iter().all(|path| !path.starts_with("/api/")), "{plain:?} are not described");
        let mut ids: Vec<&str> =
            operations.iter().filter_map(|(_, _, o)| o["operationId"].as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), operations.len(), "operations are told apart by their ids");
    }

    #[tokio::test]
    async fn every_route_says_whom_it_is_for() {
        let described = described(&mut router(site())).await;
        let mut routes: Vec<(String, String)> = described
            .into_iter()
            .map(|(method, path, _)| (method, path.replace("{key}", "{*key}")))
            .collect();
        // Routes without a description are found in the source text.
        let own = include_str!("routes.rs");
        let own = &own[..own.find("pub fn metrics_router").unwrap()];
        for route in
            [own, include_str!("pages/mod.rs")].iter().flat_map(|source| source.split(".route(\"").skip(1))
        {
            let (path, handlers) = route.split_once('"').unwrap();
            let handlers = handlers.lines().next().unwrap();
            for (method, call) in [("GET", "get("), ("POST", "post("), ("PUT", "put("), ("DELETE", "delete(")]
            {
                if handlers.contains(call) {
                    routes.push((method.into(), path.into()));
                }
            }
        }
        let mut rows: Vec<(String, String)> = Vec::new();
        for (_, method, paths) in ROUTE_ACCESS {
            rows.extend(paths.iter().map(|path| ((*method).to_owned(), (*path).to_owned())));
        }
        routes.sort();
        rows.sort();
        assert_eq!(rows, routes);
    }

    #[tokio::test]
    async fn an_invalid_query_is_explained() {
        let mut router = router(site());
        for (path, words) in [
            ("/api/v1/jobs?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/audit?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/events?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/barriers?state=recent&limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/events?kind=nothing", "\"nothing\" is none; there are barrier-failed"),
            ("/api/v1/jobs/a/events?stream=1&newest=true", "a stream tells what happens as it happens"),
            ("/api/v1/jobs/a/barriers?state=old", "in-progress"),
        ] {
            let (status, problem) = ask(&mut router, "GET", path).await;
            assert_eq!(
                (status, &problem["type"]),
                (StatusCode::BAD_REQUEST, &"/problems/bad-query".into()),
                "{path}"
            );
            assert!(
                problem["detail"].as_str().is_some_and(|detail| detail.contains(words)),
                "{path}: {problem}"
            );
        }
        let (status, page) = ask(&mut router, "GET", "/api/v1/jobs/a/barriers?state=recent&limit=1").await;
        assert_eq!((status, &page["recent"]), (StatusCode::OK, &serde_json::json!([])), "{page}");
        let (status, page) = ask(&mut router, "GET", "/api/v1/jobs/a/events?newest=true&limit=1").await;
        assert_eq!((status, &page["events"][0]["kind"]), (StatusCode::OK, &"run-opened".into()), "{page}");
        // Every list states that its limit is at least 1.
        for (_, path, operation) in described(&mut router).await {
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let limit = parameter["name"] == "limit";
                assert!(!limit || parameter["schema"]["minimum"] == 1, "{path}: {parameter}");
            }
        }
    }

    #[tokio::test]
    async fn a_change_on_condition_of_a_tag_changes_nothing() {
        let mut router = router(site());
        for (method, path) in [("PATCH", "/api/v1/jobs/a"), ("DELETE", "/api/v1/jobs/a?reason=r")] {
            let (status, problem) =
                ask_with(&mut router, method, path, ("if-match", "W/\"0123456789abcdef\"")).await;
            assert_eq!(status, StatusCode::PRECONDITION_FAILED, "{method}: {problem}");
            assert_eq!(problem["type"], "/problems/no-strong-tags");
        }
        let (status, _) = ask_with(&mut router, "GET", "/api/v1/jobs/a", ("if-match", "\"x\"")).await;
        assert_eq!(status, StatusCode::OK, "it is there, and to look changes nothing");
        let (status, _) = ask_with(&mut router, "DELETE", "/api/v1/jobs/a?reason=r", ("if-match", "*")).await;
        assert_eq!(status, StatusCode::NO_CONTENT, "whatever it is, it was there");
    }

    #[tokio::test]
    async fn the_description_says_how_a_caller_shows_who_they_are() {
        let (_, document) = ask(&mut router(site()), "GET", "/api/v1/openapi.json").await;
        let schemes = &document["components"]["securitySchemes"];
        assert_eq!(
            (&schemes["bearer"]["type"], &schemes["bearer"]["scheme"]),
            (&"http".into(), &"bearer".into())
        );
        for (scheme, cookie) in [("cookie", "__Host-muster"), ("cookie-plaintext", "muster-session")] {
            let found = (&schemes[scheme]["in"], &schemes[scheme]["name"]);
            assert_eq!(found, (&"cookie".into(), &cookie.into()), "{schemes}");
        }
        let ways: Vec<String> = document["security"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|way| way.as_object().unwrap().keys().cloned())
            .collect();
        assert_eq!(ways, ["bearer", "cookie", "cookie-plaintext"], "or nothing, where nobody is asked");
    }

    #[tokio::test]
    async fn whatever_the_description_refers_to_is_in_it() {
        let (_, document) = ask(&mut router(site()), "GET", "/api/v1/openapi.json").await;
        let text = document.to_string();
        let references = text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next());
        let mut count = 0;
        for reference in references {
            assert!(document.pointer(reference).is_some(), "{reference} is not there");
            count += 1;
        }
        assert!(count > 50, "only {count} references");
        let refusal = "/paths/~1api~1v1~1jobs~1{job}~1exclusions/post/responses/409/content";
        assert!(
            document
                .pointer(refusal)
                .is_some_and(|content| content.get("application/problem+json").is_some())
        );
    }

    #[tokio::test]
    async fn whatever_changes_something_wants_a_reason() {
        let mut router = router(site());
        for (method, path, operation) in described(&mut router).await {
            if method == "GET" {
                continue;
            }
            let (status, _) = ask(&mut router, &method, &filled(&path)).await;
            assert!(status.is_client_error(), "{method} {path} without a reason: {status}");
            let by_query = operation["parameters"].to_string().contains("\"reason\"");
            assert!(by_query || operation.get("requestBody").is_some(), "{method} {path} takes no reason");
        }
    }
}

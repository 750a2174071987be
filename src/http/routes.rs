//! Lists the routes, each with the access that it requires, and builds the routers of the listeners.
//!
//! The handlers are in the modules of their subjects, and the routes of pages are in `pages/mod.rs`. Begin at
//! [`router`], then `route_builder.rs`.

use axum::Router;
use utoipa_axum::routes;

use super::access::{RequiredAccess, login};
use super::route_access_table::RouteAccessTable;
use super::route_builder::RouteBuilder;
use super::{
    AppState, activity, audit, barrier_arrivals, collectives, drain, events, exclusions, findings, health,
    hosts, jobs, journal, keys, metrics, openapi, pages, runs, server_info, stack_helper, stacks,
    task_owners, task_states, transfers,
};

/// Returns the REST routes.
fn api_routes() -> RouteBuilder {
    RouteBuilder::default()
        .add_described_routes(RequiredAccess::VIEWER, routes!(server_info::show_server_info))
        .add_described_routes(RequiredAccess::VIEWER, routes!(server_info::list_failed_handshakes))
        .add_described_routes(RequiredAccess::VIEWER, routes!(journal::show_journal))
        .add_described_routes(RequiredAccess::VIEWER, routes!(openapi::show_document))
        .add_described_routes(RequiredAccess::VIEWER, routes!(audit::list_audit_lines))
        .add_described_routes(RequiredAccess::VIEWER, routes!(jobs::list_jobs))
        .add_described_routes(RequiredAccess::ADMIN, routes!(jobs::create_job))
        .add_described_routes(RequiredAccess::VIEWER, routes!(jobs::show_job))
        .add_described_routes(RequiredAccess::ADMIN, routes!(jobs::change_settings, jobs::delete_job))
        .add_described_routes(RequiredAccess::VIEWER, routes!(activity::show_activity))
        .add_described_routes(RequiredAccess::VIEWER, routes!(events::list_or_stream_events))
        .add_described_routes(RequiredAccess::VIEWER, routes!(exclusions::list_exclusions))
        .add_described_routes(RequiredAccess::OPERATOR, routes!(exclusions::create_exclusion))
        .add_described_routes(RequiredAccess::VIEWER, routes!(exclusions::show_exclusion))
        .add_described_routes(RequiredAccess::OPERATOR, routes!(exclusions::lift_exclusion))
        .add_described_routes(RequiredAccess::VIEWER, routes!(hosts::list_hosts))
        .add_described_routes(RequiredAccess::VIEWER, routes!(hosts::show_host))
        .add_described_routes(RequiredAccess::VIEWER, routes!(task_owners::list_task_owners))
        .add_described_routes(
            RequiredAccess::OPERATOR,
            routes!(task_owners::claim_task_id, task_owners::forget_all_task_owners),
        )
        .add_described_routes(RequiredAccess::OPERATOR, routes!(task_owners::forget_task_owner))
        .add_described_routes(RequiredAccess::VIEWER, routes!(drain::show_drain))
        .add_described_routes(RequiredAccess::OPERATOR, routes!(drain::create_drain))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::list_runs))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::show_run))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::compare_runs))
        .add_described_routes(RequiredAccess::VIEWER, routes!(task_states::list_task_states))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::list_tasks))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::show_task))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::list_barriers))
        .add_described_routes(RequiredAccess::VIEWER, routes!(barrier_arrivals::list_barrier_arrivals))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::show_live_set))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::list_devices))
        .add_described_routes(RequiredAccess::VIEWER, routes!(runs::show_device_map))
        .add_described_routes(RequiredAccess::VIEWER, routes!(transfers::show_transfers))
        .add_described_routes(RequiredAccess::VIEWER, routes!(transfers::list_task_transfers))
        .add_described_routes(RequiredAccess::VIEWER, routes!(collectives::list_cliques))
        .add_described_routes(RequiredAccess::VIEWER, routes!(collectives::show_clique))
        .add_described_routes(RequiredAccess::VIEWER, routes!(stacks::show_stacks))
        .add_described_routes(RequiredAccess::OPERATOR, routes!(stacks::create_stack_request))
        // The token of a program should permit as little as possible.
        .add_described_routes(RequiredAccess::VIEWER, routes!(stacks::wait_for_stack_request))
        .add_described_report_routes(RequiredAccess::VIEWER, routes!(stacks::accept_stack_answer))
        .add_described_routes(RequiredAccess::VIEWER, routes!(findings::list_job_findings))
        .add_described_routes(RequiredAccess::VIEWER, routes!(findings::list_all_findings))
        .add_described_routes(RequiredAccess::VIEWER, routes!(keys::list_keys))
        // Tasks find and trust one another by values: addresses, and the ids that admit a process to a
        // communicator.
        .add_described_routes(
            RequiredAccess::OPERATOR,
            routes!(keys::show_value, keys::store_value, keys::remove_keys),
        )
}

/// Returns the probes. They have no tokens.
fn health_routes() -> RouteBuilder {
    RouteBuilder::default()
        .add_get_route(RequiredAccess::Public, "/healthz/live", health::answer_liveness_probe)
        .add_get_route(RequiredAccess::Public, "/healthz/ready", health::answer_readiness_probe)
}

fn metrics_routes() -> RouteBuilder {
    RouteBuilder::default().add_get_route(RequiredAccess::VIEWER, "/metrics", metrics::serve_metrics)
}

/// Returns the routes of the HTTP port.
fn all_routes() -> RouteBuilder {
    RouteBuilder::default()
        .add_get_route(RequiredAccess::Public, "/version", server_info::show_version)
        .add_get_route(RequiredAccess::Public, "/helper.py", stack_helper::serve_helper)
        // A client that logs in has not sent its token yet.
        .add_get_route(RequiredAccess::Public, "/login", login::show_login_page)
        .add_post_route(RequiredAccess::Public, "/login", login::log_in)
        .add_post_route(RequiredAccess::VIEWER, "/logout", login::log_out)
        .merge_routes(health_routes())
        .merge_routes(metrics_routes())
        .merge_routes(api_routes().with_etags())
        .merge_routes(pages::page_routes())
}

/// Returns the access that each route of the HTTP port requires.
#[must_use]
pub fn route_access_table() -> RouteAccessTable {
    all_routes().into_access_table()
}

/// Returns the router of all pages and REST routes.
pub fn router(site: AppState) -> Router {
    all_routes().with_openapi_document().into_guarded_router(site)
}

/// Returns the router of a listener for metrics alone.
pub fn metrics_router(site: AppState) -> Router {
    metrics_routes().into_guarded_router(site)
}

/// Returns the router of a listener for health probes alone. It reads no bodies and requires no tokens.
pub fn health_router(site: AppState) -> Router {
    health_routes().into_router_without_access_control(site)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
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
    use crate::http::api::{ProductVersion, ServerInfo};

    fn test_app_state() -> AppState {
        let engine = Engine::new(Clock::start());
        engine.declare_job("a".parse().unwrap(), JobSettings::new(1)).unwrap();
        let about =
            ServerInfo { version: ProductVersion::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        AppState::new(engine, Arc::default(), Arc::new(about))
    }

    async fn send_request(router: &mut Router, method: &str, path: &str) -> (StatusCode, Value) {
        send_request_with_header(router, method, path, ("accept", "*/*")).await
    }

    async fn send_request_with_header(
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
    async fn documented_operations(router: &mut Router) -> Vec<(String, String, Value)> {
        let (status, document) = send_request(router, "GET", "/api/v1/openapi.json").await;
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
    fn fill_path_placeholders(path: &str) -> String {
        let path = path.replace("{job}", "a").replace("{id}", "1").replace("{task}", "0");
        path.replace("{key}", "k")
    }

    #[tokio::test]
    async fn every_route_is_described_and_every_description_has_its_route() {
        let mut router = router(test_app_state());
        let operations = documented_operations(&mut router).await;
        for (method, path, _) in &operations {
            let (status, problem) = send_request(&mut router, method, &fill_path_placeholders(path)).await;
            assert_ne!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            assert_ne!(problem["type"], "/problems/no-such-page", "{method} {path}");
        }
        // Conversely, every route of the API is described, with its role.
        let roles: BTreeSet<_> = operations
            .iter()
            .map(|(method, path, operation)| (method.clone(), path.clone(), operation["x-role"].to_string()))
            .collect();
        let routes: BTreeSet<_> = route_access_table()
            .rows()
            .filter(|(_, _, path)| path.starts_with("/api/"))
            .map(|(access, method, path)| {
                let RequiredAccess::Role(role) = access else { panic!("{method} {path} is public") };
                (method.to_string(), path.replace("{*key}", "{key}"), format!("\"{role}\""))
            })
            .collect();
        assert_eq!(roles, routes);
        let mut ids: Vec<&str> =
            operations.iter().filter_map(|(_, _, o)| o["operationId"].as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), operations.len(), "operations are told apart by their ids");
    }

    #[tokio::test]
    async fn an_invalid_query_is_explained() {
        let mut router = router(test_app_state());
        for (path, words) in [
            ("/api/v1/jobs?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs?limit=1001", "limit: write a number from 1 to 1000"),
            ("/api/v1/audit?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/events?limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/barriers?state=recent&limit=0", "limit: write a number from 1 to 1000"),
            ("/api/v1/jobs/a/events?kind=nothing", "\"nothing\" is none; there are barrier-failed"),
            ("/api/v1/jobs/a/events?stream=1&newest=true", "a stream tells what happens as it happens"),
            ("/api/v1/jobs/a/barriers?state=old", "in-progress"),
        ] {
            let (status, problem) = send_request(&mut router, "GET", path).await;
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
        let (status, page) =
            send_request(&mut router, "GET", "/api/v1/jobs/a/barriers?state=recent&limit=1").await;
        assert_eq!((status, &page["recent"]), (StatusCode::OK, &serde_json::json!([])), "{page}");
        let (status, page) =
            send_request(&mut router, "GET", "/api/v1/jobs/a/events?newest=true&limit=1").await;
        assert_eq!((status, &page["events"][0]["kind"]), (StatusCode::OK, &"run-opened".into()), "{page}");
        // Every list states that its limit is at least 1.
        for (_, path, operation) in documented_operations(&mut router).await {
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let limit = parameter["name"] == "limit";
                assert!(!limit || parameter["schema"]["minimum"] == 1, "{path}: {parameter}");
            }
        }
    }

    #[tokio::test]
    async fn a_change_on_condition_of_a_tag_changes_nothing() {
        let mut router = router(test_app_state());
        for (method, path) in [("PATCH", "/api/v1/jobs/a"), ("DELETE", "/api/v1/jobs/a?reason=r")] {
            let (status, problem) =
                send_request_with_header(&mut router, method, path, ("if-match", "W/\"0123456789abcdef\""))
                    .await;
            assert_eq!(status, StatusCode::PRECONDITION_FAILED, "{method}: {problem}");
            assert_eq!(problem["type"], "/problems/no-strong-tags");
        }
        let (status, _) =
            send_request_with_header(&mut router, "GET", "/api/v1/jobs/a", ("if-match", "\"x\"")).await;
        assert_eq!(status, StatusCode::OK, "it is there, and to look changes nothing");
        let (status, _) =
            send_request_with_header(&mut router, "DELETE", "/api/v1/jobs/a?reason=r", ("if-match", "*"))
                .await;
        assert_eq!(status, StatusCode::NO_CONTENT, "whatever it is, it was there");
    }

    #[tokio::test]
    async fn the_description_says_how_a_caller_shows_who_they_are() {
        let (_, document) = send_request(&mut router(test_app_state()), "GET", "/api/v1/openapi.json").await;
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
        let (_, document) = send_request(&mut router(test_app_state()), "GET", "/api/v1/openapi.json").await;
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
        let mut router = router(test_app_state());
        for (method, path, operation) in documented_operations(&mut router).await {
            if method == "GET" {
                continue;
            }
            let (status, _) = send_request(&mut router, &method, &fill_path_placeholders(&path)).await;
            assert!(status.is_client_error(), "{method} {path} without a reason: {status}");
            let by_query = operation["parameters"].to_string().contains("\"reason\"");
            assert!(by_query || operation.get("requestBody").is_some(), "{method} {path} takes no reason");
        }
    }
}

//! Serves `/healthz/live` and `/healthz/ready`.
//!
//! `readiness.rs` has the state that `/healthz/ready` reports. Begin at `answer_readiness_probe`.

use axum::extract::State;

use super::{AppState, Problem};

/// Serves `GET /healthz/live`.
pub(super) async fn answer_liveness_probe() -> &'static str {
    "alive\n"
}

/// Serves `GET /healthz/ready`.
///
/// A failing audit file is mentioned and does not make the server unready: tasks are served all the same.
pub(super) async fn answer_readiness_probe(State(site): State<AppState>) -> Result<String, Problem> {
    match site.readiness.not_ready_reason() {
        None => Ok(match site.operations.audit.write_error() {
            None => "ready\n".into(),
            Some(why) => format!("ready\nthe audit file cannot be written: {why}\n"),
        }),
        Some(reason) => Err(Problem::not_ready(reason)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use axum::extract::Request;
    use http_body_util::BodyExt as _;
    use tower_service::Service as _;

    use super::*;
    use crate::clock::Clock;
    use crate::engine::Engine;
    use crate::http::api::{ProductVersion, ServerInfo};
    use crate::http::{ServerReadiness, router};

    #[tokio::test]
    async fn the_probe_says_why_the_server_is_not_ready() {
        let readiness = Arc::new(ServerReadiness::default());
        let about =
            ServerInfo { version: ProductVersion::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        let site = AppState::new(Engine::new(Clock::start()), Arc::clone(&readiness), Arc::new(about));
        let mut router = router(site);
        let mut probe = async || {
            let request = Request::get("/healthz/ready").body(Body::empty()).unwrap();
            let (head, body) = router.call(request).await.unwrap().into_parts();
            (
                head.status.as_u16(),
                String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap(),
            )
        };
        let (status, body) = probe().await;
        assert!(status == 503 && body.contains("the server is starting"), "{body}");
        readiness.mark_ready();
        assert_eq!(probe().await, (200, "ready\n".into()));
        readiness.mark_stopping();
        let (status, body) = probe().await;
        assert!(status == 503 && body.contains("the server is stopping"), "{body}");
        assert!(body.contains("\"instance\":\"/healthz/ready\""), "{body}");
    }
}

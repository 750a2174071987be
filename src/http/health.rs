//! Serves `/healthz/live` and `/healthz/ready`, and holds `ServerReadiness`, the state that they report.
//!
//! The health service of the gRPC port (`grpc`) reads the same `ServerReadiness`. Begin at `ServerReadiness`.

use std::sync::atomic::{AtomicU8, Ordering};

use axum::extract::State;

use super::{AppState, Problem};

const STARTING: u8 = 0;
const READY: u8 = 1;
const STOPPING: u8 = 2;

/// The readiness of the server: ready from the moment at which every listener is bound until the server
/// stops.
#[derive(Debug, Default)]
pub struct ServerReadiness(AtomicU8);

impl ServerReadiness {
    /// Records that every listener is bound.
    pub fn mark_ready(&self) {
        // A stop that came first prevails.
        let _ = self.0.compare_exchange(STARTING, READY, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records that the server stops.
    pub fn mark_stopping(&self) {
        self.0.store(STOPPING, Ordering::Relaxed);
    }

    /// Returns why the server is not ready; `None` if it is.
    #[must_use]
    pub fn not_ready_reason(&self) -> Option<&'static str> {
        match self.0.load(Ordering::Relaxed) {
            READY => None,
            STOPPING => Some("the server is stopping"),
            _ => Some("the server is starting: not every listener is bound yet"),
        }
    }
}

/// Serves `GET /healthz/live`.
pub(super) async fn answer_liveness() -> &'static str {
    "alive\n"
}

/// Serves `GET /healthz/ready`.
///
/// A failing audit file is mentioned and does not make the server unready: tasks are served all the same.
pub(super) async fn answer_readiness(State(site): State<AppState>) -> Result<String, Problem> {
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
    use crate::http::api::{ServerInfo, Version};
    use crate::http::router;

    #[tokio::test]
    async fn the_probe_says_why_the_server_is_not_ready() {
        let readiness = Arc::new(ServerReadiness::default());
        let about =
            ServerInfo { version: Version::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
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

    #[test]
    fn a_server_that_stops_never_becomes_ready() {
        let readiness = ServerReadiness::default();
        assert!(readiness.not_ready_reason().is_some_and(|reason| reason.contains("starting")));
        readiness.mark_ready();
        assert_eq!(readiness.not_ready_reason(), None);
        readiness.mark_stopping();
        readiness.mark_ready();
        assert!(readiness.not_ready_reason().is_some_and(|reason| reason.contains("stopping")));
    }
}

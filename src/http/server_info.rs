//! Serves `GET /version`, `GET /api/v1/server` and `GET /api/v1/handshakes`: the version, the addresses, and the
//! failed TLS handshakes.
//!
//! `health.rs` serves the health checks. Begin at `show_server_info`.

use axum::Json;
use axum::extract::State;

use super::AppState;
use super::api::{ProductVersion, ServerInfo};
use crate::tls::HandshakeFailuresView;

/// Serves `GET /version`.
pub(super) async fn show_version() -> Json<ProductVersion> {
    Json(ProductVersion::current())
}

/// The version of the server and the addresses of its listeners
#[utoipa::path(get, path = "/api/v1/server", operation_id = "server_show", tag = "server",
    responses((status = 200, description = "Version and addresses, with the jobs that each gRPC address serves")))]
pub(super) async fn show_server_info(State(site): State<AppState>) -> Json<ServerInfo> {
    Json(site.engine.read(|core, _| site.about.with_jobs(core.jobs().map(|(_, name)| name))))
}

/// The failed TLS handshakes with their reasons, which JAX clients do not report
#[utoipa::path(get, path = "/api/v1/handshakes", operation_id = "handshakes_list", tag = "server",
    responses((status = 200, body = HandshakeFailuresView, description = "Failed handshakes of both listeners, the latest first, equal ones counted")))]
pub(super) async fn list_failed_handshakes(State(site): State<AppState>) -> Json<HandshakeFailuresView> {
    Json(site.handshakes.to_view())
}

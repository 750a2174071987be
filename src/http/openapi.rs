//! The description of the REST API, made from the handlers.

use axum::Extension;
use axum::http::header;
use axum::response::IntoResponse;
use bytes::Bytes;
use utoipa::OpenApi;

/// What the description says of the whole.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Muster",
        description = "Jobs of a Muster server: look at them and steer them. Errors are RFC 9457 problem details \
                       (application/problem+json). Times are microseconds since the Unix epoch. Lists come in pages: give \
                       the `next` of one as `after` of the following. Answers to GET have weak entity tags."
    ),
    tags(
        (name = "jobs"), (name = "runs"), (name = "tasks"), (name = "barriers"), (name = "devices"), (name = "keys"),
        (name = "exclusions", description = "Who takes no part, and why"),
        (name = "drain", description = "Coordinated saves"),
        (name = "events"), (name = "audit"), (name = "server"),
    )
)]
struct Head;

/// The description without its paths.
pub(super) fn head() -> utoipa::openapi::OpenApi {
    Head::openapi()
}

/// The description as it is sent.
#[derive(Clone)]
pub(super) struct Document(Bytes);

impl Document {
    pub fn new(described: &utoipa::openapi::OpenApi) -> Self {
        // Axum writes a path's rest as `{*key}`, which no description knows.
        let text = described.to_json().unwrap_or_default();
        Self(text.replace("{*key}", "{key}").into())
    }

    /// The description as JSON.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// This description
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "server",
    responses((status = 200, description = "The REST API as an OpenAPI document")))]
pub(super) async fn show(Extension(document): Extension<Document>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], document.0)
}

//! Renders `GET /api` from the OpenAPI document.
//!
//! Begin at `show_api_page`.

use askama::Template;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::Response;
use serde_json::Value;

use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use crate::coordination::JobName;
use crate::http::openapi::OpenApiDocument;
use crate::http::{AppState, Problem, TransportSecurity};

/// A route of the OpenAPI document.
struct DocumentedRoute {
    method: String,
    path: String,
    says: String,
    tag: String,
}

#[derive(Template)]
#[template(path = "api.html")]
struct ApiPageTemplate {
    page: PageFrame,
    routes: Vec<DocumentedRoute>,
    /// The base URL of the server: scheme, host and port.
    server: String,
    job: JobName,
    /// The server requires a token.
    tokens: bool,
}

impl ApiPageTemplate {
    /// Returns the `curl` command of the examples, with a token if the server requires one.
    fn curl_command_prefix(&self) -> &'static str {
        if self.tokens { "curl -s -H \"Authorization: Bearer $MUSTER_TOKEN\"" } else { "curl -s" }
    }
}

/// Returns the routes of the OpenAPI document, grouped by tag.
fn documented_routes(document: &OpenApiDocument) -> Vec<DocumentedRoute> {
    let described: Value = serde_json::from_slice(document.json_bytes()).unwrap_or_default();
    let mut routes = Vec::new();
    for (path, methods) in described["paths"].as_object().into_iter().flatten() {
        for (method, about) in methods.as_object().into_iter().flatten() {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (says, tag) = (text(&about["summary"]), text(&about["tags"][0]));
            routes.push(DocumentedRoute { method: method.to_uppercase(), path: path.clone(), says, tag });
        }
    }
    routes.sort_by(|a, b| (&a.tag, &a.path, &a.method).cmp(&(&b.tag, &b.path, &b.method)));
    routes
}

pub(super) async fn show_api_page(
    State(site): State<AppState>,
    Extension(document): Extension<OpenApiDocument>,
    user: PageUser,
    channel: Option<Extension<TransportSecurity>>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let (job, now) = site.engine.read(|core, now| {
        let first = core.jobs().next().map(|(_, name)| name.clone());
        (first.unwrap_or_default(), now)
    });
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.map_or_else(|| site.about.http.to_string(), str::to_owned);
    let scheme = if channel.is_some_and(|channel| channel.secure) { "https" } else { "http" };
    let page = PageFrame::new(user, NavEntry::Api, "REST API", now);
    let (routes, server, tokens) =
        (documented_routes(&document), format!("{scheme}://{host}"), !site.guard.has_no_tokens());
    render_page(&ApiPageTemplate { page, routes, server, job, tokens }, now)
}

//! Writes the problem of a request into its response, as a document or as a page for browsers. This module also adds
//! the headers of every response.
//!
//! `problem.rs` builds the problems. Begin at `render_problem_and_add_headers`.

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;

use super::problem::asks_for_html_page;
use super::{Problem, TransportSecurity, pages};

/// Answers a request for an unknown path.
pub(super) async fn answer_unknown_path() -> Problem {
    let detail = "this page does not exist; the REST API is at /api/v1/jobs";
    Problem::new(StatusCode::NOT_FOUND, "/problems/no-such-page", "No such page", detail)
}

/// Answers a request whose path does not support its method.
pub(super) async fn answer_unknown_method() -> Problem {
    let detail = "this page does not support that method; the Allow header lists the supported ones";
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "/problems/no-such-method", "No such method", detail)
}

/// Writes the body of a problem, as a page for browsers and as JSON otherwise, and adds the headers of every
/// response.
pub(super) async fn render_problem_and_add_headers(uri: Uri, request: Request, next: Next) -> Response {
    let page = asks_for_html_page(request.headers(), &uri);
    let secure = request.extensions().get::<TransportSecurity>().is_some_and(|channel| channel.secure);
    let mut response = next.run(request).await;
    if let Some(mut problem) = response.extensions_mut().remove::<Problem>() {
        problem.instance = uri.path().into();
        let kind = if page {
            *response.body_mut() = pages::render_problem_page(problem).into();
            HeaderValue::from_static("text/html; charset=utf-8")
        } else {
            // A struct of strings and numbers always serializes.
            *response.body_mut() = serde_json::to_vec(&problem).unwrap_or_default().into();
            HeaderValue::from_static("application/problem+json")
        };
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONTENT_TYPE, kind);
    }
    let headers = response.headers_mut();
    super::headers::add_security_headers(headers, secure);
    // Responses show the state of one moment and are not cached. Those with a tag may be stored for
    // revalidation.
    if !headers.contains_key(header::ETAG) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

//! Weak entity tags (ETags). A client that already has the newest answer receives status 304.
//!
//! A tag is a digest of the answer without the time of the view. Answers with equal tags may differ in this time, so
//! the tags are weak. A weak tag cannot satisfy `If-Match`. If the server ignored this header, a change could
//! overwrite data that the client has not seen. A change with an `If-Match` other than `*` is therefore refused.
//! Begin at `answer_with_etag`.

use std::hash::{DefaultHasher, Hasher as _};

use axum::body::{Body, HttpBody as _};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http_body_util::BodyExt as _;

use super::Problem;

/// The field with the time of a view, which is not part of the state.
const SEEN_AT_FIELD: &[u8] = b"\"seen_at\":";

/// Adds a weak tag to every successful answer to a GET, and answers 304 if the client has it. Refuses a
/// change with a condition on a tag: such a condition needs a strong tag, and a server that ignored it could
/// change something that the client has not seen.
pub(super) async fn answer_with_etag(request: Request, next: Next) -> Response {
    let condition = request.headers().get(header::IF_MATCH).filter(|_| !request.method().is_safe());
    if condition.is_some_and(|condition| condition.as_bytes().trim_ascii() != b"*") {
        return Problem::conditional_change_unsupported().into_response();
    }
    // The body of an answer to HEAD is empty and has no digest.
    let asks = *request.method() == Method::GET;
    let known = request.headers().get(header::IF_NONE_MATCH).cloned();
    let response = next.run(request).await;
    // A stream has no end, so it has no digest.
    if !asks
        || response.status() != StatusCode::OK
        || !is_json(response.headers())
        || is_event_stream(&response)
    {
        return response;
    }
    let (mut head, body) = response.into_parts();
    // The body is in memory already, so collecting it cannot fail.
    let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let tag = format!("W/\"{:016x}\"", digest_without_view_time(&bytes));
    let matches = known.is_some_and(|known| {
        let known = known.to_str().unwrap_or_default();
        known.trim() == "*" || known.split(',').any(|one| one.trim() == tag)
    });
    if let Ok(value) = HeaderValue::from_str(&tag) {
        head.headers.insert(header::ETAG, value);
        // `no-cache` lets clients store the answer and makes them revalidate it.
        head.headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    if matches {
        head.status = StatusCode::NOT_MODIFIED;
        head.headers.remove(header::CONTENT_LENGTH);
        head.headers.remove(header::CONTENT_TYPE);
        return Response::from_parts(head, Body::empty());
    }
    Response::from_parts(head, Body::from(bytes))
}

fn is_json(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json")
}

fn is_event_stream(response: &Response) -> bool {
    response.body().size_hint().exact().is_none()
}

/// Returns a digest of an answer without the time of its view. It is the same on every server of one version.
fn digest_without_view_time(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    match bytes.windows(SEEN_AT_FIELD.len()).position(|window| window == SEEN_AT_FIELD) {
        Some(at) => {
            let (before, after) = bytes.split_at(at + SEEN_AT_FIELD.len());
            let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
            hasher.write(before);
            hasher.write(&after[digits..]);
        }
        None => hasher.write(bytes),
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_moment_of_a_view_does_not_count() {
        let view = |moment: u64, live: u32| {
            digest_without_view_time(
                format!("{{\"name\":\"a\",\"seen_at\":{moment},\"live\":{live}}}").as_bytes(),
            )
        };
        assert_eq!(view(1, 3), view(222, 3));
        assert_ne!(view(1, 3), view(1, 4));
    }
}

//! Adds security headers to every response.
//!
//! `etag.rs` adds entity tags. The referrer policy is `same-origin`. With `no-referrer`, browsers would send
//! `Origin: null` with the forms of this server. Begin at `add_security_headers`.

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// The headers of every response.
const SECURITY_HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
         form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    // With `no-referrer`, browsers send `Origin: null` with this server's own forms.
    (header::REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (
        HeaderName::from_static("permissions-policy"),
        "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    ),
];
/// HSTS, which is sent under TLS only: browsers ignore it in plaintext.
const HSTS: &str = "max-age=31536000";

/// Adds the headers that all responses share.
pub(super) fn add_security_headers(headers: &mut HeaderMap, secure: bool) {
    for (name, value) in SECURITY_HEADERS {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    if secure {
        headers.insert(header::STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(HSTS));
    }
}

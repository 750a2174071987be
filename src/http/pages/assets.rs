//! Serves the embedded static files. The address of each file contains a digest of its content.
//!
//! Begin at `serve_asset`, then `Asset::url_path`.

use std::borrow::Cow;

use axum::body::Body;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Redirect, Response};

use crate::http::Problem;

#[derive(rust_embed::RustEmbed)]
#[folder = "web/static"]
struct EmbeddedFiles;

/// An embedded static file.
pub(super) struct Asset {
    pub data: Cow<'static, [u8]>,
    tag: String,
}

impl Asset {
    /// Returns the file of this name.
    pub fn find(name: &str) -> Option<Self> {
        let file = EmbeddedFiles::get(name)?;
        let digest = file.metadata.sha256_hash();
        let tag = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Self { data: file.data, tag })
    }

    /// Returns the address of a file. It changes with the content.
    pub fn url_path(name: &str) -> String {
        let tag = Self::find(name).map(|asset| asset.tag).unwrap_or_default();
        format!("/static/{name}?v={tag}")
    }
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, end)| end) {
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        _ => "text/plain; charset=utf-8",
    }
}

/// Serves `GET /static/{file}`.
pub(super) async fn serve_asset(
    Path(name): Path<String>,
    uri: Uri,
    asked: HeaderMap,
) -> Result<Response, Problem> {
    let missing = || Problem::not_found("no-such-file", format!("there is no file {name:?}"));
    let asset = Asset::find(&name).ok_or_else(missing)?;
    let tag = format!("\"{}\"", asset.tag);
    // An address with the digest of the content never changes; other requests must revalidate.
    let named = uri.query().is_some_and(|query| query == format!("v={}", asset.tag));
    let keep = if named { "public, max-age=31536000, immutable" } else { "no-cache" };
    let headers = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, keep.to_owned())];
    let known = asked.get(header::IF_NONE_MATCH).and_then(|known| known.to_str().ok()).unwrap_or_default();
    if known.split(',').any(|one| one.trim().trim_start_matches("W/") == tag) {
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    Ok((headers, [(header::CONTENT_TYPE, content_type(&name))], Body::from(asset.data)).into_response())
}

/// Serves `GET /favicon.ico`.
pub(super) async fn redirect_favicon() -> Redirect {
    Redirect::permanent("/static/muster.svg")
}

/// Returns the address of a static file.
pub(in crate::http) fn asset_path(name: &str) -> String {
    Asset::url_path(name)
}

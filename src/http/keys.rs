//! Serves the key-value store of the present run: lists one level of its tree, and reads, changes and deletes
//! single values.
//!
//! The path contains the key, percent-encoded where necessary, because keys need not be text. The answer never
//! contains a redacted value; `redaction.rs` decides which values are redacted. Begin at `list_keys`, then
//! `read_value_for_display`.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use utoipa::IntoParams;

use super::api::{KeyInfo, KeyView, KeysPage, NewValue};
use super::exclusions::ReasonQuery;
use super::extractors::{JobPath, JsonBody, QueryParams};
use super::pagination::{page_limit, page_query};
use super::{AppState, Problem};
use crate::coordination::{KeyEntry, OperatorCommand};
use crate::service::ActorContext;
use crate::text::percent_encode;

/// The default maximum of a shown value, in bytes.
const SHOWN_BYTES: usize = 64 << 10;
/// The upper limit of that maximum, in bytes.
const SHOWN_BYTES_MAX: usize = 4 << 20;

impl From<KeyEntry> for KeyInfo {
    fn from(line: KeyEntry) -> Self {
        let (key, key_base64) = key_text_and_base64(&line.key);
        Self {
            key,
            key_base64,
            value_bytes: line.value_bytes,
            written_at: line.written_at,
            written_by: line.written_by,
            keys_below: line.keys_below,
            bytes_below: line.bytes_below,
        }
    }
}

fn key_text_and_base64(key: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(key) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (String::from_utf8_lossy(key).into_owned(), Some(STANDARD.encode(key))),
    }
}

page_query! {
    /// The query parameters of keys.
    KeysQuery {
        /// The directory; the root if it is missing.
        #[serde(default)]
        prefix: String,
        /// Return every key of the tree instead of one level with its directories.
        #[serde(default)]
        recursive: bool,
    }
    /// The `next` of the page before.
    after: String,
    /// The maximum number of keys.
    limit
}

/// The keys of the present run, by directory, with sizes
#[utoipa::path(get, path = "/api/v1/jobs/{job}/keys", operation_id = "keys_list", tag = "keys",
    params(("job" = String, Path, description = "The job's name"), KeysQuery),
    responses((status = 200, body = KeysPage, description = "A page of keys and directories, in byte order, as they were at one \
        moment, with the sizes of that moment. The pages of a listing are of several moments: a key that is there all the while \
        is listed once, and one that is written or deleted meanwhile may be listed or not.")))]
pub(super) async fn list_keys(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<KeysQuery>,
) -> Result<Json<KeysPage>, Problem> {
    let limit = page_limit(query.limit);
    let after: Vec<u8> = percent_decode_str(&query.after).collect();
    let prefix = query.prefix.as_bytes();
    let mut lines = site.read_job(&job, |look| look.list_keys(prefix, &after, query.recursive, limit + 1))?;
    let more = lines.len() > limit;
    lines.truncate(limit);
    let last = lines.last().filter(|_| more);
    let next = last.map(|line| percent_encode(&line.key));
    Ok(Json(KeysPage { keys: lines.into_iter().map(KeyInfo::from).collect(), next }))
}

/// The query parameters of a value.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ValueQuery {
    /// The maximum number of bytes of the value.
    max_bytes: Option<usize>,
}

/// One value, as text or in base64
#[utoipa::path(get, path = "/api/v1/jobs/{job}/keys/{*key}", operation_id = "keys_show", tag = "keys",
    params(("job" = String, Path, description = "The job's name"),
        ("key" = String, Path, description = "The key, slashes and all"), ValueQuery),
    responses((status = 200, body = KeyView, description = "The value"), (status = 404, description = "There is none")))]
pub(super) async fn show_value(
    State(site): State<AppState>,
    job: JobPath,
    uri: Uri,
    QueryParams(query): QueryParams<ValueQuery>,
) -> Result<Json<KeyView>, Problem> {
    read_value_for_display(&site, &job, &key_in_path(uri.path()), query.max_bytes).map(Json)
}

/// Returns a value, truncated and redacted as the settings require.
pub(super) fn read_value_for_display(
    site: &AppState,
    job: &JobPath,
    key: &[u8],
    most: Option<usize>,
) -> Result<KeyView, Problem> {
    let found = site.read_job(job, |look| look.stored_value(key))?;
    let (text_key, key_base64) = key_text_and_base64(key);
    let found = found.ok_or_else(|| {
        let text = format!("there is no key {text_key:?} in the present run of job {}", job.name);
        Problem::not_found("no-such-key", text)
    })?;
    let most = most.unwrap_or(SHOWN_BYTES).min(SHOWN_BYTES_MAX);
    // The stored key is matched: another spelling in the path must not bypass the redaction.
    let redacted = site.redaction.is_redacted(&found.key);
    let shown = if redacted { &[][..] } else { &found.value[..found.value.len().min(most)] };
    // Text that is cut within a character still counts as text.
    let text = match std::str::from_utf8(shown) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() && shown.len() < found.value.len() => {
            std::str::from_utf8(&shown[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    };
    Ok(KeyView {
        key: text_key,
        key_base64,
        value_bytes: found.value.len(),
        written_at: found.written_at,
        written_by: found.written_by,
        base64: (text.is_none() && !redacted).then(|| STANDARD.encode(shown)),
        text: text.filter(|_| !redacted).map(str::to_owned),
        truncated: !redacted && shown.len() < found.value.len(),
        redacted,
    })
}

/// Store a value
#[utoipa::path(put, path = "/api/v1/jobs/{job}/keys/{*key}", operation_id = "keys_put", tag = "keys",
    params(("job" = String, Path, description = "The job's name"),
        ("key" = String, Path, description = "The key, slashes and all")),
    request_body = NewValue,
    responses(
        (status = 204, description = "It is stored, and whoever waited for it has it"),
        (status = 409, description = "There is a value already"),
    ))]
pub(super) async fn store_value(
    State(site): State<AppState>,
    job: JobPath,
    uri: Uri,
    Extension(author): Extension<ActorContext>,
    JsonBody(new): JsonBody<NewValue>,
) -> Result<StatusCode, Problem> {
    let key = key_in_path(uri.path());
    let value = match (new.text, new.base64) {
        (Some(text), None) => Bytes::from(text),
        (None, Some(text)) => match STANDARD.decode(text) {
            Ok(value) => Bytes::from(value),
            Err(error) => return Err(Problem::invalid_request(format!("base64: {error}"))),
        },
        _ => return Err(Problem::invalid_request("give either \"text\" or \"base64\"")),
    };
    let act = OperatorCommand::PutKey { key, value, overwrite: new.overwrite };
    site.operations.perform_audited(job.job_operation(&author, new.reason, act), |_, _| ())?;
    Ok(StatusCode::NO_CONTENT)
}

/// Remove a key and everything below it
#[utoipa::path(delete, path = "/api/v1/jobs/{job}/keys/{*key}", operation_id = "keys_remove", tag = "keys",
    params(("job" = String, Path, description = "The job's name"),
        ("key" = String, Path, description = "The key, slashes and all"), ReasonQuery),
    responses((status = 204, description = "It is gone, or was not there")))]
pub(super) async fn remove_keys(
    State(site): State<AppState>,
    job: JobPath,
    uri: Uri,
    QueryParams(because): QueryParams<ReasonQuery>,
    Extension(author): Extension<ActorContext>,
) -> Result<StatusCode, Problem> {
    let act = OperatorCommand::DeleteKey { key: key_in_path(uri.path()) };
    site.operations.perform_audited(job.job_operation(&author, because.reason, act), |_, _| ())?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the key in a path `/api/v1/jobs/JOB/keys/KEY`, with its slashes.
fn key_in_path(path: &str) -> Bytes {
    let key = path.splitn(7, '/').nth(6).unwrap_or_default();
    Bytes::from(percent_decode_str(key).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_follows_slashes_and_all() {
        assert_eq!(key_in_path("/api/v1/jobs/a/keys/x/y%2Fz/%ff"), Bytes::from_static(b"x/y/z/\xff"));
        assert_eq!(key_in_path("/api/v1/jobs/a/keys/"), Bytes::new());
    }
}

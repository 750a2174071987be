//! Renders one level of the key tree, and single values. A value with a known format is decoded.
//!
//! Begin at `show_keys_page`, then `show_value_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::links;
use super::live_page::{KeysPageQuery, LivePage};
use super::snapshot::JobSnapshot;
use super::{amount, times};
use crate::coordination::{
    Coordinator, Device, JobName, KeyEntry, ProcessIdentity, TopologyKey, decode_devices,
};
use crate::http::api::KeyView;
use crate::http::extractors::{JobPath, QueryParams};
use crate::http::{AppState, Problem, keys};
use crate::text::{encode_query_value, percent_encode};

/// The maximum number of lines on a page.
const LINES: usize = 200;
/// The maximum number of bytes of a value on the page.
const VALUE_BYTES_MAX: usize = 16 << 10;

/// A row of the tree.
struct KeyRow {
    line: KeyEntry,
    /// The last segment of the key.
    name: String,
    /// The whole key, encoded for an address.
    address: String,
    hidden: bool,
}

/// A parent directory.
struct Breadcrumb {
    name: String,
    address: String,
}

#[derive(Template)]
#[template(path = "parts/keys.html")]
struct KeyLevelFragment<'a> {
    job: &'a JobName,
    entries: Vec<KeyRow>,
    next: Option<String>,
    prefix: String,
    total: usize,
    held: usize,
}

#[derive(Template)]
#[template(path = "keys.html")]
struct KeysPageTemplate {
    page: PageFrame,
    job: JobName,
    crumbs: Vec<Breadcrumb>,
}

/// Returns a key encoded for an address.
pub(super) fn encode_key_for_page_address(key: &[u8]) -> String {
    // Encoded twice: once for the bytes, once for the address.
    encode_query_value(&percent_encode(key))
}

fn decode_key_from_page_query(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

fn parent_breadcrumbs(directory: &[u8]) -> Vec<Breadcrumb> {
    let ends = directory.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    let mut from = 0;
    let mut crumbs = Vec::new();
    for end in ends.chain([directory.len()]) {
        if end > from {
            let name = String::from_utf8_lossy(&directory[from..end]).into_owned();
            crumbs.push(Breadcrumb { name, address: encode_key_for_page_address(&directory[..end]) });
        }
        from = end + 1;
    }
    crumbs
}

/// Serves `GET /jobs/{job}/keys`.
pub(super) async fn show_keys_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<KeysPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let now = snapshot.captured_at();
    let title = format!("Keys of {}", job.name);
    let (parts, crumbs) = (
        render_fragments(&site, &snapshot, &which)?,
        parent_breadcrumbs(&decode_key_from_page_query(&which.prefix)),
    );
    let page =
        PageFrame::for_job_snapshot(user, NavEntry::Keys, title, &snapshot, &LivePage::Keys(which), parts);
    render_page(&KeysPageTemplate { page, crumbs, job: job.name }, now)
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    site: &AppState,
    snapshot: &JobSnapshot,
    which: &KeysPageQuery,
) -> Result<Vec<Fragment>, Problem> {
    Ok(vec![render_head_fragment(snapshot)?, render_level_fragment(site, snapshot, which)?])
}

/// Returns the fragment with one level of the tree.
fn render_level_fragment(
    site: &AppState,
    snapshot: &JobSnapshot,
    which: &KeysPageQuery,
) -> Result<Fragment, Problem> {
    let (directory, after) =
        (decode_key_from_page_query(&which.prefix), decode_key_from_page_query(&which.after));
    let look =
        |core: &Coordinator, _| Some(core.job(snapshot.id)?.list_keys(&directory, &after, false, LINES + 1));
    let mut lines = site.engine.read(look).unwrap_or_default();
    let next = lines.get(LINES).map(|_| encode_key_for_page_address(&lines[LINES - 1].key));
    lines.truncate(LINES);
    let entries = lines.into_iter().map(|line| {
        let whole = line.key.strip_suffix(b"/").unwrap_or(&line.key);
        let name = whole.rsplit(|byte| *byte == b'/').next().unwrap_or(whole);
        let hidden = line.value_bytes.is_some() && site.redaction.is_redacted(&line.key);
        KeyRow {
            name: String::from_utf8_lossy(name).into_owned(),
            address: encode_key_for_page_address(whole),
            hidden,
            line,
        }
    });
    let keys = KeyLevelFragment {
        job: &snapshot.view.name,
        entries: entries.collect(),
        next,
        prefix: encode_key_for_page_address(&directory),
        total: snapshot.view.run.keys,
        held: snapshot.view.run.store_bytes,
    };
    Fragment::new("keys", &keys)
}

/// Returns the numbers of a list as Orbax writes it, such as `[2, 3]`; `None` if the value is no such list.
pub(super) fn parse_number_list(value: &[u8]) -> Option<Vec<i32>> {
    let text = std::str::from_utf8(value).ok()?.trim();
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let numbers = inside.split(',').map(str::trim).filter(|number| !number.is_empty());
    numbers.map(|number| number.parse().ok()).collect()
}

/// A value that was decoded by its known format.
enum DecodedValue {
    /// Devices, from a topology that JAX workers publish.
    Devices(Vec<Device>),
    /// A description in words.
    Words(String),
    Nothing,
}

/// Decodes a value whose format is known.
fn decode_value(key: &str, value: &[u8]) -> DecodedValue {
    if let Some(TopologyKey::Identity { task }) = TopologyKey::parse(key.as_bytes()) {
        return ProcessIdentity::from_store_value(value).map_or(DecodedValue::Nothing, |identity| {
            DecodedValue::Words(format!(
                "Task {task} is {identity}: its host and its number there, over runs."
            ))
        });
    }
    if let Some(topology) = TopologyKey::parse(key.as_bytes()) {
        return match decode_devices([(&topology, value)]) {
            devices if devices.is_empty() => DecodedValue::Nothing,
            devices => DecodedValue::Devices(devices),
        };
    }
    if let Some(process) = key.strip_prefix("orbax/distributed_to_device_ids/") {
        return DecodedValue::Words(match parse_number_list(value) {
            Some(ids) => {
                let ids: Vec<String> = ids.iter().map(i32::to_string).collect();
                format!(
                    "Orbax: distributed process {process} has {} device(s), with the global ids {}. The page of devices \
                     says which tasks have them now.",
                    ids.len(),
                    ids.join(", ")
                )
            }
            None => format!("Orbax: the global ids of the devices of distributed process {process}."),
        });
    }
    if let Some(process) = key.strip_prefix("jax/process_id/") {
        return DecodedValue::Words(format!(
            "JAX: what distributed process {process} says of its process index."
        ));
    }
    match key {
        "RECEIVED_PREEMPTION_NOTICE" | "PREEMPTION_NOTICE" => {
            DecodedValue::Words("The notice of a coordinated save; see the drain page.".into())
        }
        _ => DecodedValue::Nothing,
    }
}

/// The query parameters of the page of a value.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ValuePageQuery {
    key: String,
}

#[derive(Template)]
#[template(path = "value.html")]
struct ValuePageTemplate {
    page: PageFrame,
    job: JobName,
    crumbs: Vec<Breadcrumb>,
    value: KeyView,
    devices: Vec<Device>,
    words: String,
    rest: String,
}

/// Serves `GET /jobs/{job}/keys/value`.
pub(super) async fn show_value_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<ValuePageQuery>,
) -> Result<Response, Problem> {
    let key = decode_key_from_page_query(&which.key);
    let value = keys::read_value_for_display(&site, &job, &key, Some(VALUE_BYTES_MAX))?;
    let raw = site.read_job(&job, |look| look.stored_value(&key))?.filter(|_| !value.redacted);
    let known = raw.map_or(DecodedValue::Nothing, |raw| decode_value(&value.key, &raw.value));
    let (devices, words) = match known {
        DecodedValue::Devices(devices) => (devices, String::new()),
        DecodedValue::Words(words) => (Vec::new(), words),
        DecodedValue::Nothing => (Vec::new(), String::new()),
    };
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let now = snapshot.captured_at();
    let title = format!("Key {} of {}", value.key, job.name);
    let page = PageFrame::for_job_snapshot(
        user,
        NavEntry::Keys,
        title,
        &snapshot,
        &LivePage::Head,
        vec![render_head_fragment(&snapshot)?],
    );
    let rest = format!("/api/v1/jobs/{}/keys/{}", job.name, encode_query_value(&value.key));
    let (crumbs, job) = (parent_breadcrumbs(&key), job.name);
    render_page(&ValuePageTemplate { page, job, crumbs, value, devices, words, rest }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read_and_nothing_else() {
        assert_eq!(parse_number_list(b"[2, 3]"), Some(vec![2, 3]));
        assert_eq!(parse_number_list(b" 2048,2049 "), Some(vec![2048, 2049]));
        assert_eq!(parse_number_list(b"[]"), Some(Vec::new()));
        for other in [&b"[2, x]"[..], b"{\"a\": 1}", b"\xff\xfe", b"[99999999999999999999]"] {
            assert_eq!(parse_number_list(other), None, "{other:?}");
        }
    }

    #[test]
    fn every_directory_above_has_its_address_whatever_bytes_it_has() {
        let told: Vec<_> =
            parent_breadcrumbs(b"a b/\xff/c").into_iter().map(|crumb| (crumb.name, crumb.address)).collect();
        assert_eq!(told[0], ("a b".to_owned(), "a%2520b".to_owned()));
        assert_eq!(told[1].1, "a%2520b%252F%25FF");
        assert_eq!(told.len(), 3);
        assert_eq!(decode_key_from_page_query("a%20b%2F%FF"), b"a b/\xff");
    }
}

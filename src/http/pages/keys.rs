//! Renders a level of the key tree, and one value decoded where its format is known.
//!
//! Begin at `show`, then `value`.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job::head;
use super::links::{self, query_encode};
use super::snapshot::JobSnapshot;
use super::{status, times};
use crate::coordination::{Coordinator, Device, JobName, KeyEntry, TopologyKey, decode_devices};
use crate::http::extract::{JobPath, QueryParams};
use crate::http::keys::{self, KeyView};
use crate::http::{AppState, Problem};

/// The maximum number of lines on a page.
const LINES: usize = 200;
/// The maximum number of bytes of a value on the page.
const VALUE_BYTES_MAX: usize = 16 << 10;

/// The query parameters of the page of keys.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct KeysPageQuery {
    /// The directory, percent-encoded twice, because keys need not be text.
    pub prefix: String,
    pub after: String,
}

impl KeysPageQuery {
    /// Returns the query of the address at which the page follows updates.
    fn query(&self) -> String {
        format!("keys&prefix={}&after={}", query_encode(&self.prefix), query_encode(&self.after))
    }
}

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
struct Keys<'a> {
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
pub(super) fn encode_key(key: &[u8]) -> String {
    // Encoded twice: once for the bytes, once for the address.
    query_encode(&percent_encoding::percent_encode(key, percent_encoding::NON_ALPHANUMERIC).to_string())
}

fn decode_key(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

fn crumbs(directory: &[u8]) -> Vec<Breadcrumb> {
    let ends = directory.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    let mut from = 0;
    let mut crumbs = Vec::new();
    for end in ends.chain([directory.len()]) {
        if end > from {
            let name = String::from_utf8_lossy(&directory[from..end]).into_owned();
            crumbs.push(Breadcrumb { name, address: encode_key(&directory[..end]) });
        }
        from = end + 1;
    }
    crumbs
}

/// Serves `GET /jobs/{job}/keys`.
pub(super) async fn show(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<KeysPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::of(&site, &job)?;
    let now = snapshot.now();
    let title = format!("Keys of {}", job.name);
    let parts = parts(&site, &snapshot, &which)?.to_vec();
    let page = PageFrame::of_job_snapshot(user, NavEntry::Keys, title, &snapshot, &which.query(), parts);
    render_page(&KeysPageTemplate { page, crumbs: crumbs(&decode_key(&which.prefix)), job: job.name }, now)
}

/// Returns the parts of the page.
pub(super) fn parts(
    site: &AppState,
    snapshot: &JobSnapshot,
    which: &KeysPageQuery,
) -> Result<Arc<Vec<Fragment>>, Problem> {
    snapshot.cached_parts(&which.query(), || Ok(vec![head(snapshot)?, level(site, snapshot, which)?]))
}

/// Returns the part with one level of the tree.
fn level(site: &AppState, snapshot: &JobSnapshot, which: &KeysPageQuery) -> Result<Fragment, Problem> {
    let (directory, after) = (decode_key(&which.prefix), decode_key(&which.after));
    let look =
        |core: &Coordinator, _| Some(core.job(snapshot.id)?.keys(&directory, &after, false, LINES + 1));
    let mut lines = site.engine.read(look).unwrap_or_default();
    let next = lines.get(LINES).map(|_| encode_key(&lines[LINES - 1].key));
    lines.truncate(LINES);
    let entries = lines.into_iter().map(|line| {
        let whole = line.key.strip_suffix(b"/").unwrap_or(&line.key);
        let name = whole.rsplit(|byte| *byte == b'/').next().unwrap_or(whole);
        let hidden = line.value_bytes.is_some() && site.redaction.is_redacted(&line.key);
        KeyRow { name: String::from_utf8_lossy(name).into_owned(), address: encode_key(whole), hidden, line }
    });
    let keys = Keys {
        job: &snapshot.view.name,
        entries: entries.collect(),
        next,
        prefix: encode_key(&directory),
        total: snapshot.view.run.keys,
        held: snapshot.view.run.store_bytes,
    };
    Fragment::new("keys", &keys)
}

/// Returns the numbers of a list as Orbax writes it, such as `[2, 3]`; `None` if the value is no such list.
pub(super) fn numbers(value: &[u8]) -> Option<Vec<i32>> {
    let text = std::str::from_utf8(value).ok()?.trim();
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let numbers = inside.split(',').map(str::trim).filter(|number| !number.is_empty());
    numbers.map(|number| number.parse().ok()).collect()
}

/// A value that was decoded by its known format.
enum Decoded {
    /// Devices, from a topology that JAX workers publish.
    Devices(Vec<Device>),
    /// A description in words.
    Words(String),
    Nothing,
}

/// Decodes a value whose format is known.
fn decode(key: &str, value: &[u8]) -> Decoded {
    if let Some(topology) = TopologyKey::parse(key.as_bytes()) {
        return match decode_devices([(&topology, value)]) {
            devices if devices.is_empty() => Decoded::Nothing,
            devices => Decoded::Devices(devices),
        };
    }
    if let Some(process) = key.strip_prefix("orbax/distributed_to_device_ids/") {
        return Decoded::Words(match numbers(value) {
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
        return Decoded::Words(format!("JAX: what distributed process {process} says of its process index."));
    }
    match key {
        "RECEIVED_PREEMPTION_NOTICE" | "PREEMPTION_NOTICE" => {
            Decoded::Words("The notice of a coordinated save; see the drain page.".into())
        }
        _ => Decoded::Nothing,
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
struct ValuePage {
    page: PageFrame,
    job: JobName,
    crumbs: Vec<Breadcrumb>,
    value: KeyView,
    devices: Vec<Device>,
    words: String,
    rest: String,
}

/// Serves `GET /jobs/{job}/keys/value`.
pub(super) async fn value(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<ValuePageQuery>,
) -> Result<Response, Problem> {
    let key = decode_key(&which.key);
    let value = keys::value(&site, &job, &key, Some(VALUE_BYTES_MAX))?;
    let raw = site.read_job(&job, |look| look.key(&key))?.filter(|_| !value.redacted);
    let known = raw.map_or(Decoded::Nothing, |raw| decode(&value.key, &raw.value));
    let (devices, words) = match known {
        Decoded::Devices(devices) => (devices, String::new()),
        Decoded::Words(words) => (Vec::new(), words),
        Decoded::Nothing => (Vec::new(), String::new()),
    };
    let snapshot = JobSnapshot::of(&site, &job)?;
    let now = snapshot.now();
    let title = format!("Key {} of {}", value.key, job.name);
    let page =
        PageFrame::of_job_snapshot(user, NavEntry::Keys, title, &snapshot, "head", vec![head(&snapshot)?]);
    let rest = format!("/api/v1/jobs/{}/keys/{}", job.name, query_encode(&value.key));
    let (crumbs, job) = (crumbs(&key), job.name);
    render_page(&ValuePage { page, job, crumbs, value, devices, words, rest }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read_and_nothing_else() {
        assert_eq!(numbers(b"[2, 3]"), Some(vec![2, 3]));
        assert_eq!(numbers(b" 2048,2049 "), Some(vec![2048, 2049]));
        assert_eq!(numbers(b"[]"), Some(Vec::new()));
        for other in [&b"[2, x]"[..], b"{\"a\": 1}", b"\xff\xfe", b"[99999999999999999999]"] {
            assert_eq!(numbers(other), None, "{other:?}");
        }
    }

    #[test]
    fn every_directory_above_has_its_address_whatever_bytes_it_has() {
        let told: Vec<_> =
            crumbs(b"a b/\xff/c").into_iter().map(|crumb| (crumb.name, crumb.address)).collect();
        assert_eq!(told[0], ("a b".to_owned(), "a%2520b".to_owned()));
        assert_eq!(told[1].1, "a%2520b%252F%25FF");
        assert_eq!(told.len(), 3);
        assert_eq!(decode_key("a%20b%2F%FF"), b"a b/\xff");
    }
}

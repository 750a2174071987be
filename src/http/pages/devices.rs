//! Renders the devices of a run next to those of the previous run.
//!
//! `coordination/views/device_comparison.rs` matches the devices of the two runs. Begin at `show_devices_page`.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::live_page::{DevicesPageQuery, LivePage};
use super::snapshot::JobSnapshot;
use super::{amount, links};
use crate::coordination::{
    Coordinator, Device, DeviceChange, DeviceComparison, DevicePlaceComparison, JobName, StoredValue, TaskId,
};
use crate::http::extractors::{JobPath, QueryParams};
use crate::http::{AppState, Problem};

/// The maximum number of rows of a table.
const ROWS_MAX: usize = 400;
/// The maximum number of Orbax keys that are read.
const ORBAX_KEYS_MAX: usize = 2_000;
/// The directory in which Orbax stores the device ids of each process.
const ORBAX: &[u8] = b"orbax/distributed_to_device_ids";

/// The devices of the run and what moved since the run before.
#[derive(Template)]
#[template(path = "parts/devices.html")]
struct DeviceMapFragment<'a> {
    job: &'a JobName,
    query: &'a DevicesPageQuery,
    total: usize,
    platforms: Vec<(String, usize)>,
    hosts: usize,
    map: DeviceComparison,
    fates: [(DeviceChange, usize); 4],
    changed: Vec<DevicePlaceComparison>,
    changes: usize,
}

impl DeviceMapFragment<'_> {
    fn change_word(&self, fate: &DeviceChange) -> &'static str {
        change_word(*fate)
    }
}

fn change_word(fate: DeviceChange) -> &'static str {
    match fate {
        DeviceChange::Same => "same",
        DeviceChange::Moved => "moved",
        DeviceChange::Came => "came",
        DeviceChange::Gone => "gone",
    }
}

/// The list of devices.
#[derive(Template)]
#[template(path = "parts/device-list.html")]
struct DeviceListFragment<'a> {
    job: &'a JobName,
    total: usize,
    devices: Vec<&'a Device>,
    found: usize,
}

#[derive(Template)]
#[template(path = "parts/orbax.html")]
struct OrbaxDeviceIdsFragment<'a> {
    job: &'a JobName,
    rows: Vec<OrbaxProcessRow>,
}

/// The device ids that Orbax recorded for one process, beside the tasks that have those devices in this run.
struct OrbaxProcessRow {
    process: String,
    ids: Vec<i32>,
    /// The tasks that have these devices.
    tasks: Vec<TaskId>,
    /// The device ids that no task has.
    unowned_ids: Vec<i32>,
    /// The raw value, if it is no list of numbers.
    raw: String,
}

impl OrbaxProcessRow {
    fn from_value(line: &StoredValue, devices: &[Device]) -> Option<Self> {
        let process = String::from_utf8_lossy(&line.key).rsplit('/').next()?.to_owned();
        let ids = super::keys::parse_number_list(&line.value).unwrap_or_default();
        let owner =
            |id: &i32| devices.iter().find(|device| device.global_id == *id).map(|device| device.task);
        let mut tasks: Vec<TaskId> = ids.iter().filter_map(owner).collect();
        tasks.sort_unstable();
        tasks.dedup();
        let nobodys = ids.iter().copied().filter(|id| owner(id).is_none()).collect();
        let raw = if ids.is_empty() {
            String::from_utf8_lossy(&line.value[..line.value.len().min(400)]).into_owned()
        } else {
            String::new()
        };
        Some(Self { process, ids, tasks, unowned_ids: nobodys, raw })
    }

    /// Returns the device ids as text.
    fn ids_text(&self) -> String {
        let ids: Vec<String> = self.ids.iter().map(i32::to_string).collect();
        ids.join(", ")
    }

    /// Returns whether the process number differs from the task that has its devices now.
    fn differs_from_owning_task(&self) -> bool {
        self.tasks.iter().any(|task| task.0.to_string() != self.process)
    }
}

/// Returns the fragment about the device ids that Orbax recorded.
fn render_orbax_fragment(site: &AppState, snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let look = |core: &Coordinator, _| {
        let look = core.job(snapshot.id)?;
        let lines = look.list_keys(ORBAX, b"", false, ORBAX_KEYS_MAX);
        let keys = lines.into_iter().filter(|line| line.value_bytes.is_some());
        Some(keys.filter_map(|line| look.stored_value(&line.key)).collect::<Vec<_>>())
    };
    let lines = site.engine.read(look).unwrap_or_default();
    let shown = lines.iter().filter(|line| !site.redaction.is_redacted(&line.key));
    let rows =
        shown.filter_map(|line| OrbaxProcessRow::from_value(line, &snapshot.view.run.devices)).collect();
    Fragment::new("orbax", &OrbaxDeviceIdsFragment { job: &snapshot.view.name, rows })
}

/// Adds the fragment with values of keys for a user who may see them.
fn add_orbax_fragment_for_operator(
    site: &AppState,
    snapshot: &JobSnapshot,
    user: &PageUser,
    parts: Arc<Vec<Fragment>>,
) -> Result<Arc<Vec<Fragment>>, Problem> {
    if !user.operator {
        return Ok(parts);
    }
    let mut parts = parts.to_vec();
    parts.push(render_orbax_fragment(site, snapshot)?);
    Ok(Arc::new(parts))
}

/// Returns the fragments of the page. Viewers share them, except for the one with values of keys.
pub(super) fn render_fragments_for_user(
    site: &AppState,
    snapshot: &JobSnapshot,
    user: &PageUser,
    which: &DevicesPageQuery,
) -> Result<Arc<Vec<Fragment>>, Problem> {
    let name = LivePage::Devices(which.clone()).to_query();
    let parts = snapshot.cached_or_rendered_fragments(&name, || render_fragments(site, snapshot, which))?;
    add_orbax_fragment_for_operator(site, snapshot, user, parts)
}

/// Returns the fragments that every user sees.
fn render_fragments(
    site: &AppState,
    snapshot: &JobSnapshot,
    which: &DevicesPageQuery,
) -> Result<Vec<Fragment>, Problem> {
    let job = &snapshot.view.name;
    let look = |core: &Coordinator, _| {
        let job = core.job(snapshot.id)?;
        let runs = job.runs_with_devices();
        // Without an earlier run, no place has changed, and none is shown.
        let [run] = runs[..] else { return job.compare_devices(None, None) };
        Some(DeviceComparison { run, previous: None, runs, places: Vec::new() })
    };
    let map = site.engine.read(look).ok_or_else(|| Problem::no_such_job(job.as_str(), Vec::new()))?;
    let count = |fate: DeviceChange| (fate, map.places.iter().filter(|place| place.fate == fate).count());
    let fates = [DeviceChange::Moved, DeviceChange::Gone, DeviceChange::Came, DeviceChange::Same].map(count);
    let wanted = |place: &&DevicePlaceComparison| match which.fate.as_str() {
        "" => place.fate != DeviceChange::Same,
        fate => change_word(place.fate) == fate,
    };
    let changed: Vec<DevicePlaceComparison> = map.places.iter().filter(wanted).cloned().collect();
    let all = &snapshot.view.run.devices;
    let mut platforms: Vec<(String, usize)> = Vec::new();
    for device in all.iter() {
        match platforms.last_mut() {
            Some((platform, count)) if *platform == device.platform => *count += 1,
            _ => platforms.push((device.platform.clone(), 1)),
        }
    }
    let mut boots: Vec<&str> = all.iter().map(|device| device.boot_id.as_str()).collect();
    boots.sort_unstable();
    boots.dedup();
    let task = which.task.trim().parse::<i32>().ok();
    let found: Vec<&Device> = all.iter().filter(|one| task.is_none_or(|task| one.task.0 == task)).collect();
    let devices = DeviceMapFragment {
        job,
        query: which,
        total: all.len(),
        platforms,
        hosts: boots.len(),
        fates,
        changes: changed.len(),
        changed: changed.into_iter().take(ROWS_MAX).collect(),
        map,
    };
    let list = DeviceListFragment {
        job,
        total: all.len(),
        found: found.len(),
        devices: found.into_iter().take(ROWS_MAX).collect(),
    };
    Ok(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("devices", &devices)?,
        Fragment::new("device-list", &list)?,
    ])
}

#[derive(Template)]
#[template(path = "devices.html")]
struct DevicesPageTemplate {
    page: PageFrame,
    job: JobName,
    query: DevicesPageQuery,
}

pub(super) async fn show_devices_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(which): QueryParams<DevicesPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let now = snapshot.captured_at();
    let (title, live) = (format!("Devices of {}", job.name), LivePage::Devices(which.clone()));
    let parts = render_fragments_for_user(&site, &snapshot, &user, &which)?.to_vec();
    let page = PageFrame::for_job_snapshot(user, NavEntry::Devices, title, &snapshot, &live, parts);
    render_page(&DevicesPageTemplate { page, job: job.name, query: which }, now)
}

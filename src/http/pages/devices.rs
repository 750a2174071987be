//! `GET /jobs/{job}/devices`: this run's devices beside those of the run before: what moved.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::job::head;
use super::scene::Scene;
use super::shell::{Guest, Page, Place, answer};
use super::{links, look};
use crate::coordination::{Device, DeviceFate, DeviceMap, DeviceMove, JobName};
use crate::http::extract::{Job, Params};
use crate::http::{Problem, Site};

/// How many rows a table has at most.
const ROWS_MAX: usize = 400;
/// How many keys of Orbax are read.
const ORBAX_KEYS_MAX: usize = 2_000;
/// Where Orbax leaves which process has which devices.
const ORBAX: &[u8] = b"orbax/distributed_to_device_ids";

/// Which rows are wanted.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    task: String,
    fate: String,
}

#[derive(Template)]
#[template(path = "devices.html")]
struct DevicesPage {
    page: Page,
    job: JobName,
    which: Which,
    total: usize,
    platforms: Vec<(String, usize)>,
    hosts: usize,
    devices: Vec<Device>,
    found: usize,
    map: DeviceMap,
    fates: [(DeviceFate, usize); 4],
    changed: Vec<DeviceMove>,
    changes: usize,
    orbax: Vec<(String, String)>,
}

impl DevicesPage {
    fn word(&self, fate: &DeviceFate) -> &'static str {
        word(*fate)
    }
}

fn word(fate: DeviceFate) -> &'static str {
    match fate {
        DeviceFate::Same => "same",
        DeviceFate::Moved => "moved",
        DeviceFate::Came => "came",
        DeviceFate::Gone => "gone",
    }
}

/// What Orbax says of who has which devices: the process, and its list.
fn orbax(site: &Site, job: &Job) -> Result<Vec<(String, String)>, Problem> {
    let lines = site.look(job, |look| {
        let lines = look.keys(ORBAX, b"", false, ORBAX_KEYS_MAX);
        let keys = lines.into_iter().filter(|line| line.value_bytes.is_some());
        keys.filter_map(|line| look.key(&line.key)).collect::<Vec<_>>()
    })?;
    let shown = lines.into_iter().filter(|line| !site.redaction.hides(&line.key));
    Ok(shown
        .filter_map(|line| {
            let key = String::from_utf8_lossy(&line.key).into_owned();
            let process = key.rsplit('/').next()?.to_owned();
            let text = String::from_utf8_lossy(&line.value[..line.value.len().min(400)]).into_owned();
            Some((process, text))
        })
        .collect())
}

pub(super) async fn show(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let scene = Scene::of(&site, &job)?;
    let now = scene.now();
    let map = site.look(&job, |look| look.device_map())?;
    let count = |fate: DeviceFate| (fate, map.places.iter().filter(|place| place.fate == fate).count());
    let fates = [DeviceFate::Moved, DeviceFate::Gone, DeviceFate::Came, DeviceFate::Same].map(count);
    let wanted = |place: &&DeviceMove| match which.fate.as_str() {
        "" => place.fate != DeviceFate::Same,
        fate => word(place.fate) == fate,
    };
    let changed: Vec<DeviceMove> = map.places.iter().filter(wanted).cloned().collect();
    let changes = changed.len();
    let all = &scene.view.run.devices;
    let mut platforms: Vec<(String, usize)> = Vec::new();
    for device in all {
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
    // Values of keys are not for everybody.
    let orbax = if guest.operator { orbax(&site, &job)? } else { Vec::new() };
    let title = format!("Devices of {}", job.name);
    let page = Page::of_scene(guest, Place::Devices, title, &scene, "head", vec![head(&scene)?]);
    let page = DevicesPage {
        page,
        orbax,
        job: job.name,
        which,
        total: all.len(),
        platforms,
        hosts: boots.len(),
        found: found.len(),
        devices: found.into_iter().take(ROWS_MAX).cloned().collect(),
        fates,
        changed: changed.into_iter().take(ROWS_MAX).collect(),
        changes,
        map,
    };
    answer(&page, now)
}

//! `GET /jobs/{job}/tasks/{task}`: one task, its lives, its pulse, and what can be done about it.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::exclusions::{Did, Form};
use super::job::head;
use super::look::{Look, barrier_name};
use super::part::{Part, Parts};
use super::scene::{Scene, host};
use super::shell::{Guest, Page, Place, answer};
use super::table::gap_classes;
use super::{look, timeline, times, transfers};
use crate::coordination::{
    BarrierOutcome, BarrierRecord, Device, ExclusionView, JobName, JobView, KeyLine, Target, TaskId, TaskView,
};
use crate::http::extract::{Item, Job, Params};
use crate::http::{Problem, Site};

/// Among how many keys those that the task wrote are looked for.
const KEYS_SEARCHED: usize = 20_000;
/// How many of them are shown.
const KEYS_SHOWN: usize = 40;
/// How many recent barriers are shown.
const MEETINGS_SHOWN: usize = 24;

#[derive(Template)]
#[template(path = "parts/task.html")]
struct State_<'a> {
    job: &'a JobName,
    task: &'a TaskView,
    look: Look,
    host: String,
    waits: Vec<String>,
    awaited_at: Vec<(String, usize, usize)>,
}

#[derive(Template)]
#[template(path = "parts/pulse.html")]
struct Pulse<'a> {
    task: &'a TaskView,
    classes: Vec<(String, u64)>,
    timeout: String,
    score: String,
}

struct Meeting<'a> {
    record: &'a BarrierRecord,
    name: String,
    came: String,
    late_us: Option<u64>,
    passed: bool,
}

#[derive(Template)]
#[template(path = "parts/meetings.html")]
struct Meetings<'a> {
    meetings: Vec<Meeting<'a>>,
}

/// How a task came to a barrier, as far as the record tells.
fn meeting<'a>(record: &'a BarrierRecord, task: TaskId) -> Meeting<'a> {
    let arrival = record.latest.iter().position(|arrival| arrival.task == task);
    let late_us = arrival.map(|at| record.lateness_us(&record.latest[at]));
    let came = match arrival {
        _ if record.without.contains(&task) => "did not come".to_owned(),
        _ if record.first == Some(task) => "came first".to_owned(),
        Some(0) => "came last".to_owned(),
        Some(place) => format!("came {} before the last", place),
        None => "came in time".to_owned(),
    };
    let passed = record.outcome == BarrierOutcome::Passed;
    Meeting { name: barrier_name(&record.id), came, late_us, passed, record }
}

/// The parts of the page; none if there is no such task.
pub(super) fn parts(scene: &Scene, id: TaskId) -> Result<Option<Vec<Part>>, Problem> {
    let Some(task) = scene.task(id) else { return Ok(None) };
    let (view, run) = (&scene.view, &scene.view.run);
    let waited_for = run.barriers.iter().filter(|barrier| barrier.missing.contains(&id));
    let state = State_ {
        job: &view.name,
        task,
        look: scene.look(id),
        host: host(task),
        waits: task.waits_at.iter().map(|id| barrier_name(id)).collect(),
        awaited_at: waited_for.map(|b| (barrier_name(&b.id), b.arrived, b.members)).collect(),
    };
    let pulse = Pulse {
        task,
        classes: task.pulse.as_ref().map(gap_classes).unwrap_or_default(),
        timeout: times::span(&view.settings.heartbeat_timeout),
        score: task.straggling.as_ref().map(|it| format!("{:.2}", it.score)).unwrap_or_default(),
    };
    let meetings =
        run.recent_barriers.iter().take(MEETINGS_SHOWN).map(|record| meeting(record, id)).collect();
    Ok(Some(vec![
        head(scene)?,
        Part::new("task", &state)?,
        Part::new("pulse", &pulse)?,
        transfers::of_task(scene, id)?,
        Part::new("meetings", &Meetings { meetings })?,
        timeline::part(scene, false, Some(id))?,
    ]))
}

#[derive(Template)]
#[template(path = "task.html")]
struct TaskPage {
    page: Page,
    parts: Parts,
    view: JobView,
    id: TaskId,
    keys: Vec<(KeyLine, String)>,
    devices: Vec<Device>,
    exclusion: Option<ExclusionView>,
    form: Form,
    error: Option<String>,
    host: Option<std::net::IpAddr>,
}

impl TaskPage {
    fn address(&self, line: &KeyLine) -> String {
        super::keys::coded(&line.key)
    }
}

/// The page as it is after what was just done, or with an error in its form.
pub(super) fn page(site: &Site, job: &Job, guest: Guest, id: TaskId, did: &Did) -> Result<Response, Problem> {
    let scene = Scene::of(site, job)?;
    let missing = || {
        let last = scene.tasks().saturating_sub(1);
        let text = format!("there is no task {id}: job {} has the tasks 0 to {last}", job.name);
        Problem::not_found("no-such-task", text)
    };
    let parts = Parts(parts(&scene, id)?.ok_or_else(missing)?);
    let now = scene.now();
    let lines = site.look(job, |look| look.keys(b"", b"", true, KEYS_SEARCHED))?;
    let wrote = lines.into_iter().filter(|line| line.written_by == Some(id)).take(KEYS_SHOWN);
    let keys = wrote
        .map(|line| (String::from_utf8_lossy(&line.key).into_owned(), line))
        .map(|(k, l)| (l, k))
        .collect();
    let devices = scene.view.run.devices.iter().filter(|device| device.task == id).cloned().collect();
    let host = scene
        .task(id)
        .and_then(|task| task.lives.iter().find_map(|life| life.peer))
        .map(|peer| peer.ip().to_canonical());
    let covers = |exclusion: &&ExclusionView| match exclusion.target {
        Target::Task(task) => task == id,
        Target::Host(address) => Some(address) == host,
    };
    let exclusion = scene.view.exclusions.iter().find(covers).cloned();
    let page = Page::new(guest, Place::Task, format!("Task {id} of {}", job.name), now)
        .of_job(&job.name)
        .live_at(format!("/jobs/{}/live?page=task&task={id}", job.name))
        .saying(did.words());
    let form = Form { task: id.to_string(), ..Form::default() };
    answer(
        &TaskPage { page, parts, view: scene.view, id, keys, devices, exclusion, form, error: None, host },
        now,
    )
}

pub(super) async fn show(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    Item(task): Item<i32>,
    Params(did): Params<Did>,
) -> Result<Response, Problem> {
    page(&site, &job, guest, TaskId(task), &did)
}

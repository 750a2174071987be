//! `GET /jobs/{job}/tasks/{task}`: one task, its lives, its pulse, and what can be done about it.

use std::net::IpAddr;
use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::exclusions::{Did, Form};
use super::job::{head, is_young};
use super::look::{Look, barrier_name, key_name};
use super::part::Part;
use super::scene::{Scene, host};
use super::shell::{Guest, Page, Place, answer};
use super::table::gap_classes;
use super::{links, look, timeline, times, transfers};
use crate::coordination::{
    BarrierOutcome, BarrierRecord, Coordinator, Device, ExclusionView, GapAt, JobName, JobView, KeyLine,
    Target, TaskId, TaskView, Timestamp,
};
use crate::findings::{Finding, Severity};
use crate::http::extract::{Item, Job, Params};
use crate::http::runs::no_such_task;
use crate::http::{Problem, Site};

/// Among how many keys those that the task wrote are looked for.
const KEYS_SEARCHED: usize = 20_000;
/// How many of them are shown.
const KEYS_SHOWN: usize = 40;
/// How many wide gaps in a row are no accident.
const WIDE_MIN: usize = 3;
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
    /// The keys that it waits for, and since when.
    keys: Vec<(String, Timestamp)>,
    awaited_at: Vec<(String, usize, usize)>,
    /// What is found that is about it.
    found: Vec<&'a Finding>,
}

#[derive(Template)]
#[template(path = "parts/pulse.html")]
struct Pulse<'a> {
    task: &'a TaskView,
    classes: Vec<(String, u64)>,
    /// The same gaps over time.
    course: Vec<GapAt>,
    timeout: Duration,
    /// What is usual in the job: the median of its tasks' usual intervals, in microseconds.
    median_us: u64,
    wide_since: Option<Timestamp>,
    score: String,
}

impl<'a> Pulse<'a> {
    fn of(site: &Site, scene: &'a Scene, task: &'a TaskView) -> Self {
        let now = |core: &Coordinator, _| core.job(scene.id).and_then(|job| job.task(task.task));
        let course = site.engine.look(now).map(|task| task.recent_gaps).unwrap_or_default();
        let pulses = scene.view.run.tasks.iter().filter_map(|task| task.pulse.as_ref());
        let mut usual: Vec<u64> = pulses.map(|pulse| pulse.interval_us).collect();
        let middle = usual.len() / 2;
        let median_us = match usual.is_empty() {
            true => 0,
            false => *usual.select_nth_unstable(middle).1,
        };
        Self {
            task,
            classes: task.pulse.as_ref().map(gap_classes).unwrap_or_default(),
            wide_since: wide_since(&course, median_us),
            course,
            timeout: scene.view.settings.heartbeat_timeout,
            median_us,
            score: task.straggling.as_ref().map(|it| format!("{:.2}", it.score)).unwrap_or_default(),
        }
    }

    fn timeout_us(&self) -> u128 {
        self.timeout.as_micros()
    }

    /// How many of a thousand of the timeout a gap is.
    fn part(&self, gap: &GapAt) -> u128 {
        (u128::from(gap.gap_us) * 1000 / self.timeout_us().max(1)).min(1000)
    }
}

/// Since when every gap has been wide beside what is usual in the job; nothing if the last ones are not.
fn wide_since(course: &[GapAt], median_us: u64) -> Option<Timestamp> {
    let wide = |gap: &&GapAt| gap.gap_us >= median_us + median_us / 2;
    let last = course.iter().rev().take_while(wide).count();
    (median_us > 0 && last >= WIDE_MIN).then(|| course[course.len() - last].at)
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
fn meeting<'a>(record: &'a BarrierRecord, task_view: &TaskView) -> Meeting<'a> {
    let task = task_view.task;
    let arrival = record.latest.iter().position(|arrival| arrival.task == task);
    let late_us = arrival.map(|at| record.lateness_us(&record.latest[at]));
    let there = task_view.live_since.is_some_and(|since| since <= record.ended);
    let came = match arrival {
        _ if record.without.contains(&task) => "did not come".to_owned(),
        _ if record.first == Some(task) => "came first".to_owned(),
        Some(0) => "came last".to_owned(),
        Some(place) => format!("came {} before the last", place),
        // All who came are named.
        None if record.arrived <= record.latest.len() => "took no part".to_owned(),
        // Where it was then, another life of it knows.
        None if !there => "not known: before this life took part".to_owned(),
        None => format!("not among the last {}", record.latest.len()),
    };
    let passed = record.outcome == BarrierOutcome::Passed;
    Meeting { name: barrier_name(&record.id), came, late_us, passed, record }
}

/// Taking the task out, or letting it in again.
#[derive(Template)]
#[template(path = "parts/act.html")]
struct Act<'a> {
    job: &'a JobName,
    guest: &'a Guest,
    id: TaskId,
    exclusion: Option<&'a ExclusionView>,
    recoverable: bool,
    form: Form,
    host: Option<IpAddr>,
}

impl<'a> Act<'a> {
    fn of(scene: &'a Scene, task: &TaskView, guest: &'a Guest) -> Self {
        let id = task.task;
        let peer = task.lives.iter().find_map(|life| life.peer);
        let host = peer.map(|peer| peer.ip().to_canonical());
        let covers = |exclusion: &&ExclusionView| match exclusion.target {
            Target::Task(task) => task == id,
            Target::Host(address) => Some(address) == host,
        };
        let (job, recoverable) = (&scene.view.name, scene.view.settings.recoverable);
        let exclusion = scene.view.exclusions.iter().find(covers);
        let form = Form { task: id.to_string(), ..Form::default() };
        Self { job, guest, id, exclusion, recoverable, form, host }
    }
}

/// The parts of the page, as this guest sees them; none if there is no such task.
pub(super) fn parts(
    site: &Site,
    scene: &Scene,
    guest: &Guest,
    id: TaskId,
) -> Result<Option<Vec<Part>>, Problem> {
    let Some(task) = scene.task(id) else { return Ok(None) };
    let (view, run) = (&scene.view, &scene.view.run);
    let waited_for =
        run.barriers.iter().filter(|barrier| barrier.missing.contains(&id) && !is_young(scene, barrier));
    let state = State_ {
        job: &view.name,
        task,
        look: scene.look(id),
        host: host(task),
        waits: task.waits_at.iter().map(|id| barrier_name(id)).collect(),
        keys: task.waits_for.iter().map(|wait| (key_name(&wait.key), wait.since)).collect(),
        awaited_at: waited_for.map(|b| (barrier_name(&b.id), b.arrived, b.members)).collect(),
        found: scene.open.iter().filter(|finding| finding.tasks.contains(&id)).collect(),
    };
    let pulse = Pulse::of(site, scene, task);
    let meetings =
        run.recent_barriers.iter().take(MEETINGS_SHOWN).map(|record| meeting(record, task)).collect();
    Ok(Some(vec![
        head(scene)?,
        Part::new("task", &state)?,
        Part::new("act", &Act::of(scene, task, guest))?,
        Part::new("pulse", &pulse)?,
        transfers::of_task(scene, id)?,
        Part::new("meetings", &Meetings { meetings })?,
        timeline::part(scene, false, Some(id))?,
        devices(scene, id)?,
        keys(site, scene, id)?,
    ]))
}

#[derive(Template)]
#[template(path = "parts/task-devices.html")]
struct Devices<'a> {
    job: &'a JobName,
    devices: Vec<&'a Device>,
}

fn devices(scene: &Scene, id: TaskId) -> Result<Part, Problem> {
    let devices = scene.view.run.devices.iter().filter(|device| device.task == id).collect();
    Part::new("task-devices", &Devices { job: &scene.view.name, devices })
}

#[derive(Template)]
#[template(path = "parts/task-keys.html")]
struct Keys<'a> {
    job: &'a JobName,
    keys: Vec<(KeyLine, String)>,
    /// Every key was looked at; else only the first so many.
    whole: bool,
    searched: usize,
}

impl Keys<'_> {
    fn address(&self, line: &KeyLine) -> String {
        super::keys::coded(&line.key)
    }
}

/// The keys that a task wrote. Looked for once a scene, however many look.
fn keys(site: &Site, scene: &Scene, id: TaskId) -> Result<Part, Problem> {
    let made = scene.made(&format!("task-keys/{id}"), || {
        let look = |core: &Coordinator, _| Some(core.job(scene.id)?.keys(b"", b"", true, KEYS_SEARCHED));
        let lines = site.engine.look(look).unwrap_or_default();
        let wrote = lines.into_iter().filter(|line| line.written_by == Some(id)).take(KEYS_SHOWN);
        let keys = wrote.map(|line| {
            let name = String::from_utf8_lossy(&line.key).into_owned();
            (line, name)
        });
        let (job, searched) = (&scene.view.name, KEYS_SEARCHED);
        let whole = scene.view.run.keys <= searched;
        Ok(vec![Part::new("task-keys", &Keys { job, keys: keys.collect(), whole, searched })?])
    })?;
    made.first().cloned().ok_or_else(Problem::internal)
}

#[derive(Template)]
#[template(path = "task.html")]
struct TaskPage {
    page: Page,
    view: JobView,
    id: TaskId,
}

/// The page as it is after what was just done, or with an error in its form.
pub(super) fn page(site: &Site, job: &Job, guest: Guest, id: TaskId, did: &Did) -> Result<Response, Problem> {
    let scene = Scene::of(site, job)?;
    let missing = || no_such_task(job, id.0, scene.view.settings.tasks);
    let parts = parts(site, &scene, &guest, id)?.ok_or_else(missing)?;
    let now = scene.now();
    let (title, query) = (format!("Task {id} of {}", job.name), format!("task&task={id}"));
    let page = Page::of_scene(guest, Place::Task, title, &scene, &query, parts).saying(did.words());
    answer(&TaskPage { page, view: scene.view, id }, now)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wide_gap_is_an_accident_and_three_at_the_end_are_not() {
        let course = |gaps: &[u64]| -> Vec<GapAt> {
            (1..).zip(gaps).map(|(at, gap)| GapAt { at: Timestamp(at), gap_us: *gap }).collect()
        };
        assert_eq!(wide_since(&course(&[10, 10, 40, 10, 10]), 10), None);
        assert_eq!(wide_since(&course(&[10, 10, 15, 20, 30]), 10), Some(Timestamp(3)));
        assert_eq!(wide_since(&course(&[30, 30, 30, 10]), 10), None);
        assert_eq!(wide_since(&[], 10), None);
        assert_eq!(wide_since(&course(&[1, 1, 1]), 0), None);
    }
}

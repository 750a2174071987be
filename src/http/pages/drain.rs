//! `/jobs/{job}/drain`: a coordinated save: asking for it, and how it stands.

use askama::Template;
use axum::extract::State;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use super::exclusions::Did;
use super::job::head;
use super::part::Part;
use super::scene::Scene;
use super::shell::{Guest, Page, Place, answer_with};
use super::{links, times};
use crate::coordination::{JobName, PreemptionView, Reason, RunNumber, RunState, TaskId};
use crate::http::actor::Acting;
use crate::http::extract::{Fields, Job, Params};
use crate::http::{NewDrain, Problem, Site, drain};

/// How many acknowledgements are shown.
const SHOWN: usize = 200;

#[derive(Template)]
#[template(path = "parts/drain.html")]
struct Stands<'a> {
    job: &'a JobName,
    run: RunNumber,
    preemption: Option<&'a PreemptionView>,
    waiting: Vec<TaskId>,
    live: usize,
    shown: usize,
}

impl Stands<'_> {
    /// How many of a thousand so many of the live tasks are.
    fn part(&self, tasks: usize) -> usize {
        tasks * 1000 / self.live.max(1)
    }
}

/// How the drain of the present run stands.
fn part(scene: &Scene) -> Result<Part, Problem> {
    let run = &scene.view.run;
    let preemption = run.preemption.as_ref();
    let told = |task: TaskId| {
        preemption.is_some_and(|preemption| preemption.acknowledged.iter().any(|(one, _)| *one == task))
    };
    let live = run.tasks.iter().filter(|task| task.live_since.is_some());
    let waiting = live.map(|task| task.task).filter(|task| !told(*task)).collect();
    let (job, live) = (&scene.view.name, run.live);
    Part::new("drain", &Stands { job, run: run.number, preemption, waiting, live, shown: SHOWN })
}

/// What the form says.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Form {
    reason: String,
    seconds: String,
}

#[derive(Template)]
#[template(path = "parts/ask.html")]
struct Ask<'a> {
    job: &'a JobName,
    guest: &'a Guest,
    /// Why nobody can be asked now.
    closed: Option<String>,
    form: Form,
}

/// The parts of the page, as this guest sees them.
pub(super) fn parts(scene: &Scene, guest: &Guest, form: Form) -> Result<Vec<Part>, Problem> {
    let run = &scene.view.run;
    let closed = match run.state {
        RunState::Running if run.preemption.is_some() => Some("This run has been asked already.".to_owned()),
        RunState::Running => None,
        state => Some(format!("Run {} is {state}: there is nobody to ask.", run.number)),
    };
    let ask = Ask { job: &scene.view.name, guest, closed, form };
    Ok(vec![head(scene)?, part(scene)?, Part::new("ask", &ask)?])
}

#[derive(Template)]
#[template(path = "drain.html")]
struct DrainPage<'a> {
    page: Page,
    job: &'a JobName,
}

fn page(
    site: &Site,
    job: &Job,
    guest: Guest,
    did: &Did,
    form: Form,
    error: Option<(u16, String)>,
) -> Result<Response, Problem> {
    let scene = Scene::of(site, job)?;
    let (title, parts) = (format!("Drain {}", job.name), parts(&scene, &guest, form)?);
    let page = Page::of_scene(guest, Place::Drain, title, &scene, "drain", parts);
    let page = page.saying(did.words()).failing(error);
    answer_with(page.status(), &DrainPage { page, job: &job.name }, scene.now())
}

/// `GET /jobs/{job}/drain`
pub(super) async fn show(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    Params(did): Params<Did>,
) -> Result<Response, Problem> {
    page(&site, &job, guest, &did, Form::default(), None)
}

/// `POST /jobs/{job}/drain`
pub(super) async fn ask(
    State(site): State<Site>,
    job: Job,
    guest: Guest,
    Acting(author): Acting,
    Fields(form): Fields<Form>,
) -> Result<Response, Problem> {
    let reason = Reason::try_from(form.reason.clone()).map_err(|error| (422, error.to_string()));
    let asked = reason.and_then(|reason| {
        let in_seconds = form.seconds.parse().unwrap_or_default();
        drain::ask(&site, &job, &author, NewDrain { reason, in_seconds })
            .map_err(|problem| (problem.status, problem.detail.into_string()))
    });
    match asked {
        Ok(_) => Ok(Redirect::to(&format!("/jobs/{}/drain?did=drained", job.name)).into_response()),
        Err(wrong) => page(&site, &job, guest, &Did::default(), form, Some(wrong)),
    }
}

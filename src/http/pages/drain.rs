//! Renders the drain page and handles its form.
//!
//! It does not carry out the drain (`http/drain.rs`). Begin at `show`, then `ask`.

use askama::Template;
use axum::extract::State;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use super::exclusions::Did;
use super::job::head;
use super::links::{self, Named};
use super::part::Part;
use super::scene::Scene;
use super::shell::{Guest, Page, Place, answer_with};
use super::{look, times};
use crate::coordination::{JobName, PreemptionView, Reason, RunNumber, RunState, TaskId};
use crate::http::actor::Acting;
use crate::http::extract::{Fields, Job, Params};
use crate::http::{NewDrain, Problem, Site, drain};

/// How many acknowledgements are shown.
const SHOWN: usize = 200;
/// How many of the tasks are named that the agreement waits for.
const AWAITED_SHOWN: usize = 12;

#[derive(Template)]
#[template(path = "parts/drain.html")]
struct Stands<'a> {
    job: &'a JobName,
    run: RunNumber,
    /// The run has ended.
    over: bool,
    preemption: Option<&'a PreemptionView>,
    /// The first of the tasks that the agreement waits for.
    awaited: Vec<Named>,
    /// How many live tasks have acknowledged.
    acknowledged: usize,
    live: usize,
    shown: usize,
}

impl Stands<'_> {
    /// How many of a thousand tasks the agreement waits for no more.
    fn part(&self, it: &PreemptionView) -> usize {
        let all = self.live.max(it.arrived + it.awaited.len()).max(1);
        (all - it.awaited.len().min(all)) * 1000 / all
    }

    /// What the agreement on a step waits for.
    fn state(&self, it: &PreemptionView) -> String {
        let (live, arrived) = (self.live, it.arrived);
        let tasks = if live == 1 { "task" } else { "tasks" };
        if let Some(step) = it.agreed_step {
            format!("All save at step {step}")
        } else if self.over {
            "The run ended before its tasks agreed on a step: they may not have saved".into()
        } else if it.failed {
            "The tasks did not agree on a step: the barrier at which they agree failed".into()
        } else if self.acknowledged < live {
            format!("{} of {live} live {tasks} have acknowledged", self.acknowledged)
        } else {
            let members = arrived + it.awaited.len();
            format!(
                "All {live} live {tasks} have acknowledged; {arrived} of {members} have reached the barrier at which \
                 they agree on a step"
            )
        }
    }
}

/// How the drain of the present run stands.
pub(super) fn part(scene: &Scene) -> Result<Part, Problem> {
    let run = &scene.view.run;
    let preemption = run.preemption.as_ref();
    let is_live = |task: TaskId| scene.task(task).is_some_and(|task| task.live_since.is_some());
    let acknowledged =
        preemption.map_or(0, |it| it.acknowledged.iter().filter(|(task, _)| is_live(*task)).count());
    let awaited = preemption.map_or(&[][..], |it| &it.awaited);
    let awaited = awaited.iter().take(AWAITED_SHOWN).map(|task| scene.named(*task)).collect();
    let (job, live) = (&scene.view.name, run.live);
    let over = run.ended_at.is_some();
    let stands = Stands { job, run: run.number, over, preemption, awaited, acknowledged, live, shown: SHOWN };
    Part::new("drain", &stands)
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
    /// Why the run cannot be drained now.
    closed: Option<String>,
    form: Form,
}

/// The parts of the page, as this guest sees them.
pub(super) fn parts(scene: &Scene, guest: &Guest, form: Form) -> Result<Vec<Part>, Problem> {
    let run = &scene.view.run;
    let closed = match run.state {
        RunState::Running if run.preemption.is_some() => {
            Some("This run is already being drained.".to_owned())
        }
        RunState::Running => None,
        state => Some(format!("Run {} is {state}. Only a running run can be drained.", run.number)),
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

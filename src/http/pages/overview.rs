//! Renders `GET /`: all jobs with their issues.
//!
//! It does not hold the fleet: it takes one snapshot a view. Begin at `Survey`, then `show`.

use std::collections::BTreeSet;
use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::{Redirect, Response};

use super::job::{Waiting, waiting};
use super::look::Look;
use super::needs::{self, Need};
use super::part::Part;
use super::scene::Scene;
use super::shell::{Guest, Page, Place, answer};
use super::{look, times};
use crate::coordination::{JobId, JobName, RunNumber, RunState, Timestamp};
use crate::http::{Problem, Site};
use crate::tls::FailedHandshake;

/// How many jobs are shown with all that there is to say; the rest are counted.
const JOBS_SHOWN: usize = 500;

/// A job in a line.
struct Line {
    name: JobName,
    run: RunNumber,
    state: RunState,
    since: Timestamp,
    live: usize,
    total: usize,
    counts: Vec<(Look, usize)>,
    waits: Option<(String, usize, usize, Timestamp, String)>,
    barriers: usize,
    needs: usize,
    worst: &'static str,
}

/// Every job, as they were at one moment.
pub(super) struct Survey {
    lines: Vec<Line>,
    needs: Vec<Need>,
    handshakes: Vec<FailedHandshake>,
    /// What is said of the last job if there is no issue.
    calm: String,
    more: usize,
    /// Who asks must show a token.
    tokens: bool,
    pub now: Timestamp,
}

/// A handshake that failed so long ago is no news.
const LATELY: Duration = Duration::from_secs(10 * 60);
/// How many handshakes that failed are shown.
const HANDSHAKES: usize = 3;

impl Survey {
    /// Looks at every job.
    pub fn see(site: &Site) -> Self {
        let (jobs, now): (Vec<JobId>, Timestamp) =
            site.engine.look(|core, now| (core.jobs().map(|(job, _)| job).collect(), now));
        let mut handshakes = site.handshakes.page().handshakes;
        handshakes.retain(|failed| now.since(failed.last) < LATELY);
        handshakes.truncate(HANDSHAKES);
        let more = jobs.len().saturating_sub(JOBS_SHOWN);
        let tokens = !site.guard.is_open();
        let mut survey =
            Self { lines: Vec::new(), needs: Vec::new(), handshakes, calm: String::new(), more, tokens, now };
        for job in jobs.into_iter().take(JOBS_SHOWN) {
            // What happened is on the page of the job.
            if let Some(scene) = Scene::see(site, job) {
                survey.add(&scene);
            }
        }
        survey.ordered()
    }

    /// The same with what matters most first.
    pub fn ordered(mut self) -> Self {
        self.lines.sort_by(|a, b| (b.worst == "bad", &a.name).cmp(&(a.worst == "bad", &b.name)));
        self.needs.sort_by_key(needs::rank);
        self
    }

    /// No job, seen now.
    #[cfg(test)]
    pub fn empty(now: Timestamp) -> Self {
        let (lines, needs, handshakes, calm) = (Vec::new(), Vec::new(), Vec::new(), String::new());
        Self { lines, needs, handshakes, calm, more: 0, tokens: false, now }
    }

    pub fn add(&mut self, scene: &Scene) {
        let needs = needs::of(scene);
        self.calm = needs::calm(scene);
        let run = &scene.view.run;
        let first = waiting(scene, &BTreeSet::new()).into_iter().next();
        let waits = first.map(|it: Waiting<'_>| {
            let who = match &it.barrier.missing[..] {
                [] => String::new(),
                [one] => format!("task {one}"),
                many if many.len() <= 4 => format!("tasks {}", it.numbers),
                many => format!("{} tasks", many.len()),
            };
            (it.name.clone(), it.barrier.arrived, it.barrier.members, it.barrier.since, who)
        });
        let tones = ["bad", "warn", "info"];
        let worst = tones.into_iter().find(|tone| needs.iter().any(|need| need.tone == *tone));
        self.lines.push(Line {
            name: scene.view.name.clone(),
            run: run.number,
            state: run.state,
            since: run.ended_at.or(run.started_at).unwrap_or(run.opened_at),
            live: run.live,
            total: scene.tasks(),
            counts: scene.counts(),
            waits,
            barriers: run.barriers.len(),
            needs: needs.len(),
            worst: worst.unwrap_or(""),
        });
        self.needs.extend(needs);
    }
}

#[derive(Template)]
#[template(path = "parts/jobs.html")]
struct Jobs<'a> {
    lines: &'a [Line],
    more: usize,
    tokens: bool,
}

#[derive(Template)]
#[template(path = "parts/handshakes.html")]
struct Handshakes<'a> {
    handshakes: &'a [FailedHandshake],
}

/// The parts of the page.
pub(super) fn parts(survey: &Survey) -> Result<Vec<Part>, Problem> {
    let calm = match &survey.lines[..] {
        [] => "No job is declared yet.".to_owned(),
        [_] => survey.calm.clone(),
        many => format!("No action needed in {} jobs", many.len()),
    };
    let jobs = Part::new("jobs", &Jobs { lines: &survey.lines, more: survey.more, tokens: survey.tokens })?;
    let handshakes = Part::new("handshakes", &Handshakes { handshakes: &survey.handshakes })?;
    Ok(vec![needs::part(&survey.needs, true, calm)?, handshakes, jobs])
}

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    page: Page,
}

pub(super) async fn show(State(site): State<Site>, guest: Guest) -> Result<Response, Problem> {
    let survey = Survey::see(&site);
    let page = Page::new(guest, Place::Overview, "Overview", survey.now)
        .following("/live?page=overview".into(), parts(&survey)?);
    answer(&Overview { page }, survey.now)
}

/// `GET /jobs`
pub(super) async fn elsewhere() -> Redirect {
    Redirect::permanent("/")
}

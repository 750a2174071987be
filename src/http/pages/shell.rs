//! Renders the frame of every page: navigation, role, CSRF proof, errors.
//!
//! Begin at `Page`.

use std::convert::Infallible;
use std::sync::Arc;

use askama::Template;
use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request;
use axum::response::{Html, IntoResponse as _, Response};

use super::assets::Asset;
use super::part::{Part, Parts};
use super::scene::Scene;
use super::times::fill;
use crate::coordination::{Actor, JobName, Timestamp};
use crate::http::guard::Proof;
use crate::http::{How, Problem, Role, Visitor};

/// Who looks at a page, as far as pages want to know.
#[derive(Debug, Default, Clone)]
pub(super) struct Guest {
    /// What forms must carry.
    pub csrf: Arc<str>,
    /// Their name, if they have given one.
    pub who: Option<Arc<str>>,
    /// They may log out.
    pub session: bool,
    /// They may act, and see the values of keys.
    pub operator: bool,
}

impl<S: Sync> FromRequestParts<S> for Guest {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut request::Parts, _state: &S) -> Result<Self, Infallible> {
        // The proof stands there for browsers that have their cookie from this very answer, too.
        let csrf = parts.extensions.get::<Proof>().map(|proof| Arc::clone(&proof.0)).unwrap_or_default();
        let Some(visitor) = parts.extensions.get::<Visitor>() else {
            return Ok(Self { csrf, ..Self::default() });
        };
        let named = visitor.actor.who.as_ref() != Actor::ANONYMOUS;
        Ok(Self {
            csrf,
            who: named.then(|| Arc::clone(&visitor.actor.who)),
            session: visitor.how == How::Session,
            operator: visitor.role >= Role::Operator,
        })
    }
}

/// Which entry of the navigation a page belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Overview,
    Job,
    Timeline,
    Barriers,
    Task,
    Devices,
    Keys,
    Drain,
    Exclusions,
    Moves,
    Transfers,
    Audit,
    Api,
    Guide,
    Nowhere,
}

/// What the frame of a page is made of.
pub(super) struct Page {
    pub title: String,
    pub place: Place,
    pub job: Option<JobName>,
    pub guest: Guest,
    /// What is searched for: it stands in the field of the search.
    pub query: String,
    /// Where the page follows what changes.
    pub live: Option<String>,
    /// What has just been done.
    pub notice: Option<String>,
    /// Why what was wanted could not be done: the status of the answer, and the words.
    pub error: Option<(u16, String)>,
    /// What it is made of and follows.
    pub parts: Parts,
    pub now: Timestamp,
}

impl Page {
    pub fn new(guest: Guest, place: Place, title: impl Into<String>, now: Timestamp) -> Self {
        let (live, parts) = (None, Parts::default());
        Self {
            title: title.into(),
            place,
            job: None,
            guest,
            query: String::new(),
            live,
            notice: None,
            error: None,
            parts,
            now,
        }
    }

    /// A page of a job, made of these parts; it follows them as what `query` names.
    pub fn of_scene(
        guest: Guest,
        place: Place,
        title: impl Into<String>,
        scene: &Scene,
        query: &str,
        parts: Vec<Part>,
    ) -> Self {
        let job = &scene.view.name;
        let live = format!("/jobs/{job}/live?page={query}");
        Self::new(guest, place, title, scene.now()).of_job(job).following(live, parts)
    }

    pub fn of_job(mut self, job: &JobName) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// The page is made of these parts, and follows them at this address.
    pub fn following(mut self, address: String, parts: Vec<Part>) -> Self {
        (self.live, self.parts) = (Some(address), Parts(parts));
        self
    }

    /// The page says that something was done.
    pub fn saying(mut self, notice: Option<String>) -> Self {
        self.notice = notice;
        self
    }

    /// The page says that something was not done.
    pub fn failing(mut self, error: Option<(u16, String)>) -> Self {
        self.error = error;
        self
    }

    /// The status of the answer.
    pub fn status(&self) -> u16 {
        self.error.as_ref().map_or(200, |(status, _)| *status)
    }

    /// Marks the entry of the navigation that one is at.
    pub fn at(&self, place: Place) -> &'static str {
        if self.place == place { "page" } else { "false" }
    }

    /// The address of a static file.
    pub fn asset(&self, name: &str) -> String {
        Asset::address(name)
    }
}

/// Renders a page.
pub(super) fn answer(page: &impl Template, now: Timestamp) -> Result<Response, Problem> {
    let html = page.render().map_err(|error| {
        tracing::error!(%error, "a page cannot be rendered");
        Problem::internal()
    })?;
    Ok(Html(fill(&html, now)).into_response())
}

/// Renders a page that says that something did not work.
pub(super) fn answer_with(status: u16, page: &impl Template, now: Timestamp) -> Result<Response, Problem> {
    let mut response = answer(page, now)?;
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Ok(response)
}

#[derive(Template)]
#[template(path = "problem.html")]
struct ProblemPage {
    page: Page,
    problem: Problem,
}

/// A problem as a page.
pub fn of_problem(problem: Problem) -> String {
    // The page shows no time, and follows nothing.
    let page = Page::new(Guest::default(), Place::Nowhere, problem.title.clone(), Timestamp::default());
    ProblemPage { page, problem }.render().unwrap_or_default()
}

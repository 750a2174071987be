//! What every page is given, and how it is answered: one frame, one set of headers, errors as pages.

use std::convert::Infallible;

use askama::Template;
use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse as _, Response};

use super::assets::Asset;
use super::times::fill;
use crate::clock::Clock;
use crate::coordination::{JobName, Timestamp};
use crate::http::Problem;
use crate::http::guard::{self, How, Proof};

/// What a browser may do with a page: everything comes from here, nothing is written into it, nobody frames it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
    connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// Who looks at a page, as far as the page shows it.
#[derive(Debug, Default, Clone)]
pub(super) struct Visitor {
    /// The proof that forms send back.
    csrf: String,
    /// Their name, where they had to say it.
    who: Option<String>,
}

impl Visitor {
    /// As the guard let them in.
    fn of(extensions: &Extensions) -> Self {
        let proof = extensions.get::<Proof>();
        let known = extensions.get::<guard::Visitor>().filter(|visitor| visitor.how != How::Open);
        Self {
            csrf: proof.map_or_else(String::new, |proof| proof.0.to_string()),
            who: known.map(|visitor| visitor.actor.who.to_string()),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Visitor {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.extensions))
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
    pub csrf: String,
    pub who: Option<String>,
    /// Where the page follows what changes.
    pub live: Option<String>,
    /// What has just been done.
    pub notice: Option<String>,
    pub now: Timestamp,
}

impl Page {
    pub fn new(visitor: Visitor, place: Place, title: impl Into<String>, now: Timestamp) -> Self {
        let Visitor { csrf, who } = visitor;
        Self { title: title.into(), place, job: None, csrf, who, live: None, notice: None, now }
    }

    pub fn of_job(mut self, job: &JobName) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// The page follows what changes, at this address.
    pub fn live_at(mut self, address: String) -> Self {
        self.live = Some(address);
        self
    }

    /// The page says that something was done.
    pub fn saying(mut self, notice: Option<String>) -> Self {
        self.notice = notice;
        self
    }

    /// Marks the entry of the navigation that one is at.
    pub fn at(&self, place: Place) -> &'static str {
        if self.place == place { "page" } else { "false" }
    }

    /// The name of the job that the page is about.
    pub fn job_name(&self) -> &str {
        self.job.as_ref().map_or("", JobName::as_str)
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

/// Shows problems as pages, and gives every page its headers.
pub(super) async fn finish(request: Request, next: Next) -> Response {
    let visitor = Visitor::of(request.extensions());
    let mut response = next.run(request).await;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        response = page_of(problem, visitor);
    }
    dressed(response)
}

/// A problem as a page, for whoever asked with a browser for something that is no page; otherwise the problem itself.
pub fn as_page(problem: Problem, uri: &Uri, asked: &HeaderMap) -> Result<Response, Problem> {
    let accepts = asked.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !accepts.contains("text/html") || uri.path().starts_with("/api/") {
        return Err(problem);
    }
    Ok(dressed(page_of(problem, Visitor::default())))
}

fn page_of(problem: Problem, visitor: Visitor) -> Response {
    let now = Clock::start().now();
    let page = Page::new(visitor, Place::Nowhere, problem.title.clone(), now);
    let status = problem.status;
    answer_with(status, &ProblemPage { page, problem }, now).unwrap_or_else(|problem| problem.into_response())
}

fn dressed(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

//! Renders the parts that every page has: the navigation, the user, the CSRF proof, and the message about the last
//! action. This module also renders the page of a problem.
//!
//! Begin at `PageFrame`.

use std::convert::Infallible;
use std::sync::Arc;

use askama::Template;
use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request;
use axum::response::{Html, IntoResponse as _, Response};

use super::assets::Asset;
use super::fragment::{Fragment, FragmentSet};
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::times::fill_relative_times;
use crate::coordination::{Actor, JobName, Timestamp};
use crate::http::access::CsrfProof;
use crate::http::{AuthMethod, Principal, Problem};
use crate::service::AccessRole;

/// The user of a page.
#[derive(Debug, Default, Clone)]
pub(super) struct PageUser {
    /// The CSRF proof that forms carry.
    pub csrf: Arc<str>,
    /// The name, if the user is known.
    pub who: Option<Arc<str>>,
    /// The user has a session and may log out.
    pub session: bool,
    /// The user may change jobs and see the values of keys.
    pub operator: bool,
}

impl<S: Sync> FromRequestParts<S> for PageUser {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut request::Parts, _state: &S) -> Result<Self, Infallible> {
        // The middleware sets the proof also for browsers that get their cookie with this very response.
        let csrf = parts.extensions.get::<CsrfProof>().map(|proof| Arc::clone(&proof.0)).unwrap_or_default();
        let Some(visitor) = parts.extensions.get::<Principal>() else {
            return Ok(Self { csrf, ..Self::default() });
        };
        let named = visitor.actor.who.as_ref() != Actor::ANONYMOUS;
        Ok(Self {
            csrf,
            who: named.then(|| Arc::clone(&visitor.actor.who)),
            session: visitor.auth_method == AuthMethod::Session,
            operator: visitor.role >= AccessRole::Operator,
        })
    }
}

/// The entry of the navigation to which a page belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NavEntry {
    Overview,
    Job,
    Hosts,
    Timeline,
    Barriers,
    Stacks,
    Task,
    Devices,
    Keys,
    Drain,
    Exclusions,
    JobTransfers,
    Transfers,
    Audit,
    Api,
    Guide,
    Unlisted,
}

/// The data of a page's frame.
pub(super) struct PageFrame {
    pub title: String,
    pub nav_entry: NavEntry,
    pub job: Option<JobName>,
    pub user: PageUser,
    /// The text in the search field.
    pub query: String,
    /// The address at which the page follows updates.
    pub live: Option<String>,
    /// The message about the last action.
    pub notice: Option<String>,
    /// The error of the last action: the status of the response, and the text.
    pub error: Option<(u16, String)>,
    /// The fragments of the page.
    pub parts: FragmentSet,
    pub now: Timestamp,
}

impl PageFrame {
    pub fn new(user: PageUser, place: NavEntry, title: impl Into<String>, now: Timestamp) -> Self {
        let (live, parts) = (None, FragmentSet::default());
        Self {
            title: title.into(),
            nav_entry: place,
            job: None,
            user,
            query: String::new(),
            live,
            notice: None,
            error: None,
            parts,
            now,
        }
    }

    /// Returns the frame of a job's page with these fragments, which are those of `page`.
    pub fn for_job_snapshot(
        user: PageUser,
        place: NavEntry,
        title: impl Into<String>,
        snapshot: &JobSnapshot,
        page: &LivePage,
        parts: Vec<Fragment>,
    ) -> Self {
        let job = &snapshot.view.name;
        let live = format!("/jobs/{job}/live?{}", page.to_query());
        Self::new(user, place, title, snapshot.captured_at()).with_job(job).with_live_updates(live, parts)
    }

    pub fn with_job(mut self, job: &JobName) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// Sets the fragments, and the address at which the page follows them.
    pub fn with_live_updates(mut self, address: String, parts: Vec<Fragment>) -> Self {
        (self.live, self.parts) = (Some(address), FragmentSet(parts));
        self
    }

    /// Sets the message about a successful action.
    pub fn with_notice(mut self, notice: Option<String>) -> Self {
        self.notice = notice;
        self
    }

    /// Sets the error of a failed action.
    pub fn with_error(mut self, error: Option<(u16, String)>) -> Self {
        self.error = error;
        self
    }

    /// Returns the status of the response.
    pub fn response_status(&self) -> u16 {
        self.error.as_ref().map_or(200, |(status, _)| *status)
    }

    /// Returns the value of `aria-current` for an entry of the navigation: `page` for the current one,
    /// otherwise `false`.
    pub fn aria_current(&self, place: NavEntry) -> &'static str {
        if self.nav_entry == place { "page" } else { "false" }
    }

    /// Returns the address of a static file.
    pub fn asset_path(&self, name: &str) -> String {
        Asset::url_path(name)
    }
}

/// Renders a page.
pub(super) fn render_page(page: &impl Template, now: Timestamp) -> Result<Response, Problem> {
    let html = page.render().map_err(|error| {
        tracing::error!(%error, "a page cannot be rendered");
        Problem::internal_error()
    })?;
    Ok(Html(fill_relative_times(&html, now)).into_response())
}

/// Renders a page with this status.
pub(super) fn render_page_with_status(
    status: u16,
    page: &impl Template,
    now: Timestamp,
) -> Result<Response, Problem> {
    let mut response = render_page(page, now)?;
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Ok(response)
}

#[derive(Template)]
#[template(path = "problem.html")]
struct ProblemPageTemplate {
    page: PageFrame,
    problem: Problem,
}

/// Returns the page that shows a problem.
pub fn render_problem_page(problem: Problem) -> String {
    // The page shows no time and follows no updates.
    let page =
        PageFrame::new(PageUser::default(), NavEntry::Unlisted, problem.title.clone(), Timestamp::default());
    ProblemPageTemplate { page, problem }.render().unwrap_or_default()
}

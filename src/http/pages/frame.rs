//! Renders the parts that every page has: the navigation, the user, the CSRF proof, and the message about the last
//! action. This module also renders the page of a problem.
//!
//! Begin at `PageFrame`.

use std::convert::Infallible;
use std::sync::Arc;

use askama::Template;
use axum::extract::FromRequestParts;
use axum::http::{Method, StatusCode, header, request};
use axum::response::{Html, IntoResponse as _, Response};

use super::assets::Asset;
use super::fragment::{Fragment, FragmentSet};
use super::links::JobPages;
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use crate::coordination::{Actor, JobName, RunNumber, Timestamp};
use crate::http::access::CsrfProof;
use crate::http::page_times::{PageClock, PageWithoutTimes, TimeStyle};
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
    /// How the user wants to see times.
    pub times: TimeStyle,
    /// The path and query of the page, if it can be opened again; none of the answer to a form.
    pub address: Option<Arc<str>>,
    /// The host, perhaps with a port, at which the user reaches this server. The middleware has checked it.
    pub host: Option<Arc<str>>,
}

/// The maximum length of an address to which the switch of times leads back, in bytes.
const ADDRESS_BYTES_MAX: usize = 2000;

impl<S: Sync> FromRequestParts<S> for PageUser {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut request::Parts, _state: &S) -> Result<Self, Infallible> {
        // The middleware sets the proof also for browsers that get their cookie with this very response.
        let csrf = parts.extensions.get::<CsrfProof>().map(|proof| Arc::clone(&proof.0)).unwrap_or_default();
        let address = parts.uri.path_and_query().map(|address| Arc::from(address.as_str()));
        let address = address
            .filter(|address: &Arc<str>| parts.method == Method::GET && address.len() <= ADDRESS_BYTES_MAX);
        let header = || parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let host = parts.uri.authority().map(|authority| authority.as_str()).or_else(header);
        let reader = Self {
            csrf,
            times: TimeStyle::of_request(&parts.headers),
            address,
            host: host.map(Arc::from),
            ..Self::default()
        };
        let Some(visitor) = parts.extensions.get::<Principal>() else { return Ok(reader) };
        let named = visitor.actor.who.as_ref() != Actor::ANONYMOUS;
        Ok(Self {
            who: named.then(|| Arc::clone(&visitor.actor.who)),
            session: visitor.auth_method == AuthMethod::Session,
            operator: visitor.role >= AccessRole::Operator,
            ..reader
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
    Collectives,
    Stacks,
    Task,
    Devices,
    Keys,
    Drain,
    Exclusions,
    JobTransfers,
    Transfers,
    Comparison,
    Audit,
    Api,
    Guide,
    Unlisted,
}

/// The addresses at which a job has a page: that of the present run, that of a run which the address names, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TabScope {
    PresentRun,
    NamedRun,
    Both,
}

/// A tab of the pages of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JobTab {
    pub label: &'static str,
    /// The end of the address, after that of the job or of its run.
    pub path: &'static str,
    entry: NavEntry,
    scope: TabScope,
}

const fn tab(label: &'static str, path: &'static str, entry: NavEntry, scope: TabScope) -> JobTab {
    JobTab { label, path, entry, scope }
}

/// The tabs of the pages of a job, in their order.
const JOB_TABS: [JobTab; 13] = [
    tab("Status", "", NavEntry::Job, TabScope::PresentRun),
    tab("Run", "", NavEntry::Job, TabScope::NamedRun),
    tab("Hosts", "/hosts", NavEntry::Hosts, TabScope::Both),
    tab("Barriers", "/barriers", NavEntry::Barriers, TabScope::Both),
    tab("Collectives", "/collectives", NavEntry::Collectives, TabScope::PresentRun),
    tab("Stacks", "/stacks", NavEntry::Stacks, TabScope::PresentRun),
    tab("Timeline", "/timeline", NavEntry::Timeline, TabScope::Both),
    tab("Devices", "/devices", NavEntry::Devices, TabScope::PresentRun),
    tab("Transfers", "/transfers", NavEntry::JobTransfers, TabScope::Both),
    tab("Keys", "/keys", NavEntry::Keys, TabScope::PresentRun),
    tab("Exclusions", "/exclusions", NavEntry::Exclusions, TabScope::PresentRun),
    tab("Drain", "/drain", NavEntry::Drain, TabScope::PresentRun),
    tab("Comparison", "/comparison", NavEntry::Comparison, TabScope::NamedRun),
];

/// The data of a page's frame.
pub(super) struct PageFrame {
    pub title: String,
    pub nav_entry: NavEntry,
    pub job: Option<JobName>,
    /// The run that the address names, if it names one.
    pub run: Option<RunNumber>,
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
    pub clock: PageClock,
}

impl PageFrame {
    pub fn new(
        user: PageUser,
        place: NavEntry,
        title: impl Into<String>,
        clock: impl Into<PageClock>,
    ) -> Self {
        let (live, parts) = (None, FragmentSet::default());
        Self {
            title: title.into(),
            nav_entry: place,
            job: None,
            run: None,
            user,
            query: String::new(),
            live,
            notice: None,
            error: None,
            parts,
            clock: clock.into(),
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
        let JobPages { name: job, run } = &snapshot.pages;
        let mut title = title.into();
        // An ended run does not change; the present one has live updates at its other address.
        let live = match run {
            None => Some(format!("/jobs/{job}/live?{}", page.to_query())),
            Some(run) => {
                title = format!("{title}, run {run}");
                None
            }
        };
        let frame = Self::new(user, place, title, snapshot.page_clock()).with_job(job);
        Self { run: *run, live, parts: FragmentSet(parts), ..frame }
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

    /// Returns the value of `aria-current` for a tab of the pages of a job.
    pub fn aria_current_of_tab(&self, tab: &JobTab) -> &'static str {
        self.aria_current(tab.entry)
    }

    /// Returns the pages of the job to which the page belongs, if it belongs to one.
    pub fn job_pages(&self) -> Option<JobPages> {
        self.job.clone().map(|name| JobPages { name, run: self.run })
    }

    /// Returns the tabs of these pages.
    pub fn job_tabs(&self) -> impl Iterator<Item = JobTab> {
        let other = if self.run.is_some() { TabScope::PresentRun } else { TabScope::NamedRun };
        JOB_TABS.into_iter().filter(move |tab| tab.scope != other)
    }

    /// Returns how the reader can choose to see times: name, label, and whether it is the present choice.
    pub fn time_styles(&self) -> [(&'static str, &'static str, bool); 3] {
        TimeStyle::ALL.map(|style| (style.name(), style.label(), style == self.user.times))
    }

    /// Returns the address of a static file.
    pub fn asset_path(&self, name: &str) -> String {
        Asset::url_path(name)
    }
}

/// Renders a page, whose times `page_times.rs` writes.
pub(super) fn render_page(page: &impl Template, clock: impl Into<PageClock>) -> Result<Response, Problem> {
    let html = page.render().map_err(|error| {
        tracing::error!(%error, "a page cannot be rendered");
        Problem::internal_error()
    })?;
    let mut response = Html("").into_response();
    response.extensions_mut().insert(PageWithoutTimes { html: html.into(), clock: clock.into() });
    Ok(response)
}

/// Renders a page with this status.
pub(super) fn render_page_with_status(
    status: u16,
    page: &impl Template,
    clock: impl Into<PageClock>,
) -> Result<Response, Problem> {
    let mut response = render_page(page, clock)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::pages::page_routes;

    #[test]
    fn every_tab_of_a_job_and_of_a_run_leads_to_a_page() {
        let table = page_routes().into_access_table();
        for (run, prefix, count) in
            [(None, "/jobs/{job}", 11), (Some(RunNumber(3)), "/jobs/{job}/runs/{run}", 6)]
        {
            let frame = PageFrame::new(PageUser::default(), NavEntry::Job, "", Timestamp::default());
            let frame = PageFrame { run, ..frame.with_job(&"train".parse().unwrap()) };
            for tab in frame.job_tabs() {
                let path = format!("{prefix}{}", tab.path);
                assert!(table.rows().any(|(_, _, route)| *route == *path), "{path}");
            }
            assert_eq!(frame.job_tabs().count(), count);
        }
    }
}

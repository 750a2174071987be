//! Renders the stacks of a job: the latest request, who has answered, and the groups of equal stacks. Handles the form that
//! asks for them. The page of barriers shows a part of it.
//!
//! `http/stacks.rs` carries out the request. Begin at `show_stacks_page`, then `submit_stacks_form`.

use std::convert::Infallible;

use askama::Template;
use axum::Extension;
use axum::extract::{FromRequestParts, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page_with_status};
use super::job_head::render_head_fragment;
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::{amount, times};
use crate::coordination::{ActorOrigin, CommandReason, JobName};
use crate::http::extractors::{FormBody, JobPath, QueryParams};
use crate::http::request_client::TransportSecurity;
use crate::http::{AppState, Problem, stacks};
use crate::service::ActorContext;
use crate::service::stacks::{
    StackGroupView, StackRequestView, StackSource, StacksView, TaskRange, TaskRanges,
};

/// The maximum number of groups of main threads on the page, and of other threads.
const GROUPS_SHOWN: usize = 32;
/// The maximum number of groups on the page of barriers.
const SUMMARY_SHOWN: usize = 6;
/// The maximum number of ranges of tasks in one list.
const RANGES_SHOWN: usize = 16;

/// Returns tasks as text: `0–6, 9`.
fn ranges_text(ranges: &[TaskRange]) -> String {
    let shown = ranges.iter().take(RANGES_SHOWN).map(|TaskRange { first, last }| {
        if first == last { first.to_string() } else { format!("{first}–{last}") }
    });
    let more = (ranges.len() > RANGES_SHOWN).then(|| "…".to_owned());
    shown.chain(more).collect::<Vec<_>>().join(", ")
}

/// Returns `1 task` or `7 tasks`.
fn tasks_text(count: &usize) -> String {
    match count {
        1 => "1 task".to_owned(),
        count => format!("{} tasks", crate::text::format_grouped(count)),
    }
}

/// The latest request, as both pages show it.
struct StacksOverview<'a> {
    request: &'a StackRequestView,
    view: &'a StacksView,
}

impl StacksOverview<'_> {
    fn is_automatic(&self) -> bool {
        self.request.actor.means == ActorOrigin::Rule
    }

    fn answered_count(&self) -> usize {
        TaskRange::count(&self.view.answered)
    }

    /// Returns how many of the asked tasks have answered, as a sentence.
    fn progress_sentence(&self) -> String {
        format!("{} of {} have answered", self.answered_count(), tasks_text(&self.request.task_count))
    }
}

#[derive(Template)]
#[template(path = "parts/stacks.html")]
struct StacksFragment<'a> {
    overview: Option<StacksOverview<'a>>,
    main: Vec<&'a StackGroupView>,
    others: Vec<&'a StackGroupView>,
    main_count: usize,
    other_count: usize,
}

/// Returns the part of the page that shows the answers.
fn render_stacks_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let view = snapshot.stacks_view(GROUPS_SHOWN);
    let (main, others) = view.groups.iter().partition(|group| group.main);
    let fragment = StacksFragment {
        overview: view.request.as_ref().map(|request| StacksOverview { request, view: &view }),
        main,
        others,
        main_count: view.main_group_count,
        other_count: view.group_count - view.main_group_count,
    };
    Fragment::new("stacks", &fragment)
}

#[derive(Template)]
#[template(path = "parts/stack-summary.html")]
struct StackSummaryFragment<'a> {
    job: &'a JobName,
    /// The latest request, if it is one of the present run.
    overview: Option<StacksOverview<'a>>,
    groups: Vec<&'a StackGroupView>,
    group_count: usize,
    /// The number of tasks that can answer.
    helpers: usize,
    /// A barrier is in progress.
    waiting: bool,
}

/// Returns the part of the page of barriers: where the tasks are, in a line for each group of main threads.
pub(super) fn render_summary_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let view = snapshot.stacks_view(SUMMARY_SHOWN);
    let run = &snapshot.view.run;
    let request = view.request.as_ref().filter(|request| request.run == run.number);
    let is_shown = |group: &&StackGroupView| group.main && request.is_some();
    let fragment = StackSummaryFragment {
        job: &snapshot.view.name,
        overview: request.map(|request| StacksOverview { request, view: &view }),
        groups: view.groups.iter().filter(is_shown).collect(),
        group_count: view.main_group_count,
        helpers: view.helpers,
        waiting: !run.barriers.is_empty(),
    };
    Fragment::new("stack-summary", &fragment)
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(snapshot: &JobSnapshot) -> Result<Vec<Fragment>, Problem> {
    Ok(vec![render_head_fragment(snapshot)?, render_stacks_fragment(snapshot)?])
}

/// The fields of the form.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct StacksForm {
    tasks: String,
    reason: String,
}

#[derive(Template)]
#[template(path = "stacks.html")]
struct StacksPageTemplate<'a> {
    page: PageFrame,
    user: PageUser,
    job: &'a JobName,
    form: StacksForm,
    /// The address by which the browser has reached the server.
    server: ServerAddress,
}

/// The address by which a browser has reached the server, whose host name the middleware has checked.
pub(super) struct ServerAddress {
    url: String,
}

impl<S: Sync> FromRequestParts<S> for ServerAddress {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let is_secure = parts.extensions.get::<TransportSecurity>().is_some_and(|channel| channel.secure);
        let host = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        Ok(Self { url: format!("{}://{host}", if is_secure { "https" } else { "http" }) })
    }
}

/// The last action, which the address carries after the redirect.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AskedQuery {
    asked: String,
}

fn render_stacks_page(
    site: &AppState,
    job: &JobPath,
    (user, server): (PageUser, ServerAddress),
    notice: Option<String>,
    form: StacksForm,
    error: Option<(u16, String)>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(site, job)?;
    let (title, parts) = (format!("Stacks of {}", job.name), render_fragments(&snapshot)?);
    let page = PageFrame::for_job_snapshot(
        user.clone(),
        NavEntry::Stacks,
        title,
        &snapshot,
        &LivePage::Stacks,
        parts,
    );
    let page = page.with_notice(notice).with_error(error);
    render_page_with_status(
        page.response_status(),
        &StacksPageTemplate { page, user, job: &job.name, form, server },
        snapshot.captured_at(),
    )
}

/// Serves `GET /jobs/{job}/stacks`.
pub(super) async fn show_stacks_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    server: ServerAddress,
    QueryParams(did): QueryParams<AskedQuery>,
) -> Result<Response, Problem> {
    let notice = did
        .asked
        .parse::<u64>()
        .ok()
        .map(|number| format!("Request {number} is made. Tasks with a helper answer within seconds."));
    render_stacks_page(&site, &job, (user, server), notice, StacksForm::default(), None)
}

/// Serves `POST /jobs/{job}/stacks`.
pub(super) async fn submit_stacks_form(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    server: ServerAddress,
    Extension(author): Extension<ActorContext>,
    FormBody(form): FormBody<StacksForm>,
) -> Result<Response, Problem> {
    let tasks = match form.tasks.trim() {
        "" => Ok(None),
        text => text.parse::<TaskRanges>().map(Some),
    };
    let reason = CommandReason::try_from(form.reason.clone()).map_err(|error| error.to_string());
    let asked = match (tasks, reason) {
        (Ok(tasks), Ok(reason)) => stacks::request_stacks(&site, &job, &author, reason, tasks)
            .map_err(|problem| (problem.status, problem.detail.into_string())),
        (Err(wrong), _) | (_, Err(wrong)) => Err((422, wrong)),
    };
    match asked {
        Ok(number) => Ok(Redirect::to(&format!("/jobs/{}/stacks?asked={number}", job.name)).into_response()),
        Err(wrong) => render_stacks_page(&site, &job, (user, server), None, form, Some(wrong)),
    }
}

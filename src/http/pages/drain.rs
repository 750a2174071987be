//! Renders the drain page and handles its form.
//!
//! `http/drain.rs` carries out the drain. Begin at `show_drain_page`, then `submit_drain_form`.

use askama::Template;
use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use super::exclusions::CompletedActionQuery;
use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page_with_status};
use super::job_head::render_head_fragment;
use super::links::{self, TaskLabel};
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::{amount, times};
use crate::coordination::{CommandReason, JobName, PreemptionView, RunNumber, RunState, TaskId};
use crate::http::api::NewDrain;
use crate::http::extractors::{FormBody, JobPath, QueryParams};
use crate::http::{AppState, Problem, drain};
use crate::service::ActorContext;

/// The maximum number of acknowledgements on the page.
const SHOWN: usize = 200;
/// The maximum number of tasks that are named as missing from the agreement.
const AWAITED_SHOWN: usize = 12;

#[derive(Template)]
#[template(path = "parts/drain.html")]
struct DrainStatusFragment<'a> {
    job: &'a JobName,
    run: RunNumber,
    /// The run has ended.
    over: bool,
    preemption: Option<&'a PreemptionView>,
    /// The first tasks that the agreement waits for.
    awaited: Vec<TaskLabel>,
    /// The number of live tasks that have acknowledged.
    acknowledged: usize,
    live: usize,
    shown: usize,
}

impl DrainStatusFragment<'_> {
    /// Returns the share of tasks for which the agreement does not wait, in thousandths.
    fn agreement_progress_in_thousandths(&self, it: &PreemptionView) -> usize {
        let all = self.live.max(it.arrived + it.awaited.len()).max(1);
        (all - it.awaited.len().min(all)) * 1000 / all
    }

    /// Returns the progress of the agreement on a step, as a sentence.
    fn progress_sentence(&self, it: &PreemptionView) -> String {
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

/// Returns the fragment that shows the progress of the drain.
pub(super) fn render_status_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let preemption = run.preemption.as_ref();
    let is_live = |task: TaskId| snapshot.find_task(task).is_some_and(|task| task.live_since.is_some());
    let acknowledged =
        preemption.map_or(0, |it| it.acknowledged.iter().filter(|(task, _)| is_live(*task)).count());
    let awaited = preemption.map_or(&[][..], |it| &it.awaited);
    let awaited = awaited.iter().take(AWAITED_SHOWN).map(|task| snapshot.task_label(*task)).collect();
    let (job, live) = (&snapshot.view.name, run.live);
    let over = run.ended_at.is_some();
    let stands = DrainStatusFragment {
        job,
        run: run.number,
        over,
        preemption,
        awaited,
        acknowledged,
        live,
        shown: SHOWN,
    };
    Fragment::new("drain", &stands)
}

/// The fields of the form.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct DrainForm {
    reason: String,
    seconds: String,
}

#[derive(Template)]
#[template(path = "parts/ask.html")]
struct DrainFormFragment<'a> {
    job: &'a JobName,
    user: &'a PageUser,
    /// The reason why the run cannot be drained now.
    closed: Option<String>,
    form: DrainForm,
}

/// Returns the fragments of the page for this user.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    user: &PageUser,
    form: DrainForm,
) -> Result<Vec<Fragment>, Problem> {
    let run = &snapshot.view.run;
    let closed = match run.state {
        RunState::Running if run.preemption.is_some() => {
            Some("This run is already being drained.".to_owned())
        }
        RunState::Running => None,
        state => Some(format!("Run {} is {state}. Only a running run can be drained.", run.number)),
    };
    let ask = DrainFormFragment { job: &snapshot.view.name, user, closed, form };
    Ok(vec![render_head_fragment(snapshot)?, render_status_fragment(snapshot)?, Fragment::new("ask", &ask)?])
}

#[derive(Template)]
#[template(path = "drain.html")]
struct DrainPageTemplate<'a> {
    page: PageFrame,
    job: &'a JobName,
}

fn render_drain_page(
    site: &AppState,
    job: &JobPath,
    user: PageUser,
    did: &CompletedActionQuery,
    form: DrainForm,
    error: Option<(u16, String)>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(site, job)?;
    let (title, parts) = (format!("Drain {}", job.name), render_fragments(&snapshot, &user, form)?);
    let page = PageFrame::for_job_snapshot(user, NavEntry::Drain, title, &snapshot, &LivePage::Drain, parts);
    let page = page.with_notice(did.completed_action_message()).with_error(error);
    render_page_with_status(
        page.response_status(),
        &DrainPageTemplate { page, job: &job.name },
        snapshot.captured_at(),
    )
}

/// Serves `GET /jobs/{job}/drain`.
pub(super) async fn show_drain_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(did): QueryParams<CompletedActionQuery>,
) -> Result<Response, Problem> {
    render_drain_page(&site, &job, user, &did, DrainForm::default(), None)
}

/// Serves `POST /jobs/{job}/drain`.
pub(super) async fn submit_drain_form(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    Extension(author): Extension<ActorContext>,
    FormBody(form): FormBody<DrainForm>,
) -> Result<Response, Problem> {
    let reason = CommandReason::try_from(form.reason.clone()).map_err(|error| (422, error.to_string()));
    let asked = reason.and_then(|reason| {
        let in_seconds = form.seconds.parse().unwrap_or_default();
        drain::request_drain(&site, &job, &author, NewDrain { reason, in_seconds })
            .map_err(|problem| (problem.status, problem.detail.into_string()))
    });
    match asked {
        Ok(_) => Ok(Redirect::to(&format!("/jobs/{}/drain?did=drained", job.name)).into_response()),
        Err(wrong) => {
            render_drain_page(&site, &job, user, &CompletedActionQuery::default(), form, Some(wrong))
        }
    }
}

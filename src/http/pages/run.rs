//! Renders one run of a job: how it ended, its tasks, and their states over time. The pages of its hosts, barriers, tasks and
//! transfers are those of the present run, which show the run that their address names.
//!
//! Begin at `show_run_page`.

use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::links::{self, JobPages};
use super::live_page::{LivePage, TaskTableQuery, TimelinePageQuery};
use super::snapshot::JobSnapshot;
use super::timeline::{TimelineScope, render_state_chart_fragment, render_timeline_fragment};
use super::{amount, status, task_grid, task_table, times};
use crate::coordination::{HostId, JobName, JobView, RunDetail, RunNumber};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun};
use crate::http::{AppState, Problem};

/// How a run went, in a few facts.
#[derive(Template)]
#[template(path = "parts/run-summary.html")]
struct RunSummaryFragment<'a> {
    job: &'a JobPages,
    view: &'a JobView,
    length: Duration,
    /// The run is not the present one.
    is_past: bool,
    hosts: usize,
    barriers: usize,
    /// The bytes that its transfers sent, if any task reported some.
    sent_bytes: Option<u64>,
    /// The host of the task of the first cause, if it has several tasks.
    cause_host: Option<&'a HostId>,
}

impl RunSummaryFragment<'_> {
    /// Returns the run before, if it is known.
    fn earlier_run(&self) -> Option<RunNumber> {
        self.view.history.first().map(|run| run.number)
    }
}

fn render_summary_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let transfers =
        snapshot.records.reports.transfers_summary(snapshot.id, &snapshot.roster, snapshot.captured_at());
    let cause_task = run.first_cause.as_ref().and_then(|cause| cause.task);
    let host = cause_task.and_then(|task| snapshot.host_assignment.host_of(task));
    let cause_host = host.filter(|host| host.tasks.len() > 1).map(|host| &host.name);
    Fragment::new(
        "run-summary",
        &RunSummaryFragment {
            job: &snapshot.pages,
            view: &snapshot.view,
            length: run.measured_interval().duration(snapshot.captured_at()),
            is_past: snapshot.past.is_some(),
            hosts: snapshot.hosts.len(),
            barriers: run.recent_barriers.len(),
            sent_bytes: (transfers.taken > 0).then(|| transfers.totals.sent_bytes()),
            cause_host,
        },
    )
}

#[derive(Template)]
#[template(path = "run.html")]
struct RunPageTemplate {
    page: PageFrame,
    job: JobName,
    run: RunNumber,
}

/// The page of a run whose tasks are no longer kept.
#[derive(Template)]
#[template(path = "run-outline.html")]
struct RunOutlinePageTemplate {
    page: PageFrame,
    detail: RunDetail,
    length: Duration,
}

/// Returns what is left of a run whose tasks are no longer kept; the problem, if nothing is known of it.
fn show_outline_page(
    site: &AppState,
    job: &JobPath,
    run: Option<RunNumber>,
    user: PageUser,
    problem: Problem,
) -> Result<Response, Problem> {
    let detail = site.read_job(job, |reader| reader.run_detail(run?))?.ok_or(problem)?;
    let now = site.engine.clock().now();
    let title = format!("Run {} of {}", detail.run.number, job.name);
    let page = PageFrame::new(user, NavEntry::Job, title, now).with_job(&job.name);
    let length = detail.run.measured_interval().duration(now);
    render_page(&RunOutlinePageTemplate { page, detail, length }, now)
}

/// Serves `GET /jobs/{job}/runs/{run}`.
pub(super) async fn show_run_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(listing): QueryParams<TaskTableQuery>,
) -> Result<Response, Problem> {
    let snapshot = match JobSnapshot::capture_in_run(&site, &job, run) {
        Ok(snapshot) => snapshot,
        Err(problem) => return show_outline_page(&site, &job, run, user, problem),
    };
    let (clock, run) = (snapshot.page_clock(), snapshot.view.run.number);
    let parts = vec![
        render_head_fragment(&snapshot)?,
        render_summary_fragment(&snapshot)?,
        render_state_chart_fragment(&snapshot, &TimelinePageQuery::default())?,
        task_grid::render_task_grid_fragment(&snapshot, &listing)?,
        task_table::render_task_table_fragment(&snapshot, &listing)?,
        render_timeline_fragment(&snapshot, TimelineScope::Job)?,
    ];
    let live = LivePage::Job(listing);
    let title = format!("Job {}", job.name);
    let page = PageFrame::for_job_snapshot(user, NavEntry::Job, title, &snapshot, &live, parts);
    render_page(&RunPageTemplate { page, job: job.name, run }, clock)
}

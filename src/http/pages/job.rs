//! Renders the page of one job.
//!
//! `issues.rs` computes the issues, and `task_table.rs` the rows of the table of tasks. Begin at `show_job_page`.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::links::TaskLabel;
use super::live_page::{LivePage, TaskTableQuery};
use super::named_tasks::{NamedGroup, NamedTasks};
use super::snapshot::{JobSnapshot, last_arrival_time};
use super::status::{AWAITED_AFTER, TaskStatus, barrier_display_name};
use super::timeline::TimelineScope;
use super::{amount, issues, links, status, task_grid, task_table, timeline, times};
use crate::coordination::{BarrierKind, BarrierView, JobName, JobView, RunState, RunSummary, TaskId};
use crate::http::extractors::{JobPath, QueryParams};
use crate::http::{AppState, Problem};
use crate::text::format_count_with_noun;
use crate::text::format_grouped;

/// The maximum number of missing tasks that are named at each barrier.
const NAMED: usize = 12;
const NAMED_OF_MANY: usize = 4;
/// The maximum number of barriers in progress on the page.
const BARRIERS_SHOWN: usize = 32;

/// A barrier in progress, as a row.
pub(super) struct BarrierInProgressRow<'a> {
    pub barrier: &'a BarrierView,
    pub name: String,
    /// The missing tasks that the page has not named above.
    pub missing: NamedTasks,
    /// The numbers of the missing tasks that the page names above.
    pub above: String,
    pub first: TaskLabel,
    /// The numbers of all missing tasks.
    pub numbers: String,
    /// The barrier never times out.
    pub has_no_timeout: bool,
    /// The last arrival was recent, so no task is late yet.
    pub has_recent_arrival: bool,
}

impl<'a> BarrierInProgressRow<'a> {
    /// Returns the row of a barrier. `above` are the tasks that the page has named already.
    fn new(snapshot: &JobSnapshot, barrier: &'a BarrierView, above: &BTreeSet<TaskId>) -> Self {
        let (above, mut missing): (Vec<TaskId>, Vec<TaskId>) =
            barrier.missing.iter().copied().partition(|task| above.contains(task));
        let named = if missing.len() > NAMED { NAMED_OF_MANY } else { NAMED };
        // Tasks that may still arrive are named before lost ones.
        missing.sort_by_key(|task| snapshot.status_of(*task) == TaskStatus::Failed);
        Self {
            name: barrier_display_name(&barrier.id),
            missing: NamedTasks::new(snapshot, &missing, missing.len(), named),
            above: links::task_ranges_text(&above),
            first: snapshot.task_label(barrier.first),
            numbers: links::task_ranges_text(&barrier.missing),
            has_no_timeout: times::has_no_timeout(&barrier.deadline, snapshot.captured_at()),
            has_recent_arrival: has_recent_arrival(snapshot, barrier),
            barrier,
        }
    }

    /// Returns the progress of the barrier, in thousandths.
    pub fn progress_in_thousandths(&self) -> usize {
        self.barrier.arrived * 1000 / self.barrier.members.max(1)
    }

    /// Returns what tasks do at the barrier.
    pub fn arrive_verb(&self) -> &'static str {
        if self.is_registration() { "registered" } else { "arrived" }
    }

    /// Returns the number of missing tasks as text.
    pub fn missing_count_text(&self) -> String {
        format_grouped(self.barrier.missing.len())
    }

    pub fn is_registration(&self) -> bool {
        self.barrier.kind == BarrierKind::Registration
    }
}

/// Returns whether a task arrived at the barrier a moment ago, so that it is still filling.
pub(super) fn has_recent_arrival(snapshot: &JobSnapshot, barrier: &BarrierView) -> bool {
    let waited = snapshot.captured_at().since(last_arrival_time(barrier));
    barrier.kind != BarrierKind::Registration && waited < AWAITED_AFTER
}

/// Returns the rows of the barriers in progress. `above` are the tasks that the page has named already.
pub(super) fn barrier_in_progress_rows<'a>(
    snapshot: &'a JobSnapshot,
    above: &BTreeSet<TaskId>,
) -> Vec<BarrierInProgressRow<'a>> {
    let shown = snapshot.barriers_in_progress().into_iter().take(BARRIERS_SHOWN);
    shown.map(|barrier| BarrierInProgressRow::new(snapshot, barrier, above)).collect()
}

#[derive(Template)]
#[template(path = "parts/waits.html")]
struct BarriersInProgressFragment<'a> {
    job: &'a JobName,
    waiting: Vec<BarrierInProgressRow<'a>>,
    all: usize,
    running: bool,
}

fn render_barriers_fragment(snapshot: &JobSnapshot, above: &BTreeSet<TaskId>) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let (job, running) = (&snapshot.view.name, run.state == RunState::Running);
    let all = run.barriers.len();
    Fragment::new(
        "waits",
        &BarriersInProgressFragment { job, waiting: barrier_in_progress_rows(snapshot, above), all, running },
    )
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    listing: &TaskTableQuery,
) -> Result<Vec<Fragment>, Problem> {
    let needs = issues::job_issues(snapshot);
    let calm = issues::no_issue_text(snapshot);
    let named = needs.iter().flat_map(|need| need.named.task_ids()).collect();
    Ok(vec![
        render_head_fragment(snapshot)?,
        issues::render_issue_list_fragment(&needs, false, calm)?,
        render_barriers_fragment(snapshot, &named)?,
        task_grid::render_task_grid_fragment(snapshot, listing)?,
        task_table::render_task_table_fragment(snapshot, listing)?,
        timeline::render_timeline_fragment(snapshot, TimelineScope::Job)?,
        Fragment::new("history", &EarlierRunsFragment { view: &snapshot.view })?,
        Fragment::new("settings", &SettingsFragment { view: &snapshot.view })?,
    ])
}

/// The earlier runs.
#[derive(Template)]
#[template(path = "parts/history.html")]
struct EarlierRunsFragment<'a> {
    view: &'a JobView,
}

#[derive(Template)]
#[template(path = "parts/settings.html")]
struct SettingsFragment<'a> {
    view: &'a JobView,
}

impl SettingsFragment<'_> {
    /// Returns the number of tasks as text.
    fn tasks_text(&self) -> String {
        format_count_with_noun(self.view.settings.tasks as usize, "task", "tasks")
    }
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobPageTemplate {
    page: PageFrame,
    view: JobView,
}

impl EarlierRunsFragment<'_> {
    /// Returns the duration of an ended run.
    fn duration_text(&self, run: &RunSummary) -> String {
        times::duration_text(&run.measured_interval().duration(run.ended_at))
    }
}

pub(super) async fn show_job_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(listing): QueryParams<TaskTableQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let now = snapshot.captured_at();
    let (title, parts) = (format!("Job {}", job.name), render_fragments(&snapshot, &listing)?);
    let live = LivePage::Job(listing);
    let page = PageFrame::for_job_snapshot(user, NavEntry::Job, title, &snapshot, &live, parts);
    render_page(&JobPageTemplate { page, view: snapshot.view }, now)
}

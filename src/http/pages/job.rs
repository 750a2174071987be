//! The page of one job.
//!
//! It computes neither the issues (`issues.rs`) nor the rows of the table (`task_table.rs`). Begin at `show`.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::links::TaskLabel;
use super::snapshot::JobSnapshot;
use super::status::{AWAITED_AFTER, TaskStatus, barrier_name, grouped};
use super::task_table::{self, TaskTableQuery};
use super::{grid, issues, links, status, timeline, times};
use crate::coordination::{
    BarrierKind, BarrierView, FirstCause, JobName, JobView, RunState, RunSummary, TaskId,
};
use crate::http::extract::{JobPath, QueryParams};
use crate::http::{AppState, Problem};

/// The maximum number of missing tasks that are named at each barrier.
const NAMED: usize = 12;
const NAMED_OF_MANY: usize = 4;
/// The maximum number of barriers in progress on the page.
const BARRIERS_SHOWN: usize = 32;

/// The state of a job, in the line below its name on every page of the job.
#[derive(Template)]
#[template(path = "parts/head.html")]
struct Head<'a> {
    view: &'a JobView,
    total: usize,
    out: usize,
    excluded: usize,
    is_unregistered: bool,
}

impl Head<'_> {
    /// Returns the tone of the state. A run without some of its tasks has a tone of its own.
    fn tone(&self) -> &'static str {
        let running = self.view.run.state == RunState::Running;
        if running && self.out > self.excluded { "warn" } else { status::tone(&self.view.run.state) }
    }

    /// Returns the share of live tasks, in percent.
    fn part(&self) -> usize {
        self.view.run.live * 100 / self.total.max(1)
    }
}

pub(super) fn head(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let excluded = run.counts.excluded;
    let nobody = run.tasks.iter().all(|task| task.lives.is_empty());
    let (view, total) = (&snapshot.view, snapshot.tasks());
    let out = total.saturating_sub(run.live);
    Fragment::new("head", &Head { view, total, out, excluded, is_unregistered: nobody })
}

/// A barrier in progress, as a row.
pub(super) struct BarrierRow<'a> {
    pub barrier: &'a BarrierView,
    pub name: String,
    pub missing: Vec<TaskLabel>,
    /// The number of missing tasks that are listed neither here nor above.
    pub others: usize,
    /// The numbers of the missing tasks that the page names above.
    pub above: String,
    pub first: TaskLabel,
    /// The numbers of all missing tasks.
    pub numbers: String,
    /// The barrier never times out.
    pub has_no_timeout: bool,
    /// The last arrival was recent, so no task is late yet.
    pub is_filling: bool,
}

impl<'a> BarrierRow<'a> {
    /// Returns the row of a barrier. `above` are the tasks that the page has named already.
    fn of(snapshot: &JobSnapshot, barrier: &'a BarrierView, above: &BTreeSet<TaskId>) -> Self {
        let (above, mut missing): (Vec<TaskId>, Vec<TaskId>) =
            barrier.missing.iter().copied().partition(|task| above.contains(task));
        let named = if missing.len() > NAMED { NAMED_OF_MANY } else { NAMED };
        // Tasks that may still arrive are named before lost ones.
        missing.sort_by_key(|task| snapshot.status_of(*task) == TaskStatus::Failed);
        Self {
            name: barrier_name(&barrier.id),
            missing: missing.iter().take(named).map(|task| snapshot.task_label(*task)).collect(),
            others: missing.len().saturating_sub(named),
            above: links::ranges(&above),
            first: snapshot.task_label(barrier.first),
            numbers: links::ranges(&barrier.missing),
            has_no_timeout: times::has_no_timeout(&barrier.deadline, snapshot.now()),
            is_filling: is_filling(snapshot, barrier),
            barrier,
        }
    }

    /// Returns the progress of the barrier, in thousandths.
    pub fn part(&self) -> usize {
        self.barrier.arrived * 1000 / self.barrier.members.max(1)
    }

    /// Returns the number of missing tasks as text.
    pub fn missing_count(&self) -> String {
        grouped(self.barrier.missing.len())
    }

    pub fn is_registration(&self) -> bool {
        self.barrier.kind == BarrierKind::Registration
    }
}

/// Returns whether a task arrived at the barrier a moment ago, so that it is still filling.
pub(super) fn is_filling(snapshot: &JobSnapshot, barrier: &BarrierView) -> bool {
    let waited = snapshot.now().since(issues::last_arrival(barrier));
    barrier.kind != BarrierKind::Registration && waited < AWAITED_AFTER
}

/// Returns the rows of the barriers in progress. `above` are the tasks that the page has named already.
pub(super) fn waiting<'a>(snapshot: &'a JobSnapshot, above: &BTreeSet<TaskId>) -> Vec<BarrierRow<'a>> {
    let shown = snapshot.barriers().into_iter().take(BARRIERS_SHOWN);
    shown.map(|barrier| BarrierRow::of(snapshot, barrier, above)).collect()
}

#[derive(Template)]
#[template(path = "parts/waits.html")]
struct BarrierListFragment<'a> {
    job: &'a JobName,
    waiting: Vec<BarrierRow<'a>>,
    all: usize,
    running: bool,
}

fn waits(snapshot: &JobSnapshot, above: &BTreeSet<TaskId>) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let (job, running) = (&snapshot.view.name, run.state == RunState::Running);
    let all = run.barriers.len();
    Fragment::new("waits", &BarrierListFragment { job, waiting: waiting(snapshot, above), all, running })
}

/// Returns the parts of the page.
pub(super) fn parts(snapshot: &JobSnapshot, listing: &TaskTableQuery) -> Result<Vec<Fragment>, Problem> {
    let needs = issues::of(snapshot);
    let calm = issues::no_issue_text(snapshot);
    let named = needs.iter().flat_map(|need| need.tasks.iter().map(|one| one.task)).collect();
    Ok(vec![
        head(snapshot)?,
        issues::fragment(&needs, false, calm)?,
        waits(snapshot, &named)?,
        grid::fragment(snapshot)?,
        task_table::fragment(snapshot, listing)?,
        timeline::fragment(snapshot, false, None)?,
        Fragment::new("history", &HistoryFragment { view: &snapshot.view })?,
        Fragment::new("settings", &SettingsFragment { view: &snapshot.view })?,
    ])
}

/// The earlier runs.
#[derive(Template)]
#[template(path = "parts/history.html")]
struct HistoryFragment<'a> {
    view: &'a JobView,
}

#[derive(Template)]
#[template(path = "parts/settings.html")]
struct SettingsFragment<'a> {
    view: &'a JobView,
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobPage {
    page: PageFrame,
    view: JobView,
}

impl HistoryFragment<'_> {
    /// Returns the first error of a run in few words, and as clients received it.
    fn cause(&self, cause: &FirstCause) -> (String, String) {
        status::error_texts(&cause.error, &cause.why)
    }

    /// Returns the duration of an ended run.
    fn lasted(&self, run: &RunSummary) -> String {
        times::span(&run.span().length(run.ended_at))
    }
}

pub(super) async fn show(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(listing): QueryParams<TaskTableQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::of(&site, &job)?;
    let now = snapshot.now();
    let (title, query) = (format!("Job {}", job.name), format!("job&{}", listing.live_query()));
    let page = PageFrame::of_job_snapshot(
        user,
        NavEntry::Job,
        title,
        &snapshot,
        &query,
        parts(&snapshot, &listing)?,
    );
    render_page(&JobPage { page, view: snapshot.view }, now)
}

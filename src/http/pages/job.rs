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

/// How many of the missing are named at each barrier: all of a few, and the first of many.
const NAMED: usize = 12;
const NAMED_OF_MANY: usize = 4;
/// How many barriers in progress are shown.
const BARRIERS_SHOWN: usize = 32;

/// Where a job stands, in the line below its name. Every page of a job has it.
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
    /// The tone of the state: a run that goes on without some of its tasks is not simply well.
    fn tone(&self) -> &'static str {
        let running = self.view.run.state == RunState::Running;
        if running && self.out > self.excluded { "warn" } else { status::tone(&self.view.run.state) }
    }

    /// How many of a hundred are live.
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

/// A barrier in progress, as it is shown.
pub(super) struct BarrierRow<'a> {
    pub barrier: &'a BarrierView,
    pub name: String,
    pub missing: Vec<TaskLabel>,
    /// How many more are missing than are listed here and above.
    pub others: usize,
    /// The numbers of those that the page has named already.
    pub above: String,
    pub first: TaskLabel,
    /// The numbers of all who are missing.
    pub numbers: String,
    /// There is no end to the waiting.
    pub has_no_timeout: bool,
    /// Somebody has only just come: nobody is late yet.
    pub is_filling: bool,
}

impl<'a> BarrierRow<'a> {
    /// The barrier, where `above` says which tasks the page has named already.
    fn of(snapshot: &JobSnapshot, barrier: &'a BarrierView, above: &BTreeSet<TaskId>) -> Self {
        let (above, mut missing): (Vec<TaskId>, Vec<TaskId>) =
            barrier.missing.iter().copied().partition(|task| above.contains(task));
        let named = if missing.len() > NAMED { NAMED_OF_MANY } else { NAMED };
        // Those that may still arrive are named before those that are lost.
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

    /// How far it is, of a thousand.
    pub fn part(&self) -> usize {
        self.barrier.arrived * 1000 / self.barrier.members.max(1)
    }

    /// How many are missing.
    pub fn missing_count(&self) -> String {
        grouped(self.barrier.missing.len())
    }

    pub fn is_registration(&self) -> bool {
        self.barrier.kind == BarrierKind::Registration
    }
}

/// Whether somebody has only just come to a barrier: it is merely filling.
pub(super) fn is_filling(snapshot: &JobSnapshot, barrier: &BarrierView) -> bool {
    let waited = snapshot.now().since(issues::last_arrival(barrier));
    barrier.kind != BarrierKind::Registration && waited < AWAITED_AFTER
}

/// The barriers in progress, as they are shown on a page that has named the tasks `above` already.
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

/// The parts of the page.
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

/// The runs before this one.
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
    /// The first error of a run in few words, and as clients were told.
    fn cause(&self, cause: &FirstCause) -> (String, String) {
        status::error_texts(&cause.error, &cause.why)
    }

    /// How long an ended run lasted.
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

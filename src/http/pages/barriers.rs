//! Renders the barriers of a job: those in progress, recent ones, and the tasks that arrive late.
//!
//! `coordination/straggler_stats.rs` measures lateness. Begin at `show_barriers_page`.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job::{BarrierInProgressRow, barrier_in_progress_rows};
use super::job_head::render_head_fragment;
use super::links;
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::status::barrier_display_name;
use super::{amount, times};
use crate::coordination::{BarrierOutcome, BarrierRecord, JobName, StragglerView, TaskId, TaskView};
use crate::http::extractors::JobPath;
use crate::http::{AppState, Problem};

/// The maximum number of recent barriers on the page.
const RECENT_SHOWN: usize = 60;
/// The maximum number of late tasks on the page.
const LATE_SHOWN: usize = 20;

#[derive(Template)]
#[template(path = "parts/progress.html")]
struct BarriersPageProgressFragment<'a> {
    job: &'a JobName,
    waiting: Vec<BarrierInProgressRow<'a>>,
}

struct EndedBarrierRow<'a> {
    record: &'a BarrierRecord,
    name: String,
    took_us: u64,
    passed: bool,
    /// Its share of the longest bar, in thousandths.
    part: u64,
}

#[derive(Template)]
#[template(path = "parts/recent.html")]
struct RecentBarriersFragment<'a> {
    job: &'a JobName,
    recent: Vec<EndedBarrierRow<'a>>,
}

struct LateTask<'a> {
    task: TaskId,
    host: String,
    it: &'a StragglerView,
    last_percent: u64,
    score: String,
}

#[derive(Template)]
#[template(path = "parts/late.html")]
struct LateTasksFragment<'a> {
    job: &'a JobName,
    late: Vec<LateTask<'a>>,
}

fn ended_barrier_row<'a>(record: &'a BarrierRecord, longest: u64) -> EndedBarrierRow<'a> {
    let took_us = record.ended.0.saturating_sub(record.began.0);
    EndedBarrierRow {
        name: barrier_display_name(&record.id),
        took_us,
        passed: record.outcome == BarrierOutcome::Passed,
        part: took_us * 1000 / longest.max(1),
        record,
    }
}

fn late_task_row_if_ever_last(task: &TaskView) -> Option<LateTask<'_>> {
    let it = task.straggling.as_ref().filter(|it| it.last > 0)?;
    Some(LateTask {
        task: task.task,
        host: super::snapshot::task_address_text(task),
        last_percent: it.recent_last * 100 / it.recent.max(1),
        score: format!("{:.2}", it.score),
        it,
    })
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(snapshot: &JobSnapshot) -> Result<Vec<Fragment>, Problem> {
    let (job, run) = (&snapshot.view.name, &snapshot.view.run);
    let progress =
        BarriersPageProgressFragment { job, waiting: barrier_in_progress_rows(snapshot, &BTreeSet::new()) };
    let shown = || run.recent_barriers.iter().take(RECENT_SHOWN);
    let longest = shown().map(|record| record.ended.0.saturating_sub(record.began.0)).max().unwrap_or(1);
    let recent = RecentBarriersFragment {
        job,
        recent: shown().map(|record| ended_barrier_row(record, longest)).collect(),
    };
    let mut late: Vec<LateTask<'_>> = run.tasks.iter().filter_map(late_task_row_if_ever_last).collect();
    late.sort_by_key(|it| (std::cmp::Reverse((it.it.recent_last, it.it.held_up_us)), it.task));
    late.truncate(LATE_SHOWN);
    Ok(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("progress", &progress)?,
        Fragment::new("recent", &recent)?,
        Fragment::new("late", &LateTasksFragment { job, late })?,
    ])
}

#[derive(Template)]
#[template(path = "barriers.html")]
struct BarriersPageTemplate {
    page: PageFrame,
    job: JobName,
}

pub(super) async fn show_barriers_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let now = snapshot.captured_at();
    let title = format!("Barriers of {}", job.name);
    let page = PageFrame::for_job_snapshot(
        user,
        NavEntry::Barriers,
        title,
        &snapshot,
        &LivePage::Barriers,
        render_fragments(&snapshot)?,
    );
    render_page(&BarriersPageTemplate { page, job: job.name }, now)
}

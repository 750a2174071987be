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
use super::links::{self, JobPages};
use super::live_page::{BarriersPageQuery, LivePage};
use super::named_tasks::NamedGroup;
use super::snapshot::JobSnapshot;
use super::status::barrier_display_name;
use super::waterfall::{OpenedBarrier, Waterfall};
use super::{amount, stacks, times};
use crate::coordination::{BarrierOutcome, BarrierRecord, HostId, JobName, StragglerView, TaskId, TaskView};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun};
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

#[derive(Template)]
#[template(path = "parts/waterfall.html")]
struct WaterfallFragment<'a> {
    job: &'a JobPages,
    query: &'a BarriersPageQuery,
    waterfall: Waterfall,
    /// Barriers of the run have ended.
    has_recent: bool,
}

impl WaterfallFragment<'_> {
    fn query_with_scale(&self, scale: &str) -> String {
        BarriersPageQuery { scale: scale.to_owned(), ..self.query.clone() }.to_query()
    }
}

#[derive(Template)]
#[template(path = "parts/opened.html")]
struct OpenedBarrierFragment<'a> {
    job: &'a JobPages,
    query: &'a BarriersPageQuery,
    opened: Option<OpenedBarrier>,
}

struct EndedBarrierRow<'a> {
    record: &'a BarrierRecord,
    name: String,
    took_us: u64,
    passed: bool,
    /// Its share of the longest bar, in thousandths.
    part: u64,
    /// The members that had not arrived.
    absent: String,
}

#[derive(Template)]
#[template(path = "parts/recent.html")]
struct RecentBarriersFragment<'a> {
    job: &'a JobPages,
    recent: Vec<EndedBarrierRow<'a>>,
}

struct LateTask<'a> {
    task: TaskId,
    host: Option<&'a HostId>,
    address: String,
    it: &'a StragglerView,
    last_percent: u64,
    score: String,
}

#[derive(Template)]
#[template(path = "parts/late.html")]
struct LateTasksFragment<'a> {
    job: &'a JobPages,
    late: Vec<LateTask<'a>>,
}

fn ended_barrier_row<'a>(record: &'a BarrierRecord, longest: u64) -> EndedBarrierRow<'a> {
    let took_us = record.ended.0.saturating_sub(record.began.0);
    EndedBarrierRow {
        name: barrier_display_name(&record.id),
        took_us,
        passed: record.outcome == BarrierOutcome::Passed,
        part: took_us * 1000 / longest.max(1),
        absent: absent_members_text(record),
        record,
    }
}

/// Returns the members that had not arrived, as `0–3, 7 and 12 more`. A record names the first of them.
fn absent_members_text(record: &BarrierRecord) -> String {
    let named = super::links::task_ranges_text(&record.without);
    match record.absent().saturating_sub(record.without.len()) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

fn late_task_row_if_ever_last(task: &TaskView) -> Option<LateTask<'_>> {
    let it = task.straggling.as_ref().filter(|it| it.last > 0)?;
    let address = super::snapshot::task_address_text(task);
    Some(LateTask {
        task: task.task,
        // A host that is named by its address is not told twice.
        host: task.host.as_ref().filter(|host| !address.contains(host.as_str())),
        address,
        last_percent: it.recent_last * 100 / it.recent.max(1),
        score: format!("{:.2}", it.score),
        it,
    })
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    query: &BarriersPageQuery,
) -> Result<Vec<Fragment>, Problem> {
    let (job, run) = (&snapshot.pages, &snapshot.view.run);
    let progress = BarriersPageProgressFragment {
        job: snapshot.job_name(),
        waiting: barrier_in_progress_rows(snapshot, &BTreeSet::new()),
    };
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
        if snapshot.past.is_none() {
            Fragment::new("progress", &progress)?
        } else {
            Fragment::empty("progress")
        },
        match snapshot.pages.run {
            None => stacks::render_summary_fragment(snapshot)?,
            Some(_) => Fragment::empty("stack-summary"),
        },
        Fragment::new(
            "waterfall",
            &WaterfallFragment {
                job,
                query,
                waterfall: Waterfall::new(snapshot, query),
                has_recent: !run.recent_barriers.is_empty(),
            },
        )?,
        Fragment::new(
            "opened",
            &OpenedBarrierFragment { job, query, opened: OpenedBarrier::new(snapshot, query) },
        )?,
        Fragment::new("recent", &recent)?,
        Fragment::new("late", &LateTasksFragment { job, late })?,
    ])
}

#[derive(Template)]
#[template(path = "barriers.html")]
struct BarriersPageTemplate {
    page: PageFrame,
}

pub(super) async fn show_barriers_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(query): QueryParams<BarriersPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(&site, &job, run)?;
    let clock = snapshot.page_clock();
    let (title, parts) = (format!("Barriers of {}", job.name), render_fragments(&snapshot, &query)?);
    let page = PageFrame::for_job_snapshot(
        user,
        NavEntry::Barriers,
        title,
        &snapshot,
        &LivePage::Barriers(query),
        parts,
    );
    render_page(&BarriersPageTemplate { page }, clock)
}

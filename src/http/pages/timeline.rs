//! Renders timelines, with the first cause at the top.
//!
//! `service/timelines.rs` records the timelines. Begin at `show_timeline_page`.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::links::JobPages;
use super::live_page::{LivePage, TimelinePageQuery};
use super::picture_rows::ROW_HEIGHT;
use super::snapshot::JobSnapshot;
use super::state_chart::StateChart;
use super::{amount, issues, links, status, times};
use crate::coordination::{EventKind, HostId, JobName, RunNumber, TaskId, TaskPhase, Timestamp};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun};
use crate::http::{AppState, Problem};
use crate::service::{CausalRole, TIMELINE_ENTRIES_MAX, TimelineEntry, TimelineTone};
use crate::text::format_grouped;

/// The maximum number of entries on the page of the job.
const ENTRIES_SHORT: usize = 10;
/// The time before and after an entry that its address shows, in microseconds.
const AROUND_US: u64 = 30_000_000;
/// The maximum number of task ranges in one entry.
const RANGES_SHOWN: usize = 6;
/// The maximum number of hosts in one entry, and of tasks whose hosts are looked up.
const HOSTS_SHOWN: usize = 4;
const HOST_TASKS_MAX: usize = 256;

/// An entry of a timeline, as the page shows it.
struct TimelineRow<'a> {
    entry: &'a TimelineEntry,
    /// The hosts of its tasks, if it is about trouble of a few hosts.
    hosts: Vec<String>,
}

impl<'a> TimelineRow<'a> {
    fn new(snapshot: &JobSnapshot, entry: &'a TimelineEntry) -> Self {
        // A reader looks for the host of a failure, and not for the hosts of everything else.
        let is_trouble = matches!(entry.tone, TimelineTone::Warning | TimelineTone::Bad);
        let is_known = entry.run == snapshot.view.run.number && entry.tasks.len() <= HOST_TASKS_MAX;
        let hosts = if is_trouble && is_known { host_names(snapshot, &entry.tasks) } else { Vec::new() };
        Self { entry, hosts }
    }

    /// Returns the name of the style.
    fn tone(&self) -> &'static str {
        match self.entry.tone {
            TimelineTone::Calm => "calm",
            TimelineTone::Info => "info",
            TimelineTone::Warning => "warn",
            TimelineTone::Bad => "bad",
        }
    }

    /// Returns the id of the entry in the page.
    fn anchor(&self) -> String {
        format!("event-{}", self.entry.number)
    }

    /// Returns the address of the entry, whose page shows the time around it. It stays when the next run has opened.
    fn permalink(&self, job: &JobName) -> String {
        let (at, run) = (self.entry.at.0, self.entry.run);
        let (from, until) = (at.saturating_sub(AROUND_US), at.saturating_add(AROUND_US));
        format!("/jobs/{job}/runs/{run}/timeline?from={from}&until={until}#{}", self.anchor())
    }

    fn is_consequence(&self) -> bool {
        self.entry.role == CausalRole::Consequence
    }

    /// Returns the kind of the change in words.
    fn kind_text(&self) -> String {
        self.entry.kind().replace('-', " ")
    }

    /// Returns the tasks as ranges.
    fn tasks_text(&self) -> String {
        match self.entry.tasks_it_happened_to() {
            [] => String::new(),
            [one] => format!("task {one}"),
            many => {
                let mut sorted = many.to_vec();
                sorted.sort_unstable();
                format!(
                    "{} tasks: {}",
                    format_grouped(many.len()),
                    links::first_task_ranges_text(&sorted, RANGES_SHOWN)
                )
            }
        }
    }

    /// Returns the hosts as text.
    fn hosts_text(&self) -> String {
        if self.hosts.is_empty() { String::new() } else { format!(" (on {})", self.hosts.join(", ")) }
    }

    /// Returns a label for the task of the text, if the entry has several tasks.
    fn latest_task_prefix(&self) -> String {
        self.entry.latest.map_or_else(String::new, |task| format!("latest, task {task}: "))
    }

    /// Returns the page of a task in the run of the entry: the present one has no address of its own on the pages of a job.
    fn task_path(&self, job: &JobPages, present: &RunNumber, task: &TaskId) -> String {
        let run = job.run.or_else(|| Some(self.entry.run).filter(|run| run != present));
        links::task_page_path(&JobPages { name: job.name.clone(), run }, task)
    }

    /// Returns the task, if the entry has exactly one.
    fn single_task(&self) -> Option<&TaskId> {
        if let [one] = self.entry.tasks_it_happened_to() { Some(one) } else { None }
    }
}

/// Returns the names of the hosts on which these tasks are, if they are a few hosts with several tasks each.
fn host_names(snapshot: &JobSnapshot, tasks: &[TaskId]) -> Vec<String> {
    let host = |task: &TaskId| {
        let host = snapshot.host_assignment.host_of(*task)?;
        (host.tasks.len() > 1).then_some(&host.name)
    };
    let hosts: Option<BTreeSet<&HostId>> = tasks.iter().map(host).collect();
    let hosts = hosts.filter(|hosts| hosts.len() <= HOSTS_SHOWN).unwrap_or_default();
    hosts.into_iter().map(links::short_host_name).collect()
}

#[derive(Template)]
#[template(path = "parts/timeline.html")]
struct TimelineFragment<'a> {
    job: &'a JobPages,
    /// The run of the page.
    run: RunNumber,
    /// The first cause of that run.
    cause: Option<FirstCauseRow>,
    /// The page shows the first cause above.
    cause_shown_above: bool,
    entries: Vec<TimelineRow<'a>>,
    more: bool,
    /// Earlier entries were dropped.
    is_truncated: bool,
}

struct FirstCauseRow {
    at: Timestamp,
    task: Option<TaskId>,
    address: String,
    why: String,
    /// The text that clients received, if it is another one.
    told: String,
    following: usize,
}

/// The entries of a timeline fragment.
#[derive(Debug, Clone, Copy)]
pub(super) enum TimelineScope<'a> {
    /// The latest entries, for the page of the job.
    Job,
    /// The latest entries about one task, for its page.
    Task(TaskId),
    /// The latest entries about tasks, ascending, for the page of their host.
    Tasks(&'a [TaskId]),
    /// All entries that are kept, for the page of the timeline: of all tasks and kinds, or of one.
    Whole { task: Option<TaskId>, kind: Option<&'a str> },
}

impl TimelineScope<'_> {
    fn includes(&self, entry: &TimelineEntry) -> bool {
        match self {
            Self::Job => true,
            Self::Task(task) => entry.tasks.contains(task),
            Self::Whole { task, kind } => {
                task.is_none_or(|task| entry.tasks.contains(&task))
                    && kind.is_none_or(|kind| entry.kind() == kind)
            }
            Self::Tasks(tasks) => entry.tasks.iter().any(|task| tasks.binary_search(task).is_ok()),
        }
    }
}

/// Renders a timeline.
pub(super) fn render_timeline_fragment(
    snapshot: &JobSnapshot,
    scope: TimelineScope<'_>,
) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let whole = matches!(scope, TimelineScope::Whole { .. });
    let most = if whole { TIMELINE_ENTRIES_MAX } else { ENTRIES_SHORT };
    let about = |entry: &&TimelineEntry| scope.includes(entry);
    let following = |entry: &&TimelineEntry| entry.role == CausalRole::Consequence && entry.run == run.number;
    let cause = run.first_cause.as_ref().map(|cause| {
        let (why, told) = status::first_cause_texts(cause);
        FirstCauseRow {
            at: cause.at,
            task: cause.task,
            address: cause.task.map(|task| snapshot.task_label(task).address).unwrap_or_default(),
            why,
            told,
            following: snapshot
                .records
                .timeline
                .latest_first()
                .filter(following)
                .filter(about)
                .map(|entry| entry.tasks.len().max(1))
                .sum(),
        }
    });
    // The page of the job shows the first cause as its first issue, the page of its task as the last error.
    let told_above = match scope {
        TimelineScope::Job => issues::is_first_cause_listed(snapshot),
        TimelineScope::Task(task) => run.first_cause.as_ref().is_some_and(|cause| cause.task == Some(task)),
        TimelineScope::Tasks(_) | TimelineScope::Whole { .. } => false,
    };
    let shown = snapshot.records.timeline.latest_first().filter(about);
    let more = !whole && shown.clone().nth(most).is_some();
    let entries: Vec<TimelineRow<'_>> =
        shown.take(most).map(|entry| TimelineRow::new(snapshot, entry)).collect();
    let cut = !more && snapshot.records.timeline.is_truncated();
    Fragment::new(
        "timeline",
        &TimelineFragment {
            job: &snapshot.pages,
            run: run.number,
            cause,
            cause_shown_above: told_above,
            entries,
            more,
            is_truncated: cut,
        },
    )
}

#[derive(Template)]
#[template(path = "timeline.html")]
struct TimelinePageTemplate {
    page: PageFrame,
    job: JobPages,
    /// The parameters that stay when another task is chosen.
    kept: [(&'static str, String); 3],
    task: Option<i32>,
    tasks: usize,
    kind: Option<&'static str>,
}

impl TimelinePageTemplate {
    /// Returns the kinds of events that have entries.
    fn kinds(&self) -> impl Iterator<Item = &'static str> {
        EventKind::NAMES.into_iter().filter(|name| *name != "barrier-started")
    }

    fn is_chosen(&self, kind: &str) -> bool {
        self.kind == Some(kind)
    }
}

impl TimelinePageQuery {
    pub fn task_filter(&self) -> Option<TaskId> {
        self.task.trim().parse().ok().map(TaskId)
    }

    /// Returns the kind of event to which the list is limited; none if the name is not known.
    fn kind_filter(&self) -> Option<&'static str> {
        EventKind::NAMES.into_iter().find(|name| *name == self.kind.trim())
    }
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    which: &TimelinePageQuery,
) -> Result<Vec<Fragment>, Problem> {
    let scope = TimelineScope::Whole { task: which.task_filter(), kind: which.kind_filter() };
    Ok(vec![
        render_head_fragment(snapshot)?,
        render_state_chart_fragment(snapshot, which)?,
        render_timeline_fragment(snapshot, scope)?,
    ])
}

/// The picture of the states of tasks over the run.
#[derive(Template)]
#[template(path = "parts/state-chart.html")]
struct StateChartFragment<'a> {
    job: &'a JobPages,
    chart: StateChart,
    /// The address of the page of the timeline, which the links of the picture lead to.
    page_path: String,
}

/// Renders the picture of the states of tasks over the run.
pub(super) fn render_state_chart_fragment(
    snapshot: &JobSnapshot,
    which: &TimelinePageQuery,
) -> Result<Fragment, Problem> {
    let chart = StateChart::new(snapshot, &snapshot.run_states(), which);
    let page_path = format!("/jobs/{}/timeline", snapshot.pages);
    Fragment::new("state-chart", &StateChartFragment { job: &snapshot.pages, chart, page_path })
}

/// Serves `GET /jobs/{job}/timeline` and `GET /jobs/{job}/runs/{run}/timeline`.
pub(super) async fn show_timeline_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(which): QueryParams<TimelinePageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(&site, &job, run)?;
    let (clock, tasks) = (snapshot.page_clock(), snapshot.task_count());
    let (parts, task) = (render_fragments(&snapshot, &which)?, which.task_filter().map(|task| task.0));
    let kept = [("by", which.by.clone()), ("from", which.from.clone()), ("until", which.until.clone())];
    let title = format!("Timeline of {}", job.name);
    let kind = which.kind_filter();
    let live = LivePage::Timeline(which);
    let page = PageFrame::for_job_snapshot(user, NavEntry::Timeline, title, &snapshot, &live, parts);
    render_page(&TimelinePageTemplate { page, job: snapshot.pages, kept, task, tasks, kind }, clock)
}

//! Renders a run beside an earlier one: which tasks and hosts failed or came late in which of them, and which have moved.
//!
//! `coordination/views/run_comparison.rs` compares. Begin at `show_comparison_page`.

use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::links::{self, JobPages};
use super::{amount, status, times};
use crate::coordination::{
    ComparedHost, ComparedLateness, ComparedTask, DeviceChange, DevicePlaceComparison, HostId, HostLateness,
    JobName, RunComparison, RunDetail, RunListItem, RunNumber, TaskId, Timestamp,
};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun, no_such_run};
use crate::http::{AppState, Problem};
use crate::text::format_count_with_noun;

/// The maximum number of tasks, of hosts and of devices on the page.
const ROWS_MAX: usize = 100;

/// The query parameters of the page.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct ComparisonPageQuery {
    /// The earlier run; by default the one before.
    before: String,
}

#[derive(Template)]
#[template(path = "run-comparison.html")]
struct ComparisonPageTemplate {
    page: PageFrame,
    job: JobName,
    run: RunNumber,
    /// The earlier runs with which it can be compared, the newest first.
    earlier: Vec<RunListItem>,
    /// The run that followed it.
    next: Option<RunNumber>,
    comparison: Option<RunComparison>,
    /// The first devices that have changed.
    changed_devices: Vec<DevicePlaceComparison>,
    now: Timestamp,
}

impl ComparisonPageTemplate {
    /// Returns the pages of one of the runs.
    fn pages_of(&self, run: &RunDetail) -> JobPages {
        JobPages { name: self.job.clone(), run: Some(run.run.number) }
    }

    /// Returns the address of a task: in the later run, unless it has no such task.
    fn task_path(&self, comparison: &RunComparison, task: &ComparedTask) -> String {
        let is_there = usize::try_from(task.task.0).is_ok_and(|number| number < comparison.now.tasks);
        let run = if is_there { &comparison.now } else { &comparison.before };
        links::task_page_path(&self.pages_of(run), &task.task)
    }

    /// Returns the host that a task had in one of the runs, if the comparison names the task.
    fn host_of<'a>(
        &self,
        comparison: &'a RunComparison,
        run: &RunDetail,
        task: &TaskId,
    ) -> Option<&'a HostId> {
        let compared = comparison.tasks.iter().find(|compared| compared.task == *task)?;
        let is_before = run.run.number == comparison.before.run.number;
        if is_before { compared.host_before.as_ref() } else { compared.host.as_ref() }
    }

    fn length_of(&self, run: &RunDetail) -> Duration {
        run.run.measured_interval().duration(self.now)
    }

    fn tasks<'a>(&self, comparison: &'a RunComparison) -> &'a [ComparedTask] {
        &comparison.tasks[..comparison.tasks.len().min(ROWS_MAX)]
    }

    fn hosts<'a>(&self, comparison: &'a RunComparison) -> &'a [ComparedHost] {
        &comparison.hosts[..comparison.hosts.len().min(ROWS_MAX)]
    }

    fn has_more_changed_devices(&self, comparison: &RunComparison) -> bool {
        comparison.changed_devices.is_some_and(|count| count > self.changed_devices.len())
    }

    fn runs<'a>(&self, comparison: &'a RunComparison) -> [&'a RunDetail; 2] {
        [&comparison.before, &comparison.now]
    }

    fn task_lateness(&self, task: &ComparedTask) -> [Option<ComparedLateness>; 2] {
        [task.before, task.now]
    }

    fn host_lateness<'a>(&self, host: &'a ComparedHost) -> [Option<&'a HostLateness>; 2] {
        [host.before.as_ref(), host.now.as_ref()]
    }

    /// Returns the tasks of a host in both runs as text.
    fn host_tasks(&self, host: &ComparedHost) -> [String; 2] {
        [&host.tasks_before, &host.tasks].map(|tasks| match &tasks[..] {
            [] => "none".to_owned(),
            tasks => links::first_task_ranges_text(tasks, 6),
        })
    }

    fn count_text(&self, count: &usize, one: &str, many: &str) -> String {
        format_count_with_noun(*count, one, many)
    }

    /// Returns in which of the runs something held, in words.
    fn when_text(&self, held: [bool; 2]) -> &'static str {
        match held {
            [true, true] => "in both",
            [true, false] => "before",
            [false, true] => "now",
            [false, false] => "",
        }
    }
}

/// Serves `GET /jobs/{job}/runs/{run}/comparison`.
pub(super) async fn show_comparison_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(query): QueryParams<ComparisonPageQuery>,
) -> Result<Response, Problem> {
    let (runs, now) = (site.read_job(&job, |look| look.runs())?, site.engine.clock().now());
    let run = run.unwrap_or(RunNumber(0));
    if !runs.iter().any(|one| one.number == run) {
        return Err(no_such_run(&job, run));
    }
    let next = runs.iter().map(|one| one.number).filter(|later| *later > run).min();
    let earlier: Vec<RunListItem> = runs.into_iter().filter(|one| one.number < run).collect();
    let before = match query.before.trim() {
        "" => earlier.first().map(|one| one.number),
        number => {
            let before = RunNumber(number.parse().unwrap_or_default());
            let is_earlier = earlier.iter().any(|one| one.number == before);
            Some(is_earlier.then_some(before).ok_or_else(|| no_such_run(&job, before))?)
        }
    };
    let comparison = match before {
        Some(before) => site.read_job(&job, |look| look.compare_runs(before, run))?,
        None => None,
    };
    let changed_devices = match &comparison {
        Some(it) => {
            let runs = (Some(it.now.run.number), Some(it.before.run.number));
            let map = site.read_job(&job, |look| look.compare_devices(runs.0, runs.1))?;
            let places = map.into_iter().flat_map(|map| map.places);
            places.filter(|place| place.fate != DeviceChange::Same).take(ROWS_MAX).collect()
        }
        None => Vec::new(),
    };
    let title = format!("Comparison of {}, run {run}", job.name);
    let mut page = PageFrame::new(user, NavEntry::Comparison, title, now).with_job(&job.name);
    page.run = Some(run);
    let page =
        ComparisonPageTemplate { page, job: job.name, run, earlier, next, comparison, changed_devices, now };
    render_page(&page, now)
}

//! Serves runs, tasks, barriers, live sets and devices of a job.
//!
//! The state machine (`coordination`) holds this state. Begin at `list_runs`, then `list_tasks`.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::api::{BarriersPage, DevicesPage, EndedBarrierView, RunsPage, TasksPage};
use super::extractors::{ItemInJobPath, JobPath, QueryParams, no_such_run};
use super::pagination::{page_limit, page_query};
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::{
    BarrierRecord, DeviceChange, DeviceComparison, LiveTasksView, RunComparison, RunDetail, RunListItem,
    RunNumber, RunState, TaskId, TaskPhase, TaskView, Timestamp,
};

page_query! {
    /// The query parameters of runs.
    RunsQuery {
        /// Only runs in this state: `forming`, `running`, `completed`, `failed` or `abandoned`.
        #[param(value_type = Option<String>)]
        state: Option<RunState>,
        /// `json` (the default), or `csv` for a table: all runs, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The number of the last run that the client has.
    after: Option<u64>,
    /// The maximum number of runs.
    limit
}

/// The runs of a job, the present one first
#[utoipa::path(get, path = "/api/v1/jobs/{job}/runs", operation_id = "runs", tag = "runs",
    params(("job" = String, Path, description = "The job's name"), RunsQuery),
    responses((status = 200, description = "A page of runs, the newest first", content((RunsPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_runs(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<RunsQuery>,
) -> Result<Response, Problem> {
    let mut runs = site.read_job(&job, |look| look.runs())?;
    runs.retain(|run| query.state.is_none_or(|state| state == run.state));
    // Runs are listed newest first, so the next run has a smaller number.
    let order = |run: &RunListItem| std::cmp::Reverse(run.number);
    let after = query.after.map(|number| std::cmp::Reverse(RunNumber(number)));
    let (runs, next) = query.format.paginate(runs, after, query.limit, order);
    Ok(answer_in_format(query.format, RunsPage { runs, next: next.map(|number| number.0) }))
}

/// One run as a whole: the present one, or an ended one
#[utoipa::path(get, path = "/api/v1/jobs/{job}/runs/{run}", operation_id = "run", tag = "runs",
    params(("job" = String, Path, description = "The job's name"), ("run" = u64, Path, description = "Its number")),
    responses((status = 200, body = RunDetail, description = "The run"), (status = 404, description = "It is not known")))]
pub(super) async fn show_run(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(number): ItemInJobPath<u64>,
) -> Result<Json<RunDetail>, Problem> {
    let run = RunNumber(number);
    let found = site.read_job(&job, |look| look.run_detail(run))?;
    found.map(Json).ok_or_else(|| no_such_run(&job, run))
}

/// The query parameters of a comparison.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RunComparisonQuery {
    /// The earlier run; by default the one before.
    before: Option<u64>,
}

/// A run beside an earlier one
///
/// Tells which tasks and hosts came late at barriers in which of the two runs, and which have moved. The query
/// `devices/map` lists the devices that have moved.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/runs/{run}/comparison", operation_id = "run_comparison", tag = "runs",
    params(("job" = String, Path, description = "The job's name"), ("run" = u64, Path, description = "The later run"), RunComparisonQuery),
    responses((status = 200, body = RunComparison, description = "The two runs"),
        (status = 404, description = "One of the runs is not known, or its tasks are no longer kept")))]
pub(super) async fn compare_runs(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(number): ItemInJobPath<u64>,
    QueryParams(query): QueryParams<RunComparisonQuery>,
) -> Result<Json<RunComparison>, Problem> {
    let before = RunNumber(query.before.unwrap_or(number.saturating_sub(1)));
    let now = RunNumber(number);
    let compared = site.read_job(&job, |look| {
        // Why there is no comparison is found out only if there is none: opening a run costs a copy of its tasks.
        look.compare_runs(before, now).ok_or_else(|| look.in_run(now).is_some())
    })?;
    compared.map(Json).map_err(|is_now_kept| match (is_now_kept, before < now) {
        (false, _) => no_such_run(&job, now),
        (true, false) => Problem::bad_query(format!(
            "run {before} is not earlier than run {now}: name an earlier one by `before`"
        )),
        (true, true) => no_such_run(&job, before),
    })
}

page_query! {
    /// The query parameters of tasks.
    TasksQuery {
        /// Only tasks in this state: `missing`, `registering`, `connected`, `suspect`, `disconnected` or
        /// `failed`.
        #[param(value_type = Option<String>)]
        state: Option<TaskPhase>,
        /// Only excluded tasks, or only tasks that are not excluded.
        excluded: Option<bool>,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all tasks, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The number of the last task that the client has.
    after: Option<i32>,
    /// The maximum number of tasks.
    limit
}

/// The tasks of the present run, or of an ended one as they were
#[utoipa::path(get, path = "/api/v1/jobs/{job}/tasks", operation_id = "tasks", tag = "tasks",
    params(("job" = String, Path, description = "The job's name"), TasksQuery),
    responses((status = 200, description = "A page of tasks, by number", content((TasksPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_tasks(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TasksQuery>,
) -> Result<Response, Problem> {
    let mut tasks = site.read_job_in_run(&job, query.run, |look| look.tasks())?;
    tasks.retain(|task| {
        query.state.is_none_or(|state| state == task.standing)
            && query.excluded.is_none_or(|wanted| wanted == task.excluded.is_some())
    });
    let (tasks, next) = query.format.paginate(tasks, query.after.map(TaskId), query.limit, |task| task.task);
    Ok(answer_in_format(query.format, TasksPage { tasks, next }))
}

/// One task, with its heartbeat gaps over time
#[utoipa::path(get, path = "/api/v1/jobs/{job}/tasks/{task}", operation_id = "task", tag = "tasks",
    params(("job" = String, Path, description = "The job's name"), ("task" = i32, Path, description = "Its number")),
    responses((status = 200, body = TaskView, description = "The task"), (status = 404, description = "There is none")))]
pub(super) async fn show_task(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(number): ItemInJobPath<i32>,
) -> Result<Json<TaskView>, Problem> {
    let (found, tasks) = site.read_job(&job, |look| (look.task(TaskId(number)), look.settings().tasks))?;
    found.map(Json).ok_or_else(|| no_such_task(&job, number, tasks))
}

/// Returns the problem that a job of this many tasks has no task of that number.
pub(super) fn no_such_task(job: &JobPath, number: i32, tasks: u32) -> Problem {
    let last = tasks.saturating_sub(1);
    let text = format!("there is no task {number}: job {} has the tasks 0 to {last}", job.name);
    Problem::not_found("no-such-task", text)
}

/// The states of barriers to return.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum BarrierState {
    /// Barriers in progress.
    #[default]
    InProgress,
    /// Ended barriers.
    Recent,
}

page_query! {
    /// The query parameters of barriers.
    BarriersQuery {
        /// `in-progress`, or `recent` for the latest ended barriers of the run.
        #[serde(default)]
        #[param(inline)]
        state: BarrierState,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all barriers, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The `next` of the page before.
    after: Option<u64>,
    /// The maximum number of barriers; slightly more if several ended at the same time.
    limit
}

/// The barriers in progress, the longest waiting first, or recent ones, the latest first
#[utoipa::path(get, path = "/api/v1/jobs/{job}/barriers", operation_id = "barriers", tag = "barriers",
    params(("job" = String, Path, description = "The job's name"), BarriersQuery),
    responses((status = 200, description = "A page of barriers: the tasks that arrived and those that are missing, and the deadline; of ended ones the duration and the skew", content((BarriersPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_barriers(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<BarriersQuery>,
) -> Result<Response, Problem> {
    let is_whole = query.format == TableFormat::Csv && query.limit.is_none();
    if query.state == BarrierState::Recent {
        let latest = site.read_job_in_run(&job, query.run, |look| look.recent_barriers())?;
        let limit = if is_whole { latest.len() } else { page_limit(query.limit) };
        let page = ended_barriers_page(latest, query.after.map(Timestamp), limit);
        return Ok(answer_in_format(query.format, page));
    }
    let mut barriers = site.read_job_in_run(&job, query.run, |look| look.barriers())?;
    barriers.sort_by(|a, b| (a.since, &a.id).cmp(&(b.since, &b.id)));
    let numbered = (1..).zip(barriers);
    let (page, next) = query.format.paginate(numbered, query.after, query.limit, |(number, _)| *number);
    let barriers = page.into_iter().map(|(_, barrier)| barrier).collect();
    Ok(answer_in_format(query.format, BarriersPage { barriers, recent: Vec::new(), next }))
}

/// Returns a page of ended barriers, the latest first. The time of the end is the cursor, so barriers that
/// ended at the same time are never split between two pages.
fn ended_barriers_page(latest: Vec<BarrierRecord>, after: Option<Timestamp>, limit: usize) -> BarriersPage {
    let mut rest =
        latest.into_iter().filter(|record| after.is_none_or(|after| record.ended < after)).peekable();
    let mut recent: Vec<EndedBarrierView> = Vec::new();
    while let Some(next) = rest.peek() {
        let same = recent.last().is_some_and(|last| last.record.ended == next.ended);
        if recent.len() >= limit && !same {
            break;
        }
        recent.extend(rest.next().map(EndedBarrierView::from));
    }
    let more = rest.peek().is_some();
    let next = recent.last().filter(|_| more).map(|last| last.record.ended.0);
    BarriersPage { barriers: Vec::new(), recent, next }
}

/// The live set, and the live-set requests in progress
#[utoipa::path(get, path = "/api/v1/jobs/{job}/live", operation_id = "live", tag = "tasks",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, body = LiveTasksView, description = "Who is alive: connected, and not excluded")))]
pub(super) async fn show_live_set(
    State(site): State<AppState>,
    job: JobPath,
) -> Result<Json<LiveTasksView>, Problem> {
    site.read_job(&job, |look| look.live_tasks()).map(Json)
}

page_query! {
    /// The query parameters of devices.
    DevicesQuery {
        /// Only devices of this task.
        task: Option<i32>,
        /// Only devices of this platform.
        platform: Option<String>,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all devices, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The `next` of the page before.
    after: Option<u64>,
    /// The maximum number of devices.
    limit
}

/// The devices that the tasks of the present run, or of an ended one, have published
#[utoipa::path(get, path = "/api/v1/jobs/{job}/devices", operation_id = "devices", tag = "devices",
    params(("job" = String, Path, description = "The job's name"), DevicesQuery),
    responses((status = 200, description = "A page of devices", content((DevicesPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_devices(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<DevicesQuery>,
) -> Result<Response, Problem> {
    let devices = site.read_job_in_run(&job, query.run, |look| look.devices())?;
    let wanted = devices.iter().filter(|device| {
        query.task.is_none_or(|task| device.task == TaskId(task))
            && query.platform.as_ref().is_none_or(|platform| device.platform == *platform)
    });
    let (page, next) =
        query.format.paginate((1..).zip(wanted), query.after, query.limit, |(number, _)| *number);
    let devices = page.into_iter().map(|(_, device)| device.clone()).collect();
    Ok(answer_in_format(query.format, DevicesPage { devices, next }))
}

/// The query parameters of the device map.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DeviceMapQuery {
    /// Only places with this change: `same`, `moved`, `came` or `gone`.
    #[param(value_type = Option<String>)]
    state: Option<DeviceChange>,
    /// The run; by default the present one.
    run: Option<u64>,
    /// The earlier run with which it is compared; by default the last one whose devices are known.
    before: Option<u64>,
}

/// The devices of a run compared with those of an earlier one
///
/// Devices are matched by their location (the identity of their process's host or else its boot, the platform, their
/// local id) and not by the task number or the global id, which processes get anew with every start. `runs` names the
/// runs that can be compared.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/devices/map", operation_id = "device_map", tag = "devices",
    params(("job" = String, Path, description = "The job's name"), DeviceMapQuery),
    responses(
        (status = 200, body = DeviceComparison, description = "Every place, with who it was and who it is"),
        (status = 404, description = "The devices of that run are not known"),
    ))]
pub(super) async fn show_device_map(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<DeviceMapQuery>,
) -> Result<Json<DeviceComparison>, Problem> {
    let (run, before) = (query.run.map(RunNumber), query.before.map(RunNumber));
    let map = site.read_job(&job, |look| look.compare_devices(run, before))?;
    let mut map = map.ok_or_else(|| {
        let text = "the devices of such a run are not known: `runs` of devices/map names those that are, and `before` is \
                    an earlier run than `run`";
        Problem::not_found("no-such-run", text.to_owned())
    })?;
    map.places.retain(|place| query.state.is_none_or(|fate| fate == place.fate));
    Ok(Json(map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{BarrierKind, BarrierOutcome};

    #[test]
    fn recent_barriers_come_in_pages_the_latest_first_and_none_is_passed_over() {
        let record = |counter: i64, ended: u64| BarrierRecord {
            id: "step".into(),
            counter,
            kind: BarrierKind::Client,
            began: Timestamp(ended - 5),
            ended: Timestamp(ended),
            members: 2,
            arrived: 2,
            first: Some(TaskId(0)),
            last: Some(TaskId(1)),
            skew_us: 4,
            waited_us: 6,
            outcome: BarrierOutcome::Passed,
            without: Vec::new(),
            latest: Vec::new(),
        };
        let all = || vec![record(4, 40), record(3, 30), record(2, 30), record(1, 10)];
        let of = |page: &BarriersPage| -> Vec<i64> {
            assert!(page.barriers.is_empty() && page.recent.iter().all(|ended| ended.duration_us == 5));
            page.recent.iter().map(|ended| ended.record.counter).collect()
        };
        let first = ended_barriers_page(all(), None, 2);
        assert_eq!((of(&first), first.next), (vec![4, 3, 2], Some(30)), "two that ended at once");
        let second = ended_barriers_page(all(), Some(Timestamp(30)), 2);
        assert_eq!((of(&second), second.next), (vec![1], None));
        let json = serde_json::to_value(&first.recent[0]).unwrap();
        assert_eq!(
            (&json["duration_us"], &json["skew_us"], &json["id"]),
            (&5.into(), &4.into(), &"step".into())
        );
    }
}

//! The REST resource of the states of tasks over a run, as JSON and as CSV.
//!
//! `service/state_history.rs` records the changes. Begin at `list_task_states`.

use axum::extract::State;
use axum::response::Response;

use super::api::{TaskStatesPage, TaskStatesView};
use super::extractors::{JobPath, QueryParams};
use super::pagination::page_query;
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::{JobReader, RunNumber, TaskId, TaskPhase, Timestamp};
use crate::service::RunStates;

page_query! {
    /// The query parameters of the states of tasks.
    TaskStatesQuery {
        /// The run; by default the present one.
        run: Option<u64>,
        /// Only this task.
        task: Option<i32>,
        /// `json` (the default), or `csv` for a table with a line for each period.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The number of the last task that the client has.
    after: Option<i32>,
    /// The maximum number of tasks.
    limit
}

/// A run, as far as its states over time depend on it.
pub(super) struct RunOutline {
    pub run: RunNumber,
    /// The phase of each task, and since when it lasts.
    phases: Vec<(TaskPhase, Timestamp)>,
    opened_at: Timestamp,
    ended_at: Option<Timestamp>,
}

impl RunOutline {
    /// Returns the outline of the run that a reader shows.
    pub fn of_reader(reader: JobReader<'_>) -> Self {
        let (run, opened_at, ended_at) = reader.run_interval();
        let phases = reader.tasks().iter().map(|task| (task.standing, task.since)).collect();
        Self { run, phases, opened_at, ended_at }
    }

    /// Returns the states of its tasks over time.
    pub fn states(&self, site: &AppState, job: &JobPath) -> RunStates {
        let history = site.states.of_run(job.id, self.run);
        let (interval, now) = ((self.opened_at, self.ended_at), site.engine.clock().now());
        RunStates::new(&history, self.run, &self.phases, interval, now)
    }
}

/// The states of the tasks over a run: from when until when each task was in which state
///
/// Periods of a task follow one another without gaps. A restarted task begins a new period. The service keeps at
/// most the latest 65,536 changes of a job, and those of at most 64 runs.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/states", operation_id = "task_states", tag = "runs",
    params(("job" = String, Path, description = "The job's name"), TaskStatesQuery),
    responses((status = 200, description = "A page of tasks, by number",
        content((TaskStatesPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_task_states(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TaskStatesQuery>,
) -> Result<Response, Problem> {
    let (outline, hosts) =
        site.read_job_in_run(&job, query.run, |reader| (RunOutline::of_reader(reader), reader.task_hosts()))?;
    let RunStates { run, opened_at, until, known_since, marks, tasks, .. } = outline.states(&site, &job);
    let tasks = tasks.into_iter().filter(|of| query.task.is_none_or(|task| of.task == TaskId(task)));
    let (tasks, next) = query.format.paginate(tasks, query.after.map(TaskId), query.limit, |of| of.task);
    let with_host = |states: crate::service::TaskPeriods| TaskStatesView {
        host: hosts.host_of(states.task).map(|host| host.name.clone()),
        states,
    };
    let tasks: Vec<TaskStatesView> = tasks.into_iter().map(with_host).collect();
    let page = TaskStatesPage { run, opened_at, until, known_since, marks, tasks, next };
    Ok(answer_in_format(query.format, page))
}

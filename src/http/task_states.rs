//! The REST resource of the states of tasks over a run, as JSON and as CSV.
//!
//! `service/state_history.rs` records the changes. Begin at `list_task_states`.

use std::fmt::Write as _;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};

use super::api::{TaskStatesPage, TaskStatesView};
use super::barrier_arrivals::TableFormat;
use super::extractors::{JobPath, QueryParams};
use super::pagination::{page_query, paginate};
use super::{AppState, Problem};
use crate::coordination::{HostId, JobReader, RunNumber, TaskId, Timestamp};
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
    tasks: usize,
    opened_at: Timestamp,
    ended_at: Option<Timestamp>,
}

impl RunOutline {
    /// Returns the outline of the run that a reader shows.
    pub fn of_reader(reader: JobReader<'_>) -> Self {
        let (run, opened_at, ended_at) = reader.run_interval();
        Self { run, tasks: reader.task_count(), opened_at, ended_at }
    }

    /// Returns the states of its tasks over time.
    pub fn states(&self, site: &AppState, job: &JobPath) -> RunStates {
        let history = site.states.of_run(job.id, self.run);
        let (interval, now) = ((self.opened_at, self.ended_at), site.engine.clock().now());
        RunStates::new(&history, self.run, self.tasks, interval, now)
    }
}

/// The states of the tasks over a run: from when until when each task was in which state
///
/// Periods of a task follow one another without gaps. A restarted task begins a new period. The service keeps the
/// latest 65,536 changes of a job.
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
    let (tasks, next) = paginate(tasks, query.after.map(TaskId), query.limit, |of| of.task);
    let with_host = |states: crate::service::TaskStates| TaskStatesView {
        host: hosts.host_of(states.task).map(|host| host.name.clone()),
        states,
    };
    let tasks: Vec<TaskStatesView> = tasks.into_iter().map(with_host).collect();
    Ok(match query.format {
        TableFormat::Json => {
            Json(TaskStatesPage { run, opened_at, until, known_since, marks, tasks, next }).into_response()
        }
        TableFormat::Csv => {
            ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], periods_as_csv(run, until, &tasks))
                .into_response()
        }
    })
}

/// Returns a line for each period, below a line with the names of the columns. The last period of a task ends when
/// its states were last known.
fn periods_as_csv(run: RunNumber, until: Timestamp, tasks: &[TaskStatesView]) -> String {
    let mut csv = "run,task,host,state,from_us,until_us\r\n".to_owned();
    for TaskStatesView { host, states } in tasks {
        let host = host.as_ref().map_or("", HostId::as_str);
        for period in &states.periods {
            let end = period.until.unwrap_or(until).0;
            // Writing to a string cannot fail.
            let _ = write!(
                csv,
                "{run},{},\"{}\",{},{},{end}\r\n",
                states.task,
                host.replace('"', "\"\""),
                period.state.name(),
                period.from.0,
            );
        }
    }
    csv
}

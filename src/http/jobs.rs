//! Serves jobs: lists, shows, creates, changes and deletes them.
//!
//! The state machine (`coordination`) holds the jobs. This module parses settings, and the state machine decides
//! whether they may change. Begin at `list_jobs`, then `change_settings`.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::IntoParams;

use super::api::{JobPatch, JobsPage, NewJob, SettingsBody};
use super::extractors::{JobPath, JsonBody, QueryParams};
use super::pagination::page_query;
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::{
    CommandOutcome, CommandReason, JobBounds, JobReader, JobSettings, JobSummary, JobView, OperatorCommand,
    RunState, SettingsChange, TASKS_MAX,
};
use crate::service::{ActorContext, JobOperation};
use crate::text::parse_duration;

page_query! {
    /// The query parameters of jobs.
    JobsQuery {
        /// Only jobs whose present run is in this state: `forming`, `running`, `completed`, `failed` or
        /// `abandoned`.
        #[param(value_type = Option<String>)]
        state: Option<RunState>,
        /// `json` (the default), or `csv` for a table: all jobs, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The name of the last job that the client has.
    after: Option<String>,
    /// The maximum number of jobs.
    limit
}

/// The summaries of all jobs
#[utoipa::path(get, path = "/api/v1/jobs", operation_id = "jobs_list", tag = "jobs", params(JobsQuery),
    responses((status = 200, description = "A page of jobs, by name", content((JobsPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_jobs(
    State(site): State<AppState>,
    QueryParams(query): QueryParams<JobsQuery>,
) -> Result<Response, Problem> {
    let summaries: Vec<JobSummary> = site.engine.read(|core, _| {
        let jobs = core.jobs().filter_map(|(job, _)| core.job(job));
        jobs.map(|job| job.summary()).collect()
    });
    let wanted =
        summaries.iter().filter(|job| query.state.is_none_or(|state| state == job.state)).collect::<Vec<_>>();
    let (page, next) =
        query.format.paginate(wanted, query.after.as_deref(), query.limit, |job| job.name.as_str());
    let next = next.and_then(|name| name.parse().ok());
    Ok(answer_in_format(query.format, JobsPage { jobs: page.into_iter().cloned().collect(), next }))
}

/// A job with its present run: tasks, barriers, devices, history
#[utoipa::path(get, path = "/api/v1/jobs/{job}", operation_id = "jobs_show", tag = "jobs",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, body = JobView, description = "The job"), (status = 404, description = "There is none")))]
pub(super) async fn show_job(State(site): State<AppState>, job: JobPath) -> Result<Json<JobView>, Problem> {
    let view = site.engine.read(|core, now| core.job_view(job.id, now));
    view.map(Json).ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
}

impl SettingsBody {
    fn into_settings_change(self, present: &JobSettings) -> Result<SettingsChange, Problem> {
        let duration = |name: &str, text: Option<String>| {
            let read = text.map(|text| parse_duration(&text)).transpose();
            read.map_err(|wrong| Problem::invalid_request(format!("{name}: {wrong}")))
        };
        if self.tasks.is_some_and(|tasks| tasks == 0 || tasks > TASKS_MAX) {
            return Err(Problem::invalid_request(format!("tasks: write a number from 1 to {TASKS_MAX}")));
        }
        let disconnect_grace = match self.disconnect_grace.as_deref() {
            Some("off") => Some(None),
            _ => duration("disconnect_grace", self.disconnect_grace)?.map(Some),
        };
        Ok(SettingsChange {
            tasks: self.tasks,
            recoverable: self.recoverable,
            heartbeat_timeout: duration("heartbeat_timeout", self.heartbeat_timeout)?,
            register_timeout: duration("register_timeout", self.register_timeout)?,
            shutdown_timeout: duration("shutdown_timeout", self.shutdown_timeout)?,
            disconnect_grace,
            error_delivery: self.error_delivery,
            auto_exclude: self.auto_exclude,
            auto_exclude_for: duration("auto_exclude_for", self.auto_exclude_for)?,
            transfers_with: self.transfers_with,
            bounds: self.bounds.map(|given| merge_bounds(&present.bounds, given)).transpose()?,
        })
    }
}

/// Returns the bounds with some of them replaced.
fn merge_bounds(
    present: &JobBounds,
    given: serde_json::Map<String, serde_json::Value>,
) -> Result<JobBounds, Problem> {
    let Ok(serde_json::Value::Object(mut all)) = serde_json::to_value(present) else {
        return Err(Problem::internal_error());
    };
    all.extend(given);
    serde_json::from_value(all.into()).map_err(|error| Problem::invalid_request(format!("bounds: {error}")))
}

/// Create a job
///
/// Its tasks reach it on the shared listener by the name that they dial: `NAME.HOST:PORT`.
#[utoipa::path(post, path = "/api/v1/jobs", operation_id = "jobs_create", tag = "jobs", request_body = NewJob,
    responses(
        (status = 201, body = JobSummary, description = "The job in short"),
        (status = 409, description = "There is a job of that name, or there are too many"),
    ))]
pub(super) async fn create_job(
    State(site): State<AppState>,
    Extension(author): Extension<ActorContext>,
    JsonBody(new): JsonBody<NewJob>,
) -> Result<Response, Problem> {
    let Some(tasks) = new.settings.tasks else {
        return Err(Problem::invalid_request("settings.tasks is required: how many tasks the job has"));
    };
    let defaults = JobSettings::new(tasks);
    let change = new.settings.into_settings_change(&defaults)?;
    let settings = change.apply_to(&defaults).map_err(Problem::invalid_request)?;
    let name = new.name;
    let view = |job: Option<JobReader<'_>>| job.map(|job| job.summary());
    let summary = site.operations.create_job(&name, settings, &author, new.reason, view)?;
    let summary = summary.ok_or_else(Problem::internal_error)?;
    let place = [(header::LOCATION, format!("/api/v1/jobs/{name}"))];
    Ok((StatusCode::CREATED, place, Json(summary)).into_response())
}

/// Change settings of a job
///
/// The heartbeat timeout takes effect at once, other timeouts for what begins afterwards. The number of tasks
/// and whether they are recoverable cannot change during a run.
#[utoipa::path(patch, path = "/api/v1/jobs/{job}", operation_id = "jobs_change", tag = "jobs",
    params(("job" = String, Path, description = "The job's name")),
    request_body = JobPatch,
    responses(
        (status = 200, body = JobSettings, description = "The settings that hold now"),
        (status = 409, description = "A run in progress does not allow it"),
    ))]
pub(super) async fn change_settings(
    State(site): State<AppState>,
    job: JobPath,
    Extension(author): Extension<ActorContext>,
    JsonBody(patch): JsonBody<JobPatch>,
) -> Result<Json<JobSettings>, Problem> {
    let present = site.read_job(&job, |look| look.settings().clone())?;
    let subject = serde_json::to_string(&patch.settings).unwrap_or_default();
    let change = Box::new(patch.settings.into_settings_change(&present)?);
    let job_operation = job.job_operation(&author, patch.reason, OperatorCommand::Configure(change));
    let job_operation = JobOperation { subject: Some(subject), ..job_operation };
    match site.operations.perform_audited(job_operation, |_, done| done)? {
        CommandOutcome::Configured(settings) => Ok(Json(*settings)),
        _ => Err(Problem::internal_error()),
    }
}

/// The query parameters of a deletion.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DeleteQuery {
    /// The reason: one line of at most 500 bytes.
    #[param(value_type = String)]
    reason: CommandReason,
    /// Delete the job even if tasks are connected.
    #[serde(default)]
    force: bool,
}

/// Delete a job
///
/// Waiting calls are answered with NOT_FOUND, as is every later call.
#[utoipa::path(delete, path = "/api/v1/jobs/{job}", operation_id = "jobs_delete", tag = "jobs",
    params(("job" = String, Path, description = "The job's name"), DeleteQuery),
    responses(
        (status = 204, description = "It is gone"),
        (status = 409, description = "Tasks are connected, and it was not said to do it by force"),
    ))]
pub(super) async fn delete_job(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(how): QueryParams<DeleteQuery>,
    Extension(author): Extension<ActorContext>,
) -> Result<StatusCode, Problem> {
    let act = OperatorCommand::DeleteJob { force: how.force };
    site.operations.perform_audited(job.job_operation(&author, how.reason, act), |_, _| ())?;
    Ok(StatusCode::NO_CONTENT)
}

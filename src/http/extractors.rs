//! The extractors of the handlers: they parse the job and the item in the path, the query, a JSON body, or a form.
//! If parsing fails, the answer is a problem document.
//!
//! `body.rs` reads the bodies. Begin at `JobPath`, then `QueryParams`.

use std::fmt::Display;
use std::str::FromStr;

use axum::Json;
use axum::extract::rejection::{FormRejection, JsonRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, RawPathParams, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::{AppState, Problem};
use crate::coordination::{
    CommandReason, JobId, JobName, JobReader, OperatorCommand, RunNumber, TaskId, Timestamp,
};
use crate::service::{ActorContext, JobOperation};

/// The JSON body of a request. Types refuse unknown fields.
pub(super) struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection @ JsonRejection::MissingJsonContentType(_)) => {
                let detail = "the body must be JSON: send it with the header content-type: application/json";
                Err(Problem::bad_body(rejection.status(), detail))
            }
            Err(rejection) => Err(Problem::bad_body(rejection.status(), rejection.body_text())),
        }
    }
}

/// The query parameters of a request. Types refuse unknown parameters.
pub(super) struct QueryParams<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(Problem::bad_query(rejection.body_text())),
        }
    }
}

/// The job that the path names.
pub(super) struct JobPath {
    pub id: JobId,
    pub name: JobName,
}

impl JobPath {
    /// A command upon this job.
    pub(super) fn job_operation<'a>(
        &'a self,
        by: &'a ActorContext,
        reason: CommandReason,
        command: OperatorCommand,
    ) -> JobOperation<'a> {
        JobOperation { job: self.id, name: &self.name, by, reason, command, subject: None }
    }
}

impl AppState {
    /// Reads a part of a job.
    pub(super) fn read_job<T>(
        &self,
        job: &JobPath,
        look: impl FnOnce(JobReader<'_>) -> T,
    ) -> Result<T, Problem> {
        let seen = self.engine.read(|core, _| core.job(job.id).map(look));
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }

    /// Checks that a job has had this run, though nothing of it may be kept any more.
    pub(super) fn check_run_has_opened(&self, job: &JobPath, run: Option<u64>) -> Result<(), Problem> {
        let Some(run) = run.map(RunNumber) else { return Ok(()) };
        let (present, ..) = self.read_job(job, |reader| reader.run_interval())?;
        if (RunNumber(1)..=present).contains(&run) { Ok(()) } else { Err(no_such_run(job, run)) }
    }

    /// Reads a part of a job in one of its runs, by default the present one.
    pub(super) fn read_job_in_run<T>(
        &self,
        job: &JobPath,
        run: Option<u64>,
        look: impl FnOnce(JobReader<'_>) -> T,
    ) -> Result<T, Problem> {
        self.read_job_in_run_with_time(job, run, |reader, _| look(reader))
    }

    /// Reads a part of a job in one of its runs, and gets the time of its state: of a run before the present one, its end.
    pub(super) fn read_job_in_run_with_time<T>(
        &self,
        job: &JobPath,
        run: Option<u64>,
        look: impl FnOnce(JobReader<'_>, Timestamp) -> T,
    ) -> Result<T, Problem> {
        let now = self.engine.clock().now();
        let Some(run) = run.map(RunNumber) else { return self.read_job(job, |reader| look(reader, now)) };
        let in_run = self.read_job(job, |reader| reader.in_run(run))?;
        let in_run = in_run.ok_or_else(|| no_such_run(job, run))?;
        Ok(look(in_run.reader(), in_run.seen_at(now)))
    }
}

/// Returns the problem that nothing, or no more than a summary, is known of a run.
pub(super) fn no_such_run(job: &JobPath, run: RunNumber) -> Problem {
    let text = format!(
        "job {} has no run {run}, or its tasks are no longer kept: GET /api/v1/jobs/{}/runs lists the runs that are known",
        job.name, job.name
    );
    Problem::not_found("no-such-run", text)
}

impl FromRequestParts<AppState> for JobPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, site: &AppState) -> Result<Self, Problem> {
        let params = RawPathParams::from_request_parts(parts, site).await;
        let params = params.map_err(|error| Problem::bad_path(error.body_text()))?;
        let name = params.iter().find(|(key, _)| *key == "job").map_or("", |(_, value)| value);
        site.engine.read_under_lock(|core| match (core.job_named(name), name.parse()) {
            (Some(id), Ok(name)) => Ok(Self { id, name }),
            _ => Err(Problem::no_such_job(name, core.jobs().map(|(_, name)| name.clone()).collect())),
        })
    }
}

/// The path segment after the job.
pub(super) struct ItemInJobPath<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<AppState> for ItemInJobPath<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, site: &AppState) -> Result<Self, Problem> {
        match Path::<(String, T)>::from_request_parts(parts, site).await {
            Ok(Path((_, item))) => Ok(Self(item)),
            Err(rejection) => Err(Problem::bad_path(rejection.body_text())),
        }
    }
}

/// Returns the value of this name in the path, if the path has one.
async fn path_value<T: FromStr<Err: Display>>(
    parts: &mut Parts,
    site: &AppState,
    name: &str,
) -> Result<Option<T>, Problem> {
    let params = RawPathParams::from_request_parts(parts, site).await;
    let params = params.map_err(|error| Problem::bad_path(error.body_text()))?;
    let Some((_, value)) = params.iter().find(|(key, _)| *key == name) else { return Ok(None) };
    let parsed = value.parse().map_err(|error| Problem::bad_path(format!("the {name} {value:?}: {error}")));
    parsed.map(Some)
}

/// The task that the path of a page names.
pub(super) struct TaskInPath(pub TaskId);

impl FromRequestParts<AppState> for TaskInPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, site: &AppState) -> Result<Self, Problem> {
        Ok(Self(path_value(parts, site, "task").await?.map(TaskId).unwrap_or_default()))
    }
}

/// The host that the path of a page names.
pub(super) struct HostInPath(pub String);

impl FromRequestParts<AppState> for HostInPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, site: &AppState) -> Result<Self, Problem> {
        Ok(Self(path_value(parts, site, "host").await?.unwrap_or_default()))
    }
}

/// The run that the path of a page names, if it names one: `/jobs/{job}/runs/{run}/…`.
pub(super) struct ViewedRun(pub Option<RunNumber>);

impl FromRequestParts<AppState> for ViewedRun {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, site: &AppState) -> Result<Self, Problem> {
        Ok(Self(path_value(parts, site, "run").await?.map(RunNumber)))
    }
}

/// The fields of a form. Unknown fields are ignored, because every form carries some that the middleware
/// reads.
pub(super) struct FormBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for FormBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        match axum::Form::<T>::from_request(request, state).await {
            Ok(axum::Form(fields)) => Ok(Self(fields)),
            Err(rejection @ FormRejection::InvalidFormContentType(_)) => {
                let detail = "this address takes the form of a page (content-type: application/x-www-form-urlencoded); programs \
                              send JSON to the REST API, which /api describes";
                Err(Problem::bad_body(rejection.status(), detail))
            }
            Err(rejection) => Err(Problem::bad_body(rejection.status(), rejection.body_text())),
        }
    }
}

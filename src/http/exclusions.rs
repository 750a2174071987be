//! The REST resource of exclusions: list, preview, create, lift.
//!
//! It contains no rule of exclusion: `coordination` does. The pages call the same functions. Begin at `create`,
//! then `exclude`.

use std::net::IpAddr;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::actor::{ActorContext, RequestActor};
use super::extract::{JobPath, JsonBody, PathItem, QueryParams};
use super::pagination::{deserialize_limit, paginate};
use super::{AppState, Problem};
use crate::coordination::{
    CommandOutcome, ExclusionId, ExclusionPreview, ExclusionTarget, ExclusionView, OperatorCommand, Reason,
    TaskId,
};

/// The maximum duration of an exclusion with an expiry: a year, in seconds.
const SECONDS_MAX: u64 = 366 * 24 * 60 * 60;

/// A request for an exclusion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewExclusion {
    /// A task, by its number; either this or `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<i32>,
    /// A host, by its IP address: every task that registers from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The reason: one line of at most 500 bytes, which the excluded process receives.
    #[schema(value_type = String)]
    pub reason: Reason,
    /// The duration in seconds; without it the exclusion holds until it is lifted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
    /// Exclude even if that ends the run.
    #[serde(default)]
    pub end_run: bool,
    /// Return the effects without excluding.
    #[serde(default)]
    pub dry_run: bool,
}

impl NewExclusion {
    fn target(&self) -> Result<ExclusionTarget, Problem> {
        match (self.task, &self.host) {
            (Some(task), None) => Ok(ExclusionTarget::Task(TaskId(task))),
            (None, Some(host)) => match host.parse::<IpAddr>() {
                Ok(address) => Ok(ExclusionTarget::host(address)),
                Err(_) => Err(Problem::unusable(format!(
                    "{host:?} is no IP address: a host is excluded by the address that its tasks register from, without \
                     a port (see the tasks of the job)"
                ))),
            },
            _ => Err(Problem::unusable("give either \"task\": NUMBER or \"host\": \"IP ADDRESS\"")),
        }
    }

    fn expires_in(&self) -> Result<Option<Duration>, Problem> {
        match self.expires_in_seconds {
            Some(0) => {
                Err(Problem::unusable("expires_in_seconds must be at least 1; leave it out for no end"))
            }
            Some(seconds) if seconds > SECONDS_MAX => {
                Err(Problem::unusable(format!("expires_in_seconds can be {SECONDS_MAX} (a year) at most")))
            }
            seconds => Ok(seconds.map(Duration::from_secs)),
        }
    }
}

/// A page of a job's exclusions, by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionsPage {
    /// The exclusions of this page.
    pub exclusions: Vec<ExclusionView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<ExclusionId>,
}

/// The states of exclusions to return.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = Wanted)]
pub(super) enum ExclusionFilter {
    /// Exclusions in force.
    #[default]
    InForce,
    /// Exclusions that have ended, as far as they are kept.
    #[serde(rename = "over")]
    Ended,
    /// Both.
    All,
}

/// The query parameters of exclusions.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExclusionsQuery {
    /// `in-force` (the default), `over` or `all`.
    #[serde(default)]
    #[param(inline)]
    state: ExclusionFilter,
    /// The number of the last exclusion that the client has.
    after: Option<u64>,
    /// The maximum number of exclusions.
    #[serde(default, deserialize_with = "deserialize_limit")]
    #[param(minimum = 1)]
    limit: Option<usize>,
}

/// The reason of a change whose request has no body.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReasonQuery {
    /// The reason: one line of at most 500 bytes.
    #[param(value_type = String)]
    pub reason: Reason,
}

/// Exclude a task or a host
///
/// The exclusion takes effect at once: waiting calls of the task are answered, the other tasks continue
/// without it, and its registrations are refused with the reason while the exclusion holds. In a job whose
/// tasks share their fate this ends the run, and is refused unless `end_run` is set. With `dry_run` nothing
/// changes: the answer has the effects.
#[utoipa::path(post, path = "/api/v1/jobs/{job}/exclusions", operation_id = "exclusions_create", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name")),
    request_body = NewExclusion,
    responses(
        (status = 201, body = ExclusionView, description = "The exclusion, which holds now"),
        (status = 200, body = ExclusionPreview, description = "What it would do (dry run)"),
        (status = 409, description = "It is refused: it would end the run, or there is one already"),
        (status = 422, description = "There is no such task or address"),
    ))]
pub(super) async fn create(
    State(site): State<AppState>,
    job: JobPath,
    RequestActor(author): RequestActor,
    JsonBody(new): JsonBody<NewExclusion>,
) -> Result<Response, Problem> {
    if new.dry_run {
        return Ok(Json(preview(&site, &job, &author, &new)?).into_response());
    }
    let view = exclude(&site, &job, &author, new)?;
    let place = [(header::LOCATION, format!("/api/v1/jobs/{}/exclusions/{}", job.name, view.id))];
    Ok((StatusCode::CREATED, place, Json(view)).into_response())
}

/// Returns the effects that an exclusion would have.
pub(super) fn preview(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    new: &NewExclusion,
) -> Result<ExclusionPreview, Problem> {
    let target = new.target()?;
    new.expires_in()?;
    Ok(site
        .engine
        .read(|core, now| core.preview_exclusion(now, job.id, &author.actor, &new.reason, target))?)
}

/// Excludes a task or a host.
pub(super) fn exclude(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    new: NewExclusion,
) -> Result<ExclusionView, Problem> {
    let (target, expires_in) = (new.target()?, new.expires_in()?);
    let act = OperatorCommand::Exclude { target, expires_in, end_run: new.end_run };
    let done = site.act(job, author, new.reason, "exclude", target.to_string(), act)?;
    let CommandOutcome::Excluded(id) = done else { return Err(Problem::internal()) };
    find(site, job, id)
}

/// The exclusions of a job
#[utoipa::path(get, path = "/api/v1/jobs/{job}/exclusions", operation_id = "exclusions_list", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name"), ExclusionsQuery),
    responses((status = 200, body = ExclusionsPage, description = "A page of exclusions, by number")))]
pub(super) async fn list(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<ExclusionsQuery>,
) -> Result<Json<ExclusionsPage>, Problem> {
    let mut all = site.read_job(&job, |look| look.exclusions())?;
    all.retain(|exclusion| match query.state {
        ExclusionFilter::InForce => exclusion.ended.is_none(),
        ExclusionFilter::Ended => exclusion.ended.is_some(),
        ExclusionFilter::All => true,
    });
    all.sort_by_key(|exclusion| exclusion.id);
    let (exclusions, next) =
        paginate(all, query.after.map(ExclusionId), query.limit, |exclusion| exclusion.id);
    Ok(Json(ExclusionsPage { exclusions, next }))
}

/// One exclusion
#[utoipa::path(get, path = "/api/v1/jobs/{job}/exclusions/{id}", operation_id = "exclusions_show", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name"), ("id" = u64, Path, description = "Its number")),
    responses((status = 200, body = ExclusionView, description = "The exclusion"), (status = 404, description = "There is none")))]
pub(super) async fn show(
    State(site): State<AppState>,
    job: JobPath,
    PathItem(id): PathItem<u64>,
) -> Result<Json<ExclusionView>, Problem> {
    find(&site, &job, ExclusionId(id)).map(Json)
}

/// Lift an exclusion
///
/// The task or host may register again. An excluded process has ended and must be started again.
#[utoipa::path(delete, path = "/api/v1/jobs/{job}/exclusions/{id}", operation_id = "exclusions_lift", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name"), ("id" = u64, Path, description = "Its number"), ReasonQuery),
    responses(
        (status = 200, body = ExclusionView, description = "The exclusion, which is over now"),
        (status = 404, description = "There is none"),
        (status = 409, description = "It is over already"),
    ))]
pub(super) async fn lift(
    State(site): State<AppState>,
    job: JobPath,
    PathItem(id): PathItem<u64>,
    QueryParams(because): QueryParams<ReasonQuery>,
    RequestActor(author): RequestActor,
) -> Result<Json<ExclusionView>, Problem> {
    readmit(&site, &job, ExclusionId(id), &author, because.reason).map(Json)
}

/// Lifts an exclusion.
pub(super) fn readmit(
    site: &AppState,
    job: &JobPath,
    id: ExclusionId,
    author: &ActorContext,
    reason: Reason,
) -> Result<ExclusionView, Problem> {
    let before = find(site, job, id).ok();
    let target = before.map_or_else(String::new, |exclusion| format!(" ({})", exclusion.target));
    let subject = format!("exclusion {id}{target}");
    site.act(job, author, reason, "readmit", subject, OperatorCommand::Readmit { exclusion: id })?;
    find(site, job, id)
}

pub(super) fn find(site: &AppState, job: &JobPath, id: ExclusionId) -> Result<ExclusionView, Problem> {
    let all = site.read_job(job, |look| look.exclusions())?;
    all.into_iter().find(|exclusion| exclusion.id == id).ok_or_else(|| {
        let text = format!("there is no exclusion {id} in job {} (or it is over and forgotten)", job.name);
        Problem::not_found("no-such-exclusion", text)
    })
}

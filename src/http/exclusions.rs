//! The REST resource of exclusions: lists, previews, creates and lifts them.
//!
//! `coordination` has the rules of exclusions. The pages call the functions of this module too. Begin at
//! `create_exclusion`, then `perform_exclusion`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::api::{ExclusionsPage, NewExclusion};
use super::extractors::{ItemInJobPath, JobPath, JsonBody, QueryParams};
use super::pagination::page_query;
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::{
    CommandOutcome, CommandReason, ExclusionId, ExclusionPreview, ExclusionTarget, ExclusionView, JobReader,
    OperatorCommand, TaskId,
};
use crate::service::ActorContext;

/// The maximum duration of an exclusion with an expiry: a year, in seconds.
const SECONDS_MAX: u64 = 366 * 24 * 60 * 60;

impl NewExclusion {
    /// Returns the target: a task, a host by its address, or a host that the present run of the job has by its name.
    fn resolve_target(&self, site: &AppState, job: &JobPath) -> Result<ExclusionTarget, Problem> {
        match (self.task, &self.host) {
            (Some(task), None) => Ok(ExclusionTarget::Task(TaskId(task))),
            (None, Some(host)) => resolve_host(site, job, host),
            _ => Err(Problem::invalid_request(
                "give either \"task\": NUMBER or \"host\": \"NAME OR IP ADDRESS\"",
            )),
        }
    }

    fn checked_duration(&self) -> Result<Option<Duration>, Problem> {
        match self.expires_in_seconds {
            Some(0) => Err(Problem::invalid_request(
                "expires_in_seconds must be at least 1; leave it out for no end",
            )),
            Some(seconds) if seconds > SECONDS_MAX => Err(Problem::invalid_request(format!(
                "expires_in_seconds can be {SECONDS_MAX} (a year) at most"
            ))),
            seconds => Ok(seconds.map(Duration::from_secs)),
        }
    }
}

/// Returns the target for a host, by its name or its address. A host that is known by its address alone, which no other
/// host has, is excluded by the address, as is an address at which no host is known.
pub(super) fn resolve_host(site: &AppState, job: &JobPath, host: &str) -> Result<ExclusionTarget, Problem> {
    let found = site.read_job(job, |look| look.excluded_host(host))?;
    if let Ok(address) = host.parse::<IpAddr>()
        && found.as_ref().is_none_or(|found| found.is_known_by_address_alone(address))
    {
        return Ok(ExclusionTarget::host(address));
    }
    found.map(|host| ExclusionTarget::NamedHost(Arc::new(host))).ok_or_else(|| {
        Problem::invalid_request(format!(
            "{host:?} is no IP address, and no task of the present run is on a host with this name: see the hosts of \
             the job, and write an address without a port"
        ))
    })
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

page_query! {
    /// The query parameters of exclusions.
    ExclusionsQuery {
        /// `in-force` (the default), `over` or `all`.
        #[serde(default)]
        #[param(inline)]
        state: ExclusionFilter,
        /// `json` (the default), or `csv` for a table: all exclusions, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The number of the last exclusion that the client has.
    after: Option<u64>,
    /// The maximum number of exclusions.
    limit
}

/// The reason of a change whose request has no body.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReasonQuery {
    /// The reason: one line of at most 500 bytes.
    #[param(value_type = String)]
    pub reason: CommandReason,
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
        (status = 422, description = "There is no such task or host"),
    ))]
pub(super) async fn create_exclusion(
    State(site): State<AppState>,
    job: JobPath,
    Extension(author): Extension<ActorContext>,
    JsonBody(new): JsonBody<NewExclusion>,
) -> Result<Response, Problem> {
    if new.dry_run {
        return Ok(Json(preview_exclusion(&site, &job, &author, &new)?).into_response());
    }
    let view = perform_exclusion(&site, &job, &author, new)?;
    let place = [(header::LOCATION, format!("/api/v1/jobs/{}/exclusions/{}", job.name, view.id))];
    Ok((StatusCode::CREATED, place, Json(view)).into_response())
}

/// Returns the effects that an exclusion would have.
pub(super) fn preview_exclusion(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    new: &NewExclusion,
) -> Result<ExclusionPreview, Problem> {
    let target = new.resolve_target(site, job)?;
    new.checked_duration()?;
    Ok(site
        .engine
        .read(|core, now| core.preview_exclusion(now, job.id, &author.actor, &new.reason, &target))?)
}

/// Excludes a task or a host.
pub(super) fn perform_exclusion(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    new: NewExclusion,
) -> Result<ExclusionView, Problem> {
    let (target, expires_in) = (new.resolve_target(site, job)?, new.checked_duration()?);
    let act = OperatorCommand::Exclude { target, expires_in, end_run: new.end_run };
    let view = site.operations.perform_audited(
        job.job_operation(author, new.reason, act),
        |after, done| match done {
            CommandOutcome::Excluded(id) => after.and_then(|after| exclusion_with_id(after, id)),
            _ => None,
        },
    )?;
    view.ok_or_else(Problem::internal_error)
}

/// The exclusions of a job
#[utoipa::path(get, path = "/api/v1/jobs/{job}/exclusions", operation_id = "exclusions_list", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name"), ExclusionsQuery),
    responses((status = 200, description = "A page of exclusions, by number", content((ExclusionsPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_exclusions(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<ExclusionsQuery>,
) -> Result<Response, Problem> {
    let mut all = site.read_job(&job, |look| look.exclusions())?;
    all.retain(|exclusion| match query.state {
        ExclusionFilter::InForce => exclusion.ended.is_none(),
        ExclusionFilter::Ended => exclusion.ended.is_some(),
        ExclusionFilter::All => true,
    });
    all.sort_by_key(|exclusion| exclusion.id);
    let (exclusions, next) =
        query.format.paginate(all, query.after.map(ExclusionId), query.limit, |exclusion| exclusion.id);
    Ok(answer_in_format(query.format, ExclusionsPage { exclusions, next }))
}

/// One exclusion
#[utoipa::path(get, path = "/api/v1/jobs/{job}/exclusions/{id}", operation_id = "exclusions_show", tag = "exclusions",
    params(("job" = String, Path, description = "The job's name"), ("id" = u64, Path, description = "Its number")),
    responses((status = 200, body = ExclusionView, description = "The exclusion"), (status = 404, description = "There is none")))]
pub(super) async fn show_exclusion(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(id): ItemInJobPath<u64>,
) -> Result<Json<ExclusionView>, Problem> {
    find_exclusion(&site, &job, ExclusionId(id)).map(Json)
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
pub(super) async fn lift_exclusion(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(id): ItemInJobPath<u64>,
    QueryParams(because): QueryParams<ReasonQuery>,
    Extension(author): Extension<ActorContext>,
) -> Result<Json<ExclusionView>, Problem> {
    lift_and_audit_exclusion(&site, &job, ExclusionId(id), &author, because.reason).map(Json)
}

/// Lifts an exclusion.
pub(super) fn lift_and_audit_exclusion(
    site: &AppState,
    job: &JobPath,
    id: ExclusionId,
    author: &ActorContext,
    reason: CommandReason,
) -> Result<ExclusionView, Problem> {
    let job_operation = job.job_operation(author, reason, OperatorCommand::Readmit { exclusion: id });
    let view = site
        .operations
        .perform_audited(job_operation, |after, _| after.and_then(|after| exclusion_with_id(after, id)))?;
    view.ok_or_else(Problem::internal_error)
}

pub(super) fn find_exclusion(
    site: &AppState,
    job: &JobPath,
    id: ExclusionId,
) -> Result<ExclusionView, Problem> {
    site.read_job(job, |look| exclusion_with_id(look, id))?.ok_or_else(|| {
        let text = format!("there is no exclusion {id} in job {} (or it is over and forgotten)", job.name);
        Problem::not_found("no-such-exclusion", text)
    })
}

fn exclusion_with_id(job: JobReader<'_>, id: ExclusionId) -> Option<ExclusionView> {
    job.exclusions().into_iter().find(|exclusion| exclusion.id == id)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::clock::Clock;
    use crate::coordination::{
        Actor, ActorOrigin, CallOutcome, Caller, JobId, JobSettings, Request, TaskIncarnation,
    };
    use crate::engine::{AnswerInbox, AnsweredOrWaiting, Engine};
    use crate::http::api::{ProductVersion, ServerInfo};

    fn operator_actor() -> Actor {
        Actor { who: "alice".into(), address: None, means: ActorOrigin::Api }
    }

    fn test_reason() -> CommandReason {
        CommandReason::try_from("a test".to_owned()).unwrap()
    }

    /// Deletes the job as soon as a call is answered: between a command and whatever its author does next.
    struct JobDeletingInbox {
        engine: Arc<Engine>,
        job: JobId,
    }

    impl AnswerInbox for JobDeletingInbox {
        fn deliver(&self, _slot: u64, _outcome: CallOutcome) {
            let delete = OperatorCommand::DeleteJob { force: true };
            let _ = self.engine.perform_command(self.job, operator_actor(), test_reason(), delete);
        }
    }

    #[tokio::test]
    async fn an_exclusion_is_answered_as_made_whatever_happens_to_the_job_next() {
        let engine = Engine::new(Clock::start());
        let name: crate::coordination::JobName = "a".parse().unwrap();
        let job = engine.declare_job(name.clone(), JobSettings::new(2)).unwrap();
        let peer = SocketAddr::from(([10, 0, 0, 1], 1));
        let caller = Caller { connection: engine.register_connection(peer), claim: None };
        let inbox: Arc<dyn AnswerInbox> = Arc::new(JobDeletingInbox { engine: Arc::clone(&engine), job });
        let register =
            Request::Register { task: TaskId(0), incarnation: TaskIncarnation(1), recoverable: false };
        let waits = engine.call(job, caller, register, &inbox, 1);
        assert!(matches!(waits, AnsweredOrWaiting::Waiting(_)), "the other task has not registered");

        let about = ServerInfo { version: ProductVersion::current(), http: peer, grpc: Vec::new() };
        let site = AppState::new(Arc::clone(&engine), Arc::default(), Arc::new(about));
        let new = NewExclusion {
            task: Some(0),
            host: None,
            reason: test_reason(),
            expires_in_seconds: None,
            end_run: true,
            dry_run: false,
        };
        let author = ActorContext::new(operator_actor(), None, None);
        let made = perform_exclusion(&site, &JobPath { id: job, name }, &author, new).expect("it was made");
        assert_eq!((made.target, made.ended), (ExclusionTarget::Task(TaskId(0)), None));
        assert_eq!(engine.read(|core, _| core.jobs().count()), 0, "the job is gone meanwhile");
        let lines = site.operations.audit.latest_lines(usize::MAX, |_| true);
        let line = lines.first().expect("it is in the audit");
        assert_eq!((&*line.act, &*line.subject, &*line.detail), ("exclude", "task 0", "exclusion 1"));
    }
}

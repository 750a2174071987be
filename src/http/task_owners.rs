//! The REST resource of the owners of a job's task ids: lists the process to which each id belongs, grants a task id to a
//! process, and makes the service forget the owner of a task id.
//!
//! `coordination/task_id_claims.rs` has the rules. A process claims its task id, and repeats the claim until the task
//! id is granted. A claim is not a command of an operator, so it is not in the audit. The answer to a claim contains
//! no more than the answer that the gRPC port gives. Begin at `list_task_owners`, then `claim_task_id`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};

use super::api::{NewClaim, TaskClaimView, TaskOwnersPage};
use super::exclusions::ReasonQuery;
use super::extractors::{ItemInJobPath, JobPath, JsonBody, QueryParams};
use super::pagination::{page_query, paginate};
use super::{AppState, Problem};
use crate::coordination::{
    ClaimAnswer, CommandOutcome, OperatorCommand, ProcessIdentity, TaskClaim, TaskId, TaskOwnerView,
};
use crate::service::ActorContext;

page_query! {
    /// The query parameters of task owners.
    TaskOwnersQuery {
        /// Only owners that hold their task id now, or only those that do not.
        held: Option<bool>,
    }
    /// The number of the last task that the client has.
    after: Option<i32>,
    /// The maximum number of task owners.
    limit
}

/// The processes that own task ids
///
/// A task id belongs to the process that claimed it last, over runs. Processes that wait for a task id are in every
/// page.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/task-owners", operation_id = "task_owners_list", tag = "task owners",
    params(("job" = String, Path, description = "The job's name"), TaskOwnersQuery),
    responses((status = 200, body = TaskOwnersPage, description = "A page of task owners, and the processes that wait")))]
pub(super) async fn list_task_owners(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TaskOwnersQuery>,
) -> Result<Json<TaskOwnersPage>, Problem> {
    let now = site.engine.clock().now();
    let mut all = site.read_job(&job, |look| look.task_owners(now))?;
    all.owners.retain(|owner| query.held.is_none_or(|held| held == owner.held));
    let (owners, next) =
        paginate(all.owners, query.after.map(TaskId), query.limit, |owner: &TaskOwnerView| owner.task);
    Ok(Json(TaskOwnersPage { owners, waiting: all.waiting, next }))
}

/// Ask which task a process is
///
/// A process that does not know its task id states the identity of its host. A known identity gets its task id at
/// once; a new one when as many processes are present as the job has tasks. Until then the answer says why, and the
/// process asks again after `retry_ms`. A claim that is not repeated for 10 s counts no more.
#[utoipa::path(post, path = "/api/v1/jobs/{job}/task-owners", operation_id = "task_owners_claim", tag = "task owners",
    params(("job" = String, Path, description = "The job's name")),
    request_body = NewClaim,
    responses(
        (status = 200, body = TaskClaimView, description = "The process is this task"),
        (status = 202, body = TaskClaimView, description = "It is no task yet: why, and when to ask again"),
        (status = 409, description = "Too many new processes wait"),
        (status = 422, description = "This is no identity"),
    ))]
pub(super) async fn claim_task_id(
    State(site): State<AppState>,
    job: JobPath,
    JsonBody(new): JsonBody<NewClaim>,
) -> Result<(StatusCode, Json<TaskClaimView>), Problem> {
    let identity = ProcessIdentity::new(&new.host, new.local).map_err(Problem::invalid_request)?;
    let claimant = u64::from_str_radix(&new.claimant, 16).map_err(|_| {
        Problem::invalid_request("claimant must be a random number of 64 bits in hexadecimal")
    })?;
    match site.engine.claim_task_id(job.id, TaskClaim { identity, claimant, connection: None }) {
        Ok(ClaimAnswer::Granted { task, tasks }) => {
            let view = TaskClaimView { task: Some(task), tasks, pending: None, why: None, retry_ms: None };
            Ok((StatusCode::OK, Json(view)))
        }
        Ok(ClaimAnswer::Pending { why, tasks, retry_after }) => {
            let view = TaskClaimView {
                task: None,
                tasks,
                pending: Some(why.kind().to_owned()),
                why: Some(why.to_string()),
                retry_ms: u32::try_from(retry_after.as_millis()).ok(),
            };
            Ok((StatusCode::ACCEPTED, Json(view)))
        }
        Err(refusal) => Err(refusal.into()),
    }
}

/// Forget the owner of a task id
///
/// The next new process may take the id. A process that holds it goes on.
#[utoipa::path(delete, path = "/api/v1/jobs/{job}/task-owners/{task}", operation_id = "task_owners_forget", tag = "task owners",
    params(("job" = String, Path, description = "The job's name"), ("task" = i32, Path, description = "The task's number"), ReasonQuery),
    responses((status = 204, description = "It is forgotten"), (status = 404, description = "The id has no owner")))]
pub(super) async fn forget_task_owner(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(task): ItemInJobPath<i32>,
    Extension(author): Extension<ActorContext>,
    QueryParams(why): QueryParams<ReasonQuery>,
) -> Result<StatusCode, Problem> {
    let act = OperatorCommand::ForgetTaskOwners { task: Some(TaskId(task)) };
    site.operations
        .perform_audited(job.job_operation(&author, why.reason, act), |_, _: CommandOutcome| ())?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forget the owners of all task ids of a job
///
/// The next processes are numbered anew, in the order of their identities.
#[utoipa::path(delete, path = "/api/v1/jobs/{job}/task-owners", operation_id = "task_owners_forget_all", tag = "task owners",
    params(("job" = String, Path, description = "The job's name"), ReasonQuery),
    responses((status = 204, description = "They are forgotten")))]
pub(super) async fn forget_all_task_owners(
    State(site): State<AppState>,
    job: JobPath,
    Extension(author): Extension<ActorContext>,
    QueryParams(why): QueryParams<ReasonQuery>,
) -> Result<StatusCode, Problem> {
    let act = OperatorCommand::ForgetTaskOwners { task: None };
    site.operations
        .perform_audited(job.job_operation(&author, why.reason, act), |_, _: CommandOutcome| ())?;
    Ok(StatusCode::NO_CONTENT)
}

//! The REST resource of stacks: requests the stacks of tasks, shows the answers, hands requests out to helpers, and accepts
//! their answers.
//!
//! `service/stacks/` keeps the requests and groups equal stacks. A helper is a part of a Python program
//! (`python/muster/_stacks.py`). It needs the role viewer, so that the token of a program permits nothing else than what
//! every viewer may see; an answer needs a ticket, which the service gives to the helper with the request. Begin at
//! `create_stack_request`, then `wait_for_stack_request`.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use serde::Deserialize;
use tokio::time::{Instant, sleep_until};
use utoipa::IntoParams;

use super::extractors::{JobPath, JsonBody, QueryParams};
use super::pagination::{page_query, paginate};
use super::{AppState, ClientNetwork, Problem};
use crate::coordination::{CommandReason, TaskId};
use crate::service::ActorContext;
use crate::service::stacks::{
    HelperPoll, NewStackAnswer, NewStackRequestBody, StackAnswerRefusal, StackRequestRefusal, StackWaitView,
    StacksView, TaskRanges,
};

/// The longest time for which a request of a helper waits.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The pause of a helper whose request ends because the server stops.
const STOP_PAUSE: Duration = Duration::from_secs(2);

impl From<StackRequestRefusal> for Problem {
    fn from(refusal: StackRequestRefusal) -> Self {
        let (status, kind, title) = match &refusal {
            StackRequestRefusal::NoSuchJob => (StatusCode::NOT_FOUND, "no-such-job", "No such job"),
            StackRequestRefusal::NoSuchTask { .. } => {
                (StatusCode::UNPROCESSABLE_ENTITY, "no-such-task", "No such task")
            }
            StackRequestRefusal::TooSoon(_) => (StatusCode::TOO_MANY_REQUESTS, "too-soon", "Too soon"),
        };
        Self::new(status, &format!("/problems/{kind}"), title, refusal.to_string())
    }
}

impl From<StackAnswerRefusal> for Problem {
    fn from(refusal: StackAnswerRefusal) -> Self {
        let (status, kind, title) = match &refusal {
            StackAnswerRefusal::NoSuchJob => (StatusCode::NOT_FOUND, "no-such-job", "No such job"),
            StackAnswerRefusal::NoSuchTask(_) => (StatusCode::NOT_FOUND, "no-such-task", "No such task"),
            StackAnswerRefusal::NoSuchRequest(_) => {
                (StatusCode::NOT_FOUND, "no-such-stack-request", "No such request")
            }
            StackAnswerRefusal::Over(_) => (StatusCode::CONFLICT, "stack-request-over", "Request over"),
            StackAnswerRefusal::NotAsked { .. } => (StatusCode::CONFLICT, "not-asked", "Not asked"),
            StackAnswerRefusal::AlreadyAnswered { .. } => {
                (StatusCode::CONFLICT, "already-answered", "Already answered")
            }
            StackAnswerRefusal::WrongTicket { .. } => (StatusCode::CONFLICT, "wrong-ticket", "Wrong ticket"),
            StackAnswerRefusal::StaleIncarnation(_) => {
                (StatusCode::CONFLICT, "stale-incarnation", "Stale incarnation")
            }
            StackAnswerRefusal::Invalid(_) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "unusable", "Unusable request")
            }
            StackAnswerRefusal::NoRoom => (StatusCode::INSUFFICIENT_STORAGE, "no-room", "No room"),
        };
        Self::new(status, &format!("/problems/{kind}"), title, refusal.to_string())
    }
}

/// Ask tasks for their stacks
///
/// Tasks whose programs have loaded the helper, and workers, send the stacks of their threads within seconds. The answers to
/// the former request are dropped. The request changes nothing for the job.
#[utoipa::path(post, path = "/api/v1/jobs/{job}/stacks", operation_id = "stacks_ask", tag = "stacks",
    params(("job" = String, Path, description = "The job's name")),
    request_body = NewStackRequestBody,
    responses(
        (status = 202, body = StacksView, description = "The tasks are asked; which of them can answer"),
        (status = 409, description = "The tasks were asked, and another request has replaced this one before the answer"),
        (status = 422, description = "There is no such task"),
        (status = 429, description = "Stacks were requested a moment ago"),
    ))]
pub(super) async fn create_stack_request(
    State(site): State<AppState>,
    job: JobPath,
    Extension(author): Extension<ActorContext>,
    JsonBody(new): JsonBody<NewStackRequestBody>,
) -> Result<(StatusCode, Json<StacksView>), Problem> {
    let number = request_stacks(&site, &job, &author, new.reason, new.tasks)?;
    let view = read_stacks_view(&site, &job, None)?;
    // The client takes the view for that of its own request.
    if view.request.as_ref().is_none_or(|request| request.number != number) {
        let detail = format!("request {number} was made, and another request has replaced it");
        return Err(Problem::new(
            StatusCode::CONFLICT,
            "/problems/stack-request-replaced",
            "Request replaced",
            detail,
        ));
    }
    Ok((StatusCode::ACCEPTED, Json(view)))
}

/// Requests the stacks of tasks.
pub(super) fn request_stacks(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    reason: CommandReason,
    tasks: Option<TaskRanges>,
) -> Result<u64, Problem> {
    Ok(site.operations.ask_for_stacks(&site.stacks, (job.id, &job.name), author, reason, tasks)?)
}

page_query! {
    /// The query parameters of stacks.
    StacksQuery {
        /// Only the stacks of this task.
        task: Option<i32>,
    }
    /// The number of the last group that the client has.
    after: Option<u64>,
    /// The maximum number of groups.
    limit
}

/// The latest request for stacks, and the answers to it
///
/// Equal stacks are one group, with the tasks that have them. Stacks contain names of functions and files, and no values.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/stacks", operation_id = "stacks_show", tag = "stacks",
    params(("job" = String, Path, description = "The job's name"), StacksQuery),
    responses((status = 200, body = StacksView, description = "The tasks that have answered, and a page of the groups")))]
pub(super) async fn show_stacks(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<StacksQuery>,
) -> Result<Json<StacksView>, Problem> {
    let mut view = read_stacks_view(&site, &job, query.task.map(TaskId))?;
    (view.groups, view.next) = paginate(view.groups, query.after, query.limit, |group| group.number);
    Ok(Json(view))
}

/// Returns the latest request with all its groups.
pub(super) fn read_stacks_view(
    site: &AppState,
    job: &JobPath,
    task: Option<TaskId>,
) -> Result<StacksView, Problem> {
    let roster = site.read_job(job, |look| look.task_incarnations())?;
    Ok(site.stacks.view(job.id, &roster, site.engine.clock().now(), task, usize::MAX))
}

/// The query parameters of a helper that waits.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StackWaitQuery {
    /// The task of the helper.
    task: i32,
    /// The last request that the helper has dealt with; 0 for none.
    #[serde(default)]
    after: u64,
    /// The seconds to wait for a request: 30 at most.
    #[serde(default)]
    wait_seconds: u64,
}

/// Wait until the stacks of a task are requested
///
/// For the helper in a program. The answer has the request with the ticket to answer it, or no request after the given time.
/// The server lets a limited number of requests wait; others are answered at once, with the time after which to ask again.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/stacks/requests", operation_id = "stacks_wait", tag = "stacks",
    params(("job" = String, Path, description = "The job's name"), StackWaitQuery),
    responses((status = 200, body = StackWaitView, description = "The request, or none"), (status = 404, description = "There is no such task")))]
pub(super) async fn wait_for_stack_request(
    State(site): State<AppState>,
    job: JobPath,
    source: ClientNetwork,
    QueryParams(query): QueryParams<StackWaitQuery>,
) -> Result<Json<StackWaitView>, Problem> {
    let gone = || Problem::no_such_job(job.name.as_str(), Vec::new());
    let poll = HelperPoll { task: TaskId(query.task), after: query.after };
    let until = Instant::now() + Duration::from_secs(query.wait_seconds).min(WAIT_MAX);
    // Subscribed first, so no request is missed between the poll and the wait.
    let mut latest = site.stacks.subscribe(&site.engine, job.id)?;
    let place = if query.wait_seconds == 0 { None } else { site.stack_waits.reserve(source) };
    let retry = |view, after: Duration| {
        Ok(Json(StackWaitView { retry_ms: u32::try_from(after.as_millis()).unwrap_or(u32::MAX), ..view }))
    };
    let Some((_place, mut stop)) = place else {
        let view = site.stacks.poll(&site.engine, job.id, poll)?;
        return retry(view, site.stacks.poll_pause());
    };
    loop {
        let view = site.stacks.poll(&site.engine, job.id, poll)?;
        if view.request.is_some() {
            return Ok(Json(view));
        }
        tokio::select! {
            changed = latest.changed() => changed.map_err(|_| gone())?,
            () = sleep_until(until) => return Ok(Json(view)),
            // The limiter lives as long as the server.
            _ = stop.wait_for(|stop| *stop) => return retry(view, STOP_PAUSE),
        }
    }
}

/// Send the stacks of a task
///
/// For the helper in a program: the answer to a request that was handed out to it.
#[utoipa::path(post, path = "/api/v1/jobs/{job}/stacks/answers", operation_id = "stacks_answer", tag = "stacks",
    params(("job" = String, Path, description = "The job's name")),
    request_body = NewStackAnswer,
    responses(
        (status = 204, description = "The answer is kept"),
        (status = 404, description = "There is no such task, or this is not the latest request"),
        (status = 409, description = "The task was not asked with this ticket, has answered, or is another process by now"),
        (status = 422, description = "The answer has too many threads or frames"),
        (status = 507, description = "There is no memory for the answer"),
    ))]
pub(super) async fn accept_stack_answer(
    State(site): State<AppState>,
    job: JobPath,
    JsonBody(answer): JsonBody<NewStackAnswer>,
) -> Result<StatusCode, Problem> {
    site.stacks.accept_helper_answer(&site.engine, job.id, answer)?;
    Ok(StatusCode::NO_CONTENT)
}

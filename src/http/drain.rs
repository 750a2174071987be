//! Serves the drain resource of a job: the request and its state.
//!
//! It does not decide the step: the tasks do. Begin at `show` and `request_drain`.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::RequestActor;
use super::extract::{JobPath, JsonBody};
use super::{AppState, Problem};
use crate::coordination::{JobReader, OperatorCommand, PreemptionView, Reason, RunNumber, RunState, TaskId};
use crate::service::ActorContext;

/// The maximum notice: a day, in seconds.
const SECONDS_MAX: u64 = 24 * 60 * 60;

/// A request for a drain.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDrain {
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: Reason,
    /// The seconds until the machines are gone, as the notice says; 0 for now. JAX saves a quarter of an hour
    /// before that time.
    #[serde(default)]
    pub in_seconds: u64,
}

/// The state of a drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainView {
    /// The run that is drained.
    pub run: RunNumber,
    /// The notice, the tasks that have acknowledged it, and the agreed step; `None` without a drain.
    pub preemption: Option<PreemptionView>,
    /// The state of the run: after its end no step will be agreed on.
    #[serde(default = "running")]
    pub state: RunState,
    /// The tasks that the agreement on a step waits for.
    pub waiting_for: Vec<TaskId>,
}

/// The default of `state` in the answer of a server that does not send it.
fn running() -> RunState {
    RunState::Running
}

/// Ask all tasks to agree on a step and save
///
/// The notice is the one that JAX programs wait for (`multihost_utils.reached_preemption_sync_point`). A run can be
/// drained once.
#[utoipa::path(post, path = "/api/v1/jobs/{job}/drain", operation_id = "drain_create", tag = "drain",
    params(("job" = String, Path, description = "The job's name")),
    request_body = NewDrain,
    responses(
        (status = 202, body = DrainView, description = "The notice is given; how it stands"),
        (status = 409, description = "No run is running, or a drain is under way already"),
    ))]
pub(super) async fn create(
    State(site): State<AppState>,
    job: JobPath,
    RequestActor(author): RequestActor,
    JsonBody(new): JsonBody<NewDrain>,
) -> Result<(StatusCode, Json<DrainView>), Problem> {
    Ok((StatusCode::ACCEPTED, Json(request_drain(&site, &job, &author, new)?)))
}

/// Requests a coordinated save.
pub(super) fn request_drain(
    site: &AppState,
    job: &JobPath,
    author: &ActorContext,
    new: NewDrain,
) -> Result<DrainView, Problem> {
    if new.in_seconds > SECONDS_MAX {
        return Err(Problem::unusable(format!("in_seconds can be {SECONDS_MAX} (a day) at most")));
    }
    let notice = Duration::from_secs(new.in_seconds);
    let at = (new.in_seconds > 0).then(|| site.engine.clock().now().after(notice));
    let operation = job.operation(author, new.reason, OperatorCommand::Drain { at });
    site.operations.act(operation, |after, _| after.map(view_of))?.ok_or_else(Problem::internal)
}

/// The state of the present run's drain
#[utoipa::path(get, path = "/api/v1/jobs/{job}/drain", operation_id = "drain_show", tag = "drain",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, body = DrainView, description = "Who has acknowledged, and the step that was agreed")))]
pub(super) async fn show(State(site): State<AppState>, job: JobPath) -> Result<Json<DrainView>, Problem> {
    view(&site, &job).map(Json)
}

pub(super) fn view(site: &AppState, job: &JobPath) -> Result<DrainView, Problem> {
    site.read_job(job, view_of)
}

fn view_of(job: JobReader<'_>) -> DrainView {
    let preemption = job.preemption();
    let waiting_for = preemption.as_ref().map_or_else(Vec::new, |it| it.awaited.clone());
    DrainView { run: job.live().run, state: job.summary().state, waiting_for, preemption }
}

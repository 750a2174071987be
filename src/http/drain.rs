//! Serves the drain of a job: requests it, and shows its state.
//!
//! The tasks decide at which step they save. Begin at `show_drain` and `request_drain`.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};

use super::api::{DrainView, NewDrain};
use super::extractors::{JobPath, JsonBody};
use super::{AppState, Problem};
use crate::coordination::{JobReader, OperatorCommand};
use crate::service::ActorContext;

/// The maximum notice: a day, in seconds.
const SECONDS_MAX: u64 = 24 * 60 * 60;

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
pub(super) async fn create_drain(
    State(site): State<AppState>,
    job: JobPath,
    Extension(author): Extension<ActorContext>,
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
        return Err(Problem::invalid_request(format!("in_seconds can be {SECONDS_MAX} (a day) at most")));
    }
    let notice = Duration::from_secs(new.in_seconds);
    let at = (new.in_seconds > 0).then(|| site.engine.clock().now().after(notice));
    let job_operation = job.job_operation(author, new.reason, OperatorCommand::Drain { at });
    site.operations
        .perform_audited(job_operation, |after, _| after.map(drain_view_of))?
        .ok_or_else(Problem::internal_error)
}

/// The state of the present run's drain
#[utoipa::path(get, path = "/api/v1/jobs/{job}/drain", operation_id = "drain_show", tag = "drain",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, body = DrainView, description = "Who has acknowledged, and the step that was agreed")))]
pub(super) async fn show_drain(
    State(site): State<AppState>,
    job: JobPath,
) -> Result<Json<DrainView>, Problem> {
    read_drain_view(&site, &job).map(Json)
}

pub(super) fn read_drain_view(site: &AppState, job: &JobPath) -> Result<DrainView, Problem> {
    site.read_job(job, drain_view_of)
}

fn drain_view_of(job: JobReader<'_>) -> DrainView {
    let preemption = job.preemption();
    let waiting_for = preemption.as_ref().map_or_else(Vec::new, |it| it.awaited.clone());
    DrainView { run: job.live_tasks().run, state: job.summary().state, waiting_for, preemption }
}

//! The REST resource of what a job did over the last ten minutes.
//!
//! `service/activity.rs` keeps the steps. The overview draws the same numbers (`pages/sparkline.rs`). Begin at
//! `show_activity`.

use axum::Json;
use axum::extract::State;

use super::extractors::JobPath;
use super::{AppState, Problem};
use crate::coordination::{JobId, TaskIncarnations, Timestamp};
use crate::service::JobActivity;

/// The activity of a job over the last ten minutes, in steps of ten seconds
///
/// Live tasks, barriers and their skew, and the rate of transfers. Only finished steps are included. The overview draws
/// these numbers.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/activity", operation_id = "activity", tag = "jobs",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, body = JobActivity, description = "The steps, the oldest first")))]
pub(super) async fn show_activity(
    State(site): State<AppState>,
    job: JobPath,
) -> Result<Json<JobActivity>, Problem> {
    let roster = site.read_job(&job, |look| look.task_incarnations())?;
    Ok(Json(recent_activity(&site, job.id, &roster, site.engine.clock().now())))
}

/// Returns what a job did over the last ten minutes.
pub(super) fn recent_activity(
    site: &AppState,
    job: JobId,
    roster: &TaskIncarnations,
    now: Timestamp,
) -> JobActivity {
    site.activity.recent_activity(job, now, &site.transfers, roster)
}

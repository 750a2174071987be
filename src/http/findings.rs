//! Serves open and closed findings of one job and of all jobs.
//!
//! `service::findings` detects and stores the findings. Begin at `list_job_findings`.

use axum::Json;
use axum::extract::State;

use super::AppState;
use super::api::{FindingsPage, JobFindings};
use super::extractors::JobPath;
use crate::coordination::JobId;
use crate::service::findings;

/// The open and closed findings of a job
#[utoipa::path(get, path = "/api/v1/jobs/{job}/findings", operation_id = "job_findings", tag = "findings",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, description = "The findings of the job", body = JobFindings), (status = 404, description = "There is none")))]
pub(super) async fn list_job_findings(State(site): State<AppState>, job: JobPath) -> Json<JobFindings> {
    let (open, closed) =
        findings::open_and_closed_findings(&site.engine, &site.worker_reports(), &site.findings, job.id);
    Json(JobFindings { open, closed, looked_at: site.findings.last_checked_at() })
}

/// The open findings of every job
#[utoipa::path(get, path = "/api/v1/findings", operation_id = "findings_list", tag = "findings",
    responses((status = 200, description = "The open findings of every job", body = FindingsPage)))]
pub(super) async fn list_all_findings(State(site): State<AppState>) -> Json<FindingsPage> {
    let jobs: Vec<JobId> = site.engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
    let of =
        |job| findings::open_and_closed_findings(&site.engine, &site.worker_reports(), &site.findings, job).0;
    let findings = jobs.into_iter().flat_map(of).collect();
    Json(FindingsPage { findings, looked_at: site.findings.last_checked_at() })
}

//! Serves open and closed findings of one job and of all jobs.
//!
//! It does not detect anything (`findings`). Begin at `of_job`.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::AppState;
use super::extract::JobPath;
use crate::coordination::{JobId, Timestamp};
use crate::findings::{self, Finding};

/// The findings of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobFindings {
    /// The findings that hold now, by severity.
    pub open: Vec<Finding>,
    /// The closed findings, the latest first: 64 at most.
    pub closed: Vec<Finding>,
    /// The time of the last check.
    pub looked_at: Timestamp,
}

/// The open findings of every job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FindingsPage {
    /// The findings by job, by severity.
    pub findings: Vec<Finding>,
    /// The time of the last check.
    pub looked_at: Timestamp,
}

/// The open and closed findings of a job
#[utoipa::path(get, path = "/api/v1/jobs/{job}/findings", operation_id = "job_findings", tag = "findings",
    params(("job" = String, Path, description = "The job's name")),
    responses((status = 200, description = "The findings of the job", body = JobFindings), (status = 404, description = "There is none")))]
pub(super) async fn of_job(State(site): State<AppState>, job: JobPath) -> Json<JobFindings> {
    let (open, closed) = findings::present(&site.engine, &site.transfers, &site.findings, job.id);
    Json(JobFindings { open, closed, looked_at: site.findings.looked_at() })
}

/// The open findings of every job
#[utoipa::path(get, path = "/api/v1/findings", operation_id = "findings_list", tag = "findings",
    responses((status = 200, description = "The open findings of every job", body = FindingsPage)))]
pub(super) async fn all(State(site): State<AppState>) -> Json<FindingsPage> {
    let jobs: Vec<JobId> = site.engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
    let of = |job| findings::present(&site.engine, &site.transfers, &site.findings, job).0;
    let findings = jobs.into_iter().flat_map(of).collect();
    Json(FindingsPage { findings, looked_at: site.findings.looked_at() })
}

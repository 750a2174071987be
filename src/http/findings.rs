//! What was found in what is measured.

use axum::Json;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};

use super::jobs::find;
use super::{Problem, Site};
use crate::coordination::{JobId, Timestamp};
use crate::findings::Finding;

/// The findings of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobFindings {
    /// Those that are open, what matters most first.
    pub open: Vec<Finding>,
    /// Those that were found and are found no more, the latest first: 64 at most.
    pub closed: Vec<Finding>,
    /// When they were last looked for.
    pub looked_at: Timestamp,
}

/// The open findings of every job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FindingsPage {
    /// By job, what matters most first.
    pub findings: Vec<Finding>,
    /// When they were last looked for.
    pub looked_at: Timestamp,
}

/// `GET /api/v1/jobs/{job}/findings`
pub(super) async fn of_job(
    State(site): State<Site>,
    Path(name): Path<String>,
) -> Result<Json<JobFindings>, Problem> {
    let job = site.engine.look(|core, _| find(core, &name))?;
    let (open, closed) = site.findings.of(job);
    Ok(Json(JobFindings { open, closed, looked_at: site.findings.looked_at() }))
}

/// `GET /api/v1/findings`
pub(super) async fn all(State(site): State<Site>) -> Json<FindingsPage> {
    let jobs: Vec<JobId> = site.engine.look(|core, _| core.jobs().map(|(job, _)| job).collect());
    let findings = jobs.into_iter().flat_map(|job| site.findings.of(job).0).collect();
    Json(FindingsPage { findings, looked_at: site.findings.looked_at() })
}

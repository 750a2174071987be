//! Serves the lines of the audit log.
//!
//! It holds none: `service::audit` does. Begin at `list`.

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

use super::extract::QueryParams;
use super::pagination::{deserialize_limit, limit};
use super::{AppState, Problem};
use crate::service::{AuditLine, AuditOutcome, AuditPage};

/// The query parameters of the audit.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditQuery {
    /// The number of the last line that the client has.
    #[serde(default)]
    after: u64,
    /// The maximum number of lines.
    #[serde(default, deserialize_with = "deserialize_limit")]
    #[param(minimum = 1)]
    limit: Option<usize>,
    /// Only actions on this job.
    job: Option<String>,
    /// Only `done`, or only `refused`.
    #[param(value_type = Option<String>)]
    outcome: Option<AuditOutcome>,
}

/// The audit: every change, done or refused, with actor, reason, address and outcome
#[utoipa::path(get, path = "/api/v1/audit", operation_id = "audit_list", tag = "audit", params(AuditQuery),
    responses((status = 200, body = AuditPage, description = "A page of the audit, oldest first")))]
pub(super) async fn list(
    State(site): State<AppState>,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<Json<AuditPage>, Problem> {
    let wanted = |line: &AuditLine| {
        let of_job = |job: &String| line.job.as_ref().is_some_and(|named| named.as_str() == job);
        query.job.as_ref().is_none_or(of_job) && query.outcome.is_none_or(|outcome| outcome == line.outcome)
    };
    Ok(Json(site.operations.audit.page(query.after, limit(query.limit), wanted)))
}

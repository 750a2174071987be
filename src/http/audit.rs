//! Serves the lines of the audit log.
//!
//! `service::audit` stores the lines. Begin at `list_audit_lines`.

use axum::Json;
use axum::extract::State;

use super::extractors::QueryParams;
use super::pagination::{page_limit, page_query};
use super::{AppState, Problem};
use crate::service::{AuditLine, AuditOutcome, AuditPage};

page_query! {
    /// The query parameters of the audit.
    AuditQuery {
        /// Only actions on this job.
        job: Option<String>,
        /// Only `done`, or only `refused`.
        #[param(value_type = Option<String>)]
        outcome: Option<AuditOutcome>,
    }
    /// The number of the last line that the client has.
    after: u64,
    /// The maximum number of lines.
    limit
}

/// The audit: every change, done or refused, with actor, reason, address and outcome
#[utoipa::path(get, path = "/api/v1/audit", operation_id = "audit_list", tag = "audit", params(AuditQuery),
    responses((status = 200, body = AuditPage, description = "A page of the audit, oldest first")))]
pub(super) async fn list_audit_lines(
    State(site): State<AppState>,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<Json<AuditPage>, Problem> {
    let wanted = |line: &AuditLine| {
        let of_job = |job: &String| line.job.as_ref().is_some_and(|named| named.as_str() == job);
        query.job.as_ref().is_none_or(of_job) && query.outcome.is_none_or(|outcome| outcome == line.outcome)
    };
    Ok(Json(site.operations.audit.page_of_lines_after(query.after, page_limit(query.limit), wanted)))
}

//! Renders `GET /audit`: the last audit lines with their filters, and the failed TLS handshakes.
//!
//! The lines are in memory. This module does not read the audit file. Begin at `show_audit_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::live_page::{AuditPageQuery, LivePage};
use super::times;
use crate::coordination::JobName;
use crate::http::extractors::QueryParams;
use crate::http::{AppState, Problem};
use crate::service::{AuditLine, AuditOutcome};
use crate::tls::FailedHandshake;

/// The maximum number of lines on the page.
const LINES: usize = 300;

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPageTemplate {
    page: PageFrame,
    jobs: Vec<JobName>,
    query: AuditPageQuery,
}

#[derive(Template)]
#[template(path = "parts/audit.html")]
struct AuditLinesFragment<'a> {
    lines: Vec<AuditLine>,
    query: &'a AuditPageQuery,
    full: bool,
}

#[derive(Template)]
#[template(path = "parts/failed-handshakes.html")]
struct FailedHandshakesFragment {
    handshakes: Vec<FailedHandshake>,
}

impl AuditLinesFragment<'_> {
    fn is_done(&self, line: &AuditLine) -> bool {
        line.outcome == AuditOutcome::Done
    }

    /// Returns the action of a line in the words of operators.
    fn action_text<'b>(&self, line: &'b AuditLine) -> &'b str {
        match line.act.as_str() {
            "readmit" => "readmit",
            "drain" => "drain",
            "change-settings" => "change settings to",
            "create-job" => "create",
            "delete-job" => "delete",
            "put-key" => "write",
            "delete-key" => "delete",
            "login" => "log in at",
            // A request that was refused before its action was known has the path as its subject.
            "look" => "see",
            other => other,
        }
    }
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(site: &AppState, query: &AuditPageQuery) -> Result<Vec<Fragment>, Problem> {
    let lines = site.operations.audit.latest_lines(LINES, |line| {
        let outcome = match query.outcome.as_str() {
            "done" => line.outcome == AuditOutcome::Done,
            "refused" => line.outcome == AuditOutcome::Refused,
            _ => true,
        };
        let of_job = |job: &JobName| job.as_str() == query.job;
        outcome && (query.job.is_empty() || line.job.as_ref().is_some_and(of_job))
    });
    let full = lines.len() == LINES;
    let handshakes = site.handshakes.to_view().handshakes;
    Ok(vec![
        Fragment::new("audit", &AuditLinesFragment { lines, query, full })?,
        Fragment::new("handshakes", &FailedHandshakesFragment { handshakes })?,
    ])
}

pub(super) async fn show_audit_page(
    State(site): State<AppState>,
    user: PageUser,
    QueryParams(which): QueryParams<AuditPageQuery>,
) -> Result<Response, Problem> {
    let (jobs, now) =
        site.engine.read(|core, now| (core.jobs().map(|(_, name)| name.clone()).collect(), now));
    let live = format!("/live?{}", LivePage::Audit(which.clone()).to_query());
    let page = PageFrame::new(user, NavEntry::Audit, "Audit", now)
        .with_live_updates(live, render_fragments(&site, &which)?);
    render_page(&AuditPageTemplate { page, jobs, query: which }, now)
}

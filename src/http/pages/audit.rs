//! Renders `GET /audit` with its filters.
//!
//! It does not read the audit file: the last lines are in memory. Begin at `show`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::links::encoded;
use super::part::Part;
use super::shell::{Guest, Page, Place, answer};
use super::times;
use crate::coordination::JobName;
use crate::http::extract::Params;
use crate::http::{AuditLine, AuditOutcome, Problem, Site};
use crate::tls::FailedHandshake;

/// How many lines are shown.
const LINES: usize = 300;

/// Which lines are wanted.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    pub job: String,
    pub outcome: String,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    page: Page,
    jobs: Vec<JobName>,
    which: Which,
}

#[derive(Template)]
#[template(path = "parts/audit.html")]
struct Lines<'a> {
    lines: Vec<AuditLine>,
    which: &'a Which,
    full: bool,
}

#[derive(Template)]
#[template(path = "parts/failed-handshakes.html")]
struct Handshakes {
    handshakes: Vec<FailedHandshake>,
}

impl Lines<'_> {
    fn done(&self, line: &AuditLine) -> bool {
        line.outcome == AuditOutcome::Done
    }

    /// What was asked for, as operators say it.
    fn asked<'b>(&self, line: &'b AuditLine) -> &'b str {
        match line.act.as_str() {
            "readmit" => "readmit",
            "drain" => "drain",
            "change-settings" => "change settings to",
            "create-job" => "create",
            "delete-job" => "delete",
            "put-key" => "write",
            "delete-key" => "delete",
            "login" => "log in at",
            // What was refused before it was known what it would have been has the path of its request.
            "look" => "see",
            other => other,
        }
    }
}

/// The parts of the page.
pub(super) fn parts(site: &Site, which: &Which) -> Result<Vec<Part>, Problem> {
    let lines = site.audit.latest(LINES, |line| {
        let outcome = match which.outcome.as_str() {
            "done" => line.outcome == AuditOutcome::Done,
            "refused" => line.outcome == AuditOutcome::Refused,
            _ => true,
        };
        let of_job = |job: &JobName| job.as_str() == which.job;
        outcome && (which.job.is_empty() || line.job.as_ref().is_some_and(of_job))
    });
    let full = lines.len() == LINES;
    let handshakes = site.handshakes.page().handshakes;
    Ok(vec![
        Part::new("audit", &Lines { lines, which, full })?,
        Part::new("handshakes", &Handshakes { handshakes })?,
    ])
}

pub(super) async fn show(
    State(site): State<Site>,
    guest: Guest,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let (jobs, now) =
        site.engine.look(|core, now| (core.jobs().map(|(_, name)| name.clone()).collect(), now));
    let live = format!("/live?page=audit&job={}&outcome={}", encoded(&which.job), encoded(&which.outcome));
    let page = Page::new(guest, Place::Audit, "Audit", now).following(live, parts(&site, &which)?);
    answer(&AuditPage { page, jobs, which }, now)
}

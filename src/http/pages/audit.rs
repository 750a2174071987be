//! `GET /audit`: who did what, why, from where, and what came of it.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::shell::{Guest, Page, Place, answer};
use super::times;
use crate::coordination::JobName;
use crate::http::extract::Params;
use crate::http::{AuditLine, AuditOutcome, Problem, Site};
use crate::tls::FailedHandshake;

/// How many lines are shown.
const LINES: usize = 300;

/// Which lines are wanted.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    job: String,
    outcome: String,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    page: Page,
    lines: Vec<AuditLine>,
    jobs: Vec<JobName>,
    which: Which,
    full: bool,
    handshakes: Vec<FailedHandshake>,
}

impl AuditPage {
    fn done(&self, line: &AuditLine) -> bool {
        line.outcome == AuditOutcome::Done
    }
}

pub(super) async fn show(
    State(site): State<Site>,
    guest: Guest,
    Params(which): Params<Which>,
) -> Result<Response, Problem> {
    let lines = site.audit.latest(LINES, |line| {
        let outcome = match which.outcome.as_str() {
            "done" => line.outcome == AuditOutcome::Done,
            "refused" => line.outcome == AuditOutcome::Refused,
            _ => true,
        };
        let of_job = |job: &JobName| job.as_str() == which.job;
        outcome && (which.job.is_empty() || line.job.as_ref().is_some_and(of_job))
    });
    let (jobs, now) =
        site.engine.look(|core, now| (core.jobs().map(|(_, name)| name.clone()).collect(), now));
    let full = lines.len() == LINES;
    let page = Page::new(guest, Place::Audit, "Audit", now);
    let handshakes = site.handshakes.page().handshakes;
    answer(&AuditPage { page, lines, jobs, which, full, handshakes }, now)
}

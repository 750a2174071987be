//! Renders `GET /`: the first 500 jobs with their issues.
//!
//! Each page load takes a new snapshot of the jobs. For live updates, a hub takes the snapshots (`live.rs`). Begin at
//! `FleetSnapshot`, then `show_overview_page`.

use std::collections::BTreeSet;
use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::{Redirect, Response};

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::issues::{self, Issue};
use super::job::{BarrierInProgressRow, barrier_in_progress_rows};
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use super::{amount, status, times};
use crate::coordination::{JobId, JobName, RunNumber, RunState, Timestamp};
use crate::http::{AppState, Problem};
use crate::tls::FailedHandshake;

/// The maximum number of jobs with details; the rest are counted.
const JOBS_SHOWN: usize = 500;

/// A row for one job.
struct JobRow {
    name: JobName,
    run: RunNumber,
    state: RunState,
    since: Timestamp,
    live: usize,
    total: usize,
    counts: Vec<(TaskStatus, usize)>,
    waits: Option<(String, usize, usize, Timestamp, String)>,
    barriers: usize,
    issues: usize,
    worst: &'static str,
}

/// The snapshots of all jobs.
pub(super) struct FleetSnapshot {
    lines: Vec<JobRow>,
    issues: Vec<Issue>,
    handshakes: Vec<FailedHandshake>,
    /// The text about the last job if there is no issue.
    calm: String,
    more: usize,
    /// The server requires a token.
    tokens: bool,
    pub now: Timestamp,
}

/// Older failed handshakes are not shown.
const LATELY: Duration = Duration::from_secs(10 * 60);
/// The maximum number of failed handshakes on the page.
const HANDSHAKES: usize = 3;

impl FleetSnapshot {
    /// Takes a snapshot of every job.
    pub fn capture(site: &AppState) -> Self {
        let (jobs, now): (Vec<JobId>, Timestamp) =
            site.engine.read(|core, now| (core.jobs().map(|(job, _)| job).collect(), now));
        let mut handshakes = site.handshakes.to_view().handshakes;
        handshakes.retain(|failed| now.since(failed.last) < LATELY);
        handshakes.truncate(HANDSHAKES);
        let more = jobs.len().saturating_sub(JOBS_SHOWN);
        let tokens = !site.guard.has_no_tokens();
        let mut survey = Self {
            lines: Vec::new(),
            issues: Vec::new(),
            handshakes,
            calm: String::new(),
            more,
            tokens,
            now,
        };
        for job in jobs.into_iter().take(JOBS_SHOWN) {
            // The timeline is only on the page of the job.
            if let Some(snapshot) = JobSnapshot::capture(site, job) {
                survey.add_job(&snapshot);
            }
        }
        survey.sorted_by_urgency()
    }

    /// Sorts the jobs and the issues by urgency.
    pub fn sorted_by_urgency(mut self) -> Self {
        self.lines.sort_by(|a, b| (b.worst == "bad", &a.name).cmp(&(a.worst == "bad", &b.name)));
        self.issues.sort_by_key(issues::urgency_key);
        self
    }

    /// Returns a snapshot without jobs.
    #[cfg(test)]
    pub fn empty(now: Timestamp) -> Self {
        let (lines, needs, handshakes, calm) = (Vec::new(), Vec::new(), Vec::new(), String::new());
        Self { lines, issues: needs, handshakes, calm, more: 0, tokens: false, now }
    }

    pub fn add_job(&mut self, snapshot: &JobSnapshot) {
        let needs = issues::job_issues(snapshot);
        self.calm = issues::no_issue_text(snapshot);
        let run = &snapshot.view.run;
        let first = barrier_in_progress_rows(snapshot, &BTreeSet::new()).into_iter().next();
        let waits = first.map(|it: BarrierInProgressRow<'_>| {
            let who = match &it.barrier.missing[..] {
                [] => String::new(),
                [one] => format!("task {one}"),
                many if many.len() <= 4 => format!("tasks {}", it.numbers),
                many => format!("{} tasks", many.len()),
            };
            (it.name.clone(), it.barrier.arrived, it.barrier.members, it.barrier.since, who)
        });
        let tones = ["bad", "warn", "info"];
        let worst = tones.into_iter().find(|tone| needs.iter().any(|need| need.tone == *tone));
        self.lines.push(JobRow {
            name: snapshot.view.name.clone(),
            run: run.number,
            state: run.state,
            since: run.ended_at.or(run.started_at).unwrap_or(run.opened_at),
            live: run.live,
            total: snapshot.task_count(),
            counts: snapshot.status_counts(),
            waits,
            barriers: run.barriers.len(),
            issues: needs.len(),
            worst: worst.unwrap_or(""),
        });
        self.issues.extend(needs);
    }
}

#[derive(Template)]
#[template(path = "parts/jobs.html")]
struct JobsFragment<'a> {
    lines: &'a [JobRow],
    more: usize,
    tokens: bool,
}

#[derive(Template)]
#[template(path = "parts/handshakes.html")]
struct FailedHandshakesFragment<'a> {
    handshakes: &'a [FailedHandshake],
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(survey: &FleetSnapshot) -> Result<Vec<Fragment>, Problem> {
    let calm = match &survey.lines[..] {
        [] => "No job is declared yet.".to_owned(),
        [_] => survey.calm.clone(),
        many => format!("No action needed in {} jobs", many.len()),
    };
    let jobs = Fragment::new(
        "jobs",
        &JobsFragment { lines: &survey.lines, more: survey.more, tokens: survey.tokens },
    )?;
    let handshakes =
        Fragment::new("handshakes", &FailedHandshakesFragment { handshakes: &survey.handshakes })?;
    Ok(vec![issues::render_issue_list_fragment(&survey.issues, true, calm)?, handshakes, jobs])
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPageTemplate {
    page: PageFrame,
}

pub(super) async fn show_overview_page(
    State(site): State<AppState>,
    user: PageUser,
) -> Result<Response, Problem> {
    let survey = FleetSnapshot::capture(&site);
    let page = PageFrame::new(user, NavEntry::Overview, "Overview", survey.now)
        .with_live_updates(format!("/live?{}", LivePage::Overview.to_query()), render_fragments(&survey)?);
    render_page(&OverviewPageTemplate { page }, survey.now)
}

/// Serves `GET /jobs`.
pub(super) async fn redirect_to_overview() -> Redirect {
    Redirect::permanent("/")
}

//! Renders `GET /`: the first 500 jobs with their issues. While no task has come to the server, the page shows how to
//! point a program at it.
//!
//! Each page load takes a new snapshot of the jobs. For live updates, a hub takes the snapshots (`live.rs`). Begin at
//! `FleetSnapshot`, then `show_overview_page`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
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
use super::sparkline::Sparkline;
use super::status::TaskStatus;
use super::{amount, status, times};
use crate::coordination::{JobId, JobName, RunNumber, RunState, Timestamp};
use crate::engine::{DigestComparison, Durability};
use crate::http::activity::recent_activity;
use crate::http::allowed_hosts::host_without_port;
use crate::http::api::JournalView;
use crate::http::api::{ServerInfo, machine_name};
use crate::http::{AppState, Problem};
use crate::service::JobActivity;
use crate::tls::FailedHandshake;

/// The maximum number of jobs with details; the rest are counted.
const JOBS_SHOWN: usize = 500;

/// A row for one job.
struct JobRow {
    name: JobName,
    run: RunNumber,
    /// The run before, with which the present one can be compared.
    previous_run: Option<(RunNumber, RunState)>,
    state: RunState,
    /// The tone of that state.
    tone: &'static str,
    since: Timestamp,
    live: usize,
    total: usize,
    counts: Vec<(TaskStatus, usize)>,
    waits: Option<(String, usize, usize, Timestamp, String)>,
    barriers: usize,
    issues: usize,
    worst: &'static str,
    sparkline: Sparkline,
}

/// The tones of issues, the most urgent first.
const TONES: [&str; 3] = ["bad", "warn", "info"];

/// The snapshots of all jobs.
pub(super) struct FleetSnapshot {
    lines: Vec<JobRow>,
    issues: Vec<Issue>,
    handshakes: Vec<FailedHandshake>,
    journal: JournalView,
    /// The text about the last job if there is no issue.
    calm: String,
    more: usize,
    /// The server requires a token.
    tokens: bool,
    /// A task has registered in some job.
    has_tasks: bool,
    /// The addresses of the server.
    about: Option<ServerInfo>,
    pub now: Timestamp,
}

/// Older failed handshakes are not shown.
const LATELY: Duration = Duration::from_secs(10 * 60);
/// The maximum number of failed handshakes on the page.
const HANDSHAKES: usize = 3;
/// The maximum number of jobs for which the first steps are shown.
const STARTS: usize = 3;

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
            journal: JournalView::new(site.engine.journal_state().as_ref()),
            calm: String::new(),
            more,
            tokens,
            has_tasks: false,
            about: None,
            now,
        };
        for job in jobs.into_iter().take(JOBS_SHOWN) {
            // The timeline is only on the page of the job.
            if let Some(snapshot) = JobSnapshot::capture(site, job) {
                survey.add_job(&snapshot, &recent_activity(site, job, &snapshot.roster, now));
            }
        }
        if !survey.has_tasks {
            let about = site.engine.read(|core, _| site.about.with_jobs(core.jobs().map(|(_, name)| name)));
            survey.about = Some(about);
        }
        survey.sorted_by_urgency()
    }

    /// Sorts the jobs and the issues by urgency.
    pub fn sorted_by_urgency(mut self) -> Self {
        let rank = |line: &JobRow| TONES.iter().position(|tone| line.worst == *tone).unwrap_or(TONES.len());
        self.lines.sort_by(|a, b| (rank(a), &a.name).cmp(&(rank(b), &b.name)));
        self.issues.sort_by_key(issues::urgency_key);
        self
    }

    /// Returns a snapshot without jobs.
    #[cfg(test)]
    pub fn empty(now: Timestamp) -> Self {
        let (lines, needs, handshakes, calm) = (Vec::new(), Vec::new(), Vec::new(), String::new());
        let (tokens, has_tasks, about) = (false, false, None);
        let journal = JournalView::new(None);
        Self { lines, issues: needs, handshakes, journal, calm, more: 0, tokens, has_tasks, about, now }
    }

    pub fn add_job(&mut self, snapshot: &JobSnapshot, activity: &JobActivity) {
        let needs = issues::job_issues(snapshot);
        self.calm = issues::no_issue_text(snapshot);
        let run = &snapshot.view.run;
        // A barrier that is filling is not shown: between two updates it is there or not, by chance.
        let waits_long = |it: &BarrierInProgressRow<'_>| !it.has_recent_arrival;
        let mut rows = barrier_in_progress_rows(snapshot, &BTreeSet::new());
        rows.retain(waits_long);
        let barriers = rows.len();
        let first = rows.into_iter().next();
        let waits = first.map(|it: BarrierInProgressRow<'_>| {
            let who = match &it.barrier.missing[..] {
                [] => String::new(),
                [one] => format!("task {one}"),
                many if many.len() <= 4 => format!("tasks {}", it.numbers),
                many => format!("{} tasks", many.len()),
            };
            (it.name.clone(), it.barrier.arrived, it.barrier.members, it.barrier.since, who)
        });
        self.has_tasks |=
            !snapshot.view.history.is_empty() || run.tasks.iter().any(|task| !task.lives.is_empty());
        let worst = TONES.into_iter().find(|tone| needs.iter().any(|need| need.tone == *tone));
        self.lines.push(JobRow {
            name: snapshot.view.name.clone(),
            run: run.number,
            previous_run: snapshot
                .previous_run()
                .map(|previous| (previous.number, RunState::ended(previous.outcome))),
            state: run.state,
            tone: status::present_run_tone(run),
            since: run.ended_at.or(run.started_at).unwrap_or(run.opened_at),
            live: run.live,
            total: snapshot.task_count(),
            counts: snapshot.status_counts(),
            waits,
            barriers,
            issues: needs.len(),
            worst: worst.unwrap_or(""),
            sparkline: Sparkline::of_activity(activity),
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

#[derive(Template)]
#[template(path = "parts/journal.html")]
struct JournalFragment<'a> {
    journal: &'a JournalView,
}

/// How to point a program at a job.
struct FirstSteps<'a> {
    job: &'a JobName,
    tasks: usize,
    /// The address that its tasks dial.
    address: String,
}

#[derive(Template)]
#[template(path = "parts/start.html")]
struct FirstStepsFragment<'a> {
    starts: Vec<FirstSteps<'a>>,
    /// The address leads to the server only from its own machine.
    is_local: bool,
    /// The server listens on all addresses, so other hosts reach it by its name.
    machine: Option<String>,
}

/// Returns how to point a program at this server, as the reader reached it under `host`; empty as soon as a task has
/// come.
fn render_first_steps_fragment(survey: &FleetSnapshot, host: Option<&str>) -> Result<Fragment, Problem> {
    let nothing = FirstStepsFragment { starts: Vec::new(), is_local: false, machine: None };
    let Some(about) = survey.about.as_ref().filter(|_| !survey.has_tasks) else {
        return Fragment::new("start", &nothing);
    };
    let name = host.and_then(host_without_port);
    // An IPv6 address needs brackets before a port.
    let bracketed = name.filter(|name| name.contains(':')).map(|name| format!("[{name}]"));
    let reached = bracketed.as_deref().or(name);
    let starts = survey.lines.iter().take(STARTS).filter_map(|line| {
        let address = about.coordinator_address(&line.name, reached)?;
        Some(FirstSteps { job: &line.name, tasks: line.total, address })
    });
    let is_loopback = |name: &str| {
        name == "localhost"
            || name.ends_with(".localhost")
            || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    let ip = about.grpc.first().map(|listener| listener.address.ip());
    let is_everywhere = ip.is_some_and(|ip| ip.is_unspecified());
    let machine = (is_everywhere && name.is_none_or(is_loopback)).then(machine_name);
    let is_local = ip.is_some_and(|ip| ip.is_loopback());
    Fragment::new("start", &FirstStepsFragment { starts: starts.collect(), is_local, machine })
}

/// Returns the fragments of the page for a reader who reached the server under `host`. All but the first steps are
/// those of [`render_fragments`].
pub(super) fn render_fragments_for_host(
    shared: &Arc<Vec<Fragment>>,
    survey: &FleetSnapshot,
    host: Option<&str>,
) -> Result<Arc<Vec<Fragment>>, Problem> {
    if survey.has_tasks {
        return Ok(Arc::clone(shared));
    }
    let start = render_first_steps_fragment(survey, host)?;
    let others = shared.iter().filter(|part| part.id != start.id).cloned();
    Ok(Arc::new(others.chain([start.clone()]).collect()))
}

/// Returns the fragments of the page that all readers share.
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
    let needs = issues::render_issue_list_fragment(&survey.issues, true, calm)?;
    let journal = Fragment::new("journal", &JournalFragment { journal: &survey.journal })?;
    Ok(vec![needs, handshakes, render_first_steps_fragment(survey, None)?, jobs, journal])
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
    let shared = Arc::new(render_fragments(&survey)?);
    let parts = render_fragments_for_host(&shared, &survey, user.host.as_deref())?;
    drop(shared);
    let live = format!("/live?{}", LivePage::Overview.to_query());
    let page = PageFrame::new(user, NavEntry::Overview, "Overview", survey.now)
        .with_live_updates(live, Arc::unwrap_or_clone(parts));
    render_page(&OverviewPageTemplate { page }, survey.now)
}

/// Serves `GET /jobs`.
pub(super) async fn redirect_to_overview() -> Redirect {
    Redirect::permanent("/")
}

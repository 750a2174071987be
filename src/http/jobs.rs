//! Jobs and what happened in them.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use serde::{Deserialize, Serialize};

use super::{Problem, Site};
use crate::coordination::{
    Change, Coordinator, FirstCause, JobId, JobName, JobView, RunNumber, RunState, Timestamp,
};

/// How many events a page holds at most.
const EVENTS_PAGE_MAX: usize = 1000;

/// A job in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSummary {
    /// Its name.
    pub name: JobName,
    /// How many tasks it has.
    pub tasks: u32,
    /// Its tasks may fail and come back.
    pub recoverable: bool,
    /// Its present run.
    pub run: RunNumber,
    /// Where that stands.
    pub state: RunState,
    /// How many tasks are connected.
    pub live: usize,
    /// The first error of the present run.
    pub first_cause: Option<FirstCause>,
}

impl From<JobView> for JobSummary {
    fn from(view: JobView) -> Self {
        Self {
            name: view.name,
            tasks: view.settings.tasks,
            recoverable: view.settings.recoverable,
            run: view.run.number,
            state: view.run.state,
            live: view.run.live,
            first_cause: view.run.first_cause,
        }
    }
}

/// Every job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobsPage {
    /// The jobs, in the order of their declaration.
    pub jobs: Vec<JobSummary>,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventLine {
    /// Its place among all events of this server, from 1.
    pub number: u64,
    /// When, in microseconds since the Unix epoch.
    pub at: Timestamp,
    /// In which job.
    pub job: JobName,
    /// In which of its runs.
    pub run: RunNumber,
    /// What changed.
    #[serde(flatten)]
    pub what: Change,
    /// Why.
    pub reason: String,
}

/// Some events of a job, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventsPage {
    /// The events.
    pub events: Vec<EventLine>,
    /// What to give as `after` for those that follow.
    pub next: u64,
    /// Events that are no longer kept may be missing before the first.
    pub gap: bool,
}

/// `GET /api/v1/jobs`
pub(super) async fn list(State(site): State<Site>) -> Json<JobsPage> {
    let views: Vec<JobView> = site.engine.look(|core, now| {
        let ids: Vec<JobId> = core.jobs().map(|(job, _)| job).collect();
        ids.into_iter().filter_map(|job| core.job_view(job, now)).collect()
    });
    Json(JobsPage { jobs: views.into_iter().map(JobSummary::from).collect() })
}

/// `GET /api/v1/jobs/{job}`
pub(super) async fn show(
    State(site): State<Site>,
    Path(name): Path<String>,
) -> Result<Json<JobView>, Problem> {
    site.engine.look(|core, now| {
        let job = find(core, &name)?;
        core.job_view(job, now).map(Json).ok_or_else(|| Problem::no_such_job(&name, Vec::new()))
    })
}

/// The query of a page of events.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    /// The number of the last event that the caller has.
    #[serde(default)]
    after: u64,
    /// How many to give at most.
    limit: Option<usize>,
}

/// `GET /api/v1/jobs/{job}/events`
pub(super) async fn events(
    State(site): State<Site>,
    Path(name): Path<String>,
    query: Result<Query<Page>, QueryRejection>,
) -> Result<Json<EventsPage>, Problem> {
    let Query(page) = query.map_err(|error| Problem::bad_query(error.body_text()))?;
    let job = site.engine.look(|core, _| find(core, &name))?;
    let limit = page.limit.unwrap_or(EVENTS_PAGE_MAX).clamp(1, EVENTS_PAGE_MAX);
    let (kept, _) = site.engine.follow(page.after);
    let gap = kept.first().is_some_and(|first| first.number > page.after.saturating_add(1));
    let job_name: JobName = name.parse().unwrap_or_default();
    let mut next = kept.last().map_or(page.after, |last| last.number);
    let mut events = Vec::new();
    for numbered in kept.iter().filter(|numbered| numbered.event.job == job) {
        let event = numbered.event.as_ref().clone();
        events.push(EventLine {
            number: numbered.number,
            at: event.at,
            job: job_name.clone(),
            run: event.run,
            what: event.what,
            reason: event.reason,
        });
        if events.len() == limit {
            next = numbered.number;
            break;
        }
    }
    Ok(Json(EventsPage { events, next, gap }))
}

pub(super) fn find(core: &Coordinator, name: &str) -> Result<JobId, Problem> {
    core.job_named(name)
        .ok_or_else(|| Problem::no_such_job(name, core.jobs().map(|(_, name)| name.clone()).collect()))
}

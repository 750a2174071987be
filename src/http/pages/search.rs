//! Renders `GET /search`: finds jobs, tasks and hosts.
//!
//! There is no index: a search reads each of the first 500 jobs at most once. Begin at `show_search_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::{amount, links};
use crate::coordination::{HostId, HostOfTasks, JobId, JobName, JobObservation, TaskId};
use crate::http::extractors::QueryParams;
use crate::http::{AppState, Problem};

/// The maximum length of a query, in bytes.
const QUERY_BYTES_MAX: usize = 200;
/// The maximum number of jobs that are searched.
const JOBS_SEARCHED: usize = 500;
/// The maximum number of results of each kind.
const SHOWN: usize = 100;

/// The query parameter of the search.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SearchQuery {
    q: String,
}

/// A matching task: its job, its number, and its address.
struct FoundTask {
    job: JobName,
    task: TaskId,
    address: String,
}

/// A matching host, with its tasks in one job.
struct FoundHost {
    job: JobName,
    host: HostId,
    tasks: Vec<TaskId>,
}

/// The results of a search.
#[derive(Default)]
struct SearchResults {
    jobs: Vec<JobName>,
    tasks: Vec<FoundTask>,
    hosts: Vec<FoundHost>,
    /// Some kind has more results than are shown.
    more: bool,
}

impl SearchResults {
    fn result_count(&self) -> usize {
        self.jobs.len() + self.tasks.len() + self.hosts.len()
    }

    /// Adds the matches of a job.
    fn add_job_matches(
        &mut self,
        query: &str,
        name: &JobName,
        seen: impl FnOnce() -> Option<JobObservation>,
    ) {
        if name.as_str().to_lowercase().contains(query) {
            self.jobs.push(name.clone());
        }
        let number = query.strip_prefix("task").unwrap_or(query).trim().parse::<i32>().ok();
        let Some(seen) = seen() else { return };
        if let Some(task) = number.and_then(|number| seen.task(TaskId(number))) {
            let address = task.peer.map(|peer| peer.to_string()).unwrap_or_default();
            self.tasks.push(FoundTask { job: name.clone(), task: task.task, address });
        }
        let is_peer = |task: &TaskId| {
            seen.task(*task).and_then(|task| task.peer).is_some_and(|peer| peer.to_string() == query)
        };
        // A number is that of a task, and no part of an address.
        let is_match = |host: &&HostOfTasks| {
            (number.is_none() && host.name.as_str().to_lowercase().contains(query))
                || (number.is_none()
                    && host.addresses.iter().any(|address| address.to_string().contains(query)))
                || (query.contains(':') && host.tasks.iter().any(is_peer))
        };
        let found = seen.hosts.hosts().iter().filter(is_match).map(|host| FoundHost {
            job: name.clone(),
            host: host.name.clone(),
            tasks: host.tasks.clone(),
        });
        self.hosts.extend(found.take(SHOWN + 1));
    }

    /// Limits the results of each kind.
    fn with_limited_results(mut self) -> Self {
        self.more |= self.jobs.len().max(self.tasks.len()).max(self.hosts.len()) > SHOWN;
        self.jobs.truncate(SHOWN);
        self.tasks.truncate(SHOWN);
        self.hosts.truncate(SHOWN);
        self
    }
}

#[derive(Template)]
#[template(path = "search.html")]
struct SearchPageTemplate {
    page: PageFrame,
    query: String,
    found: SearchResults,
}

/// Serves `GET /search`.
pub(super) async fn show_search_page(
    State(site): State<AppState>,
    user: PageUser,
    QueryParams(asked): QueryParams<SearchQuery>,
) -> Result<Response, Problem> {
    let query = asked.q.trim();
    let query = query.get(..query.floor_char_boundary(QUERY_BYTES_MAX)).unwrap_or_default().to_owned();
    let (jobs, now): (Vec<(JobId, JobName)>, _) =
        site.engine.read(|core, now| (core.jobs().map(|(job, name)| (job, name.clone())).collect(), now));
    let mut found = SearchResults { more: jobs.len() > JOBS_SEARCHED, ..SearchResults::default() };
    if !query.is_empty() {
        let sought = query.to_lowercase();
        for (job, name) in jobs.into_iter().take(JOBS_SEARCHED) {
            found
                .add_job_matches(&sought, &name, || site.engine.read(|core, now| core.observe_job(job, now)));
        }
    }
    let mut page = PageFrame::new(user, NavEntry::Unlisted, "Search", now);
    page.query.clone_from(&query);
    render_page(&SearchPageTemplate { page, query, found: found.with_limited_results() }, now)
}

//! Renders the hosts of a job: a picture with a box for each host, and a table with those that need a look first.
//!
//! `host_map.rs` draws the picture, and `host.rs` is the page of one host. Begin at `show_hosts_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::host_map::{HostMap, MapColouring, PADDING};
use super::job_head::render_head_fragment;
use super::links::JobPages;
use super::live_page::{HostsPageQuery, LivePage};
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use super::{amount, links, times};
use crate::coordination::{HostState, HostView};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun};
use crate::http::{AppState, Problem};
use crate::service::findings::Finding;

/// The maximum number of rows of the table.
const ROWS_MAX: usize = 200;

#[derive(Template)]
#[template(path = "parts/hosts.html")]
struct HostsFragment<'a> {
    job: &'a JobPages,
    /// The number of hosts in each state that some host has.
    counts: Vec<(HostState, usize)>,
    total: usize,
    /// The tasks that are on no known host.
    tasks_without_host: usize,
    map: HostMap<'a>,
}

#[derive(Template)]
#[template(path = "parts/host-table.html")]
struct HostTableFragment<'a> {
    job: &'a JobPages,
    rows: Vec<&'a HostView>,
    found: usize,
    total: usize,
    findings: &'a [Finding],
}

impl HostTableFragment<'_> {
    /// Returns the titles of the findings that are about a host.
    fn findings_about(&self, host: &HostView) -> Vec<&str> {
        let about = self.findings.iter().filter(|finding| finding.hosts.contains(&host.host));
        about.map(|finding| finding.title.as_str()).collect()
    }
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    query: &HostsPageQuery,
) -> Result<Vec<Fragment>, Problem> {
    let (job, all) = (&snapshot.pages, &snapshot.hosts);
    let count = |state| (state, all.iter().filter(|host| host.state == state).count());
    let counts = HostState::ALL.map(count).into_iter().filter(|(_, count)| *count > 0).collect();
    let tasks_on_hosts: usize = all.iter().map(|host| host.tasks.len()).sum();
    let hosts = HostsFragment {
        job,
        counts,
        total: all.len(),
        tasks_without_host: snapshot.task_count().saturating_sub(tasks_on_hosts),
        map: HostMap::new(snapshot, MapColouring::from_query(&query.by)),
    };
    let mut rows: Vec<&HostView> = all
        .iter()
        .filter(|host| query.state.is_empty() || host.state.name() == query.state)
        .filter(|host| query.find.is_empty() || is_found(host, query.find.trim()))
        .collect();
    rows.sort_by_key(|host| host.urgency());
    let found = rows.len();
    rows.truncate(ROWS_MAX);
    let table = HostTableFragment { job, rows, found, total: all.len(), findings: &snapshot.findings };
    Ok(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("hosts", &hosts)?,
        Fragment::new("host-table", &table)?,
    ])
}

/// Returns whether a host has this text in its name or in one of its addresses, or the task with this number.
pub(super) fn is_found(host: &HostView, text: &str) -> bool {
    let by_number = text.parse().is_ok_and(|number: i32| host.tasks.iter().any(|task| task.0 == number));
    by_number
        || host.host.as_str().contains(text)
        || host.addresses.iter().any(|address| address.to_string().contains(text))
}

#[derive(Template)]
#[template(path = "hosts.html")]
struct HostsPageTemplate {
    page: PageFrame,
    job: JobPages,
    query: HostsPageQuery,
}

/// Serves `GET /jobs/{job}/hosts` and `GET /jobs/{job}/runs/{run}/hosts`.
pub(super) async fn show_hosts_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(query): QueryParams<HostsPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(&site, &job, run)?;
    let (clock, parts) = (snapshot.page_clock(), render_fragments(&snapshot, &query)?);
    let (title, live) = (format!("Hosts of {}", job.name), LivePage::Hosts(query.clone()));
    let page = PageFrame::for_job_snapshot(user, NavEntry::Hosts, title, &snapshot, &live, parts);
    render_page(&HostsPageTemplate { page, job: snapshot.pages, query }, clock)
}

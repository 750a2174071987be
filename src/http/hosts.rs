//! The REST resource of a job's hosts: lists the hosts of the present run, and shows one of them.
//!
//! `coordination/views/host_assignment.rs` tells which tasks are on a host. Begin at `list_hosts`.

use axum::Json;
use axum::extract::State;
use axum::response::Response;

use super::api::HostsPage;
use super::extractors::{ItemInJobPath, JobPath, QueryParams};
use super::pagination::page_query;
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::{HostState, HostView, TaskId};

page_query! {
    /// The query parameters of hosts.
    HostsQuery {
        /// Only hosts in this state: `down`, `degraded`, `excluded` or `healthy`.
        #[param(value_type = Option<String>)]
        state: Option<HostState>,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all hosts, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The first task of the last host that the client has.
    after: Option<i32>,
    /// The maximum number of hosts.
    limit
}

/// The hosts of the present run, or of an ended one as they were, in the order of their first task
///
/// A host is known by the identity that its processes publish, or by the boot id of its kernel, or by its address.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/hosts", operation_id = "hosts_list", tag = "hosts",
    params(("job" = String, Path, description = "The job's name"), HostsQuery),
    responses((status = 200, description = "A page of hosts", content((HostsPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_hosts(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<HostsQuery>,
) -> Result<Response, Problem> {
    let mut all = site.read_job_in_run(&job, query.run, |look| look.hosts())?;
    all.retain(|host| query.state.is_none_or(|state| state == host.state));
    let (hosts, next) =
        query.format.paginate(all, query.after.map(TaskId), query.limit, HostView::first_task);
    Ok(answer_in_format(query.format, HostsPage { hosts, next }))
}

/// One host
#[utoipa::path(get, path = "/api/v1/jobs/{job}/hosts/{host}", operation_id = "hosts_show", tag = "hosts",
    params(("job" = String, Path, description = "The job's name"), ("host" = String, Path, description = "The host's name")),
    responses((status = 200, body = HostView, description = "The host"), (status = 404, description = "No task of the present run is on it")))]
pub(super) async fn show_host(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(name): ItemInJobPath<String>,
) -> Result<Json<HostView>, Problem> {
    let hosts = site.read_job(&job, |look| look.hosts())?;
    let found = hosts.into_iter().find(|host| host.host.as_str() == name);
    found.map(Json).ok_or_else(|| no_such_host(&job, &name))
}

/// Returns the problem that no task of the present run is on a host with this name.
pub(super) fn no_such_host(job: &JobPath, name: &str) -> Problem {
    let text = format!("no task of the present run of job {} is on a host with the name {name:?}", job.name);
    Problem::not_found("no-such-host", text)
}

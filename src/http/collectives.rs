//! The REST resource of a job's collectives: lists the cliques, those that wait first, and shows the ranks of one.
//!
//! `service/collectives/` has the reports and the analysis. Begin at `list_cliques`.

use axum::Json;
use axum::extract::State;
use muster_collectives::parse_clique_name;

use super::extractors::{ItemInJobPath, JobPath, QueryParams};
use super::pagination::{page_query, paginate};
use super::{AppState, Problem};
use crate::service::collectives::{CliqueView, CollectivesView};

page_query! {
    /// The query parameters of collectives.
    CollectivesQuery {}
    /// The number of the last clique that the client has.
    after: Option<u64>,
    /// The maximum number of cliques.
    limit
}

/// The collectives of a job: its cliques, those that wait first
///
/// Processes report that have loaded NCCL's profiler plug-in of Muster. A clique is the communicators of all its ranks.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/collectives", operation_id = "collectives_list", tag = "collectives",
    params(("job" = String, Path, description = "The job's name"), CollectivesQuery),
    responses((status = 200, body = CollectivesView, description = "A page of the cliques")))]
pub(super) async fn list_cliques(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<CollectivesQuery>,
) -> Result<Json<CollectivesView>, Problem> {
    let tasks = site.read_job(&job, |look| look.task_count())?;
    let mut view = site.collectives.view(&site.engine, job.id, tasks);
    (view.cliques, view.next) = paginate(view.cliques, query.after, query.limit, |clique| clique.number);
    Ok(Json(view))
}

/// One clique with its ranks
#[utoipa::path(get, path = "/api/v1/jobs/{job}/collectives/{clique}", operation_id = "collectives_show", tag = "collectives",
    params(("job" = String, Path, description = "The job's name"),
        ("clique" = String, Path, description = "NCCL's hash of its unique id: 16 hexadecimal digits")),
    responses((status = 200, body = CliqueView, description = "The clique"), (status = 404, description = "No process reports it")))]
pub(super) async fn show_clique(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(name): ItemInJobPath<String>,
) -> Result<Json<CliqueView>, Problem> {
    let tasks = site.read_job(&job, |look| look.task_count())?;
    let hash = parse_clique_name(&name);
    let found = hash.and_then(|hash| site.collectives.clique(&site.engine, job.id, tasks, hash));
    found.map(Json).ok_or_else(|| {
        let text = format!("no process of job {} reports a clique {name:?}", job.name);
        Problem::not_found("no-such-clique", text)
    })
}

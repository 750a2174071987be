//! Serves transfer reports of a job and of its tasks.
//!
//! It does not check reports (`reports`). Begin at `show`.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::{JobPath, QueryParams};
use super::pagination::{deserialize_limit, limit, paginate};
use super::{AppState, Problem};
use crate::coordination::{TaskId, TaskIncarnations};
use crate::reports::{ConnectionView, PairView, ReportedTransport, TaskTransfers, Throughput, TransfersView};

/// The default number of seconds of throughput.
const SECONDS: usize = 60;

/// The transfers of a job's present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransfersPage {
    /// The totals.
    #[serde(flatten)]
    pub summary: TransfersView,
    /// The bytes over time.
    pub throughput: Throughput,
    /// The pairs of tasks of this page, by number.
    pub pairs: Vec<PairView>,
    /// The number of pairs that are kept one by one.
    pub pairs_kept: usize,
    /// The present connections, those with the most launches of each task first: at most as many as the page
    /// has pairs.
    pub connections: Vec<ConnectionView>,
    /// The value of `after` for the next page of pairs; none on the last page.
    pub next: Option<u64>,
}

/// The query parameters of transfers.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TransfersQuery {
    /// Only pairs and connections of this task.
    task: Option<i32>,
    /// Only pairs and connections of this transport: `shm`, `pvm`, `unix`, `tcp` or `other`.
    #[param(value_type = Option<String>)]
    transport: Option<ReportedTransport>,
    /// The seconds of throughput to return: 60 by default, 600 at most.
    seconds: Option<usize>,
    /// The `next` of the page before.
    after: Option<u64>,
    /// The maximum number of pairs.
    #[serde(default, deserialize_with = "deserialize_limit")]
    #[param(minimum = 1)]
    limit: Option<usize>,
}

/// Returns the position of a pair in the order of all pairs: a task number has twenty bits.
fn place(pair: &PairView) -> u64 {
    let number = |task: TaskId| u64::from(task.0.unsigned_abs());
    number(pair.from) << 23 | number(pair.to) << 3 | pair.transport as u64
}

fn roster(site: &AppState, job: &JobPath) -> Result<TaskIncarnations, Problem> {
    site.read_job(job, |look| look.task_incarnations())
}

/// The transfers that workers of the present run report
///
/// Workers that move buffers by Muster's transfer engine report about once a second. Transfers that a JAX
/// program makes by itself are not included: if no task reports, every list is empty.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/transfers", operation_id = "transfers", tag = "transfers",
    params(("job" = String, Path, description = "The job's name"), TransfersQuery),
    responses((status = 200, body = TransfersPage, description = "Totals, throughput, connections, failures, and a page of pairs")))]
pub(super) async fn show(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TransfersQuery>,
) -> Result<Json<TransfersPage>, Problem> {
    let (board, roster) = (&site.transfers, roster(&site, &job)?);
    let now = site.engine.clock().now();
    let task = query.task.map(TaskId);
    let mut throughput = board.throughput(job.id, &roster, query.seconds.unwrap_or(SECONDS));
    throughput.transports.retain(|it| query.transport.is_none_or(|wanted| wanted == it.transport));
    throughput.pairs.retain(|it| {
        query.transport.is_none_or(|wanted| wanted == it.transport)
            && task.is_none_or(|wanted| wanted == it.from || wanted == it.to)
    });
    let pairs = board.pairs(job.id, &roster, task, query.transport);
    let pairs_kept = pairs.len();
    let (pairs, next) = paginate(pairs, query.after, query.limit, place);
    let mut connections = board.connections(job.id, &roster, task, query.transport);
    connections.truncate(limit(query.limit));
    let summary = board.summary(job.id, &roster, now);
    Ok(Json(TransfersPage { summary, throughput, pairs, pairs_kept, connections, next }))
}

/// A page of the transfers of single tasks, by task number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskTransfersPage {
    /// The tasks of this page; tasks without reports are left out.
    pub tasks: Vec<TaskTransfers>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

/// The query parameters of task transfers.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TaskTransfersQuery {
    /// Only tasks with failures, or only those without.
    failed: Option<bool>,
    /// Only tasks whose reporting life has ended, or only those whose life has not.
    stale: Option<bool>,
    /// The number of the last task that the client has.
    after: Option<i32>,
    /// The maximum number of tasks.
    #[serde(default, deserialize_with = "deserialize_limit")]
    #[param(minimum = 1)]
    limit: Option<usize>,
}

/// The transfers that each task of the present run reports
#[utoipa::path(get, path = "/api/v1/jobs/{job}/transfers/tasks", operation_id = "task_transfers", tag = "transfers",
    params(("job" = String, Path, description = "The job's name"), TaskTransfersQuery),
    responses((status = 200, body = TaskTransfersPage, description = "A page of tasks that have reported, by number")))]
pub(super) async fn tasks(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TaskTransfersQuery>,
) -> Result<Json<TaskTransfersPage>, Problem> {
    let mut tasks = site.transfers.tasks(job.id, &roster(&site, &job)?);
    tasks.retain(|task| {
        query.failed.is_none_or(|wanted| wanted == (task.totals.failed() > 0))
            && query.stale.is_none_or(|wanted| wanted == task.stale)
    });
    let (tasks, next) = paginate(tasks, query.after.map(TaskId), query.limit, |task| task.task);
    Ok(Json(TaskTransfersPage { tasks, next }))
}

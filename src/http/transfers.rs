//! Serves transfer reports of a job and of its tasks.
//!
//! `service::reports` receives and checks the reports. Begin at `show_transfers`.

use axum::extract::State;
use axum::response::Response;

use super::api::{TaskTransfersPage, TransfersPage};
use super::extractors::{JobPath, QueryParams};
use super::hosts::no_such_host;
use super::pagination::{page_limit, page_query};
use super::tables::{TableFormat, answer_in_format};
use super::{AppState, Problem};
use crate::coordination::TaskId;
use crate::service::reports::{PairView, ReportedTransport};

/// The default number of seconds of throughput.
const SECONDS: usize = 60;

page_query! {
    /// The query parameters of transfers.
    TransfersQuery {
        /// Only pairs and connections of this task.
        task: Option<i32>,
        /// Only pairs and connections of this transport: `shm`, `pvm`, `gpu`, `unix`, `tcp`, `local` or `other`.
        #[param(value_type = Option<String>)]
        transport: Option<ReportedTransport>,
        /// The seconds of throughput to return: 60 by default, 600 at most.
        seconds: Option<usize>,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all pairs, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The `next` of the page before.
    after: Option<u64>,
    /// The maximum number of pairs.
    limit
}

/// Returns the position of a pair in the order of all pairs: a task number has twenty bits.
fn pair_order_key(pair: &PairView) -> u64 {
    let number = |task: TaskId| u64::from(task.0.unsigned_abs());
    number(pair.from) << 23 | number(pair.to) << 3 | pair.transport as u64
}

/// The transfers that workers of the present run report, or of an ended run have reported
///
/// Workers that move buffers by Muster's transfer engine report about once a second. Transfers that a JAX
/// program makes by itself are not included: if no task reports, every list is empty.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/transfers", operation_id = "transfers", tag = "transfers",
    params(("job" = String, Path, description = "The job's name"), TransfersQuery),
    responses((status = 200, description = "Totals, throughput, connections, failures, and a page of pairs", content((TransfersPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn show_transfers(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TransfersQuery>,
) -> Result<Response, Problem> {
    let board = &site.transfers;
    let (roster, seen_at) =
        site.read_job_in_run_with_time(&job, query.run, |look, at| (look.task_incarnations(), at))?;
    let task = query.task.map(TaskId);
    let mut throughput = board.throughput(job.id, &roster, query.seconds.unwrap_or(SECONDS));
    throughput.transports.retain(|it| query.transport.is_none_or(|wanted| wanted == it.transport));
    throughput.pairs.retain(|it| {
        query.transport.is_none_or(|wanted| wanted == it.transport)
            && task.is_none_or(|wanted| wanted == it.from || wanted == it.to)
    });
    let pairs = board.pair_views(job.id, &roster, task, query.transport);
    let pairs_kept = pairs.len();
    let (pairs, next) = query.format.paginate(pairs, query.after, query.limit, pair_order_key);
    let mut connections = board.connection_views(job.id, &roster, task, query.transport);
    connections.truncate(page_limit(query.limit));
    let mut peer_jobs = board.peer_jobs(job.id, &roster, task, query.transport);
    peer_jobs.truncate(page_limit(query.limit));
    let summary = board.transfers_summary(job.id, &roster, seen_at);
    let page = TransfersPage { summary, throughput, pairs, pairs_kept, peer_jobs, connections, next };
    Ok(answer_in_format(query.format, page))
}

page_query! {
    /// The query parameters of task transfers.
    TaskTransfersQuery {
        /// Only tasks with failures, or only those without.
        failed: Option<bool>,
        /// Only tasks whose reporting life has ended, or only those whose life has not.
        stale: Option<bool>,
        /// Only tasks on the host with this name.
        host: Option<String>,
        /// The run; by default the present one.
        run: Option<u64>,
        /// `json` (the default), or `csv` for a table: all tasks, unless there is a limit.
        #[serde(default)]
        #[param(inline)]
        format: TableFormat,
    }
    /// The number of the last task that the client has.
    after: Option<i32>,
    /// The maximum number of tasks.
    limit
}

/// The transfers that each task of the present run reports, or of an ended run has reported
#[utoipa::path(get, path = "/api/v1/jobs/{job}/transfers/tasks", operation_id = "task_transfers", tag = "transfers",
    params(("job" = String, Path, description = "The job's name"), TaskTransfersQuery),
    responses((status = 200, description = "A page of tasks that have reported, by number", content((TaskTransfersPage = "application/json"), (String = "text/csv")))))]
pub(super) async fn list_task_transfers(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<TaskTransfersQuery>,
) -> Result<Response, Problem> {
    let (roster, hosts) =
        site.read_job_in_run(&job, query.run, |look| (look.task_incarnations(), look.task_hosts()))?;
    let host = match query.host.as_deref() {
        None => None,
        Some(name) => Some(hosts.find(name).ok_or_else(|| no_such_host(&job, name))?),
    };
    let is_there = |task| host.is_none_or(|host| host.tasks.contains(&task));
    let mut tasks = site.transfers.transfers_of_tasks(job.id, &roster, is_there);
    tasks.retain(|task| {
        query.failed.is_none_or(|wanted| wanted == (task.totals.failed_launches() > 0))
            && query.stale.is_none_or(|wanted| wanted == task.stale)
    });
    let (tasks, next) = query.format.paginate(tasks, query.after.map(TaskId), query.limit, |task| task.task);
    Ok(answer_in_format(query.format, TaskTransfersPage { tasks, next }))
}

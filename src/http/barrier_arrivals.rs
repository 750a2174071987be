//! The REST resource of the arrivals at ended barriers, as JSON and as CSV.
//!
//! `service/barrier_history.rs` keeps the arrivals. Begin at `list_barrier_arrivals`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use utoipa::IntoParams;

use super::api::{BarrierArrivalsPage, BarrierArrivalsView, EndedBarrierView};
use super::csv::CsvTable;
use super::extractors::{JobPath, QueryParams};
use super::pagination::page_limit;
use super::tables::TableFormat;
use super::{AppState, Problem};
use crate::coordination::{BarrierArrival, BarrierRecordWithArrivals, RunNumber};

/// The query parameters of the arrivals at barriers.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ArrivalsQuery {
    /// Only barriers with this id.
    barrier: Option<String>,
    /// Only barriers of this run.
    run: Option<u64>,
    /// `json` (the default) or `csv`.
    #[serde(default)]
    #[param(inline)]
    format: TableFormat,
    /// The maximum number of barriers.
    #[serde(default, deserialize_with = "crate::http::pagination::deserialize_limit")]
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Every arrival at the latest ended barriers, the newest first
///
/// The service keeps the arrivals at the last 64 barriers of each run, and about 65,536 arrivals of all runs. As CSV, `after_us`
/// is the time after the first arrival, and `blocked_us` the time from the arrival to the end.
#[utoipa::path(get, path = "/api/v1/jobs/{job}/barriers/arrivals", operation_id = "barriers_arrivals", tag = "barriers",
    params(("job" = String, Path, description = "The job's name"), ArrivalsQuery),
    responses((status = 200, description = "The barriers with all arrivals, by task",
        content((BarrierArrivalsPage = "application/json"), (String = "text/csv"))),
        (status = 404, description = "The job has had no such run")))]
pub(super) async fn list_barrier_arrivals(
    State(site): State<AppState>,
    job: JobPath,
    QueryParams(query): QueryParams<ArrivalsQuery>,
) -> Result<Response, Problem> {
    site.check_run_has_opened(&job, query.run)?;
    let is_wanted = |ended: &Arc<BarrierRecordWithArrivals>| {
        query.barrier.as_ref().is_none_or(|id| *ended.record.id == **id)
            && query.run.is_none_or(|run| ended.run == RunNumber(run))
    };
    let mut barriers: Vec<_> = site.barriers.latest_first(job.id).into_iter().filter(is_wanted).collect();
    barriers.truncate(page_limit(query.limit));
    Ok(match query.format {
        TableFormat::Json => {
            let view = |ended: Arc<BarrierRecordWithArrivals>| BarrierArrivalsView {
                run: ended.run,
                barrier: EndedBarrierView::from(ended.record.clone()),
                arrivals: ended.arrivals.clone(),
            };
            Json(BarrierArrivalsPage { barriers: barriers.into_iter().map(view).collect() }).into_response()
        }
        TableFormat::Csv => arrivals_as_csv(&barriers).into_response(),
    })
}

/// Returns a row for each arrival.
fn arrivals_as_csv(barriers: &[Arc<BarrierRecordWithArrivals>]) -> CsvTable {
    let mut table = CsvTable::new(&["run", "barrier", "use", "task", "at_us", "after_us", "blocked_us"]);
    for ended in barriers {
        let (record, arrivals) = (&ended.record, &ended.arrivals);
        let first = ended.first_arrival_at().0;
        for BarrierArrival { task, at } in arrivals {
            table
                .row()
                .value(ended.run)
                .text(&record.id)
                .value(record.counter)
                .value(task)
                .value(at.0)
                .value(at.0 - first)
                .value(record.ended.0.saturating_sub(at.0));
        }
    }
    table
}

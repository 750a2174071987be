//! Transfer reports of native workers. They are measurements; no rule of coordination depends on them.
//!
//! A worker calls `muster.v1.Transfers/Report` about once a second (`proto/muster_transfers.proto`), in jobs of more
//! than a thousand tasks less often. The gRPC port passes the encoded report to the [`TransferReportStore`]. The
//! store counts the rows before it allocates memory for them, and replaces unknown names by `other`. While the store
//! holds its own lock, it asks the driver (`engine::Engine`) for the present incarnation of the task. So a report of
//! an ended incarnation is never accepted after a report of the next incarnation. Begin at [`TransferReportStore`],
//! then `parse.rs`.
//!
//! - Reports stay outside of the state machine. Up to a thousand arrive in a second, and they should burden neither a
//!   replay nor the lock of the state machine. Only failed transfers become events
//!   ([`Input::TransferFailed`](crate::coordination::Input::TransferFailed)). The first failure for a reason is an
//!   event. Further failures for the same reason are counted, and an event every 30 s reports their count.
//! - A report contains totals since the start of one incarnation, and replaces the previous report. So a lost or
//!   repeated report does no harm. The store ignores a counter that decreases, and a report that is not newer than
//!   the last. It adds the counters of a new incarnation to those of the earlier ones.
//! - The counts of a lost task are kept and marked as stale. A new run starts from zero. When a job is deleted, its
//!   reports are dropped.
//! - The journal has the reports of ended runs, and snapshots have those of all runs. So an ended run is shown as it was
//!   after a restart of the service, too. The counts of a run in progress since the last snapshot come back with the
//!   next reports, except those of incarnations that have ended.
//! - The difference between two reports is spread evenly over the time between them, as one point for each second.
//!   The points of the last ten minutes are kept. The rates of a job, of its tasks and of its pairs of tasks are
//!   means over the same ten seconds: the last ten seconds that all punctual tasks have reported. So the rates of the
//!   tasks add up to the rate of the job.
//!
//! | file | contents |
//! | --- | --- |
//! | `parse.rs` | a decoded report, in which every list is bounded and every name is in the vocabulary |
//! | `vocabulary.rs` | the fixed vocabulary of reports: transports, outcomes, counters |
//! | `byte_series.rs` | bytes over time |
//! | `job_reports.rs` | the reports of one job in one run |
//! | `report_store.rs` | the reports of all jobs, within bounds |
//! | `view.rs`, `view/` | the views that pages, REST and metrics share |
//! | `metrics.rs` | the reports as metrics |
//! | `persistence.rs`, `serialised_forms.rs` | the reports in the journal |

mod byte_series;
mod job_reports;
mod metrics;
mod parse;
mod persistence;
mod report_store;
mod serialised_forms;
#[cfg(test)]
mod tests;
mod view;
mod vocabulary;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::coordination::JobId;
use crate::engine::Engine;

pub use byte_series::POINTS;
pub use job_reports::{CONNECTIONS_KEPT, PAIRS_KEPT, REASON_FAILURES_KEPT, SERIES_KEPT, TASK_FAILURES_KEPT};
pub use metrics::TransferReportMetrics;
pub use parse::{
    BYTES_MAX, CONNECTIONS_MAX, ClockReading, FAILURES_MAX, HOST_CHECKS_MAX, HostCheckState, HostCheckView,
    HostChecksView, LostGpuView, OUTCOMES_MAX, PAIRS_MAX, ReportError, STAGES_MAX,
};
pub use report_store::{AcceptedReport, TransferReportStore, report_interval_ms};
pub use view::{
    AbortView, ConnectionView, DurationView, FailureView, LinksView, OutcomeView, PairSeries, PairView,
    PeerJobView, ReasonView, Series, StageView, TaskTransfers, Throughput, TotalsView, TransferBytes,
    TransfersView,
};
pub use vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};

pub(crate) use view::rate_window;

/// The interval at which deleted jobs are dropped, suppressed failures are reported, and ended runs are recorded.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Drops deleted jobs, reports suppressed failures and records ended runs, for as long as it is polled.
pub async fn clean_up_reports_periodically(engine: Arc<Engine>, board: Arc<TransferReportStore>) {
    loop {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        let jobs: BTreeSet<JobId> = engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
        board.retain_jobs_and_flush_failures(&engine, |job| jobs.contains(&job));
        let (engine, board) = (Arc::clone(&engine), Arc::clone(&board));
        let recorded = tokio::task::spawn_blocking(move || board.record_ended_runs(&engine)).await;
        if let Err(error) = recorded {
            tracing::warn!(%error, "the transfers of ended runs were not recorded");
        }
    }
}

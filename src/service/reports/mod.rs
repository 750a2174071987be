//! Transfer reports of native workers: measurements, on which no rule of coordination depends.
//!
//! A worker calls `muster.v1.Transfers/Report` about once a second (`proto/muster_transfers.proto`). The gRPC port
//! hands the bytes to the [`ReportStore`] of the job, which counts the rows before it allocates them, maps words to fixed
//! sets, and asks the engine for the present incarnation of the task under the store's own lock. So a report
//! of an
//! incarnation that has just ended cannot follow one of the next. Begin at [`ReportStore`], then `parse.rs`.
//!
//! - Reports stay outside of the state machine. They are a thousand a second; a replay and the engine's lock should
//!   not carry them. Only failures enter the order of events
//!   ([`Input::TransferFailed`](crate::coordination::Input::TransferFailed)): failures for one reason are one
//!   event, then one count every 30 s.
//! - A report carries totals since the start of one incarnation and replaces the report before, so a lost or
//!   repeated one costs nothing. A counter that goes back, and a report that is not newer, change nothing. The
//!   counters of a new incarnation add to those before.
//! - The counts of a lost task stay, marked stale. A new run starts from zero. Deletion of a job drops all.
//! - Rates are the difference of two reports, spread over the time between them, one point a second for ten
//!   minutes. The rates of a job, of its tasks and of its pairs are means over one window, the last whole ten
//!   seconds that all tasks have reported, so they add up.
//!
//! | file | contents |
//! | --- | --- |
//! | `parse.rs` | a decoded report: every list bounded, every word one of a fixed set |
//! | `vocabulary.rs` | that vocabulary |
//! | `byte_series.rs` | bytes over time |
//! | `store.rs` | the reports of all jobs, within bounds |
//! | `view.rs` | the views that pages, REST and metrics share |
//! | `metrics.rs` | the reports as metrics |

mod byte_series;
mod metrics;
mod parse;
mod store;
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
pub use metrics::ReportMetrics;
pub use parse::{
    BYTES_MAX, CONNECTIONS_MAX, ClockReading, FAILURES_MAX, OUTCOMES_MAX, PAIRS_MAX, ReportError, STAGES_MAX,
};
pub use store::{
    CONNECTIONS_KEPT, PAIRS_KEPT, REASON_FAILURES_KEPT, ReportStore, SERIES_KEPT, TASK_FAILURES_KEPT,
    interval_ms,
};
pub use view::{
    AbortView, ConnectionView, DurationView, FailureView, LinksView, OutcomeView, PairSeries, PairView,
    ReasonView, Series, StageView, TaskTransfers, Throughput, TotalsView, TransferBytes, TransfersView,
};
pub use vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};

pub(crate) use view::rate_window;

/// The interval at which deleted jobs are dropped and suppressed failures are reported.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Drops deleted jobs and reports suppressed failures, for as long as it is polled.
pub async fn watch(engine: Arc<Engine>, board: Arc<ReportStore>) {
    loop {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        let jobs: BTreeSet<JobId> = engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
        board.retain_jobs(&engine, |job| jobs.contains(&job));
    }
}

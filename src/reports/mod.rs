//! What native workers report of their transfers: measurements, not rules.
//!
//! Workers that move buffers by the transfer engine call `muster.v1.Transfers/Report` about once a second
//! (`proto/muster_transfers.proto`). The wire edge hands each report to the [`Board`], which checks it against the
//! life of the task that counts and keeps what it says, within bounds. Nothing in here decides anything: pages,
//! metrics and the REST API read it, and failures become events.
//!
//! | file | |
//! | --- | --- |
//! | `intake.rs` | a report off the wire: every list bounded, every word one of a fixed few |
//! | `words.rs` | those words |
//! | `ring.rs` | bytes over time |
//! | `board.rs` | what is kept, and for how long |
//! | `view.rs` | what is shown of it |

mod board;
mod intake;
mod ring;
#[cfg(test)]
mod tests;
mod view;
mod words;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::coordination::JobId;
use crate::engine::Engine;

pub use board::{
    CONNECTIONS_KEPT, PAIRS_KEPT, REASON_FAILURES_KEPT, ReportStore, SERIES_KEPT, TASK_FAILURES_KEPT,
    interval_ms,
};
pub use intake::{
    BYTES_MAX, CONNECTIONS_MAX, ClockReading, FAILURES_MAX, OUTCOMES_MAX, PAIRS_MAX, ReportError, STAGES_MAX,
};
pub use ring::POINTS;
pub use view::{
    AbortView, ConnectionView, DurationView, FailureView, LinksView, OutcomeView, PairSeries, PairView,
    ReasonView, Series, StageView, TaskTransfers, Throughput, TotalsView, TransferBytes, TransfersView,
};
pub use words::{ReportedTransport, TransferCounter, TransferOutcome};

pub(crate) use view::rate_window;

/// How often jobs that are gone are forgotten, and failures told of that nobody was told of yet.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps the board in order, for as long as it is polled.
pub async fn watch(engine: Arc<Engine>, board: Arc<ReportStore>) {
    loop {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        let jobs: BTreeSet<JobId> = engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
        board.retain_jobs(&engine, |job| jobs.contains(&job));
    }
}

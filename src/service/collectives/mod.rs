//! The collectives of jobs: how far each communicator has come, and which task holds it up.
//!
//! NCCL's profiler plug-in (`src/nccl_profiler`) reports over `muster.v1.Collectives/Report` from within unmodified programs.
//! Reports are measurements outside of the state machine, and no process proves that a report is its own. One rule of
//! coordination depends on them, and only if a job asks for it: the setting `auto-exclude` may exclude a task that the finding
//! `collective-stuck` names. It needs more than a report, see [`StuckCliqueView::may_exclude`]. Begin at [`CollectiveReports`],
//! then `analysis.rs`.
//!
//! | file | contents |
//! | --- | --- |
//! | `parse.rs` | a checked report, in which every list is bounded and every name is known |
//! | `clique_key.rs` | from a communicator to devices and tasks, by the keys that XLA writes |
//! | `report_store.rs` | the reports of all jobs, within bounds |
//! | `rank_windows.rs` | the totals of a rank over windows of time |
//! | `ras_questions.rs` | what RAS, NCCL's own monitoring, is asked and has answered |
//! | `analysis.rs` | the state of a clique: which ranks hold it up, and how |
//! | `wait_graph.rs` | of several cliques that wait, the tasks that are the cause |
//! | `judged_cliques.rs` | all cliques of a job at one moment, those that wait first |
//! | `view.rs` | the views that pages, REST, findings and the command line share |
//! | `ras_view.rs` | the views of what RAS says |
//! | `wait_text.rs` | the sentence about a clique that waits |
//! | `metrics.rs` | the reports as metrics |
//!
//! - A *communicator* is one rank's side; a *clique* is what all ranks share, known by NCCL's hash of the unique id. XLA writes
//!   the unique id to the key-value store under a key that names the devices. So a clique leads to its tasks. A communicator
//!   that NCCL has split off another one has no such key: its tasks are those of the processes that report it.
//! - Collectives of a clique are numbered from 0, equally on all ranks. The analysis compares ranks by these numbers, and never
//!   by times of different hosts.
//! - A process that was heard before and is silent now counts with its last report. A clique of which no rank is heard any more
//!   is over.

mod analysis;
mod clique_key;
#[cfg(any(test, feature = "fuzzing"))]
mod fuzzing;
mod judged_cliques;
mod metrics;
mod parse;
mod rank_windows;
mod ras_questions;
mod ras_view;
mod report_store;
#[cfg(test)]
mod tests;
mod view;
mod wait_graph;
mod wait_text;

use std::time::Duration;

pub use analysis::{SLOW_RANK_LATENESS_MIN_S, WaitKind};
pub use clique_key::CliqueDevices;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use fuzzing::check_collectives_report;
pub use metrics::CollectiveMetrics;
pub use parse::CollectiveReportError;
pub use ras_view::{CliqueRasView, RasRankView, RasView};
pub use report_store::{CollectiveAnswer, CollectiveReports, WantedCollectives};
pub use view::{
    CliqueFunctionView, CliqueMemberView, CliqueView, CliqueWaitView, CollectiveTroubles, CollectiveView,
    CollectivesView, SlowRankView, StuckCliqueView,
};
pub use wait_graph::WaitRole;

/// The maximum length of a report, in bytes.
pub const REPORT_BYTES_MAX: usize = 256 << 10;
/// The maximum number of communicators of a process.
pub const COMMUNICATORS_MAX: usize = 128;
/// The maximum number of functions of a communicator.
pub const FUNCTIONS_MAX: usize = 16;
/// The maximum number of collectives of a communicator in one report.
pub const OPERATIONS_MAX: usize = 24;
/// The maximum number of communicators of which RAS is asked.
pub const RAS_COMMUNICATORS_MAX: usize = 16;
/// The maximum number of ranks of a communicator.
pub const RANKS_MAX: u32 = 1 << 20;
/// The number of processes of a job that can report, for each of its tasks.
pub const PROCESSES_PER_TASK: usize = 4;
/// The maximum memory of the reports of all jobs, in bytes.
pub const ALL_BYTES_MAX: usize = 256 << 20;
/// The maximum memory of the reports of one job, in bytes.
pub const JOB_BYTES_MAX: usize = ALL_BYTES_MAX / 2;
/// The silence after which a process counts as not heard. Processes report every second, in large jobs less often.
pub const SILENT_AFTER: Duration = Duration::from_secs(10);
/// The silence after which the last report of a process is dropped.
pub const DROPPED_AFTER: Duration = Duration::from_secs(600);
/// The time that a clique waits before there is a finding, unless the server is told otherwise.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

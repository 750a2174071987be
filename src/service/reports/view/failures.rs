//! The views of failed launches: single failures, and the number of failures for each reason.
//!
//! `report_store.rs` decides which failures are kept. Begin at [`ReasonView`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::totals::TotalsView;
use crate::coordination::{JobName, TaskId, Timestamp};
use crate::service::reports::job_reports::{JobReports, StoredTransferFailure};
use crate::service::reports::vocabulary::TransferOutcome;

/// A failed launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailureView {
    /// The time, by the worker's clock.
    pub at: Timestamp,
    /// The task that reports it.
    pub task: TaskId,
    /// The task on the other side.
    pub peer: TaskId,
    /// Its job, if it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_job: Option<JobName>,
    /// The reason.
    #[schema(value_type = String)]
    pub reason: TransferOutcome,
    /// The text of the worker.
    pub text: String,
}

impl FailureView {
    /// Returns the job of the task on the other side; `own` is that of this task.
    #[must_use]
    pub fn job_of_peer<'a>(&'a self, own: &'a JobName) -> &'a JobName {
        self.peer_job.as_ref().unwrap_or(own)
    }

    /// Returns the task on the other side in words.
    #[must_use]
    pub fn peer_name(&self) -> String {
        let of_job = self.peer_job.as_ref().map_or_else(String::new, |job| format!(" of {job}"));
        format!("task {}{of_job}", self.peer)
    }

    pub(super) fn from_failure(failure: &StoredTransferFailure) -> Self {
        let StoredTransferFailure { task, failed } = failure;
        let (at, peer, reason) = (failed.at, failed.peer, failed.reason);
        let peer_job = failed.peer_job.clone();
        Self { at, task: *task, peer, peer_job, reason, text: failed.text.to_string() }
    }
}

/// The failures for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReasonView {
    /// The reason.
    #[schema(value_type = String)]
    pub reason: TransferOutcome,
    /// The meaning of the reason.
    pub means: String,
    /// Launches with this outcome, over all tasks.
    pub launches: u64,
    /// The first failure in this run.
    pub first: Option<FailureView>,
    /// The newest failures, the latest first.
    pub newest: Vec<FailureView>,
}

/// Returns the failures by reason: the first cause first, reasons with counts alone last.
pub(super) fn failures_by_reason(of_job: &JobReports, totals: &TotalsView) -> Vec<ReasonView> {
    let mut reasons: BTreeMap<TransferOutcome, ReasonView> = BTreeMap::new();
    let failed =
        totals.launches.iter().map(|of| of.outcome).filter(|outcome| *outcome != TransferOutcome::COMPLETED);
    for reason in failed.chain(of_job.reasons.keys().copied()) {
        let known = of_job.reasons.get(&reason);
        reasons.insert(
            reason,
            ReasonView {
                reason,
                means: reason.description().to_owned(),
                launches: totals.launches_with_outcome(reason),
                first: known.and_then(|known| known.first.as_ref()).map(FailureView::from_failure),
                newest: known.map_or_else(Vec::new, |it| {
                    it.newest.iter().rev().map(FailureView::from_failure).collect()
                }),
            },
        );
    }
    let mut reasons: Vec<ReasonView> = reasons.into_values().collect();
    reasons.sort_by_key(|it| it.first.as_ref().map_or(Timestamp(u64::MAX), |first| first.at));
    reasons
}

//! The time window over which all rates of a job are measured. All rates have the same window. So the rates of the
//! tasks add up to that of the job, and so do the rates of the pairs if the store keeps all pairs.
//!
//! Begin at [`RateWindow`].

use crate::coordination::{TaskIncarnations, Timestamp};
use crate::service::reports::byte_series::{STEP_SECONDS, TenSecondSeries};
use crate::service::reports::job_reports::JobReports;
use crate::service::reports::report_store::report_interval_ms;

/// Returns the last second that every punctual task has reported.
pub(super) fn last_second_reported_by_all(of_job: &JobReports, roster: &TaskIncarnations) -> u64 {
    let interval_ms = report_interval_ms(roster.incarnations.len());
    let behind = Timestamp(of_job.at.0.saturating_sub(u64::from(interval_ms) * 1000));
    (behind.0 / 1_000_000).saturating_sub(1)
}

/// Returns the times between which a rate with this end is measured.
pub(crate) fn rate_window(until: Timestamp) -> (Timestamp, Timestamp) {
    (Timestamp(until.0.saturating_sub(STEP_SECONDS * 1_000_000)), until)
}

/// The ten seconds over which every rate is measured: the last step of [`TenSecondSeries`] that every punctual
/// task has reported completely.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateWindow(pub(super) u64);

impl RateWindow {
    pub(super) fn of_reports(of_job: &JobReports, roster: &TaskIncarnations) -> Self {
        Self(((last_second_reported_by_all(of_job, roster) + 1) / STEP_SECONDS).saturating_sub(1))
    }

    pub(super) fn end(self) -> Timestamp {
        Timestamp((self.0 + 1) * STEP_SECONDS * 1_000_000)
    }

    /// Returns the rate in bytes per second.
    pub(super) fn rate_of(self, steps: &TenSecondSeries) -> u64 {
        steps.bytes_of_step(self.0) / STEP_SECONDS
    }
}

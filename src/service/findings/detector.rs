//! Defines a detector of one kind of finding ([`Detector`]), the measurements that it reads ([`DetectorInput`]) and
//! its result ([`Detection`]).
//!
//! Each detector is in a file of its own, and `mod.rs` runs them. Begin at [`Detector`].

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{
    BarrierKind, BarrierObservation, BarrierOutcome, JobObservation, RunState, TaskId, Timestamp,
};
use crate::service::collectives::{SlowRankView, StuckCliqueView};
use crate::service::reports::{ClockReading, LostGpuView};

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something costs time.
    Notice,
    /// Something will fail if it continues.
    Warning,
    /// The job makes no progress.
    Critical,
}

impl Severity {
    /// Returns its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// A detector of one kind of finding, with its texts.
#[derive(Debug)]
pub struct Detector {
    /// Its identifier in events, metrics and addresses.
    pub id: &'static str,
    /// Its title for people.
    pub title: &'static str,
    /// The severity of its findings.
    pub severity: Severity,
    /// The meaning of its findings.
    pub means: &'static str,
    /// The advice to the operator.
    pub advice: &'static str,
    /// The function that detects the condition.
    pub(super) detect: fn(DetectorInput<'_>) -> Option<Detection>,
}

/// The measurements of a job that detectors read.
#[derive(Debug, Clone, Copy)]
pub struct DetectorInput<'a> {
    /// The measurements of the service.
    pub job: &'a JobObservation,
    /// The clocks that native workers report.
    pub clocks: &'a [(TaskId, ClockReading)],
    /// The GPU of each native worker that was first reported as lost.
    pub lost_gpus: &'a [(TaskId, LostGpuView)],
    /// The cliques of collectives that wait too long.
    pub stuck_cliques: &'a [StuckCliqueView],
    /// The ranks for which others wait in most collectives, with their cliques.
    pub slow_ranks: &'a [(String, SlowRankView)],
    /// The reason for which the journal cannot be written, if it cannot.
    pub journal_trouble: Option<&'a str>,
}

impl<'a> DetectorInput<'a> {
    /// Returns whether what processes report of their collectives is of the present run: it is running, or no task has registered
    /// for it, as in a job of PyTorch that only loads the plug-in. While tasks register, the reports may be of the run before.
    pub(super) fn collectives_are_of_present_run(&self) -> bool {
        let counts = &self.job.counts;
        let has_nobody_registered = counts.missing + counts.excluded == self.job.tasks.len();
        self.job.state == RunState::Running || (self.job.state == RunState::Forming && has_nobody_registered)
    }

    /// Returns the measurements of the service alone.
    #[must_use]
    pub fn without_reports(job: &'a JobObservation) -> Self {
        Self { job, clocks: &[], lost_gpus: &[], stuck_cliques: &[], slow_ranks: &[], journal_trouble: None }
    }
}

/// One number that a finding rests on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Evidence {
    /// The measured quantity, with its unit.
    pub what: String,
    /// The measured value.
    pub is: f64,
    /// The limit from which there is a finding.
    pub limit: f64,
}

/// The result of a detector.
#[derive(Debug, Clone, PartialEq)]
pub struct Detection {
    /// Its title, if it differs from the detector's.
    pub title: Option<String>,
    /// Its severity, if it differs from the detector's.
    pub severity: Option<Severity>,
    /// The meaning and the advice, if they differ from the detector's.
    pub meaning_and_advice: Option<(&'static str, &'static str)>,
    /// The evidence suffices for an automatic exclusion.
    pub may_exclude: bool,
    /// A sentence about the condition. It names neither tasks nor a duration, which have fields of their own.
    pub summary_without_tasks: String,
    /// The time since which the condition has held.
    pub since: Timestamp,
    /// The tasks that it concerns: of a barrier, the first 64.
    pub tasks: Vec<TaskId>,
    /// The number of tasks that it concerns.
    pub task_count: usize,
    /// The barrier that it concerns: id and counter.
    pub barrier: Option<(Arc<str>, i64)>,
    /// The numbers on which it rests.
    pub evidence: Vec<Evidence>,
}

impl Detection {
    /// Returns a detection about these tasks.
    pub(super) fn new(summary_without_tasks: String, since: Timestamp, tasks: Vec<TaskId>) -> Self {
        let task_count = tasks.len();
        Self {
            title: None,
            severity: None,
            meaning_and_advice: None,
            may_exclude: true,
            summary_without_tasks,
            since,
            tasks,
            task_count,
            barrier: None,
            evidence: Vec::new(),
        }
    }

    /// Returns a detection about a barrier and the tasks that have not reached it.
    pub(super) fn at_barrier(
        summary_without_tasks: String,
        since: Timestamp,
        barrier: &BarrierObservation,
    ) -> Self {
        let found = Self::new(summary_without_tasks, since, barrier.missing_tasks.clone());
        let id = (Arc::clone(&barrier.id), barrier.counter);
        Self { task_count: barrier.missing, barrier: Some(id), ..found }
    }

    pub(super) fn with_title(mut self, title: String) -> Self {
        self.title = Some(title);
        self
    }

    pub(super) fn with_evidence(mut self, what: &str, is: f64, limit: f64) -> Self {
        self.evidence.push(Evidence { what: what.to_owned(), is, limit });
        self
    }
}

/// Returns the longest duration of recent passed barriers with this id.
pub(super) fn longest_recent_barrier_duration(seen: &JobObservation, id: &str) -> Duration {
    let passed = seen.recent.iter().filter(|record| {
        record.kind == BarrierKind::Client
            && record.outcome == BarrierOutcome::Passed
            && record.id.as_ref() == id
    });
    passed.map(|record| record.ended.since(record.began)).max().unwrap_or_default()
}

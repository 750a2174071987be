//! Detects several failed runs in a row.
//!
//! `restart_storm.rs` detects restarts within one run. Begin at `detect`.

use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::RunOutcome;
use crate::text::format_approximate_duration;

/// The window in which failed runs are counted.
const WINDOW: Duration = Duration::from_secs(60 * 60);
/// The number of failed runs within the window from which there are too many.
const FAILED_RUNS_MIN: usize = 3;

pub(super) static DETECTOR: Detector = Detector {
    id: "generation-churn",
    title: "Runs fail repeatedly",
    severity: Severity::Warning,
    means: "The job starts, fails and starts again, and makes no progress.",
    advice: "Compare the first causes of the ended runs (GET /api/v1/jobs/{job}, history): the same task or host each time is \
             a bad host; the same error everywhere is the program.",
    detect,
};

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    let failed = seen
        .past_runs
        .iter()
        .filter(|run| run.outcome != RunOutcome::Completed && seen.seen_at.since(run.ended_at) <= WINDOW);
    let failed: Vec<_> = failed.collect();
    if failed.len() < FAILED_RUNS_MIN {
        return None;
    }
    let since = failed.iter().map(|run| run.ended_at).min()?;
    let summary = format!(
        "{} runs failed within {}; the current run is run {}",
        failed.len(),
        format_approximate_duration(seen.seen_at.since(since)),
        seen.run
    );
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    Some(Detection::new(summary, since, Vec::new()).with_evidence(
        "failed runs within an hour",
        number(failed.len()),
        number(FAILED_RUNS_MIN),
    ))
}

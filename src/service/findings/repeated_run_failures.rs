//! Detects several failed runs in a row.
//!
//! `restart_storm.rs` detects restarts within one run. Begin at `detect`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{HostId, JobObservation, PastRunObservation, RunOutcome, TaskId};
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
    advice: "Compare the first causes of the ended runs (on the page of the job, or GET /api/v1/jobs/{job}/runs): the same host each \
             time is a bad host, which can be excluded; the same error everywhere is the program.",
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
    let mut summary = format!(
        "{} runs failed within {}; the current run is run {}",
        failed.len(),
        format_approximate_duration(seen.seen_at.since(since)),
        seen.run
    );
    let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
    let common = find_common_cause(seen, &failed);
    if let Some(common) = &common {
        let times = match common.runs == failed.len() {
            true => "each time".to_owned(),
            false => format!("{} times", common.runs),
        };
        let _ = write!(summary, "; {times} the first cause was {}", common.what);
    }
    let detection = Detection::new(summary, since, common.map_or_else(Vec::new, |common| common.tasks));
    Some(
        // A program's own error often comes first from the same task, which is no reason to exclude its host.
        Detection { may_exclude: false, ..detection }.with_evidence(
            "failed runs within an hour",
            number(failed.len()),
            number(FAILED_RUNS_MIN),
        ),
    )
}

/// The common part of the first causes of most failed runs.
struct CommonCause {
    /// The number of these runs.
    runs: usize,
    what: String,
    /// The tasks of the present run that it concerns.
    tasks: Vec<TaskId>,
}

/// Returns the host or the task that was the first cause of most failed runs, and of at least [`FAILED_RUNS_MIN`]; `None` if there is
/// none. A job with one host has no host in common.
fn find_common_cause(seen: &JobObservation, failed: &[&PastRunObservation]) -> Option<CommonCause> {
    let mut tasks: BTreeMap<TaskId, usize> = BTreeMap::new();
    let mut hosts: BTreeMap<&HostId, usize> = BTreeMap::new();
    for run in failed {
        if let Some(task) = run.first_cause_task {
            *tasks.entry(task).or_default() += 1;
        }
        if let Some(host) = &run.first_cause_host {
            *hosts.entry(host).or_default() += 1;
        }
    }
    let is_most = |runs: &usize| *runs >= FAILED_RUNS_MIN && *runs > failed.len() / 2;
    if let Some((task, runs)) = tasks.into_iter().find(|(_, runs)| is_most(runs)) {
        return Some(CommonCause { runs, what: "the same task".to_owned(), tasks: vec![task] });
    }
    let (host, runs) = hosts.into_iter().find(|(_, runs)| is_most(runs))?;
    match seen.hosts.find(host.as_str()) {
        Some(_) if seen.hosts.hosts().len() == 1 => None,
        Some(present) => Some(CommonCause {
            runs,
            what: "a task of the same host".to_owned(),
            tasks: present.tasks.clone(),
        }),
        None => {
            let what = format!("a task of host {host}, which has no task in this run");
            Some(CommonCause { runs, what, tasks: Vec::new() })
        }
    }
}

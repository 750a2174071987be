//! Detects a task for which the GPUs of all others wait in most collectives.
//!
//! `service/collectives/` compares the times of ranks over 30 s. Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::service::collectives::{SLOW_RANK_LATENESS_MIN_S, SlowRankView};
use crate::text::format_approximate_seconds;

pub(super) static DETECTOR: Detector = Detector {
    id: "collective-slow-rank",
    title: "A GPU is late at collectives",
    severity: Severity::Warning,
    means: "In most collectives, all GPUs of a clique wait until one of them begins: its time in collectives is short, and that \
            of all others is long. The job goes at the pace of this GPU.",
    advice: "Compare the GPU with the others: clocks that are throttled, ECC errors, another process on it, a slower host or \
             input pipeline (`muster doctor` on its host, page Stacks). If nothing mends it, exclude the task.",
    detect,
};

fn detect(seen: DetectorInput<'_>) -> Option<Detection> {
    if !seen.collectives_are_of_present_run() {
        return None;
    }
    let slow_ranks = seen.slow_ranks;
    let latest = |one: &&(String, SlowRankView), other: &&(String, SlowRankView)| {
        one.1.lateness_s.total_cmp(&other.1.lateness_s)
    };
    let (clique, slow) = slow_ranks.iter().max_by(latest)?;
    let summary = format!(
        "in clique {clique}, the others wait about {} for rank {} in a collective",
        format_approximate_seconds(slow.lateness_s),
        slow.rank
    );
    let found = Detection::new(summary, seen.job.seen_at, slow.task.into_iter().collect());
    Some(found.with_evidence(
        "lateness in a collective, in seconds",
        slow.lateness_s,
        SLOW_RANK_LATENESS_MIN_S,
    ))
}

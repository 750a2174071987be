//! Detects collectives that wait too long, and names the tasks that hold them up.
//!
//! `service/collectives/` finds the waits. Of several cliques that wait, only those that do not follow from others are told.
//! Begin at `detect`.

use std::collections::BTreeSet;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{RunState, TaskId};
use crate::service::collectives::{StuckCliqueView, WaitKind, WaitRole};
use crate::text::format_count_with_noun;

pub(super) static DETECTOR: Detector = Detector {
    id: "collective-stuck",
    title: "A collective is stuck",
    severity: Severity::Critical,
    means: "The GPUs of a job wait for one another in a collective, and nothing has happened for a while that could end the \
            wait. Heartbeats continue, so no timeout of the coordination service clears this.",
    advice: "Look at the page Collectives of the job. A task that has not called the collective is busy or stuck in its program: \
             look at its stack (page Stacks). A GPU that has not begun it is held by an earlier kernel or another collective. If all \
             GPUs have begun it, look at the network and at the kernel's log (Xid) on the hosts. If programs differ, they have \
             taken different branches: compare their inputs. Then restart or exclude the task. Without times on the GPU the \
             finding is a warning: the program that has called least is the likely cause and not the certain one.",
    detect,
};

fn detect(seen: DetectorInput<'_>) -> Option<Detection> {
    if !seen.collectives_are_of_present_run() {
        return None;
    }
    let stuck_cliques = seen.stuck_cliques;
    let first = stuck_cliques.first()?;
    let StuckCliqueView { clique, wait, others, .. } = first;
    let mut summary = format!("clique {clique}: {}", first.summary_without_tasks);
    let other_causes = stuck_cliques[1..].iter().filter(|it| it.wait.role == WaitRole::Cause);
    let other_causes = other_causes.filter(|it| it.tasks != first.tasks).count();
    match (wait.role, others) {
        (_, 0) => {}
        (WaitRole::Cycle, _) => summary += "; its tasks wait for one another in several cliques",
        (_, others) => {
            summary += &format!(
                "; {} too",
                format_count_with_noun(*others, "other clique waits", "other cliques wait")
            );
        }
    }
    if other_causes > 0 {
        summary += &format!(", {other_causes} of them for other tasks");
    }
    let title = match wait.kind {
        WaitKind::DifferentProgram => "Tasks call different collectives",
        WaitKind::NotBegun => "A GPU has not begun a collective",
        WaitKind::NotEnded => "A collective does not end",
        WaitKind::NotCalled => "A task has not called a collective",
        WaitKind::NotHeard => "A task in a collective is silent",
    };
    // The causes may be several, and independent of one another.
    let tasks: BTreeSet<TaskId> = stuck_cliques.iter().flat_map(|it| it.tasks.iter().copied()).collect();
    // A task that has not registered is part of no run from which it could be excluded.
    let may_exclude = first.may_exclude && tasks.len() == 1 && seen.job.state == RunState::Running;
    let mut found = Detection::new(summary, wait.since, tasks.into_iter().collect())
        .with_title(title.to_owned())
        .with_evidence("ranks that are waited for", wait.waited_for.len() as f64, 1.0);
    found.may_exclude = may_exclude;
    // Programs run ahead of their GPUs. In a job with long steps, a program that has called less may be well.
    if wait.kind == WaitKind::NotCalled && !wait.certain {
        found.severity = Some(Severity::Warning);
    }
    Some(found)
}

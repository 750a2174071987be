//! Detects a task that arrives late at nearly every barrier.
//!
//! There are two rules. A task that was far behind at eight of the latest nine barriers (`recent_lateness.rs`) is found
//! after eight steps, and with it the tasks of its host that were late at six of them. Fewer than eight would not do: of
//! three equal tasks, one would be late by chance at four barriers in a row once in some hundred steps. A task that is
//! late less regularly, and one of a larger group of late tasks, is found by its score, an average over sixteen barriers.
//!
//! `stalled_task.rs` detects a task that does not arrive at all. Begin at `detect`.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::detector::{Detection, Detector, DetectorInput, Severity};
use super::recent_lateness::{LateArrivals, count_late_arrivals};
use crate::coordination::{
    HostId, JobObservation, RunState, StragglerView, TaskId, TaskObservation, TaskPhase,
};
use crate::text::{format_count_with_noun, micros_to_seconds};

pub(super) static DETECTOR: Detector = Detector {
    id: "chronic-straggler",
    title: "A task is late at nearly every barrier",
    severity: Severity::Notice,
    means: "At nearly every recent barrier the same task arrived far behind the median of the others. It sets the pace of the \
            whole job. One late arrival does not open this finding.",
    advice: "Compare its host with the others: clock speed and thermal throttling, a neighbour on the same machine, a slow \
             disk or network path. A task that was always late has a larger share of the data or the work; one that has \
             become slow has a sick host. Several tasks on one host point at the host.",
    detect,
};

/// The number of latest barriers, and at how many of them a task must have been late.
const WINDOW: usize = 9;
const LATE_LATELY: usize = 8;
/// The number of them at which another task of its host must have been late.
const LATE_WITH_HOST: usize = 6;
/// A gap between two heartbeats that is longer than usual by this ratio is no chance.
const IRREGULAR_GAP: (u64, u64) = (3, 2);

fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    if seen.state != RunState::Running {
        return None;
    }
    let takes_part = |task: &&TaskObservation| task.standing == TaskPhase::Connected && !task.excluded;
    let is_chronic = |it: &&StragglerView| it.is_chronic(seen.tasks.len());
    let present = || seen.tasks.iter().filter(takes_part);
    let mut late: Vec<(&StragglerView, TaskId)> = present()
        .filter_map(|task| Some((task.straggling.as_ref().filter(is_chronic)?, task.task)))
        .collect();
    late.sort_by_key(|(it, task)| (Reverse(it.lateness_us), *task));
    let recent = count_late_arrivals(seen.recent.iter().rev(), WINDOW);
    let is_late = |task: TaskId| {
        recent.of_task(task, LATE_LATELY).is_some() || late.iter().any(|(_, other)| *other == task)
    };
    let host = |task: TaskId| seen.hosts.host_of(task).map(|host| &host.name);
    let late_hosts: BTreeSet<&HostId> =
        present().filter(|task| is_late(task.task)).filter_map(|task| host(task.task)).collect();
    let least = |task: TaskId| {
        let is_on_late_host = host(task).is_some_and(|host| late_hosts.contains(host));
        if is_on_late_host { LATE_WITH_HOST } else { LATE_LATELY }
    };
    let mut lately: Vec<(TaskId, LateArrivals)> = present()
        .filter(|it| late.iter().all(|(_, other)| *other != it.task))
        .filter_map(|it| Some((it.task, recent.of_task(it.task, least(it.task))?)))
        .collect();
    lately.sort_by_key(|(task, it)| (Reverse(it.lateness_total_us), *task));
    let ids: Vec<TaskId> =
        late.iter().map(|(_, task)| *task).chain(lately.iter().map(|(task, _)| *task)).collect();
    let (summary_without_tasks, evidence) = match (late.first(), lately.first()) {
        (Some((worst, _)), _) => (habit_text(worst, ids.len()), evidence_of_habit(worst)),
        (None, Some((_, worst))) => {
            let late_by_us = worst.lateness_total_us / worst.count.max(1) as u64;
            let tasks = format_count_with_noun(ids.len(), "task was", "tasks were");
            let counts = || lately.iter().map(|(_, it)| it.count);
            let (least, most) = (counts().min().unwrap_or_default(), counts().max().unwrap_or_default());
            let at = if least == most { most.to_string() } else { format!("{least} to {most}") };
            let text = format!(
                "{tasks} late at {at} of the last {} barriers, by {} ms on average after the first arrival",
                recent.barriers,
                late_by_us / 1000
            );
            (text, evidence_of_late_arrivals(worst.count, late_by_us))
        }
        (None, None) => return None,
    };
    let summary_without_tasks = match heartbeats_of_late_tasks(seen, &ids) {
        Some(hint) => format!("{summary_without_tasks}; {hint}"),
        None => summary_without_tasks,
    };
    let title =
        format_count_with_noun(ids.len(), "task is late", "tasks are late") + " at nearly every barrier";
    let detection = Detection::new(summary_without_tasks, seen.seen_at, ids).with_title(title);
    Some(evidence.into_iter().fold(detection, |all, (what, is, limit)| all.with_evidence(what, is, limit)))
}

/// A measured quantity, its value, and the limit from which there is a finding.
type EvidenceRow = (&'static str, f64, f64);

/// Says how late the latest of `tasks` tasks usually is, and since when.
fn habit_text(worst: &StragglerView, tasks: usize) -> String {
    let habit = match worst.lateness_best_us {
        Some(best) if worst.has_slowed() => {
            format!("it has become slower: {} ms on average when it was at its best", best / 1000)
        }
        Some(_) => "as late as ever: it may have more work than the others".to_owned(),
        None => "since it joined the run".to_owned(),
    };
    let late_by = worst.lateness_us / 1000;
    match tasks {
        1 => format!("1 task usually reaches barriers {late_by} ms after the first ({habit})"),
        many => format!(
            "{many} tasks reach nearly every barrier late, the latest usually {late_by} ms after the first ({habit})"
        ),
    }
}

fn evidence_of_habit(worst: &StragglerView) -> Vec<EvidenceRow> {
    let significant = micros_to_seconds(StragglerView::SIGNIFICANT_LATENESS_US);
    vec![
        ("score of the latest", worst.score, StragglerView::CHRONIC_SCORE),
        ("its usual lateness, in seconds", micros_to_seconds(worst.lateness_us), significant),
        ("more than at its best, in seconds", micros_to_seconds(worst.lateness_above_best_us()), significant),
    ]
}

fn evidence_of_late_arrivals(count: usize, late_by_us: u64) -> Vec<EvidenceRow> {
    let significant = micros_to_seconds(StragglerView::SIGNIFICANT_LATENESS_US);
    vec![
        ("barriers of the last nine at which it was late", count as f64, LATE_LATELY as f64),
        ("its mean lateness at them, in seconds", micros_to_seconds(late_by_us), significant),
    ]
}

/// Returns what the heartbeats of the late tasks say about the cause, in a clause; `None` if too few have come.
fn heartbeats_of_late_tasks(seen: &JobObservation, late: &[TaskId]) -> Option<String> {
    let mut known =
        late.iter().filter_map(|task| seen.task(*task)).filter(|task| task.interval_us > 0).peekable();
    known.peek()?;
    let is_irregular = |task: &TaskObservation| {
        task.longest_gap_us > task.interval_us.saturating_mul(IRREGULAR_GAP.0) / IRREGULAR_GAP.1
    };
    let whose = if late.len() == 1 { "its" } else { "their" };
    Some(if known.any(is_irregular) {
        format!("{whose} heartbeats come late too, so look at the host and its network first")
    } else {
        format!(
            "{whose} heartbeats come on time, so look at the work, the input and the speed of the host first, and not at the \
             network"
        )
    })
}

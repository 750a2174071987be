//! The sentence about a clique that waits. Begin at [`describe_wait`].

use std::collections::BTreeSet;

use muster_collectives::Collective;

use super::analysis::{CliqueWait, WaitKind};
use super::judged_cliques::TaskNames;
use super::report_store::ReportedClique;
use crate::coordination::TaskId;
use crate::text::{format_bytes, format_count_with_noun};

/// The number of ranks that a text names.
const RANKS_NAMED: usize = 8;

/// Returns a collective in a few words: `AllReduce of 4 MiB float32`.
pub(super) fn collective_text(function: &str, bytes: u64, data_type: &str) -> String {
    format!("{function} of {} {data_type}", format_bytes(bytes))
}

fn text_of(operation: &Collective) -> String {
    collective_text(operation.function.name(), operation.bytes(), operation.data_type.name())
}

/// Returns the sentence about a wait. With `names_tasks`, it names the tasks that are waited for; else it counts them.
pub(super) fn describe_wait(
    names: &TaskNames<'_>,
    clique: &ReportedClique<'_>,
    wait: &CliqueWait,
    names_tasks: bool,
) -> String {
    let (subject, is_plural) = describe_ranks(names, clique, &wait.ranks, names_tasks);
    let operation = wait.operation.as_ref().map_or_else(|| "a collective".to_owned(), text_of);
    let place = format!("collective {} ({operation})", wait.number);
    let is_other = |rank: &u32| wait.ranks.binary_search(rank).is_err();
    let others = clique.members.iter().filter(|(rank, report)| is_other(rank) && !report.is_silent).count();
    let others = format_count_with_noun(others, "rank waits", "ranks wait");
    let have = if is_plural { "have" } else { "has" };
    match wait.kind {
        WaitKind::DifferentProgram => match &wait.instead {
            Some(instead) => {
                format!("{subject} {have} enqueued {} where the others have {place}", text_of(instead))
            }
            None => format!(
                "{subject} {have} enqueued other collectives than the others before collective {}",
                wait.number
            ),
        },
        WaitKind::NotBegun => {
            let gpu_has = if wait.ranks.len() > 1 { "GPUs have" } else { "GPU has" };
            let whose = if is_plural { "their" } else { "its" };
            format!("{subject} {have} called {place}, but {whose} {gpu_has} not begun it; {others}")
        }
        WaitKind::NotEnded if wait.ranks.is_empty() && !wait.is_timed => format!(
            "all ranks with known times on the GPU have begun {place}, and none has ended it; the times of the other ranks are \
             not known"
        ),
        WaitKind::NotEnded if wait.ranks.is_empty() => {
            format!("all ranks have begun {place}, and none has ended it")
        }
        WaitKind::NotEnded => format!("{subject} {have} begun {place} and not ended it, and others have"),
        WaitKind::NotCalled if wait.ranks.is_empty() => format!(
            "the ranks have called different numbers of collectives, at least up to {place}, and none goes on; \
             which one holds up the others is not known without times on the GPU"
        ),
        WaitKind::NotCalled => {
            let likely = if wait.is_timed { "" } else { " (by calls alone: times on the GPU are not known)" };
            format!("{subject} {have} not called {place}; {others}{likely}")
        }
        WaitKind::NotHeard => {
            let report = if is_plural { "report" } else { "reports" };
            format!("{subject} {report} nothing, and {place} waits; {others}")
        }
    }
}

/// Returns the tasks of ranks in words, or the ranks whose tasks are not known; and whether the words are a plural.
fn describe_ranks(
    names: &TaskNames<'_>,
    clique: &ReportedClique<'_>,
    ranks: &[u32],
    names_tasks: bool,
) -> (String, bool) {
    let tasks = ranks.iter().map(|rank| names.task(clique, *rank));
    let (noun, numbers): (_, Vec<i64>) = match tasks.collect::<Option<BTreeSet<TaskId>>>() {
        Some(tasks) if !names_tasks => {
            let text = if tasks.len() == 1 { "a task".to_owned() } else { format!("{} tasks", tasks.len()) };
            return (text, tasks.len() != 1);
        }
        Some(tasks) => ("task", tasks.into_iter().map(|task| i64::from(task.0)).collect()),
        None => ("rank", ranks.iter().map(|rank| i64::from(*rank)).collect()),
    };
    let shown: Vec<String> = numbers.iter().take(RANKS_NAMED).map(i64::to_string).collect();
    let more = match numbers.len().saturating_sub(RANKS_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let is_plural = numbers.len() != 1;
    let plural = if is_plural { "s" } else { "" };
    (format!("{noun}{plural} {}{more}", shown.join(", ")), is_plural)
}

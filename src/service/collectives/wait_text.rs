//! The sentence about a clique that waits. Begin at [`describe_wait`].

use std::collections::BTreeSet;

use muster_collectives::Collective;
use muster_collectives::ras::{RasCommunicator, RasRank, RasRankState};

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

/// Returns what RAS says of the ranks that are waited for, as the end of the sentence about a wait; empty if it says nothing
/// that the reports of the ranks do not.
pub(super) fn describe_ras(wait: &CliqueWait, ras: Option<&RasCommunicator>) -> String {
    let Some(ras) = ras else { return String::new() };
    let waited_for = |rank: &u32| wait.ranks.binary_search(rank).is_ok();
    let mut named = ras.notable.iter().filter(|it| waited_for(&it.rank));
    let is_unheard = wait.kind == WaitKind::NotHeard;
    match named.next() {
        // The reports of a healthy rank tell its calls better than RAS.
        Some(first) if first.state != RasRankState::Answers || is_unheard => {
            let process = match first.pid {
                0 => "its process".to_owned(),
                pid => format!("its process ({pid} on {})", first.host),
            };
            let called = match (first.state, first.called) {
                (RasRankState::Answers, Some(called)) => {
                    format!(" and has called {called} of {} collectives", ras.front)
                }
                _ => String::new(),
            };
            let is_same = |it: &&RasRank| it.state.name() == first.state.name();
            let more = match named.filter(is_same).count() {
                0 => String::new(),
                more => format!("; of {more} more it says the same"),
            };
            format!(
                "; NCCL's RAS says of rank {} that {process} {}{called}{more}",
                first.rank,
                first.state.predicate()
            )
        }
        None if is_unheard && !wait.ranks.is_empty() && ras.answered == ras.ranks => {
            let whose = if wait.ranks.len() == 1 { "its process answers" } else { "their processes answer" };
            format!(
                "; NCCL's RAS says that {whose}: the plug-in is not loaded there, or its reports do not arrive"
            )
        }
        _ => String::new(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::Timestamp;

    /// Returns what is said of rank 1 of two, of which RAS says this.
    fn text(kind: WaitKind, notable: &[(RasRankState, Option<u64>)]) -> String {
        let wait = CliqueWait {
            kind,
            number: 41,
            operation: None,
            ranks: vec![1],
            instead: None,
            since: Timestamp(0),
            known_until: None,
            is_timed: true,
        };
        let rank = |(state, called): &(RasRankState, Option<u64>)| RasRank {
            rank: 1,
            host: "10.0.0.1".into(),
            pid: 7,
            state: *state,
            called: *called,
        };
        let ras = RasCommunicator {
            hash: 1,
            ranks: 2,
            answered: 2,
            front: 42,
            back: 41,
            total_called: 83,
            notable: notable.iter().map(rank).collect(),
            notable_count: 1,
        };
        describe_ras(&wait, Some(&ras))
    }

    #[test]
    fn ras_adds_what_the_reports_do_not_tell() {
        assert_eq!(
            text(WaitKind::NotCalled, &[(RasRankState::Failed(6), Some(41))]),
            "; NCCL's RAS says of rank 1 that its process (7 on 10.0.0.1) has an error: another process has ended, or the \
             network failed (code 6)"
        );
        let behind = [(RasRankState::Answers, Some(41))];
        assert_eq!(text(WaitKind::NotCalled, &behind), "");
        assert_eq!(
            text(WaitKind::NotHeard, &behind),
            "; NCCL's RAS says of rank 1 that its process (7 on 10.0.0.1) answers and has called 41 of 42 collectives"
        );
        assert_eq!(
            text(WaitKind::NotHeard, &[]),
            "; NCCL's RAS says that its process answers: the plug-in is not loaded there, or its reports do not arrive"
        );
        assert_eq!(text(WaitKind::NotEnded, &[]), "");
    }
}

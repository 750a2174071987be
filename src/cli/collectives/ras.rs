//! Shows what RAS, NCCL's own monitoring, says of the communicators of a job. Begin at [`run`].
//!
//! RAS only counts calls, and its numbers are never of one moment. So it is asked twice: what differs between ranks and does not
//! change meanwhile is a wait.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use muster_collectives::clique_name;
use muster_collectives::ras::{RasCommunicator, RasRank, RasReport, ask_ras, ras_address_of_environment};
use serde::Serialize;

use crate::cli::output::TerminalText;
use crate::cli::server_args::ServerArgs;
use crate::text::{escape_to_one_line, format_count_with_noun};

/// The time between the two questions.
const PAUSE: Duration = Duration::from_secs(2);

/// What RAS says of a job.
#[derive(Debug, Serialize)]
struct RasOfJob {
    address: String,
    nccl_version: String,
    cliques: Vec<RasOfClique>,
}

#[derive(Debug, Serialize)]
struct RasOfClique {
    clique: String,
    ranks: u32,
    /// The number of ranks that have answered.
    answered: u32,
    /// The most and the fewest collectives that one of them has called.
    front: u64,
    back: u64,
    state: CliqueState,
    /// The ranks that differ from most, the worst first; at most 64.
    notable: Vec<RasOfRank>,
    notable_count: u32,
}

/// How a clique does, as far as calls tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CliqueState {
    /// A rank cannot go on by itself.
    Trouble,
    /// Nothing was called between the two questions, and some ranks have called less than others.
    Waits,
    /// Nothing was called between the two questions, and all ranks have called the same number.
    Idle,
    Advances,
}

#[derive(Debug, Serialize)]
struct RasOfRank {
    rank: u32,
    host: String,
    pid: Option<u32>,
    state: &'static str,
    text: String,
    called: Option<u64>,
}

impl RasOfRank {
    fn new(found: &RasRank) -> Self {
        Self {
            rank: found.rank,
            host: escape_to_one_line(&found.host).into_owned(),
            pid: Some(found.pid).filter(|pid| *pid != 0),
            state: found.state.name(),
            text: found.state.predicate(),
            called: found.called,
        }
    }

    fn process(&self) -> String {
        let pid = self.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        format!("{}:{pid}", self.host)
    }
}

impl RasOfClique {
    fn new(found: &RasCommunicator, before: Option<&RasCommunicator>) -> Self {
        let is_trouble = |rank: &RasRank| rank.state.is_trouble();
        let has_advanced = before.is_none_or(|before| before.total_called != found.total_called);
        let state = match () {
            () if found.notable.iter().any(is_trouble) => CliqueState::Trouble,
            () if has_advanced => CliqueState::Advances,
            () if found.front > found.back => CliqueState::Waits,
            () => CliqueState::Idle,
        };
        Self {
            clique: clique_name(found.hash),
            ranks: found.ranks,
            answered: found.answered,
            front: found.front,
            back: found.back,
            state,
            notable: found.notable.iter().map(RasOfRank::new).collect(),
            notable_count: found.notable_count,
        }
    }

    fn state_text(&self) -> String {
        let pause = format!("{} s", PAUSE.as_secs());
        let behind = self.notable_count as usize - self.notable.len().min(self.notable_count as usize);
        let first = self.notable.first();
        match (self.state, first) {
            (CliqueState::Trouble, Some(first)) => format!("rank {} {}", first.rank, first.text),
            (CliqueState::Waits, _) => {
                let least = |it: &&RasOfRank| it.called == Some(self.back);
                let count = self.notable.iter().filter(least).count() + behind;
                format!(
                    "has called nothing for {pause}; {} called least",
                    format_count_with_noun(count, "rank has", "ranks have")
                )
            }
            (CliqueState::Idle, _) => format!("has called nothing for {pause}; all ranks are level"),
            _ => "advances".to_owned(),
        }
    }
}

/// Runs the subcommand. Without an address, asks where NCCL listens by itself.
pub(super) fn run(address: &str, answers: &ServerArgs) -> Result<ExitCode> {
    let address = if address.is_empty() { ras_address_of_environment() } else { address.to_owned() };
    let before = ask_ras(&address)?;
    std::thread::sleep(PAUSE);
    let job = compare(address.clone(), &before, &ask_ras(&address)?);
    answers.print_answer(&job, |job| TerminalText::from_escaped_text(&text_of(job)))?;
    let is_wrong = |it: &RasOfClique| matches!(it.state, CliqueState::Trouble | CliqueState::Waits);
    Ok(if job.cliques.iter().any(is_wrong) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn compare(address: String, before: &RasReport, now: &RasReport) -> RasOfJob {
    let known: BTreeMap<u64, &RasCommunicator> =
        before.communicators.iter().map(|found| (found.hash, found)).collect();
    let mut cliques: Vec<RasOfClique> = now
        .communicators
        .iter()
        .map(|found| RasOfClique::new(found, known.get(&found.hash).copied()))
        .collect();
    let place = |it: &RasOfClique| (it.state as u8, std::cmp::Reverse(it.ranks));
    cliques.sort_by_key(place);
    RasOfJob { address, nccl_version: escape_to_one_line(&now.nccl_version).into_owned(), cliques }
}

fn text_of(job: &RasOfJob) -> String {
    let mut text = format!(
        "NCCL {} at {}: {}\n",
        job.nccl_version,
        job.address,
        format_count_with_noun(job.cliques.len(), "communicator", "communicators")
    );
    if !job.cliques.is_empty() {
        text += "CLIQUE            RANKS  CALLED BY ALL     SPREAD  STATE\n";
    }
    for clique in &job.cliques {
        let answered = match clique.answered == clique.ranks {
            true => clique.ranks.to_string(),
            false => format!("{}/{}", clique.answered, clique.ranks),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<17} {answered:<6} {:<17} {:<7} {}",
            clique.clique,
            clique.back,
            clique.front - clique.back.min(clique.front),
            clique.state_text()
        );
        if clique.state == CliqueState::Advances || clique.state == CliqueState::Idle {
            continue;
        }
        for rank in &clique.notable {
            let called = rank.called.map_or_else(|| "?".to_owned(), |called| called.to_string());
            let _ = writeln!(
                text,
                "  rank {:<6} {:<24} called {called:<10} {}",
                rank.rank,
                rank.process(),
                rank.text
            );
        }
        match clique.notable_count as usize - clique.notable.len().min(clique.notable_count as usize) {
            0 => {}
            more => drop(writeln!(text, "  and {more} more")),
        }
    }
    text.pop();
    text
}

#[cfg(test)]
mod tests {
    use muster_collectives::ras::RasRankState;

    use super::*;

    fn communicator(front: u64, back: u64, total_called: u64, notable: Vec<RasRank>) -> RasReport {
        let notable_count = notable.len() as u32;
        let one = RasCommunicator {
            hash: 5,
            ranks: 2,
            answered: 2,
            front,
            back,
            total_called,
            notable,
            notable_count,
        };
        RasReport { nccl_version: "2.29.1".into(), communicators: vec![one] }
    }

    fn rank(state: RasRankState, called: Option<u64>) -> RasRank {
        RasRank { rank: 1, host: "10.0.0.1".into(), pid: 7, state, called }
    }

    #[test]
    fn what_does_not_change_between_two_questions_waits() {
        let behind = || vec![rank(RasRankState::Answers, Some(3))];
        let (waiting, level) = (communicator(4, 3, 7, behind()), communicator(4, 4, 8, Vec::new()));
        let state =
            |before: &RasReport, now: &RasReport| compare("here".into(), before, now).cliques[0].state;
        assert_eq!(state(&waiting, &waiting), CliqueState::Waits);
        assert_eq!(state(&level, &level), CliqueState::Idle);
        assert_eq!(state(&waiting, &level), CliqueState::Advances);
        assert_eq!(state(&RasReport::default(), &level), CliqueState::Advances);
        let dead = communicator(4, 4, 4, vec![rank(RasRankState::Dead, None)]);
        assert_eq!(state(&level, &dead), CliqueState::Trouble);
    }

    #[test]
    fn the_ranks_that_differ_are_named() {
        let waiting = communicator(4, 3, 7, vec![rank(RasRankState::Answers, Some(3))]);
        let text = text_of(&compare("here".into(), &waiting, &waiting));
        assert!(
            text.contains("1 rank has called least\n  rank 1      10.0.0.1:7               called 3"),
            "{text}"
        );
    }
}

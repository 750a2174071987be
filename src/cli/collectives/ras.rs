//! Shows what RAS, NCCL's own monitoring, says of the communicators of a job. Begin at [`run`].
//!
//! RAS only counts calls, and its numbers are never of one moment. So it is asked twice: if ranks differ and do not change meanwhile,
//! they wait.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use muster_collectives::clique_name;
use muster_collectives::ras::{
    RasCommunicator, RasError, RasRank, RasReport, ask_ras, ras_address_of_environment,
};
use serde::Serialize;

use super::clique_rows::{CLIQUE_HEADING, clique_row};
use crate::cli::output::{TerminalText, print_error};
use crate::cli::server_args::ServerArgs;
use crate::service::collectives::RasRankView;
use crate::text::{escape_to_one_line, format_count_with_noun};

/// The time between the two questions.
const PAUSE: Duration = Duration::from_secs(2);
/// The number of second questions. Several jobs of a host listen at one address, and the kernel chooses the process that answers.
const ATTEMPTS: usize = 8;
/// The status if RAS gives no answer.
const NO_ANSWER: u8 = 3;

/// The RAS report on a job.
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
    notable: Vec<RasRankView>,
    notable_count: u32,
}

/// The state of a clique, as far as calls tell it.
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
    /// It was not there at the first question: it is new, or of another job.
    New,
}

/// Returns the process of a rank, as `HOST:PID`.
fn process_text(rank: &RasRankView) -> String {
    let pid = rank.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
    escape_to_one_line(&format!("{}:{pid}", rank.host)).into_owned()
}

impl RasOfClique {
    fn new(found: &RasCommunicator, before: Option<&RasCommunicator>) -> Self {
        let is_trouble = |rank: &RasRank| rank.state.is_trouble();
        let has_advanced = |before: &RasCommunicator| {
            (before.answered, before.total_called) != (found.answered, found.total_called)
        };
        let state = match before {
            _ if found.notable.iter().any(is_trouble) => CliqueState::Trouble,
            None => CliqueState::New,
            Some(before) if has_advanced(before) => CliqueState::Advances,
            Some(_) if found.front > found.back => CliqueState::Waits,
            Some(_) => CliqueState::Idle,
        };
        Self {
            clique: clique_name(found.hash),
            ranks: found.ranks,
            answered: found.answered,
            front: found.front,
            back: found.back,
            state,
            notable: found.notable.iter().map(|rank| RasRankView::new(rank, None)).collect(),
            notable_count: found.notable_count,
        }
    }

    fn state_text(&self) -> String {
        let pause = PAUSE.as_secs();
        match (self.state, self.notable.first()) {
            (CliqueState::Trouble, Some(first)) => format!("rank {} {}", first.rank, first.text),
            (CliqueState::Trouble | CliqueState::Waits, _) => {
                format!("has called nothing for {pause} s, and its ranks differ")
            }
            (CliqueState::Idle, _) => format!("has called nothing for {pause} s; all ranks are level"),
            (CliqueState::Advances, _) => "advances".to_owned(),
            (CliqueState::New, _) => format!("was not there {pause} s ago"),
        }
    }

    /// Returns the number of ranks that differ and are not listed.
    fn unlisted(&self) -> usize {
        (self.notable_count as usize).saturating_sub(self.notable.len())
    }
}

/// Runs the subcommand. Without an address, asks where NCCL listens by itself. The status is 1 if a communicator is in trouble or
/// waits, and 3 if RAS gives no answer.
pub(super) fn run(address: &str, answers: &ServerArgs) -> Result<ExitCode> {
    let address = if address.is_empty() { ras_address_of_environment() } else { address.to_owned() };
    let (before, now) = match ask_twice(&address) {
        Ok(reports) => reports,
        Err(error) => {
            print_error(format_args!("{error}"));
            return Ok(ExitCode::from(NO_ANSWER));
        }
    };
    let job = compare(address, &before, &now);
    answers.print_answer(&job, |job| TerminalText::from_escaped_text(&text_of(job)))?;
    let is_wrong = |it: &RasOfClique| matches!(it.state, CliqueState::Trouble | CliqueState::Waits);
    Ok(if job.cliques.iter().any(is_wrong) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Asks the same job twice.
fn ask_twice(address: &str) -> Result<(RasReport, RasReport), RasError> {
    let before = ask_ras(address)?;
    std::thread::sleep(PAUSE);
    let is_known = |found: &RasCommunicator| before.communicators.iter().any(|it| it.hash == found.hash);
    let mut now = ask_ras(address)?;
    for _ in 1..ATTEMPTS {
        if before.communicators.is_empty() || now.communicators.iter().any(is_known) {
            break;
        }
        now = ask_ras(address)?;
    }
    Ok((before, now))
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
        text += CLIQUE_HEADING;
    }
    for clique in &job.cliques {
        let (ranks, called) = ((clique.answered as usize, clique.ranks), (clique.back, clique.front));
        text += &clique_row(&clique.clique, ranks, called, clique.state_text());
        if !matches!(clique.state, CliqueState::Trouble | CliqueState::Waits) {
            continue;
        }
        for rank in &clique.notable {
            let called = rank.called.map_or_else(|| "?".to_owned(), |called| called.to_string());
            let _ = writeln!(
                text,
                "  rank {:<6} {:<24} called {called:<10} {}",
                rank.rank,
                process_text(rank),
                rank.text
            );
        }
        match clique.unlisted() {
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
    fn a_communicator_that_does_not_change_waits() {
        let behind = || vec![rank(RasRankState::Answers, Some(3))];
        let (waiting, level) = (communicator(4, 3, 7, behind()), communicator(4, 4, 8, Vec::new()));
        let state =
            |before: &RasReport, now: &RasReport| compare("here".into(), before, now).cliques[0].state;
        assert_eq!(state(&waiting, &waiting), CliqueState::Waits);
        assert_eq!(state(&level, &level), CliqueState::Idle);
        assert_eq!(state(&waiting, &level), CliqueState::Advances);
        assert_eq!(state(&RasReport::default(), &level), CliqueState::New);
        let dead = communicator(4, 4, 4, vec![rank(RasRankState::Dead, None)]);
        assert_eq!(state(&level, &dead), CliqueState::Trouble);
    }

    #[test]
    fn the_ranks_that_differ_are_named() {
        let waiting = communicator(4, 3, 7, vec![rank(RasRankState::Answers, Some(3))]);
        let text = text_of(&compare("here".into(), &waiting, &waiting));
        assert!(
            text.contains("and its ranks differ\n  rank 1      10.0.0.1:7               called 3"),
            "{text}"
        );
    }
}

//! The cliques of a job at one moment: which of them wait, why, and for which tasks. Begin at [`judge`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use muster_collectives::ras::RasCommunicator;

use super::analysis::{CliqueWait, find_wait};
use super::clique_key::CliqueDevices;
use super::report_store::{JobCollectives, ProcessReport, ReportedClique};
use super::wait_graph::{Participant, WaitRole, WaitingClique, find_causes};
use crate::coordination::{TaskId, Timestamp};

/// The wait from which a clique is said to wait. GPUs that advance wait for one another all the time, each time for a moment.
const SHOWN_AFTER: Duration = Duration::from_secs(1);

/// Which tasks the processes and ranks are.
pub(super) struct TaskNames<'a> {
    pub of_job: &'a JobCollectives,
    by_process: BTreeMap<u64, TaskId>,
}

impl<'a> TaskNames<'a> {
    pub fn new(of_job: &'a JobCollectives) -> Self {
        let task_of = |(process, known): (&u64, &Arc<ProcessReport>)| {
            let by_clique = known.report.communicators.iter().find_map(|it| {
                of_job.index.get(it.hash).and_then(|key| key.tasks.get(it.rank as usize).copied().flatten())
            });
            let told = known.report.task.and_then(|task| i32::try_from(task).ok()).map(TaskId);
            by_clique.or(told).map(|task| (*process, task))
        };
        Self { of_job, by_process: of_job.processes.iter().filter_map(task_of).collect() }
    }

    /// Returns the devices of a clique, if its key is known and has as many of them.
    pub fn key(&self, clique: &ReportedClique<'_>) -> Option<&'a CliqueDevices> {
        self.of_job.index.get(clique.hash).filter(|key| key.devices.len() == clique.ranks as usize)
    }

    /// Returns the task of a rank, if it is known.
    pub fn task(&self, clique: &ReportedClique<'_>, rank: u32) -> Option<TaskId> {
        let by_key = self.key(clique).and_then(|key| key.tasks.get(rank as usize).copied().flatten());
        by_key.or_else(|| {
            let report = clique.members.get(&rank)?;
            self.by_process.get(&report.process).copied()
        })
    }

    /// Returns what RAS says of a clique, while that says something about the present.
    pub fn ras(&self, clique: &ReportedClique<'_>, now: Timestamp) -> Option<&'a RasCommunicator> {
        self.of_job.ras.communicator(clique.hash, clique.ranks, now)
    }

    fn participant(&self, clique: &ReportedClique<'_>, rank: u32) -> Participant {
        match (self.task(clique, rank), clique.members.get(&rank)) {
            (Some(task), _) => Participant::Task(task),
            (None, Some(report)) => Participant::Process(report.process),
            (None, None) => Participant::Rank { clique: clique.hash, rank },
        }
    }
}

/// A clique with its wait.
pub(super) struct JudgedClique<'a> {
    pub clique: ReportedClique<'a>,
    pub wait: Option<(CliqueWait, WaitRole)>,
}

/// Returns the cliques of a job with their waits: those that wait first, and of them the causes and the longest waits.
pub(super) fn judge<'a>(
    of_job: &'a JobCollectives,
    names: &TaskNames<'_>,
    silent_after: Duration,
    now: Timestamp,
) -> Vec<JudgedClique<'a>> {
    let cliques = of_job.cliques(now, silent_after);
    // After an outage of the service or of the network, reports return one after the other. Until all had time to return, a clique
    // that lacks some of them is not judged.
    let is_resuming = now.since(of_job.resumed_at) < silent_after;
    let judge_one = |clique: &ReportedClique<'_>| {
        let is_whole = clique.heard_count() == clique.ranks as usize;
        let wait = find_wait(clique.ranks, &clique.members).filter(|_| is_whole || !is_resuming);
        wait.filter(|wait| wait.lasted(now) >= SHOWN_AFTER)
    };
    let waits: Vec<Option<CliqueWait>> = cliques.iter().map(judge_one).collect();
    let of_clique = |(clique, wait): (&ReportedClique<'_>, &Option<CliqueWait>)| {
        let wait = wait.as_ref()?;
        Some(waiting_clique(names, clique, wait, now))
    };
    let waiting: Vec<WaitingClique> = cliques.iter().zip(&waits).filter_map(of_clique).collect();
    let mut roles = find_causes(&waiting).into_iter();
    let mut judged: Vec<JudgedClique<'_>> = cliques
        .into_iter()
        .zip(waits)
        .map(|(clique, wait)| {
            let wait = wait.and_then(|wait| Some((wait, roles.next()?)));
            JudgedClique { clique, wait }
        })
        .collect();
    // For how long a wait is known to last changes with every report, and since when does not.
    judged.sort_by_key(|judged| {
        let wait = judged.wait.as_ref();
        let place = wait.map(|(wait, role)| (*role == WaitRole::Consequence, wait.since));
        (place.is_none(), place, Reverse(judged.clique.ranks), judged.clique.hash)
    });
    judged
}

/// Returns the participants that wait in a clique, and those for which they wait. A silent rank does not wait, and a task that the
/// others wait for does not wait there with another of its ranks.
fn waiting_clique(
    names: &TaskNames<'_>,
    clique: &ReportedClique<'_>,
    wait: &CliqueWait,
    now: Timestamp,
) -> WaitingClique {
    let waited_for: BTreeSet<Participant> =
        wait.ranks.iter().map(|rank| names.participant(clique, *rank)).collect();
    let others =
        clique.members.iter().filter(|(rank, it)| !it.is_silent && wait.ranks.binary_search(rank).is_err());
    let waiting = others.map(|(rank, _)| names.participant(clique, *rank));
    let waiting = waiting.filter(|participant| !waited_for.contains(participant)).collect();
    WaitingClique { lasted: wait.lasted(now), waiting, waited_for }
}

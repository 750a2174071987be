//! The property of reports: whatever a process sends, little is kept, and it is safe to show and to judge.
//!
//! Begin at [`check_collectives_report`].

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use muster_collectives::parse_clique_name;

use super::analysis::{RankReport, find_wait};
use super::parse::ProcessCollectives;
use super::{COMMUNICATORS_MAX, CollectiveReports, FUNCTIONS_MAX, OPERATIONS_MAX, RAS_COMMUNICATORS_MAX};
use crate::clock::Clock;
use crate::coordination::{JobId, JobSettings, Timestamp};
use crate::engine::Engine;
use crate::text::is_hidden_character;

/// Returns an engine with a job.
fn engine_with_job() -> &'static (Arc<Engine>, Option<JobId>) {
    static ENGINE: OnceLock<(Arc<Engine>, Option<JobId>)> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let engine = Engine::new(Clock::start());
        let name = "fuzzed".parse();
        let job = name.ok().and_then(|name| engine.declare_job(name, JobSettings::new(2)).ok());
        (engine, job)
    })
}

/// Keeps a report twice, the second time with what the first one leads to, and shows its cliques.
fn keep_and_show(input: &[u8]) {
    let (engine, Some(job)) = engine_with_job() else { return };
    let reports = CollectiveReports::default();
    for _ in 0..2 {
        // A refused report changes nothing.
        let _ = reports.accept_report(engine, *job, input);
        let _ = reports.view_with_clique(engine, *job, 2, |view| {
            view.cliques.first().and_then(|clique| parse_clique_name(&clique.clique))
        });
        let _ = (reports.find_troubles(engine, *job, 2), reports.counts(*job), reports.bytes());
    }
}

/// Decodes, checks, keeps and shows a report, and judges its communicators as if they were the ranks of one clique.
pub(crate) fn check_collectives_report(input: &[u8]) {
    let now = Timestamp(1_700_000_000_000_000);
    let Ok(report) = ProcessCollectives::parse(input, now) else { return };
    keep_and_show(input);
    assert!(report.communicators.len() <= COMMUNICATORS_MAX);
    let mut ranks = BTreeMap::new();
    for communicator in &report.communicators {
        assert!(communicator.functions.len() <= FUNCTIONS_MAX);
        assert!(communicator.operations.len() <= OPERATIONS_MAX);
        assert!(communicator.changed_at <= now && communicator.rank < communicator.ranks);
        assert!(communicator.operations.is_sorted_by(|one, next| one.number < next.number));
        for text in [&communicator.name, &report.host] {
            assert!(!text.contains(is_hidden_character), "{text:?} is not safe to show");
        }
        let is_silent = communicator.hash % 2 == 1;
        let rank = RankReport { process: report.process, communicator, heard_at: now, is_silent };
        ranks.insert(communicator.rank, rank);
    }
    if let Some(ras) = &report.ras {
        assert!(ras.communicators.len() <= RAS_COMMUNICATORS_MAX);
        let hosts = ras.communicators.iter().flat_map(|it| &it.notable).map(|rank| &rank.host);
        for text in hosts.chain([&ras.nccl_version, &ras.error]) {
            assert!(!text.contains(is_hidden_character), "{text:?} is not safe to show");
        }
    }
    let Some(most) = report.communicators.iter().map(|it| it.ranks).max() else { return };
    if let Some(wait) = find_wait(most, &ranks) {
        assert!(wait.since <= now && wait.ranks.iter().all(|rank| *rank < most));
    }
}

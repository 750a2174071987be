//! The property of reports: whatever a process sends, little is kept, and it is safe to show and to judge.
//!
//! Begin at [`check_collectives_report`].

use std::collections::BTreeMap;

use super::analysis::{RankReport, find_wait};
use super::parse::ProcessCollectives;
use super::{COMMUNICATORS_MAX, FUNCTIONS_MAX, OPERATIONS_MAX};
use crate::coordination::Timestamp;
use crate::text::is_hidden_character;

/// Decodes and checks a report, and judges its communicators as if they were the ranks of one clique.
pub(crate) fn check_collectives_report(input: &[u8]) {
    let now = Timestamp(1_700_000_000_000_000);
    let Ok(report) = ProcessCollectives::parse(input, now) else { return };
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
    let Some(most) = report.communicators.iter().map(|it| it.ranks).max() else { return };
    if let Some(wait) = find_wait(most, &ranks) {
        assert!(wait.since <= now && wait.ranks.iter().all(|rank| *rank < most));
    }
}

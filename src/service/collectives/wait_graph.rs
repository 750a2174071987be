//! Of several cliques that wait, which are the cause and which follow from it.
//!
//! A task that waits in one clique cannot call the collectives of another one. So a clique that waits for such a task follows
//! from the other clique. Begin at [`find_causes`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::TaskId;

/// The place of a clique among those that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WaitRole {
    /// It waits for a task that waits nowhere else.
    Cause,
    /// The tasks for which it waits all wait in other cliques.
    Consequence,
    /// It is one of several cliques whose tasks wait for one another.
    Cycle,
}

/// Somebody who waits in cliques: known by the most that is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Participant {
    Task(TaskId),
    /// A process of an unknown task, by the number under which it reports.
    Process(u64),
    /// A rank of which nothing was ever heard.
    Rank {
        clique: u64,
        rank: u32,
    },
}

/// A clique that waits.
#[derive(Debug, Clone, Default)]
pub(super) struct WaitingClique {
    /// For how long it has waited.
    pub lasted: Duration,
    pub waiting: BTreeSet<Participant>,
    pub waited_for: BTreeSet<Participant>,
}

/// Returns the role of each clique.
///
/// A clique follows only from one that has waited for at least half as long: a task that advances in its other cliques waits there
/// again and again, each time for a moment.
pub(super) fn find_causes(cliques: &[WaitingClique]) -> Vec<WaitRole> {
    // The cliques in which a participant waits.
    let mut waits_in: BTreeMap<Participant, Vec<usize>> = BTreeMap::new();
    for (index, clique) in cliques.iter().enumerate() {
        for participant in &clique.waiting {
            waits_in.entry(*participant).or_default().push(index);
        }
    }
    let follows: Vec<Vec<usize>> = cliques
        .iter()
        .enumerate()
        .map(|(index, clique)| {
            let elsewhere = |participant: &Participant| -> Vec<usize> {
                let found = waits_in.get(participant).into_iter().flatten();
                let is_as_old = |other: &usize| cliques[*other].lasted * 2 >= clique.lasted;
                found.copied().filter(|other| *other != index && is_as_old(other)).collect()
            };
            let of_each: Vec<Vec<usize>> = clique.waited_for.iter().map(elsewhere).collect();
            // One participant that waits nowhere else is cause enough.
            if of_each.iter().any(Vec::is_empty) { Vec::new() } else { of_each.concat() }
        })
        .collect();
    (0..cliques.len())
        .map(|index| match () {
            () if follows[index].is_empty() => WaitRole::Cause,
            () if is_reachable(&follows, index, index) => WaitRole::Cycle,
            () => WaitRole::Consequence,
        })
        .collect()
}

/// Returns whether `to` is reached from `from` by at least one step.
fn is_reachable(follows: &[Vec<usize>], from: usize, to: usize) -> bool {
    let mut seen = BTreeSet::new();
    let mut left = follows[from].clone();
    while let Some(next) = left.pop() {
        if next == to {
            return true;
        }
        if seen.insert(next) {
            left.extend(&follows[next]);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(waiting: &[u64], waited_for: &[u64]) -> WaitingClique {
        WaitingClique {
            lasted: Duration::from_secs(10),
            waiting: waiting.iter().copied().map(Participant::Process).collect(),
            waited_for: waited_for.iter().copied().map(Participant::Process).collect(),
        }
    }

    #[test]
    fn a_clique_follows_from_the_one_in_which_its_culprit_waits() {
        use WaitRole::{Cause, Consequence, Cycle};
        // 1 waits for 2 in one clique; 3 waits for 1 in another.
        assert_eq!(find_causes(&[waiting(&[1], &[2]), waiting(&[3], &[1])]), [Cause, Consequence]);
        // 1 and 2 wait for each other, and 3 for one of them.
        let cycle = [waiting(&[1], &[2]), waiting(&[2], &[1]), waiting(&[3], &[2])];
        assert_eq!(find_causes(&cycle), [Cycle, Cycle, Consequence]);
        // 4 waits nowhere, so it is the cause beside 1.
        assert_eq!(find_causes(&[waiting(&[1], &[2]), waiting(&[3], &[1, 4])]), [Cause, Cause]);
        assert_eq!(find_causes(&[waiting(&[1, 2], &[])]), [Cause], "no rank differs from the others");
        assert_eq!(find_causes(&[]), []);
        // 2 advances in another clique, in which it waits for a moment.
        let moment = WaitingClique { lasted: Duration::from_secs(1), ..waiting(&[2, 3], &[]) };
        assert_eq!(find_causes(&[waiting(&[1], &[2]), moment]), [Cause, Cause]);
    }
}

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

/// A participant in cliques: a task, else a process, else a rank.
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
    let follows: Vec<BTreeSet<usize>> = cliques
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
            let is_cause = of_each.iter().any(Vec::is_empty);
            if is_cause { BTreeSet::new() } else { of_each.into_iter().flatten().collect() }
        })
        .collect();
    let in_cycle = find_cycles(&follows);
    let role = |index: usize| match () {
        () if follows[index].is_empty() => WaitRole::Cause,
        () if in_cycle[index] => WaitRole::Cycle,
        () => WaitRole::Consequence,
    };
    (0..cliques.len()).map(role).collect()
}

/// Returns which nodes of a graph are in a cycle: those that share a strongly connected component with another node (Kosaraju).
fn find_cycles(follows: &[BTreeSet<usize>]) -> Vec<bool> {
    let mut reverse: Vec<Vec<usize>> = vec![Vec::new(); follows.len()];
    for (from, to) in follows.iter().enumerate().flat_map(|(from, all)| all.iter().map(move |to| (from, *to)))
    {
        reverse[to].push(from);
    }
    let forward: Vec<Vec<usize>> = follows.iter().map(|all| all.iter().copied().collect()).collect();
    let mut seen = vec![false; follows.len()];
    let mut finished = Vec::new();
    for start in 0..follows.len() {
        visit(&forward, start, &mut seen, &mut finished);
    }
    let mut in_cycle = vec![false; follows.len()];
    seen.fill(false);
    for start in finished.into_iter().rev() {
        let mut component = Vec::new();
        visit(&reverse, start, &mut seen, &mut component);
        if component.len() > 1 {
            component.into_iter().for_each(|node| in_cycle[node] = true);
        }
    }
    in_cycle
}

/// Visits every node that is reached from `start` and was not seen, depth first. Appends each when all that follow it are done.
fn visit(edges: &[Vec<usize>], start: usize, seen: &mut [bool], finished: &mut Vec<usize>) {
    if std::mem::replace(&mut seen[start], true) {
        return;
    }
    let mut path = vec![(start, 0)];
    while let Some((node, at)) = path.last_mut() {
        let node = *node;
        match edges[node].get(*at).copied() {
            None => {
                finished.push(node);
                path.pop();
            }
            Some(next) => {
                *at += 1;
                if !std::mem::replace(&mut seen[next], true) {
                    path.push((next, 0));
                }
            }
        }
    }
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

    #[test]
    fn a_chain_into_a_cycle_is_no_part_of_it() {
        use WaitRole::{Cause, Consequence, Cycle};
        let chain = [waiting(&[1], &[2]), waiting(&[2], &[3]), waiting(&[3], &[2]), waiting(&[3], &[9])];
        assert_eq!(find_causes(&chain), [Consequence, Cycle, Cycle, Cause]);
        // Each of many cliques follows from every one of the other half, through each of their tasks.
        let tasks_of = |half: u64| (0..60).filter(|task| task % 2 == half).collect::<Vec<u64>>();
        let many: Vec<_> = (0..600).map(|it| waiting(&tasks_of(it % 2), &tasks_of((it + 1) % 2))).collect();
        assert!(find_causes(&many).iter().all(|role| *role == Cycle));
    }
}

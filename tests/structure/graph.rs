//! Finds cycles in a graph.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the cycles among `edges`: sets of more than one node in which each node is reachable from each
/// other one.
pub fn circles(edges: &BTreeSet<(String, String)>) -> Vec<Vec<String>> {
    let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in edges {
        next.entry(from).or_default().push(to);
    }
    let reached = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut open: Vec<&str> = next.get(from).cloned().unwrap_or_default();
        while let Some(node) = open.pop() {
            if seen.insert(node.to_owned()) {
                open.extend(next.get(node).into_iter().flatten());
            }
        }
        seen
    };
    let reach: BTreeMap<&str, BTreeSet<String>> = next.keys().map(|node| (*node, reached(node))).collect();
    let mut found: Vec<Vec<String>> = Vec::new();
    for (node, there) in &reach {
        let back = |other: &&String| reach.get(other.as_str()).is_some_and(|from| from.contains(*node));
        let circle: Vec<String> = there.iter().filter(back).cloned().collect();
        if circle.len() > 1 && circle.iter().any(|other| other == node) && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

#[test]
fn a_circle_is_found_and_a_path_is_none() {
    let edge = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    let path = [edge("a", "b"), edge("b", "c"), edge("a", "c")];
    assert!(circles(&path.clone().into()).is_empty());
    let circle: BTreeSet<_> = path.into_iter().chain([edge("c", "b"), edge("d", "a")]).collect();
    assert_eq!(circles(&circle), [vec!["b".to_owned(), "c".to_owned()]]);
}

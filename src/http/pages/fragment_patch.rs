//! Computes the line difference between two versions of a fragment.
//!
//! `muster.js` applies the difference in the browser. Begin at `compute_line_patch`.

use std::collections::HashMap;

use serde::Serialize;

/// One step of a patch; all steps in order produce the new text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum PatchStep<'a> {
    /// Copies lines of the old text: the first line, counted from 0, and the number of lines.
    Take(usize, usize),
    /// Inserts a new line.
    Line(&'a str),
}

/// Returns the steps from `old` to `new`; `None` if they would not save half of the bytes.
pub(super) fn compute_line_patch<'a>(old: &str, new: &'a str) -> Option<Vec<PatchStep<'a>>> {
    let lines: Vec<&str> = old.split('\n').collect();
    // The last position of each line. Equal lines elsewhere are found as the successors of the line before.
    let places: HashMap<&str, usize> = lines.iter().enumerate().map(|(at, line)| (*line, at)).collect();
    let mut steps: Vec<PatchStep<'a>> = Vec::new();
    let (mut next, mut cost) = (0, 0);
    for line in new.split('\n') {
        let follows = lines.get(next) == Some(&line);
        let found = if follows { Some(next) } else { places.get(line).copied() };
        let Some(at) = found else {
            steps.push(PatchStep::Line(line));
            cost += line.len() + 4;
            // In most changes a line changes in place.
            next += 1;
            continue;
        };
        match steps.last_mut() {
            Some(PatchStep::Take(from, count)) if *from + *count == at => *count += 1,
            _ => {
                steps.push(PatchStep::Take(at, 1));
                cost += 10;
            }
        }
        next = at + 1;
    }
    (cost < new.len() / 2).then_some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply_patch(old: &str, steps: &[PatchStep<'_>]) -> String {
        let lines: Vec<&str> = old.split('\n').collect();
        let made = steps.iter().flat_map(|step| match step {
            PatchStep::Take(from, count) => lines[*from..from + count].to_vec(),
            PatchStep::Line(line) => vec![*line],
        });
        made.collect::<Vec<_>>().join("\n")
    }

    /// Returns a table with these rows.
    fn html_table(rows: impl Iterator<Item = u32>) -> String {
        let row = |at: u32| format!("<tr data-key=\"{at}\">\n<td>{at}</td>\n<td>passed</td>\n</tr>\n");
        format!("<table>\n{}</table>", rows.map(row).collect::<String>())
    }

    #[test]
    fn the_steps_make_the_new_text_and_are_few() {
        let old = html_table(0..100);
        let changed = old.replace("<td>70</td>", "<td>seventy</td>");
        // A row is added and the last one removed; one changes; rows are reordered; one is removed.
        let news = [
            html_table((1000..1001).chain(0..99)),
            changed,
            html_table((0..100).rev()),
            html_table((0..100).filter(|at| *at != 50)),
        ];
        let few: Vec<usize> = news
            .iter()
            .map(|new| {
                let steps = compute_line_patch(&old, new).expect("it spares something");
                assert_eq!(apply_patch(&old, &steps), *new);
                serde_json::to_string(&steps).expect("it is data").len()
            })
            .collect();
        assert!(few[0] < 100 && few[1] < 100 && few[3] < 100, "{few:?}");
    }

    #[test]
    fn a_fragment_without_common_lines_is_sent_whole() {
        assert_eq!(compute_line_patch(&html_table(0..10), "something else\nand more"), None);
        assert_eq!(compute_line_patch("", &html_table(0..10)), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_made_of_any_other(old in "[ab\n]{0,60}", new in "[ab\n]{0,60}") {
            if let Some(steps) = compute_line_patch(&old, &new) {
                proptest::prop_assert_eq!(apply_patch(&old, &steps), new);
            }
        }
    }
}

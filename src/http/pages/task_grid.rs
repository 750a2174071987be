//! The grid: one cell for each task, so that the state of ten thousand tasks fits on one screen.
//!
//! For a small job, each cell is a link. For a large job, the grid is one SVG image. The image has one path for
//! each status, filled with the pattern of the status. The path contains one rectangle for each series of
//! neighbouring tasks with that status. The size of the image therefore grows with the number of such series, not
//! with the number of tasks. `task_table.rs` shows the same tasks as a table. Begin at `render_task_grid_fragment`.

use std::fmt::Write as _;

use askama::Template;

use super::amount;
use super::fragment::Fragment;
use super::links::{self, JobPages};
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use crate::coordination::TaskId;
use crate::http::Problem;
use crate::text::format_grouped;

/// The maximum number of tasks for which each cell is a link.
const LINKS_MAX: usize = 128;
/// The side of a cell, in units of the picture.
const CELL: usize = 10;
/// The maximum number of rows and of columns that have numbers.
const NUMBERED_MAX: usize = 10;

struct GridCell {
    task: TaskId,
    status: TaskStatus,
    says: String,
}

struct StatusLayer {
    status: TaskStatus,
    path: String,
}

#[derive(Template)]
#[template(path = "parts/grid.html")]
struct TaskGridFragment<'a> {
    job: &'a JobPages,
    counts: Vec<(TaskStatus, usize)>,
    total: usize,
    cells: Vec<GridCell>,
    layers: Vec<StatusLayer>,
    columns: usize,
    width: usize,
    height: usize,
    says: String,
    /// The columns and the rows that have numbers: each with its place and the number.
    column_numbers: Vec<(usize, usize)>,
    /// The height of a number, in units of the picture, which is shown as wide as the page.
    number_size: usize,
    row_numbers: Vec<(usize, usize)>,
}

/// Returns about ten places among `count`, at a round distance of `apart` or more.
fn numbered_places(count: usize, apart: usize) -> impl Iterator<Item = usize> {
    let least = count.div_ceil(NUMBERED_MAX).max(apart);
    let step = [1, 2, 5, 10, 20, 50, 100, 200, 500].into_iter().find(|step| *step >= least).unwrap_or(least);
    (0..count).step_by(step)
}

/// Returns the number of cells in a row: a round number, so that rows can be counted.
fn column_count(tasks: usize) -> usize {
    match tasks {
        0..=500 => 50,
        501..=2_000 => 100,
        2_001..=20_000 => 200,
        _ => 400,
    }
}

/// Returns the path with a rectangle for every run of cells with this status.
fn svg_path_of_status(looks: &[TaskStatus], look: TaskStatus, columns: usize) -> String {
    let mut path = String::new();
    for (row, cells) in looks.chunks(columns).enumerate() {
        let mut at = 0;
        while at < cells.len() {
            let long = cells[at..].iter().take_while(|one| **one == look).count();
            if long > 0 {
                // Writing to a string cannot fail.
                let _ =
                    write!(path, "M{} {}h{}v{CELL}h-{}z", at * CELL, row * CELL, long * CELL, long * CELL);
            }
            at += long.max(1);
        }
    }
    path
}

pub(super) fn render_task_grid_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let (counts, total) = (snapshot.status_counts(), snapshot.task_count());
    let said: Vec<String> =
        counts.iter().map(|(look, count)| format!("{} {}", format_grouped(count), look.word())).collect();
    let says = said.join(", ");
    let job = &snapshot.pages;
    let columns = column_count(total);
    let number_size = (columns.min(total) * CELL / 80).clamp(9, 28);
    let mut grid = TaskGridFragment {
        job,
        total,
        cells: Vec::new(),
        layers: Vec::new(),
        columns,
        width: columns.min(total) * CELL,
        height: total.div_ceil(columns) * CELL,
        says,
        number_size,
        column_numbers: numbered_places(columns.min(total), 1).map(|at| (at * CELL, at)).collect(),
        // Two numbers, one below the other, do not touch.
        row_numbers: numbered_places(total.div_ceil(columns), number_size.div_ceil(CELL))
            .map(|at| (at * CELL, at * columns))
            .collect(),
        counts,
    };
    if total <= LINKS_MAX {
        grid.cells = snapshot
            .view
            .run
            .tasks
            .iter()
            .zip(&snapshot.statuses)
            .map(|(task, look)| grid_cell(snapshot, task.task, *look))
            .collect();
    } else {
        let layer = |(look, _): &(TaskStatus, usize)| StatusLayer {
            status: *look,
            path: svg_path_of_status(&snapshot.statuses, *look, columns),
        };
        // The most urgent status is drawn last, on top.
        grid.layers = grid.counts.iter().rev().map(layer).collect();
    }
    Fragment::new("grid", &grid)
}

fn grid_cell(snapshot: &JobSnapshot, task: TaskId, look: TaskStatus) -> GridCell {
    let named = snapshot.task_label(task);
    let place = if named.address.is_empty() { String::new() } else { format!(" at {}", named.address) };
    GridCell { task, status: look, says: format!("Task {task}{place}: {}", look.word()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_look_the_same_are_one_rectangle() {
        let mut looks = vec![TaskStatus::Connected; 7];
        looks[2] = TaskStatus::Failed;
        assert_eq!(svg_path_of_status(&looks, TaskStatus::Failed, 5), "M20 0h10v10h-10z");
        assert_eq!(
            svg_path_of_status(&looks, TaskStatus::Connected, 5),
            "M0 0h20v10h-20zM30 0h20v10h-20zM0 10h20v10h-20z"
        );
        assert!(
            svg_path_of_status(&vec![TaskStatus::Connected; 10_000], TaskStatus::Connected, 200).len() < 1500
        );
    }
}

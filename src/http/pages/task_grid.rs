//! The grid: one cell for each task, so that the state of ten thousand tasks fits on one screen.
//!
//! For a small job, each cell is a link. For a large job, the grid is one SVG image. The image has one path for
//! each status, filled with the pattern of the status. The path contains one rectangle for each series of
//! neighbouring tasks with that status. The size of the image therefore grows with the number of such series, not
//! with the number of tasks. The picture of thousands of tasks can be limited to a block of them, whose cells are larger.
//! `task_table.rs` shows the same tasks as a table. Begin at `render_task_grid_fragment`.

use std::fmt::Write as _;

use askama::Template;

use super::amount;
use super::fragment::Fragment;
use super::links::{self, JobPages};
use super::live_page::TaskTableQuery;
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
/// The number of tasks from which on blocks can be shown alone, the greatest number of blocks, and how many of those with
/// trouble have links.
const BLOCKS_FROM: usize = 1_001;
const BLOCKS_MAX: usize = 20;
const BLOCK_LINKS_MAX: usize = 8;

struct GridCell {
    task: TaskId,
    status: TaskStatus,
    says: String,
}

/// A block of tasks that can be shown alone.
struct TaskBlock {
    query: String,
    text: String,
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
    /// The tasks in the picture: the first, and how many.
    first: usize,
    shown: usize,
    /// The blocks with trouble.
    blocks: Vec<TaskBlock>,
    /// The query of the page that shows all tasks.
    all_query: String,
    /// The parameters of the table, which stay.
    kept: [(&'static str, &'a str); 4],
    can_zoom: bool,
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

/// Returns the number of tasks of a block: a round number, so that there are few blocks.
fn block_length(tasks: usize) -> usize {
    const LENGTHS: [usize; 6] = [500, 1_000, 2_000, 5_000, 10_000, 20_000];
    let least = tasks.div_ceil(BLOCKS_MAX);
    LENGTHS.into_iter().find(|length| *length >= least).unwrap_or(least)
}

/// Returns the blocks in which most tasks are in trouble, in the order of their numbers.
fn blocks_with_trouble(statuses: &[TaskStatus], listing: &TaskTableQuery) -> Vec<TaskBlock> {
    let length = block_length(statuses.len());
    let in_trouble = |block: &[TaskStatus]| {
        block
            .iter()
            .filter(|status| !matches!(status, TaskStatus::Connected | TaskStatus::Disconnected))
            .count()
    };
    let mut blocks: Vec<(usize, usize, usize)> = statuses
        .chunks(length)
        .enumerate()
        .map(|(place, block)| (place * length, block.len(), in_trouble(block)))
        .filter(|(_, _, trouble)| *trouble > 0)
        .collect();
    blocks.sort_by_key(|(first, _, trouble)| (std::cmp::Reverse(*trouble), *first));
    blocks.truncate(BLOCK_LINKS_MAX);
    blocks.sort_unstable();
    let block = |(first, count, trouble): (usize, usize, usize)| TaskBlock {
        query: listing.query_around(Some(first)),
        text: format!("{first}–{}: {} in trouble", first + count - 1, format_grouped(trouble)),
    };
    blocks.into_iter().map(block).collect()
}

pub(super) fn render_task_grid_fragment(
    snapshot: &JobSnapshot,
    listing: &TaskTableQuery,
) -> Result<Fragment, Problem> {
    let (counts, total) = (snapshot.status_counts(), snapshot.task_count());
    let can_zoom = total >= BLOCKS_FROM;
    let around = listing.around.trim().parse::<usize>().ok().filter(|task| can_zoom && *task < total);
    let (first, shown) = match around {
        Some(task) => {
            let length = block_length(total);
            let first = task / length * length;
            (first, length.min(total - first))
        }
        None => (0, total),
    };
    let statuses = &snapshot.statuses[first..first + shown];
    let in_picture = |status: &TaskStatus| statuses.iter().filter(|one| *one == status).count();
    let said: Vec<String> = counts
        .iter()
        .map(|(status, _)| (status, in_picture(status)))
        .filter(|(_, count)| *count > 0)
        .map(|(status, count)| format!("{} {}", format_grouped(count), status.word()))
        .collect();
    let says = said.join(", ");
    let job = &snapshot.pages;
    let columns = column_count(shown);
    let number_size = (columns.min(shown) * CELL / 80).clamp(9, 28);
    let mut grid = TaskGridFragment {
        job,
        total,
        first,
        shown,
        blocks: if can_zoom { blocks_with_trouble(&snapshot.statuses, listing) } else { Vec::new() },
        all_query: listing.query_around(None),
        kept: [
            ("state", &listing.state),
            ("find", &listing.find),
            ("sort", &listing.sort),
            ("down", &listing.down),
        ],
        can_zoom,
        cells: Vec::new(),
        layers: Vec::new(),
        columns,
        width: columns.min(shown) * CELL,
        height: shown.div_ceil(columns) * CELL,
        says,
        number_size,
        column_numbers: numbered_places(columns.min(shown), 1).map(|at| (at * CELL, at)).collect(),
        // Two numbers, one below the other, do not touch.
        row_numbers: numbered_places(shown.div_ceil(columns), number_size.div_ceil(CELL))
            .map(|at| (at * CELL, first + at * columns))
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
            path: svg_path_of_status(statuses, *look, columns),
        };
        // The most urgent status is drawn last, on top.
        grid.layers = grid.counts.iter().rev().map(layer).filter(|layer| !layer.path.is_empty()).collect();
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

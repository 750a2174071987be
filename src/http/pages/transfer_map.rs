//! Draws from which tasks to which the bytes of a job moved: a row for each sender and a column for each receiver.
//!
//! Up to 64 tasks have rows of their own. Of more, a row is a host, and of very many hosts a block of neighbouring ones, so
//! that the picture has at most 128 rows. All cells of one class are one path, as in `task_grid.rs`. Begin at
//! [`TransferMap::new`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::amount::{bytes_text, rate_text};
use super::links::{first_task_ranges_text, host_page_path, short_host_name, task_page_path};
use super::live_page::PairFilter;
use super::snapshot::JobSnapshot;
use crate::coordination::{TaskId, TaskView};
use crate::service::reports::{PairView, ReasonView};

/// The maximum number of tasks that have rows of their own.
const TASKS_MAX: usize = 64;
/// The maximum number of rows.
const ROWS_MAX: usize = 128;
/// The side of a cell, in units of the picture.
pub(super) const CELL: usize = 10;
/// The maximum number of rows that have labels.
const LABELS_MAX: usize = 32;
/// The maximum number of rows of the table.
const LISTED_MAX: usize = 40;
/// The parts of the largest cell from which on a cell has each class but the lowest, as divisors, from the highest class on.
const CLASS_DIVISORS: [u64; 4] = [2, 8, 64, 1024];

/// The tasks of a row and of the column with the same place.
pub(super) struct MapGroup {
    pub label: String,
    pub description: String,
    /// The page of the task or the host; `None` of a block of hosts.
    pub path: Option<String>,
}

/// The cells of one class, from 1 to 5.
pub(super) struct HeatLayer {
    pub class: usize,
    /// The least value of the class as text.
    pub least: String,
    pub path: String,
}

/// The bytes from one group to another.
pub(super) struct MapCell {
    /// The places of the groups.
    pub from: usize,
    pub to: usize,
    pub bytes: u64,
    pub rate: u64,
    pub has_failed: bool,
}

/// The picture.
pub(super) struct TransferMap {
    /// The unit of a row, in words.
    pub unit: &'static str,
    pub by_rate: bool,
    pub groups: Vec<MapGroup>,
    /// The places of the groups that have labels.
    pub labelled: Vec<usize>,
    pub layers: Vec<HeatLayer>,
    /// The outlines of cells with failed transfers.
    pub failures: String,
    pub side: usize,
    /// The cells with the most bytes, or the highest rates.
    pub most: Vec<MapCell>,
    /// The number of cells in which bytes moved.
    pub cells: usize,
}

/// The sums of a cell.
#[derive(Default, Clone, Copy)]
struct CellSums {
    bytes: u64,
    rate: u64,
}

impl TransferMap {
    /// Draws these pairs; `None` if no bytes have moved between or within tasks of the job.
    pub fn new(
        snapshot: &JobSnapshot,
        pairs: &[PairView],
        failures: &[ReasonView],
        choice: &PairFilter,
    ) -> Option<Self> {
        let by_rate = choice.by == "rate";
        let chosen = choice.task_filter();
        let (unit, groups, group_of) = map_groups(snapshot);
        let place = |task: TaskId| group_of.get(usize::try_from(task.0).ok()?).copied();
        let mut sums: BTreeMap<(usize, usize), CellSums> = BTreeMap::new();
        for pair in pairs {
            let Some(cell) = place(pair.from).zip(place(pair.to)) else { continue };
            let sum = sums.entry(cell).or_default();
            sum.bytes = sum.bytes.saturating_add(pair.bytes());
            sum.rate = sum.rate.saturating_add(pair.rate);
        }
        let failed: BTreeSet<(usize, usize)> = failures
            .iter()
            .flat_map(|reason| reason.first.iter().chain(&reason.newest))
            .filter(|failure| failure.peer_job.is_none())
            .filter(|failure| chosen.is_none_or(|task| task == failure.task || task == failure.peer))
            .filter_map(|failure| place(failure.task).zip(place(failure.peer)))
            .collect();
        // A cell with nothing but failures is in the table too.
        for cell in &failed {
            sums.entry(*cell).or_default();
        }
        if sums.is_empty() {
            return None;
        }
        let value = |sum: &CellSums| if by_rate { sum.rate } else { sum.bytes };
        let most = sums.values().map(value).max().unwrap_or_default();
        let mut order: Vec<(&(usize, usize), &CellSums)> = sums.iter().collect();
        order.sort_by_key(|(cell, sum)| (std::cmp::Reverse(value(sum)), **cell));
        let listed = order.iter().take(LISTED_MAX).map(|(cell, sum)| MapCell {
            from: cell.0,
            to: cell.1,
            bytes: sum.bytes,
            rate: sum.rate,
            has_failed: failed.contains(cell),
        });
        let step = groups.len().div_ceil(LABELS_MAX).max(1);
        Some(Self {
            unit,
            by_rate,
            most: listed.collect(),
            layers: heat_layers(sums.iter().map(|(cell, sum)| (*cell, value(sum))), most, by_rate),
            failures: failed.iter().fold(String::new(), |path, cell| add_cells(path, *cell, 1)),
            side: groups.len() * CELL,
            labelled: (0..groups.len()).step_by(step).collect(),
            cells: sums.len(),
            groups,
        })
    }
}

impl TransferMap {
    /// Returns the groups between which the bytes of a cell moved.
    pub fn groups_of(&self, cell: &MapCell) -> [&MapGroup; 2] {
        [&self.groups[cell.from], &self.groups[cell.to]]
    }
}

/// Returns what a row is, the rows, and the row of each task.
fn map_groups(snapshot: &JobSnapshot) -> (&'static str, Vec<MapGroup>, Vec<usize>) {
    let tasks = snapshot.task_count();
    if tasks <= TASKS_MAX {
        let group = |task: &TaskView| MapGroup {
            label: task.task.to_string(),
            description: format!("task {}", task.task),
            path: Some(task_page_path(&snapshot.pages, &task.task)),
        };
        return ("task", snapshot.view.run.tasks.iter().map(group).collect(), (0..tasks).collect());
    }
    // The hosts in the order of their first task; a task on no known host counts as one.
    let hosts = &snapshot.host_assignment;
    let mut units: Vec<Vec<TaskId>> = hosts.hosts().iter().map(|host| host.tasks.clone()).collect();
    let alone = snapshot.view.run.tasks.iter().map(|task| task.task);
    units.extend(alone.filter(|task| hosts.host_of(*task).is_none()).map(|task| vec![task]));
    units.sort();
    let block = units.len().div_ceil(ROWS_MAX).max(1);
    let mut group_of = vec![0; tasks];
    let mut groups = Vec::new();
    for (place, units) in units.chunks(block).enumerate() {
        let mut members: Vec<TaskId> = units.iter().flatten().copied().collect();
        members.sort_unstable();
        for task in &members {
            if let Some(slot) = usize::try_from(task.0).ok().and_then(|task| group_of.get_mut(task)) {
                *slot = place;
            }
        }
        let host = members.first().filter(|_| block == 1).and_then(|task| hosts.host_of(*task));
        let ranges = first_task_ranges_text(&members, 3);
        groups.push(match host {
            Some(host) => MapGroup {
                label: short_host_name(&host.name),
                description: format!("{} (tasks {ranges})", host.name),
                path: Some(host_page_path(&snapshot.pages, &host.name)),
            },
            None => MapGroup {
                label: ranges.clone(),
                description: format!("tasks {ranges}"),
                path: match &members[..] {
                    [task] => Some(task_page_path(&snapshot.pages, task)),
                    _ => None,
                },
            },
        });
    }
    let unit = if block == 1 { "host" } else { "block of neighbouring hosts" };
    (unit, groups, group_of)
}

/// Returns the cells by class, the highest class first.
fn heat_layers(
    cells: impl Iterator<Item = ((usize, usize), u64)>,
    most: u64,
    by_rate: bool,
) -> Vec<HeatLayer> {
    let bounds = CLASS_DIVISORS.map(|divisor| most / divisor);
    let mut paths = [(); CLASS_DIVISORS.len() + 1].map(|()| String::new());
    // The cell before, to draw neighbours in a row as one rectangle.
    let mut begun: Option<((usize, usize), usize, usize)> = None;
    for ((row, column), value) in cells.filter(|(_, value)| *value > 0) {
        let class = bounds.iter().take_while(|bound| value < (**bound).max(1)).count();
        begun = match begun {
            Some((cell, long, of)) if of == class && cell.0 == row && cell.1 + long == column => {
                Some((cell, long + 1, of))
            }
            other => {
                if let Some((cell, long, of)) = other {
                    paths[of] = add_cells(std::mem::take(&mut paths[of]), cell, long);
                }
                Some(((row, column), 1, class))
            }
        };
    }
    if let Some((cell, long, of)) = begun {
        paths[of] = add_cells(std::mem::take(&mut paths[of]), cell, long);
    }
    let text = |value: u64| if by_rate { rate_text(value) } else { bytes_text(value) };
    let classes = paths.into_iter().enumerate().map(|(place, path)| HeatLayer {
        class: CLASS_DIVISORS.len() + 1 - place,
        least: bounds
            .get(place)
            .map_or_else(|| "less".to_owned(), |bound| format!("≥ {}", text((*bound).max(1)))),
        path,
    });
    classes.filter(|layer| !layer.path.is_empty()).collect()
}

/// Adds the rectangle of this many cells in a row to a path.
fn add_cells(mut path: String, (row, column): (usize, usize), long: usize) -> String {
    let wide = long * CELL;
    // Writing to a string cannot fail.
    let _ = write!(path, "M{} {}h{wide}v{CELL}h-{wide}z", column * CELL, row * CELL);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_class_are_one_rectangle_and_the_largest_come_first() {
        let cells = [((0, 1), 1000), ((0, 2), 900), ((0, 3), 1), ((1, 0), 1000), ((1, 5), 0)];
        let layers = heat_layers(cells.into_iter(), 1000, false);
        let drawn: Vec<(usize, &str, &str)> =
            layers.iter().map(|layer| (layer.class, layer.least.as_str(), layer.path.as_str())).collect();
        assert_eq!(
            drawn,
            [(5, "≥ 500 B", "M10 0h20v10h-20zM0 10h10v10h-10z"), (2, "≥ 1 B", "M30 0h10v10h-10z"),]
        );
    }
}

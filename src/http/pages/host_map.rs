//! Draws the hosts of a job as one SVG picture: a box for each host, with a cell for each of its tasks.
//!
//! Cells are coloured by the status of the task, or the boxes by the lateness of the host. As in `task_grid.rs`, all
//! cells with one status are one path, so the picture stays small however many tasks there are. Begin at
//! [`HostMap::new`].

use std::fmt::Write as _;

use super::links;
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use crate::coordination::{HostId, HostState, HostView};
use crate::text::{format_count_with_noun, format_micros};

/// The side of a cell, in units of the picture.
const CELL: usize = 10;
/// The space between the border of a box and its cells.
pub(super) const PADDING: usize = 3;
/// The space between two boxes. With the padding it makes the distance of two boxes a multiple of a cell, so that the
/// pattern of a status fits into the cells of every box.
const GAP: usize = 4;
/// The maximum number of boxes that are links. A picture of more hosts has links for the hosts in trouble only, unless
/// there are more of them too.
const LINKS_MAX: usize = 1_500;
/// The width of the picture divided by its height.
const ASPECT: usize = 3;
/// The greatest lateness of each class but the last, in microseconds.
const LATENESS_CLASSES_US: [u64; 4] = [1_000, 10_000, 100_000, 1_000_000];

/// What the colours of the picture tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapColouring {
    /// The status of each task.
    State,
    /// The time by which a host is later at barriers than the median of the hosts.
    Lateness,
}

impl MapColouring {
    /// Returns the colouring with this name in an address; by state if there is none.
    pub fn from_query(name: &str) -> Self {
        if name == "lateness" { Self::Lateness } else { Self::State }
    }
}

/// A box of the picture.
pub(super) struct HostBox<'a> {
    pub host: &'a HostId,
    pub state: HostState,
    pub x: usize,
    pub y: usize,
    /// The host, its tasks and its state in words.
    pub description: String,
    /// The class of its lateness, from 0 to 4.
    pub lateness_class: usize,
    pub is_link: bool,
}

/// The cells with one status.
pub(super) struct CellLayer {
    pub status: TaskStatus,
    pub path: String,
}

/// The picture.
pub(super) struct HostMap<'a> {
    pub colouring: MapColouring,
    pub boxes: Vec<HostBox<'a>>,
    /// The cells by status, the most urgent status last.
    pub layers: Vec<CellLayer>,
    pub width: usize,
    pub height: usize,
    pub box_width: usize,
    pub box_height: usize,
}

/// The arrangement of boxes and cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// The number of cells in a row of a box.
    columns: usize,
    /// The number of rows of a box.
    rows: usize,
    /// The number of boxes in a row of the picture.
    boxes: usize,
}

impl Layout {
    /// Returns the arrangement for this many hosts, of which the largest has this many tasks.
    fn new(hosts: usize, most_tasks: usize) -> Self {
        let columns = (most_tasks * 2).isqrt().max(1);
        let rows = most_tasks.div_ceil(columns).max(1);
        let mut layout = Self { columns, rows, boxes: 1 };
        let (width, height) = (layout.box_width() + GAP, layout.box_height() + GAP);
        layout.boxes = (hosts * ASPECT * height).div_ceil(width).isqrt().clamp(1, hosts.max(1));
        layout
    }

    fn box_width(&self) -> usize {
        self.columns * CELL + 2 * PADDING
    }

    fn box_height(&self) -> usize {
        self.rows * CELL + 2 * PADDING
    }

    /// Returns the corner of a box.
    fn corner_of(&self, place: usize) -> (usize, usize) {
        let (row, column) = (place / self.boxes, place % self.boxes);
        (column * (self.box_width() + GAP), row * (self.box_height() + GAP))
    }
}

impl<'a> HostMap<'a> {
    /// Draws the hosts of a snapshot, in the order of their first task.
    pub fn new(snapshot: &'a JobSnapshot, colouring: MapColouring) -> Self {
        let hosts = &snapshot.hosts;
        let most_tasks = hosts.iter().map(|host| host.tasks.len()).max().unwrap_or_default();
        let layout = Layout::new(hosts.len(), most_tasks);
        let rows = hosts.len().div_ceil(layout.boxes);
        let in_trouble = hosts.iter().filter(|host| host.state != HostState::Healthy).count();
        let (link_all, link_trouble) = (hosts.len() <= LINKS_MAX, in_trouble <= LINKS_MAX);
        let host_box = |(place, host): (usize, &'a HostView)| {
            let (x, y) = layout.corner_of(place);
            HostBox {
                host: &host.host,
                state: host.state,
                x,
                y,
                description: describe_host(snapshot, host),
                lateness_class: lateness_class(host),
                is_link: link_all || (link_trouble && host.state != HostState::Healthy),
            }
        };
        Self {
            colouring,
            boxes: hosts.iter().enumerate().map(host_box).collect(),
            layers: match colouring {
                MapColouring::State => cell_layers(snapshot, layout),
                MapColouring::Lateness => Vec::new(),
            },
            width: (layout.box_width() + GAP) * layout.boxes - GAP,
            height: ((layout.box_height() + GAP) * rows).saturating_sub(GAP).max(1),
            box_width: layout.box_width(),
            box_height: layout.box_height(),
        }
    }

    /// Returns the classes of lateness, with their meaning.
    pub fn lateness_legend(&self) -> Vec<(usize, String)> {
        let bounds = LATENESS_CLASSES_US.iter().enumerate();
        let mut legend: Vec<(usize, String)> =
            bounds.map(|(class, bound)| (class, format!("≤ {}", format_micros(*bound)))).collect();
        legend.push((LATENESS_CLASSES_US.len(), "more".to_owned()));
        legend
    }

    /// Returns the width at which few hosts are shown, in pixels; a picture of many is as wide as the page.
    pub fn shown_width(&self) -> usize {
        const PIXELS_PER_UNIT: usize = 3;
        (self.width + 4) * PIXELS_PER_UNIT
    }

    /// Returns whether cells are drawn.
    pub fn shows_state(&self) -> bool {
        self.colouring == MapColouring::State
    }
}

/// Returns the cells with each status, the most urgent status last, on top.
fn cell_layers(snapshot: &JobSnapshot, layout: Layout) -> Vec<CellLayer> {
    let mut layers: Vec<CellLayer> = TaskStatus::ALL
        .iter()
        .rev()
        .map(|status| CellLayer { status: *status, path: String::new() })
        .collect();
    for (place, host) in snapshot.hosts.iter().enumerate() {
        let (x, y) = layout.corner_of(place);
        for (row, tasks) in host.tasks.chunks(layout.columns).enumerate() {
            let statuses: Vec<TaskStatus> = tasks.iter().map(|task| snapshot.status_of(*task)).collect();
            let mut column = 0;
            for run in statuses.chunk_by(|a, b| a == b) {
                let layer = layers.iter_mut().find(|layer| layer.status == run[0]);
                let (left, top) = (x + PADDING + column * CELL, y + PADDING + row * CELL);
                if let Some(layer) = layer {
                    let wide = run.len() * CELL;
                    // Writing to a string cannot fail.
                    let _ = write!(layer.path, "M{left} {top}h{wide}v{CELL}h-{wide}z");
                }
                column += run.len();
            }
        }
    }
    layers.retain(|layer| !layer.path.is_empty());
    layers
}

/// Returns the class of a host's lateness.
fn lateness_class(host: &HostView) -> usize {
    let late = host.lateness.as_ref().map_or(0, |it| it.above_median_us);
    LATENESS_CLASSES_US.iter().take_while(|bound| late > **bound).count()
}

/// Returns the host, its tasks and its state in words.
pub(super) fn describe_host(snapshot: &JobSnapshot, host: &HostView) -> String {
    let tasks = links::first_task_ranges_text(&host.tasks, 4);
    let noun = if host.tasks.len() == 1 { "task" } else { "tasks" };
    let mut says = format!("{}, {noun} {tasks}: {}", host.host, host.state.name());
    for (status, count) in snapshot.status_counts_of(&host.tasks) {
        if status != TaskStatus::Connected {
            let _ = write!(says, ", {} {}", count, status.word());
        }
    }
    if let Some(late) = host.lateness.as_ref().filter(|it| it.above_median_us >= LATENESS_CLASSES_US[0]) {
        let _ = write!(says, ", {} later than the median host", format_micros(late.above_median_us));
    }
    if host.devices > 0 {
        let _ = write!(says, ", {}", format_count_with_noun(host.devices, "device", "devices"));
    }
    says
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_fill_a_picture_of_about_the_wanted_shape() {
        for (hosts, tasks) in [(1, 1), (1, 10_000), (2, 8), (125, 8), (1_250, 8), (10_000, 1), (300, 3)] {
            let layout = Layout::new(hosts, tasks);
            assert!(layout.columns * layout.rows >= tasks, "{layout:?} has a cell for each of {tasks} tasks");
            let rows = hosts.div_ceil(layout.boxes);
            assert_eq!((layout.box_width() + GAP) % CELL + (layout.box_height() + GAP) % CELL, 0);
            let corners: std::collections::BTreeSet<_> =
                (0..hosts).map(|host| layout.corner_of(host)).collect();
            assert_eq!(corners.len(), hosts, "no box covers another");
            let (width, height) = (layout.boxes * layout.box_width(), rows * layout.box_height());
            assert!(
                hosts < 50 || (2 * height..5 * height).contains(&width),
                "{hosts} hosts: {width} by {height}"
            );
        }
    }
}

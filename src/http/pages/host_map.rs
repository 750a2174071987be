//! Draws the hosts of a job as one SVG picture: a box for each host, with a cell for each of its tasks, in which a dot
//! stands for each device. The hosts of a partition (devices that share a fast fabric) are together, below its name.
//!
//! Cells are coloured by the status of the task, or the boxes by the lateness of the host or by its bytes. As in `task_grid.rs`, all
//! cells with one status are one path, so the picture stays small however many tasks there are. Begin at
//! [`HostMap::new`].

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::links;
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use crate::coordination::{HostId, HostState, HostView, TaskId};
use crate::text::{format_bytes, format_count_with_noun, format_micros};

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

/// The parts of the most bytes from which on a host has each class but the lowest, as divisors.
const BYTES_DIVISORS: [u64; 4] = [64, 16, 4, 2];
/// The height of the name of a partition: a multiple of a cell, for the patterns.
const LABEL_HEIGHT: usize = 20;
/// The maximum number of devices that have dots, and of dots in the cell of a task.
const DEVICES_MAX: usize = 4_096;
const DOTS_OF_TASK: usize = 8;

/// The meaning of the picture's colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapColouring {
    /// The status of each task.
    State,
    /// The time by which a host is later at barriers than the median of the hosts.
    Lateness,
    /// The bytes that the tasks of a host sent and received in this run.
    Bytes,
}

impl MapColouring {
    /// Returns the colouring with this name in an address; by state if there is none.
    pub fn from_query(name: &str) -> Self {
        Self::ALL.into_iter().find(|colouring| colouring.name() == name).unwrap_or(Self::State)
    }

    /// Every colouring.
    pub const ALL: [Self; 3] = [Self::State, Self::Lateness, Self::Bytes];

    /// Returns the name in an address and for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Lateness => "lateness",
            Self::Bytes => "bytes",
        }
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
    /// The class of its lateness or of its bytes, from 0 to 4.
    pub class: usize,
    pub is_link: bool,
    /// An open finding is about the host.
    pub has_finding: bool,
}

/// The name of a partition above its hosts.
pub(super) struct PartitionLabel {
    pub y: usize,
    pub text: String,
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
    pub partitions: Vec<PartitionLabel>,
    /// The devices as one path of dots.
    pub devices: String,
    /// The most bytes of a host.
    most_bytes: u64,
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

    /// Returns the corner of a box among those of its partition.
    fn corner_of(&self, place: usize) -> (usize, usize) {
        let (row, column) = (place / self.boxes, place % self.boxes);
        (column * (self.box_width() + GAP), row * (self.box_height() + GAP))
    }

    /// Returns the height of this many boxes, with a gap below them.
    fn height_of(&self, hosts: usize) -> usize {
        hosts.div_ceil(self.boxes) * (self.box_height() + GAP)
    }
}

/// A host with the corner of its box.
struct PlacedHost<'a> {
    host: &'a HostView,
    corner: (usize, usize),
}

/// Places the hosts partition by partition. Returns them with the names of the partitions and the height of all.
fn place_hosts(snapshot: &JobSnapshot, layout: Layout) -> (Vec<PlacedHost<'_>>, Vec<PartitionLabel>, usize) {
    let partition_of_task: BTreeMap<TaskId, i32> = snapshot
        .view
        .run
        .devices
        .iter()
        .filter_map(|device| Some((device.task, device.partition?)))
        .collect();
    let mut partitions: BTreeMap<Option<i32>, Vec<&HostView>> = BTreeMap::new();
    for host in &snapshot.hosts {
        let partition = host.tasks.iter().find_map(|task| partition_of_task.get(task)).copied();
        partitions.entry(partition).or_default().push(host);
    }
    // A host that is a partition of its own says nothing that the box does not.
    let has_labels = partitions.len() > 1 && 2 * partitions.len() <= snapshot.hosts.len();
    if !has_labels {
        partitions = BTreeMap::from([(None, snapshot.hosts.iter().collect())]);
    }
    let (mut placed, mut labels, mut top) = (Vec::new(), Vec::new(), 0);
    for (partition, hosts) in partitions {
        if has_labels {
            let name = partition.map_or_else(|| "no partition".to_owned(), |it| format!("partition {it}"));
            let text = format!("{name}: {}", format_count_with_noun(hosts.len(), "host", "hosts"));
            labels.push(PartitionLabel { y: top + LABEL_HEIGHT - 6, text });
            top += LABEL_HEIGHT;
        }
        let below = layout.height_of(hosts.len());
        placed.extend(hosts.into_iter().enumerate().map(|(place, host)| {
            let (x, y) = layout.corner_of(place);
            PlacedHost { host, corner: (x, y + top) }
        }));
        top += below;
    }
    (placed, labels, top)
}

impl<'a> HostMap<'a> {
    /// Draws the hosts of a snapshot, in the order of their first task.
    pub fn new(snapshot: &'a JobSnapshot, colouring: MapColouring) -> Self {
        let hosts = &snapshot.hosts;
        let most_tasks = hosts.iter().map(|host| host.tasks.len()).max().unwrap_or_default();
        let layout = Layout::new(hosts.len(), most_tasks);
        let (placed, partitions, height) = place_hosts(snapshot, layout);
        let bytes = if colouring == MapColouring::Bytes { bytes_by_host(snapshot) } else { BTreeMap::new() };
        let most_bytes = bytes.values().copied().max().unwrap_or_default();
        let in_trouble = hosts.iter().filter(|host| host.state != HostState::Healthy).count();
        let (link_all, link_trouble) = (hosts.len() <= LINKS_MAX, in_trouble <= LINKS_MAX);
        let host_box = |PlacedHost { host, corner: (x, y) }: &PlacedHost<'a>| {
            let (x, y) = (*x, *y);
            let class = match colouring {
                MapColouring::State => 0,
                MapColouring::Lateness => lateness_class(host),
                MapColouring::Bytes => {
                    bytes_class(bytes.get(&host.host).copied().unwrap_or_default(), most_bytes)
                }
            };
            let about = snapshot.findings.iter().filter(|finding| finding.hosts.contains(&host.host));
            let titles: Vec<&str> = about.map(|finding| finding.title.as_str()).collect();
            let mut description = describe_host(snapshot, host);
            titles.iter().for_each(|title| _ = write!(description, "; finding: {title}"));
            let has_finding = !titles.is_empty();
            HostBox {
                host: &host.host,
                state: host.state,
                x,
                y,
                description,
                class,
                is_link: link_all || (link_trouble && host.state != HostState::Healthy) || has_finding,
                has_finding,
            }
        };
        Self {
            colouring,
            boxes: placed.iter().map(host_box).collect(),
            layers: match colouring {
                MapColouring::State => cell_layers(snapshot, &placed, layout),
                MapColouring::Lateness | MapColouring::Bytes => Vec::new(),
            },
            devices: device_dots(snapshot, &placed, layout),
            partitions,
            most_bytes,
            width: (layout.box_width() + GAP) * layout.boxes - GAP,
            height: height.saturating_sub(GAP).max(1),
            box_width: layout.box_width(),
            box_height: layout.box_height(),
        }
    }

    /// Returns the first part of the CSS classes of the boxes: to be busy is no trouble.
    pub fn class_name(&self) -> &'static str {
        if self.colouring == MapColouring::Bytes { "busy" } else { "late" }
    }

    /// Returns the classes of the boxes, with their meaning.
    pub fn class_legend(&self) -> Vec<(usize, String)> {
        if self.colouring == MapColouring::Bytes && self.most_bytes == 0 {
            return Vec::new();
        }
        if self.colouring == MapColouring::Bytes {
            let bound = |(class, divisor): (usize, &u64)| {
                (class + 1, format!("≥ {}", format_bytes(self.most_bytes / divisor)))
            };
            let rest = [(0, "less".to_owned())].into_iter();
            return rest.chain(BYTES_DIVISORS.iter().enumerate().map(bound)).collect();
        }
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

    /// Returns whether there are so many cells that those of connected tasks are small, so that the others stand out without
    /// their colour too.
    pub fn has_many(&self) -> bool {
        self.boxes.len() > 32
    }

    /// Returns whether a finding is about one of the hosts.
    pub fn has_findings(&self) -> bool {
        self.boxes.iter().any(|host| host.has_finding)
    }

    /// Returns whether cells are drawn.
    pub fn shows_state(&self) -> bool {
        self.colouring == MapColouring::State
    }
}

/// Returns the cells with each status, the most urgent status last, on top.
fn cell_layers(snapshot: &JobSnapshot, placed: &[PlacedHost<'_>], layout: Layout) -> Vec<CellLayer> {
    let mut layers: Vec<CellLayer> = TaskStatus::ALL
        .iter()
        .rev()
        .map(|status| CellLayer { status: *status, path: String::new() })
        .collect();
    for PlacedHost { host, corner: (x, y) } in placed {
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

/// Returns a dot for each device, in the lower part of the cell of its task; none if there are too many devices.
fn device_dots(snapshot: &JobSnapshot, placed: &[PlacedHost<'_>], layout: Layout) -> String {
    let mut path = String::new();
    if snapshot.view.run.devices.len() > DEVICES_MAX {
        return path;
    }
    for PlacedHost { host, corner: (x, y) } in placed {
        for (place, task) in host.tasks.iter().enumerate() {
            let (row, column) = (place / layout.columns, place % layout.columns);
            let (left, bottom) = (x + PADDING + column * CELL, y + PADDING + row * CELL + CELL);
            let devices = snapshot.device_count_of(*task).min(DOTS_OF_TASK);
            for dot in 1..=devices {
                let tenths = dot * CELL * 10 / (devices + 1);
                // Writing to a string cannot fail.
                let _ = write!(path, "M{}.{} {}.5h0", left + tenths / 10, tenths % 10, bottom - 2);
            }
        }
    }
    path
}

/// Returns the bytes that the tasks of each host sent and received.
fn bytes_by_host(snapshot: &JobSnapshot) -> BTreeMap<HostId, u64> {
    let mut bytes: BTreeMap<HostId, u64> = BTreeMap::new();
    for task in snapshot.records.reports.task_transfers(snapshot.id, &snapshot.roster) {
        if let Some(host) = snapshot.host_assignment.host_of(task.task) {
            let of_host = bytes.entry(host.name.clone()).or_default();
            let moved = task.totals.sent_bytes().saturating_add(task.totals.received_bytes());
            *of_host = of_host.saturating_add(moved);
        }
    }
    bytes
}

/// Returns the class of these bytes, of which a host has `most` at most: 0 is the lowest.
fn bytes_class(bytes: u64, most: u64) -> usize {
    BYTES_DIVISORS.iter().take_while(|divisor| bytes > 0 && bytes >= most / **divisor).count()
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

//! Who holds a tile, by host and task, and who of them is asked next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use super::placement::Placement;
use super::tiles::{NONE, Tiling};
use super::{DeviceId, PlacedDevice, PlanError, TaskId};

/// Every device that takes part, in the order of ids. Devices, tasks and hosts are numbers within these lists.
#[derive(Debug, Clone)]
pub(super) struct Parties {
    pub ids: Vec<DeviceId>,
    /// The task of each device.
    pub tasks: Vec<u32>,
    /// The host of each device. Hosts are counted in the order of their first device, so that their names do not
    /// matter.
    pub hosts: Vec<u32>,
    /// The tile of the source on each device.
    pub source: Vec<u32>,
    /// The tile of the destination on each device.
    pub destination: Vec<u32>,
    /// The ids of the tasks, in order.
    pub task_ids: Vec<TaskId>,
    /// The names of the hosts.
    pub host_names: Vec<String>,
}

impl Parties {
    /// Finds whose the devices of both sides are. Also returns the placement without everything that is not used, in
    /// order.
    pub fn of(
        source: &Tiling,
        destination: &Tiling,
        placement: &Placement,
    ) -> Result<(Self, Placement), PlanError> {
        let placed = placement.index()?;
        let mut ids: Vec<DeviceId> =
            source.devices.iter().chain(&destination.devices).map(|&(device, _)| device).collect();
        ids.sort_unstable();
        ids.dedup();
        let used: Vec<&PlacedDevice> = ids
            .iter()
            .map(|&device| placed.get(&device).copied().ok_or(PlanError::NotPlaced(device)))
            .collect::<Result<_, _>>()?;
        let mut task_ids: Vec<TaskId> = used.iter().map(|placed| placed.task).collect();
        task_ids.sort_unstable();
        task_ids.dedup();
        let mut host_names: Vec<String> = Vec::new();
        let mut numbers = BTreeMap::new();
        let hosts = used.iter().map(|placed| {
            *numbers.entry(placed.host.as_str()).or_insert_with(|| {
                host_names.push(placed.host.clone());
                number(host_names.len() - 1)
            })
        });
        let hosts: Vec<u32> = hosts.collect();
        let tasks =
            used.iter().map(|placed| number(task_ids.partition_point(|&task| task < placed.task))).collect();
        let tiles = |tiling: &Tiling| -> Vec<u32> {
            let mut tiles = vec![NONE; ids.len()];
            let mut at = 0;
            for &(device, tile) in &tiling.devices {
                at += ids[at..].partition_point(|&id| id < device);
                tiles[at] = tile;
            }
            tiles
        };
        let (source, destination) = (tiles(source), tiles(destination));
        let placement = Placement { devices: used.into_iter().cloned().collect() };
        Ok((Self { ids, tasks, hosts, source, destination, task_ids, host_names }, placement))
    }
}

/// The devices of one task that hold one tile.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub task: u32,
    devices: Range<u32>,
}

/// The tasks of one host that hold one tile.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub host: u32,
    pub groups: Range<u32>,
}

/// Who holds each tile of a tiling: by host, by task, in order.
#[derive(Debug)]
pub(super) struct Holders {
    devices: Vec<u32>,
    groups: Vec<Group>,
    spans: Vec<Span>,
    /// Where the spans of each tile begin, and where the last ones end.
    tiles: Vec<u32>,
}

impl Holders {
    /// `tile_of` has the tile of each device, or [`NONE`].
    pub fn of(parties: &Parties, tile_of: &[u32], tiles: u32) -> Self {
        let mut holding: Vec<(u32, u32, u32, u32)> = (0..number(tile_of.len()))
            .filter(|&device| tile_of[device as usize] != NONE)
            .map(|device| {
                let at = device as usize;
                (tile_of[at], parties.hosts[at], parties.tasks[at], device)
            })
            .collect();
        holding.sort_unstable();
        let mut groups: Vec<Group> = Vec::new();
        let mut spans: Vec<Span> = Vec::new();
        let mut begins = vec![0; tiles as usize + 1];
        let mut before = None;
        for (at, &(tile, host, task, _)) in holding.iter().enumerate() {
            if before.is_none_or(|(t, h, k)| (t, h, k) != (tile, host, task)) {
                if before.is_none_or(|(t, h, _)| (t, h) != (tile, host)) {
                    spans.push(Span { host, groups: number(groups.len())..number(groups.len()) });
                    begins[tile as usize + 1] = number(spans.len());
                }
                groups.push(Group { task, devices: number(at)..number(at) });
                if let Some(span) = spans.last_mut() {
                    span.groups.end += 1;
                }
            }
            if let Some(group) = groups.last_mut() {
                group.devices.end += 1;
            }
            before = Some((tile, host, task));
        }
        for tile in 1..begins.len() {
            begins[tile] = begins[tile].max(begins[tile - 1]);
        }
        Self {
            devices: holding.into_iter().map(|(.., device)| device).collect(),
            groups,
            spans,
            tiles: begins,
        }
    }

    fn span_range(&self, tile: u32) -> Range<usize> {
        self.tiles[tile as usize] as usize..self.tiles[tile as usize + 1] as usize
    }

    /// The hosts that hold a tile.
    pub fn spans(&self, tile: u32) -> &[Span] {
        &self.spans[self.span_range(tile)]
    }

    /// The tasks of such a host.
    pub fn groups(&self, span: &Span) -> &[Group] {
        &self.groups[span.groups.start as usize..span.groups.end as usize]
    }

    /// The devices of such a task.
    pub fn devices(&self, group: &Group) -> &[u32] {
        &self.devices[group.devices.start as usize..group.devices.end as usize]
    }

    /// The number of the span of a tile on a host.
    pub fn find_span(&self, tile: u32, host: u32) -> Option<u32> {
        let range = self.span_range(tile);
        let found = self.spans[range.clone()].binary_search_by_key(&host, |span| span.host).ok()?;
        Some(number(range.start + found))
    }

    /// How many tasks there are in a span.
    pub fn tasks_in(&self, span: u32) -> usize {
        self.spans[span as usize].groups.len()
    }

    /// The number of the group of a task in a span.
    pub fn find_group(&self, span: u32, task: u32) -> Option<u32> {
        let span = &self.spans[span as usize];
        let found = self.groups(span).binary_search_by_key(&task, |group| group.task).ok()?;
        Some(span.groups.start + number(found))
    }
}

/// How much somebody sends, and when it was last chosen: whoever sends least is next, and among equals whoever has
/// waited longest.
type Load = (u64, u64);

/// Chooses who of the holders of a tile sends it.
pub(super) struct Chooser<'a> {
    holders: &'a Holders,
    /// What each task, and each host, sends to others.
    tasks: Vec<Load>,
    hosts: Vec<Load>,
    /// How often a device of each group was chosen.
    turns: Vec<u32>,
    choices: u64,
    /// For each tile, its spans by the load of their hosts; for each span, its groups by the load of their tasks.
    by_host: Vec<Option<Least>>,
    by_task: Vec<Option<Least>>,
}

impl<'a> Chooser<'a> {
    pub fn new(holders: &'a Holders, parties: &Parties) -> Self {
        Self {
            holders,
            tasks: vec![(0, 0); parties.task_ids.len()],
            hosts: vec![(0, 0); parties.host_names.len()],
            turns: vec![0; holders.groups.len()],
            choices: 0,
            by_host: (1..holders.tiles.len()).map(|_| None).collect(),
            by_task: holders.spans.iter().map(|_| None).collect(),
        }
    }

    /// Takes note of bytes that leave a task, and of those that leave its host.
    pub fn sends(&mut self, task: u32, host: u32, bytes: u64, leaves_host: bool) {
        self.choices += 1;
        let task = &mut self.tasks[task as usize];
        *task = (task.0 + bytes, self.choices);
        if leaves_host {
            let host = &mut self.hosts[host as usize];
            *host = (host.0 + bytes, self.choices);
        }
    }

    /// A device of a group: each in its turn.
    pub fn in_task(&mut self, group: u32) -> u32 {
        let turn = &mut self.turns[group as usize];
        let devices = self.holders.devices(&self.holders.groups[group as usize]);
        let device = devices[*turn as usize % devices.len()];
        *turn = turn.wrapping_add(1);
        device
    }

    /// A device of a span: of the task that sends least.
    pub fn on_host(&mut self, span: u32) -> u32 {
        let groups = &self.holders.spans[span as usize].groups;
        let group = if groups.len() == 1 {
            groups.start
        } else {
            let (all, tasks) = (&self.holders.groups, &self.tasks);
            let load = |group: u32| tasks[all[group as usize].task as usize];
            self.by_task[span as usize].get_or_insert_with(|| Least::of(groups.clone(), load)).find(load)
        };
        self.in_task(group)
    }

    /// A device that holds a tile, anywhere: on the host that sends least.
    pub fn anywhere(&mut self, tile: u32) -> u32 {
        let range = self.holders.span_range(tile);
        let span = if range.len() == 1 {
            number(range.start)
        } else {
            let (all, hosts) = (&self.holders.spans, &self.hosts);
            let load = |span: u32| hosts[all[span as usize].host as usize];
            let spans = number(range.start)..number(range.end);
            self.by_host[tile as usize].get_or_insert_with(|| Least::of(spans, load)).find(load)
        };
        self.on_host(span)
    }
}

/// Some numbers by their load, which only grows. What has grown since it was put in is put right when it comes up.
struct Least(BinaryHeap<Reverse<(Load, u32)>>);

impl Least {
    fn of(numbers: Range<u32>, load: impl Fn(u32) -> Load) -> Self {
        Self(numbers.map(|number| Reverse((load(number), number))).collect())
    }

    fn find(&mut self, load: impl Fn(u32) -> Load) -> u32 {
        while let Some(mut top) = self.0.peek_mut() {
            let number = top.0.1;
            let now = load(number);
            if top.0.0 == now {
                return number;
            }
            top.0.0 = now;
        }
        NONE
    }
}

/// For counts that are bounded far below 2^32.
fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(NONE)
}

//! The table of a plan's devices, the devices that hold each tile, by host and task, and the choice of the device
//! that sends a region of a tile.
//!
//! `sender_choices.rs` gives each choice a number, and the number decides which device is chosen. Begin at
//! [`TileHolders`].

use std::collections::BTreeMap;
use std::ops::Range;

use super::placement::Placement;
use super::round_robin::RoundRobinIndex;
use super::tiles::{NONE, Tiling, saturating_u32};
use super::{DeviceId, PlacedDevice, PlanError, TaskId};

/// The devices of both sides, in the order of their ids. Devices, tasks and hosts are indices into these
/// lists.
#[derive(Debug, Clone)]
pub(super) struct DeviceTable {
    pub ids: Vec<DeviceId>,
    /// The task of each device.
    pub tasks: Vec<u32>,
    /// The host of each device. Hosts are numbered in the order of their first device, so that their names do
    /// not matter.
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

impl DeviceTable {
    /// Finds the tasks and hosts of the devices of both sides. Also returns the placement of these devices
    /// alone, in order.
    pub fn of(
        source: &Tiling,
        destination: &Tiling,
        placement: &Placement,
    ) -> Result<(Self, Placement), PlanError> {
        let placed = placement.entries_by_device()?;
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
                saturating_u32(host_names.len() - 1)
            })
        });
        let hosts: Vec<u32> = hosts.collect();
        let tasks = used
            .iter()
            .map(|placed| saturating_u32(task_ids.partition_point(|&task| task < placed.task)))
            .collect();
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
pub(super) struct TileHoldersInTask {
    pub task: u32,
    devices: Range<u32>,
}

/// The tasks of one host that hold one tile.
#[derive(Debug, Clone)]
pub(super) struct TileHoldersOnHost {
    pub host: u32,
    pub groups: Range<u32>,
}

/// The devices that hold each tile of a tiling, ordered by host, task and device.
#[derive(Debug, Clone)]
pub(super) struct TileHolders {
    devices: Vec<u32>,
    groups: Vec<TileHoldersInTask>,
    spans: Vec<TileHoldersOnHost>,
    /// The first span of each tile, and the end of the last one's spans.
    tiles: Vec<u32>,
}

impl TileHolders {
    /// Creates the holders of `tiles` tiles; `tile_of` has the tile of each device, or [`NONE`].
    pub fn of(device_table: &DeviceTable, tile_of: &[u32], tiles: u32) -> Self {
        let mut holding: Vec<(u32, u32, u32, u32)> = (0..saturating_u32(tile_of.len()))
            .filter(|&device| tile_of[device as usize] != NONE)
            .map(|device| {
                let at = device as usize;
                (tile_of[at], device_table.hosts[at], device_table.tasks[at], device)
            })
            .collect();
        holding.sort_unstable();
        let mut groups: Vec<TileHoldersInTask> = Vec::new();
        let mut spans: Vec<TileHoldersOnHost> = Vec::new();
        let mut begins = vec![0; tiles as usize + 1];
        let mut before = None;
        for (at, &(tile, host, task, _)) in holding.iter().enumerate() {
            if before.is_none_or(|(t, h, k)| (t, h, k) != (tile, host, task)) {
                if before.is_none_or(|(t, h, _)| (t, h) != (tile, host)) {
                    spans.push(TileHoldersOnHost {
                        host,
                        groups: saturating_u32(groups.len())..saturating_u32(groups.len()),
                    });
                    begins[tile as usize + 1] = saturating_u32(spans.len());
                }
                groups.push(TileHoldersInTask { task, devices: saturating_u32(at)..saturating_u32(at) });
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

    fn hosts_range(&self, tile: u32) -> Range<usize> {
        self.tiles[tile as usize] as usize..self.tiles[tile as usize + 1] as usize
    }

    /// Returns the hosts that hold a tile.
    pub fn hosts_holding_tile(&self, tile: u32) -> &[TileHoldersOnHost] {
        &self.spans[self.hosts_range(tile)]
    }

    /// Returns the tasks of a span.
    pub fn tasks_on_host(&self, span: &TileHoldersOnHost) -> &[TileHoldersInTask] {
        &self.groups[span.groups.start as usize..span.groups.end as usize]
    }

    /// Returns the devices of a group.
    pub fn devices_in_task(&self, group: &TileHoldersInTask) -> &[u32] {
        &self.devices[group.devices.start as usize..group.devices.end as usize]
    }

    /// Returns the index of the span of a tile on a host, or none if no task of the host holds it.
    pub fn find_host(&self, tile: u32, host: u32) -> Option<u32> {
        let range = self.hosts_range(tile);
        let found = self.spans[range.clone()].binary_search_by_key(&host, |span| span.host).ok()?;
        Some(saturating_u32(range.start + found))
    }

    /// Returns the number of tasks in a span.
    pub fn task_count(&self, span: u32) -> usize {
        self.spans[span as usize].groups.len()
    }

    /// Returns the index of the group of a task in a span, or none if the task is not in it.
    pub fn find_task(&self, span: u32, task: u32) -> Option<u32> {
        let span = &self.spans[span as usize];
        let found = self.tasks_on_host(span).binary_search_by_key(&task, |group| group.task).ok()?;
        Some(span.groups.start + saturating_u32(found))
    }

    /// Returns the number of tiles.
    pub fn tile_count(&self) -> u32 {
        saturating_u32(self.tiles.len() - 1)
    }

    /// Returns whether each tile is held by one device only.
    pub fn is_unreplicated(&self) -> bool {
        self.devices.len() == self.tile_count() as usize
    }

    /// Returns the device that holds a tile, if each tile is held by one device only.
    pub fn only_holder(&self, tile: u32) -> u32 {
        self.devices[tile as usize]
    }

    /// Returns the indices of the hosts that hold a tile.
    pub fn hosts(&self, tile: u32) -> impl Iterator<Item = u32> {
        self.hosts_holding_tile(tile).iter().map(|span| span.host)
    }

    /// Returns all tiles, grouped by the hosts that hold them, and within these by the tasks.
    pub fn tiles_sorted_by_holders(&self) -> Vec<u32> {
        let tasks = |tile| {
            self.hosts_holding_tile(tile)
                .iter()
                .flat_map(|span| self.tasks_on_host(span))
                .map(|group| group.task)
        };
        let mut tiles: Vec<u32> = (0..self.tile_count()).collect();
        tiles.sort_by(|&one, &other| {
            self.hosts(one).cmp(self.hosts(other)).then_with(|| tasks(one).cmp(tasks(other)))
        });
        tiles
    }

    /// Returns the device that sends in this turn, of all that hold a tile.
    pub fn sender_of_all_holders(&self, tile: u32, turn: RoundRobinIndex) -> u32 {
        let range = self.hosts_range(tile);
        let (place, turn) = turn.choose(range.len());
        self.sender_on_host(saturating_u32(range.start + place), turn)
    }

    /// Returns the device that sends in this turn, of those on a host.
    pub fn sender_on_host(&self, span: u32, turn: RoundRobinIndex) -> u32 {
        let groups = &self.spans[span as usize].groups;
        let (place, turn) = turn.choose(groups.len());
        self.sender_in_task(groups.start + saturating_u32(place), turn)
    }

    /// Returns the device that sends in this turn, of those in a task.
    pub fn sender_in_task(&self, group: u32, turn: RoundRobinIndex) -> u32 {
        let devices = self.devices_in_task(&self.groups[group as usize]);
        devices[turn.choose(devices.len()).0]
    }
}

//! Computes the steps of a plan when they are needed. The steps of one region are computed together.
//!
//! `region_routing.rs` has the rules. Begin at [`Plan::steps`].

use super::region_routing::{RegionRouter, StepRecord};
use super::staging::DevicesNeedingStaging;
use super::tiles::{NONE, RegionBounds, TilePair, interval_lengths};
use super::{BufferRole, Plan, ShardRegion, Staging, Step, StepEnd, TaskId, TransferKey, staging, step};

/// An iterator over the steps of some regions: of all tasks, or of one.
pub(super) struct StepIter<'a, R> {
    plan: &'a Plan,
    regions: R,
    task: Option<u32>,
    builder: RegionRouter<'a>,
    /// The current region, the number of its first step, and the number of its steps that were visited.
    pair: Option<TilePair>,
    first: u32,
    seen: u32,
    /// The bounds of the current region, once one of its steps is wanted; `found` says whether they are
    /// computed.
    lies: RegionBounds,
    found: bool,
}

impl<'a, R: Iterator<Item = u32>> StepIter<'a, R> {
    /// Creates the iterator. It does no work yet.
    pub fn new(plan: &'a Plan, regions: R, task: Option<u32>) -> Self {
        let (builder, lies) = (RegionRouter::new(plan), RegionBounds::default());
        Self { plan, regions, task, builder, pair: None, first: 0, seen: 0, lies, found: false }
    }

    /// Returns the next step: its number, its record, and the bounds of its region.
    pub fn advance(&mut self) -> Option<(u32, StepRecord, &RegionBounds)> {
        let of = |device: u32| self.plan.device_table.tasks[device as usize];
        loop {
            if let Some(pair) = self.pair {
                while let Some(&record) = self.builder.records().get(self.seen as usize) {
                    let number = self.first + self.seen;
                    self.seen += 1;
                    if self
                        .task
                        .is_none_or(|task| of(record.source) == task || of(record.destination) == task)
                    {
                        if !std::mem::replace(&mut self.found, true) {
                            self.lies.set_pair(&self.plan.source_tiling, &self.plan.destination_tiling, pair);
                        }
                        return Some((number, record, &self.lies));
                    }
                }
            }
            let region = self.regions.next()?;
            let pair = self.plan.region_order.region(region);
            self.builder.route_region(pair);
            (self.pair, self.first, self.seen, self.found) =
                (Some(pair), region * self.plan.copies, 0, false);
        }
    }
}

impl<R: Iterator<Item = u32>> Iterator for StepIter<'_, R> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let plan = self.plan;
        self.advance().map(|(number, record, lies)| plan.build_step(number, record, lies))
    }
}

impl Plan {
    /// Returns the step with this number.
    #[must_use]
    pub fn step(&self, index: u32) -> Option<Step> {
        let region =
            index.checked_div(self.copies).filter(|region| *region < self.region_order.region_count())?;
        StepIter::new(self, std::iter::once(region), None).nth((index % self.copies) as usize)
    }

    /// Returns the tasks over which the bytes of a step have come: the one that held them first, those that passed
    /// them on, and the one that receives them.
    #[must_use]
    pub(crate) fn tasks_on_route(&self, step: &Step) -> Vec<TaskId> {
        let before = step.after.and_then(|after| self.step(after));
        let mut route = before.map_or_else(|| vec![step.source.task], |before| self.tasks_on_route(&before));
        if route.last() != Some(&step.destination.task) {
            route.push(step.destination.task);
        }
        route
    }

    /// Returns all steps. A step comes after the one that it depends on.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        StepIter::new(self, 0..self.region_order.region_count(), None)
    }

    /// Returns the steps in which a task sends, receives or copies; no steps for a task that owns none of the
    /// devices. It visits only the regions of tiles that the task's devices hold or are to hold.
    pub fn steps_of_task(&self, task: TaskId) -> impl Iterator<Item = Step> {
        let number = self.task_index(task);
        let regions = number.map(|number| self.regions_of_task(number)).unwrap_or_default();
        StepIter::new(self, regions.into_iter(), number)
    }

    /// Returns the staging memory that a task needs, in bytes: the total size of those of its shards of which
    /// some region is packed or unpacked.
    #[must_use]
    pub fn staging_bytes(&self, task: TaskId) -> u64 {
        let Some(number) = self.task_index(task) else { return 0 };
        let mut staged = DevicesNeedingStaging::with_none_staged(self.device_table.ids.len());
        let mut steps = StepIter::new(self, self.regions_of_task(number).into_iter(), Some(number));
        while let Some((_, record, lies)) = steps.advance() {
            staged.add_devices_of(&[record], lies, self.item);
        }
        self.staging_bytes_by_task(&staged)[number as usize]
    }

    /// Returns the staging memory of each task, in bytes.
    pub(super) fn staging_bytes_by_task(&self, staged: &DevicesNeedingStaging) -> Vec<u64> {
        let mut bytes = vec![0; self.device_table.task_ids.len()];
        let devices = self.device_table.ids.iter().zip(&self.device_table.tasks);
        for ((&device, &task), needs) in devices.zip(staged.source.iter().zip(&staged.destination)) {
            for (role, needs) in [(BufferRole::Source, *needs.0), (BufferRole::Destination, *needs.1)] {
                if needs {
                    bytes[task as usize] += self.shard_bytes(role, device);
                }
            }
        }
        bytes
    }

    /// Calls `visit` with every region, its bounds and its steps, in the order that takes the least work,
    /// which is not that of the plan.
    pub(super) fn for_each_region(&self, mut visit: impl FnMut(TilePair, &RegionBounds, &[StepRecord])) {
        let mut builder = RegionRouter::new(self);
        self.region_order.for_each_region(&self.source_tiling, &self.destination_tiling, |pair, lies| {
            builder.route_region(pair);
            visit(pair, lies, builder.records());
        });
    }

    /// Returns the numbers of all regions that a device of this task holds or is to hold, in order.
    pub(super) fn regions_of_task(&self, task: u32) -> Vec<u32> {
        if self.is_empty() {
            return Vec::new();
        }
        let device_table = &self.device_table;
        let own = |tiles: &[u32]| {
            let mine =
                tiles.iter().zip(&device_table.tasks).filter(|&(&tile, &of)| of == task && tile != NONE);
            let mut mine: Vec<u32> = mine.map(|(tile, _)| *tile).collect();
            mine.sort_unstable();
            mine.dedup();
            mine
        };
        let mut regions: Vec<u32> = own(&device_table.destination)
            .into_iter()
            .flat_map(|tile| self.region_order.regions_of_destination_tile(tile))
            .collect();
        regions.extend(
            own(&device_table.source)
                .into_iter()
                .flat_map(|tile| self.region_order.regions_of_source_tile(tile)),
        );
        // The numbers of each tile are nearly in order already, for which this sort is fast.
        regions.sort();
        regions.dedup();
        regions
    }

    /// Returns a step with all its fields.
    fn build_step(&self, index: u32, record: StepRecord, lies: &RegionBounds) -> Step {
        let read_from = if record.source_role() == BufferRole::Source { &lies.held } else { &lies.wanted };
        let bytes = lies.element_count() * self.item;
        let side = |device: u32, buffer, tile: &[(u64, u64)]| {
            let at = device as usize;
            let start = lies.common.iter().zip(tile).map(|(common, tile)| common.0 - tile.0).collect();
            let region = ShardRegion { start, extent: interval_lengths(&lies.common) };
            let shape = interval_lengths(tile);
            let staged = record.class.leaves_task() && staging::needs_staging(&lies.common, tile, self.item);
            let offset = || staging::staging_offset(&lies.common, tile, self.item);
            StepEnd {
                device: self.device_table.ids[at],
                task: self.device_table.task_ids[self.device_table.tasks[at] as usize],
                host: self.device_table.host_names[self.device_table.hosts[at] as usize].clone(),
                buffer,
                runs: step::runs(&shape, &region, self.item),
                shape,
                region,
                staging: staged.then(|| Staging { offset: offset(), bytes }),
            }
        };
        // The steps of a region have consecutive numbers.
        let after = (record.after != NONE).then(|| index - index % self.copies + record.after);
        Step {
            index,
            key: TransferKey::for_step(self.fingerprint, index),
            class: record.class,
            bytes,
            after,
            source: side(record.source, record.source_role(), read_from),
            destination: side(record.destination, BufferRole::Destination, &lies.wanted),
        }
    }
}

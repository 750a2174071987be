//! Computes the steps of a plan on demand; those of one region are computed together.
//!
//! `make.rs` has the rules for the steps of a region. Begin at [`Plan::step`].

use super::make::{Maker, Record};
use super::staging::Rooms;
use super::tiles::{NONE, Pair, Stretches, extents};
use super::{BufferRole, Plan, Region, Staging, Step, StepEnd, TaskId, TransferKey, staging, step};

/// An iterator over the steps of some regions: of all tasks, or of one.
pub(super) struct Expansion<'a, R> {
    plan: &'a Plan,
    regions: R,
    task: Option<u32>,
    maker: Maker<'a>,
    /// The current region, the number of its first step, and the number of its steps that were visited.
    pair: Option<Pair>,
    first: u32,
    seen: u32,
    /// The bounds of the current region, once one of its steps is wanted; `found` says whether they are
    /// computed.
    lies: Stretches,
    found: bool,
}

impl<'a, R: Iterator<Item = u32>> Expansion<'a, R> {
    /// Creates the iterator. It does no work yet.
    pub fn new(plan: &'a Plan, regions: R, task: Option<u32>) -> Self {
        let (maker, lies) = (Maker::new(plan), Stretches::default());
        Self { plan, regions, task, maker, pair: None, first: 0, seen: 0, lies, found: false }
    }

    /// Returns the next step: its number, its record, and the bounds of its region.
    pub fn advance(&mut self) -> Option<(u32, Record, &Stretches)> {
        let of = |device: u32| self.plan.parties.tasks[device as usize];
        loop {
            if let Some(pair) = self.pair {
                while let Some(&record) = self.maker.records().get(self.seen as usize) {
                    let number = self.first + self.seen;
                    self.seen += 1;
                    if self
                        .task
                        .is_none_or(|task| of(record.source) == task || of(record.destination) == task)
                    {
                        if !std::mem::replace(&mut self.found, true) {
                            self.lies.find(&self.plan.source_tiling, &self.plan.destination_tiling, pair);
                        }
                        return Some((number, record, &self.lies));
                    }
                }
            }
            let region = self.regions.next()?;
            let pair = self.plan.rounds.region(region);
            self.maker.make(pair);
            (self.pair, self.first, self.seen, self.found) =
                (Some(pair), region * self.plan.copies, 0, false);
        }
    }
}

impl<R: Iterator<Item = u32>> Iterator for Expansion<'_, R> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let plan = self.plan;
        self.advance().map(|(number, record, lies)| plan.describe(number, record, lies))
    }
}

impl Plan {
    /// Returns the step with this number.
    #[must_use]
    pub fn step(&self, index: u32) -> Option<Step> {
        let region = index.checked_div(self.copies).filter(|region| *region < self.rounds.regions())?;
        Expansion::new(self, std::iter::once(region), None).nth((index % self.copies) as usize)
    }

    /// Returns all steps. A step comes after the one that it depends on.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        Expansion::new(self, 0..self.rounds.regions(), None)
    }

    /// Returns the steps in which a task sends, receives or copies; no steps for a task that owns none of the
    /// devices. It visits only the regions of tiles that the task's devices hold or are to hold.
    pub fn for_task(&self, task: TaskId) -> impl Iterator<Item = Step> {
        let number = self.number_of(task);
        let regions = number.map(|number| self.regions_of(number)).unwrap_or_default();
        Expansion::new(self, regions.into_iter(), number)
    }

    /// Returns the staging memory that a task needs, in bytes: the total size of those of its shards of which
    /// some region is packed or unpacked.
    #[must_use]
    pub fn staging_bytes(&self, task: TaskId) -> u64 {
        let Some(number) = self.number_of(task) else { return 0 };
        let mut rooms = Rooms::of(self.parties.ids.len());
        let mut steps = Expansion::new(self, self.regions_of(number).into_iter(), Some(number));
        while let Some((_, record, lies)) = steps.advance() {
            rooms.note(&[record], lies, self.item);
        }
        self.rooms_by_task(&rooms)[number as usize]
    }

    /// Returns the staging memory of each task, in bytes.
    pub(super) fn rooms_by_task(&self, rooms: &Rooms) -> Vec<u64> {
        let mut bytes = vec![0; self.parties.task_ids.len()];
        let devices = self.parties.ids.iter().zip(&self.parties.tasks);
        for ((&device, &task), needs) in devices.zip(rooms.source.iter().zip(&rooms.destination)) {
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
    pub(super) fn each_region(&self, mut visit: impl FnMut(Pair, &Stretches, &[Record])) {
        let mut maker = Maker::new(self);
        self.rounds.each(&self.source_tiling, &self.destination_tiling, |pair, lies| {
            maker.make(pair);
            visit(pair, lies, maker.records());
        });
    }

    /// Returns the numbers of all regions that a device of this task holds or is to hold, in order.
    pub(super) fn regions_of(&self, task: u32) -> Vec<u32> {
        if self.is_empty() {
            return Vec::new();
        }
        let parties = &self.parties;
        let own = |tiles: &[u32]| {
            let mine = tiles.iter().zip(&parties.tasks).filter(|&(&tile, &of)| of == task && tile != NONE);
            let mut mine: Vec<u32> = mine.map(|(tile, _)| *tile).collect();
            mine.sort_unstable();
            mine.dedup();
            mine
        };
        let mut regions: Vec<u32> =
            own(&parties.destination).into_iter().flat_map(|tile| self.rounds.of_wanted(tile)).collect();
        regions.extend(own(&parties.source).into_iter().flat_map(|tile| self.rounds.of_held(tile)));
        // The numbers of each tile are nearly in order already, for which this sort is fast.
        regions.sort();
        regions.dedup();
        regions
    }

    /// Returns a step with all its fields.
    fn describe(&self, index: u32, record: Record, lies: &Stretches) -> Step {
        let read_from = if record.from() == BufferRole::Source { &lies.held } else { &lies.wanted };
        let bytes = lies.volume() * self.item;
        let side = |device: u32, buffer, tile: &[(u64, u64)]| {
            let at = device as usize;
            let start = lies.common.iter().zip(tile).map(|(common, tile)| common.0 - tile.0).collect();
            let region = Region { start, extent: extents(&lies.common) };
            let shape = extents(tile);
            let staged = record.class.leaves_task() && staging::is_packed(&lies.common, tile, self.item);
            let offset = || staging::place(&lies.common, tile, self.item);
            StepEnd {
                device: self.parties.ids[at],
                task: self.parties.task_ids[self.parties.tasks[at] as usize],
                host: self.parties.host_names[self.parties.hosts[at] as usize].clone(),
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
            key: TransferKey::of(self.fingerprint, index),
            class: record.class,
            bytes,
            after,
            source: side(record.source, record.from(), read_from),
            destination: side(record.destination, BufferRole::Destination, &lies.wanted),
        }
    }
}

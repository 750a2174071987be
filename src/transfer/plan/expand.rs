//! Steps, worked out when somebody looks at them. Those of a region are worked out together.

use super::make::{Maker, Record};
use super::rounds::Pair;
use super::tiles::{NONE, Stretches};
use super::{BufferRole, Plan, Region, Side, Staging, Step, TransferKey, staging, step};

/// The steps of some regions, those of everybody or of one task.
pub(super) struct Expansion<'a, R> {
    plan: &'a Plan,
    regions: R,
    task: Option<u32>,
    maker: Maker<'a>,
    /// The present region, the number of its first step, and how many of its steps were looked at.
    pair: Option<Pair>,
    first: u32,
    seen: u32,
    /// Where a region lies, once somebody wants one of its steps.
    lies: Stretches,
    found: bool,
}

impl<'a, R: Iterator<Item = u32>> Expansion<'a, R> {
    /// Does no work yet.
    pub fn new(plan: &'a Plan, regions: R, task: Option<u32>) -> Self {
        let (maker, lies) = (Maker::new(plan), Stretches::default());
        Self { plan, regions, task, maker, pair: None, first: 0, seen: 0, lies, found: false }
    }

    /// The next step: its number, what is kept of it, and where its region lies.
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
    /// Calls back with every region, where it lies, and its steps; not in the order of the plan, but in the one that
    /// takes the least work.
    pub(super) fn each_region(&self, mut visit: impl FnMut(Pair, &Stretches, &[Record])) {
        let mut maker = Maker::new(self);
        self.rounds.each(&self.source_tiling, &self.destination_tiling, |pair, lies| {
            maker.make(pair);
            visit(pair, lies, maker.records());
        });
    }

    /// The numbers of all regions that a device of this task holds or shall hold, in order.
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
        // Those of each tile are nearly in order already.
        regions.sort();
        regions.dedup();
        regions
    }

    /// A step, with all that follows.
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
            Side {
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
        // The steps of a region follow one another.
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

pub(super) fn extents(stretches: &[(u64, u64)]) -> Vec<u64> {
    stretches.iter().map(|(start, end)| end - start).collect()
}

//! The rules that choose who copies what to whom.
//!
//! Every tile of the source that reaches into a tile of the destination makes one *region*. All who shall hold the
//! tile of the destination need that region. The rules, in this order, for each region:
//!
//! 1. who holds it already takes it from itself;
//! 2. a task of which a device holds it takes it from that device, whichever is next in turn;
//! 3. a host of which a task holds it takes it from the task that sends least, once for each task that needs it;
//! 4. any other host is fed once, by the host that sends least.
//!
//! What came to one device of a task or host is copied on from there, by steps that come after it. All holders of a
//! region together feed `fan_out` hosts (or, on their own host, tasks) for each of them; whoever was fed feeds the next
//! `fan_out`, as a tree. The first to be fed is another one for each region, so that neither what arrives nor what is
//! copied on falls to the same devices.
//!
//! The steps are in rounds. In each, every tile of the destination gets one of its regions, and neighbours get theirs
//! from other tiles of the source: who goes through the steps in order never finds everybody sending to, or asking,
//! the same device.

use super::holders::{Chooser, Group, Holders, Parties, Span};
use super::step::{BufferRole, Class};
use super::tiles::{NONE, Reach, Tiling, intersect, volume};

/// One step, as it is kept: everything else about it follows by arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// The device that gives.
    pub source: u32,
    /// The device that takes.
    pub destination: u32,
    /// The tile of the source array that the region is part of.
    pub tile: u32,
    /// The step that must be done before, or [`NONE`].
    pub after: u32,
    pub class: Class,
    /// Whether it is read from the source array, or from the destination array, where an earlier step put it.
    pub from: BufferRole,
}

/// Where a region can be had: on a device, after a step or from the start.
#[derive(Debug, Clone, Copy)]
struct Origin {
    device: u32,
    after: u32,
}

struct Maker<'a> {
    parties: &'a Parties,
    holders: &'a Holders,
    receivers: &'a Holders,
    chooser: Chooser<'a>,
    fan_out: usize,
    records: Vec<Record>,
    /// Another number for each region of a tile, and for each tile.
    turn: u64,
    /// The tile of the source, the bytes of the region, and whether it is all of both tiles.
    tile: u32,
    bytes: u64,
    whole: bool,
    /// Kept for their room.
    away: Vec<Span>,
    needy: Vec<Group>,
    hosts_fed: Vec<Origin>,
    tasks_fed: Vec<Origin>,
}

/// Makes the steps, in an order in which every step comes after those that it needs.
pub(super) fn steps(
    parties: &Parties,
    source: &Tiling,
    destination: &Tiling,
    item: u64,
    fan_out: u32,
    count: usize,
) -> Vec<Record> {
    let holders = Holders::of(parties, &parties.source, source.tiles());
    let receivers = Holders::of(parties, &parties.destination, destination.tiles());
    let mut maker = Maker {
        parties,
        holders: &holders,
        receivers: &receivers,
        chooser: Chooser::new(&holders, parties),
        fan_out: fan_out as usize,
        records: Vec::with_capacity(count),
        turn: 0,
        tile: 0,
        bytes: 0,
        whole: false,
        away: Vec::new(),
        needy: Vec::new(),
        hosts_fed: Vec::new(),
        tasks_fed: Vec::new(),
    };
    let (mut wanted, mut held, mut common) = (Vec::new(), Vec::new(), Vec::new());
    let mut reach = Reach::default();
    let mut tiles: Vec<u32> = (0..destination.tiles()).collect();
    let mut round = 0;
    while !tiles.is_empty() {
        tiles.retain(|&tile| {
            destination.intervals(tile, &mut wanted);
            if volume(&wanted) == 0 {
                return false;
            }
            let count = reach.find(source, &wanted);
            maker.turn = u64::from(tile) + round;
            maker.tile = reach.nth(source, maker.turn % count);
            source.intervals(maker.tile, &mut held);
            intersect(&held, &wanted, &mut common);
            maker.bytes = volume(&common) * item;
            maker.whole = held == wanted;
            maker.region(tile);
            round + 1 < count
        });
        round += 1;
    }
    maker.records
}

impl Maker<'_> {
    /// Sees to it that all who shall hold `wanted` get the present region.
    fn region(&mut self, wanted: u32) {
        let mut away = std::mem::take(&mut self.away);
        let receivers = self.receivers;
        for span in receivers.spans(wanted) {
            match self.holders.find_span(self.tile, span.host) {
                Some(holding) => self.host_that_holds(span, holding),
                None => away.push(span.clone()),
            }
        }
        self.hosts_that_do_not(&away);
        away.clear();
        self.away = away;
    }

    /// Rule 4.
    fn hosts_that_do_not(&mut self, away: &[Span]) {
        if away.is_empty() {
            return;
        }
        let roots = self.holders.spans(self.tile).len();
        let mut fed = std::mem::take(&mut self.hosts_fed);
        for place in 0..away.len() {
            let origin = match self.parent(place, roots) {
                None => Origin { device: self.chooser.anywhere(self.tile), after: NONE },
                Some(parent) => fed[parent],
            };
            let span = &away[self.turned(place, away.len())];
            let entry = self.host_fed_from(span, origin);
            fed.push(entry);
        }
        fed.clear();
        self.hosts_fed = fed;
    }

    /// A host that gets the region from elsewhere: one task of it does, and feeds the others. Returns where it is
    /// then.
    fn host_fed_from(&mut self, span: &Span, origin: Origin) -> Origin {
        let receivers = self.receivers;
        let groups = receivers.groups(span);
        let mut fed = std::mem::take(&mut self.tasks_fed);
        for place in 0..groups.len() {
            let from = match place {
                0 => origin,
                _ => fed[(place - 1) / self.fan_out],
            };
            let entry = self.task_fed_from(&groups[self.turned(place, groups.len())], from);
            fed.push(entry);
        }
        let entry = fed[0];
        fed.clear();
        self.tasks_fed = fed;
        entry
    }

    /// Rules 1 to 3.
    fn host_that_holds(&mut self, span: &Span, holding: u32) {
        let receivers = self.receivers;
        let mut needy = std::mem::take(&mut self.needy);
        for group in receivers.groups(span) {
            match self.holders.find_group(holding, group.task) {
                Some(held) => {
                    for &device in receivers.devices(group) {
                        let own = self.parties.source[device as usize] == self.tile;
                        let from = if own { device } else { self.chooser.in_task(held) };
                        self.step(Origin { device: from, after: NONE }, device);
                    }
                }
                None => needy.push(group.clone()),
            }
        }
        let roots = self.holders.tasks_in(holding);
        let mut fed = std::mem::take(&mut self.tasks_fed);
        for place in 0..needy.len() {
            let origin = match self.parent(place, roots) {
                None => Origin { device: self.chooser.on_host(holding), after: NONE },
                Some(parent) => fed[parent],
            };
            let entry = self.task_fed_from(&needy[self.turned(place, needy.len())], origin);
            fed.push(entry);
        }
        fed.clear();
        needy.clear();
        (self.tasks_fed, self.needy) = (fed, needy);
    }

    /// A task that gets the region from elsewhere: one device of it does, and the others copy it. Returns where it is
    /// then.
    fn task_fed_from(&mut self, group: &Group, origin: Origin) -> Origin {
        let devices = self.receivers.devices(group);
        let first = self.turned(0, devices.len());
        let after = self.step(origin, devices[first]);
        let entry = Origin { device: devices[first], after };
        for &device in devices[first + 1..].iter().chain(&devices[..first]) {
            self.step(entry, device);
        }
        entry
    }

    /// Who feeds the one at `place` of those that are fed, where so many `roots` hold the region: one of these
    /// (`None`), or one that was fed before.
    fn parent(&self, place: usize, roots: usize) -> Option<usize> {
        place.checked_sub(roots.saturating_mul(self.fan_out)).map(|place| place / self.fan_out)
    }

    /// Where the one at `place` of so many stands in the present region's order.
    fn turned(&self, place: usize, count: usize) -> usize {
        // The remainder is smaller than a number that fits.
        usize::try_from((self.turn + place as u64) % count as u64).unwrap_or(0)
    }

    fn step(&mut self, origin: Origin, destination: u32) -> u32 {
        let (from, to) = (origin.device as usize, destination as usize);
        let parties = self.parties;
        let class = if from == to && self.whole {
            Class::SameBuffer
        } else if parties.tasks[from] == parties.tasks[to] {
            Class::LocalCopy
        } else if parties.hosts[from] == parties.hosts[to] {
            Class::SameHost
        } else {
            Class::AcrossHosts
        };
        if class.leaves_task() {
            self.chooser.sends(
                parties.tasks[from],
                parties.hosts[from],
                self.bytes,
                class == Class::AcrossHosts,
            );
        }
        let from = if origin.after == NONE { BufferRole::Source } else { BufferRole::Destination };
        // Bounded by MAX_STEPS.
        let step = u32::try_from(self.records.len()).unwrap_or(NONE);
        self.records.push(Record {
            source: origin.device,
            destination,
            tile: self.tile,
            after: origin.after,
            class,
            from,
        });
        step
    }
}

//! The rules that choose which device copies which region to which.
//!
//! Every tile of the source that reaches into a tile of the destination makes one *region*, which all holders of
//! the destination tile need. Begin at the rules, in this order, for each region:
//!
//! 1. a device that holds it already takes it from itself;
//! 2. a task of which a device holds it takes it from that device;
//! 3. a host of which a task holds it takes it from that task, once for each task that needs it;
//! 4. any other host is fed once, by a host that holds it.
//!
//! Each of these costs several times the one before.
//!
//! Of several hosts, tasks or devices that hold a region, the one gives whose turn it is (`turns.rs`): the network
//! of a host is shared, and every other task would wait for a busy holder. The turn follows from the number of the
//! choice, so no step has to be made to know another.
//!
//! What came to one device of a task or host is copied on from there, by later steps, so the fewest bytes cross
//! hosts. All holders of a region together feed `fan_out` hosts (or, on their own host, tasks) for each of them;
//! each that was fed feeds the next `fan_out`, as a tree. Otherwise a broadcast would take as long as one host
//! needs to send everything; so `n` hosts are reached in about `log2(n)` rounds. The first recipient rotates with
//! the region number, so neither what arrives nor what is copied on falls to the same devices.

use super::Plan;
use super::holders::{HostHolders, TaskHolders};
use super::step::{BufferRole, StepClass};
use super::tiles::{NONE, Pair, number};
use super::turn::Turn;

/// One step of a region: everything else about it follows by arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// The device that gives.
    pub source: u32,
    /// The device that takes.
    pub destination: u32,
    /// The step of the same region that must be done before, counted from its first one, or [`NONE`].
    pub after: u32,
    pub class: StepClass,
}

impl Record {
    /// Returns whether it is read from the source array, or from the destination array, where an earlier step put it.
    pub fn from(self) -> BufferRole {
        if self.after == NONE { BufferRole::Source } else { BufferRole::Destination }
    }
}

/// Where a region can be had: on a device, after a step or from the start.
#[derive(Debug, Clone, Copy)]
struct Origin {
    device: u32,
    after: u32,
}

/// Makes the steps of one region after the other.
pub(super) struct Maker<'a> {
    plan: &'a Plan,
    fan_out: usize,
    pair: Pair,
    /// Whether the region is all of both tiles, and which of the regions of its tile of the source it is.
    whole: bool,
    ordinal: u32,
    records: Vec<Record>,
    /// Kept for their room.
    away: Vec<HostHolders>,
    needy: Vec<TaskHolders>,
    hosts_fed: Vec<Origin>,
    tasks_fed: Vec<Origin>,
}

impl<'a> Maker<'a> {
    pub fn new(plan: &'a Plan) -> Self {
        Self {
            plan,
            fan_out: plan.options.fan_out.get() as usize,
            pair: Pair { held: 0, wanted: 0, turn: 0 },
            whole: false,
            ordinal: 0,
            records: Vec::new(),
            away: Vec::new(),
            needy: Vec::new(),
            hosts_fed: Vec::new(),
            tasks_fed: Vec::new(),
        }
    }

    /// Makes the steps of a region, in an order in which every step comes after that which it needs.
    pub fn make(&mut self, pair: Pair) {
        self.pair = pair;
        self.whole = self.plan.rounds.is_whole(pair);
        self.records.clear();
        if !self.plan.turns.are_none() {
            self.ordinal = self.plan.rounds.find(pair.held, pair.wanted).unwrap_or(0);
        } else if self.plan.copies == 1 {
            // What the rules come to between one device that holds it and one that shall: most plans of millions of
            // steps have no other regions.
            let holder = self.plan.holders.only(pair.held);
            self.step(Origin { device: holder, after: NONE }, self.plan.receivers.only(pair.wanted));
            return;
        }
        self.region();
    }

    /// Returns the steps that were made last.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Makes the steps by which all devices that shall hold the region get it.
    fn region(&mut self) {
        let mut away = std::mem::take(&mut self.away);
        let plan = self.plan;
        for span in plan.receivers.spans(self.pair.wanted) {
            match plan.holders.find_span(self.pair.held, span.host) {
                Some(holding) => self.host_that_holds(span, holding),
                None => away.push(span.clone()),
            }
        }
        self.hosts_that_do_not(&away);
        away.clear();
        self.away = away;
    }

    /// Rule 4.
    fn hosts_that_do_not(&mut self, away: &[HostHolders]) {
        if away.is_empty() {
            return;
        }
        let holders = &self.plan.holders;
        let roots = holders.spans(self.pair.held).len();
        let turn = self.plan.turns.anywhere(self.pair.held, self.ordinal);
        let mut fed = std::mem::take(&mut self.hosts_fed);
        for place in 0..away.len() {
            let origin = match self.parent(place, roots) {
                None => Origin { device: holders.anywhere(self.pair.held, turn.then(place)), after: NONE },
                Some(parent) => fed[parent],
            };
            let span = &away[self.turned(place, away.len())];
            let entry = self.host_fed_from(span, origin);
            fed.push(entry);
        }
        fed.clear();
        self.hosts_fed = fed;
    }

    /// Returns a host that gets the region from elsewhere: one task of it does, and feeds the others. Returns where it is
    /// then.
    fn host_fed_from(&mut self, span: &HostHolders, origin: Origin) -> Origin {
        let groups = self.plan.receivers.groups(span);
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
    fn host_that_holds(&mut self, span: &HostHolders, holding: u32) {
        let (holders, receivers) = (&self.plan.holders, &self.plan.receivers);
        let mut needy = std::mem::take(&mut self.needy);
        for group in receivers.groups(span) {
            match holders.find_group(holding, group.task) {
                Some(held) => {
                    let devices = receivers.devices(group);
                    let turn = Turn::of(self.pair.held, self.ordinal, devices.len());
                    for (choice, &device) in devices.iter().enumerate() {
                        let own = self.plan.parties.source[device as usize] == self.pair.held;
                        let from = if own { device } else { holders.in_task(held, turn.then(choice)) };
                        self.step(Origin { device: from, after: NONE }, device);
                    }
                }
                None => needy.push(group.clone()),
            }
        }
        let roots = holders.tasks_in(holding);
        let turn =
            Turn::of(self.pair.held, self.ordinal, needy.len().min(roots.saturating_mul(self.fan_out)));
        let mut fed = std::mem::take(&mut self.tasks_fed);
        for place in 0..needy.len() {
            let origin = match self.parent(place, roots) {
                None => Origin { device: holders.on_host(holding, turn.then(place)), after: NONE },
                Some(parent) => fed[parent],
            };
            let entry = self.task_fed_from(&needy[self.turned(place, needy.len())], origin);
            fed.push(entry);
        }
        fed.clear();
        needy.clear();
        (self.tasks_fed, self.needy) = (fed, needy);
    }

    /// Returns a task that gets the region from elsewhere: one device of it does, and the others copy it. Returns where
    /// it is then.
    fn task_fed_from(&mut self, group: &TaskHolders, origin: Origin) -> Origin {
        let devices = self.plan.receivers.devices(group);
        let first = self.turned(0, devices.len());
        let after = self.step(origin, devices[first]);
        let entry = Origin { device: devices[first], after };
        for &device in devices[first + 1..].iter().chain(&devices[..first]) {
            self.step(entry, device);
        }
        entry
    }

    /// Returns which feeds the one at `place` of those that are fed, where so many `roots` hold the region: one of these
    /// (`None`), or one that was fed before.
    fn parent(&self, place: usize, roots: usize) -> Option<usize> {
        place.checked_sub(roots.saturating_mul(self.fan_out)).map(|place| place / self.fan_out)
    }

    /// Returns where the one at `place` of so many stands in the present region's order.
    fn turned(&self, place: usize, count: usize) -> usize {
        if count == 1 { 0 } else { (self.pair.turn as usize + place) % count }
    }

    fn step(&mut self, origin: Origin, destination: u32) -> u32 {
        let (from, to) = (origin.device as usize, destination as usize);
        let parties = &self.plan.parties;
        let class = if from == to && self.whole {
            StepClass::SameBuffer
        } else if parties.tasks[from] == parties.tasks[to] {
            StepClass::LocalCopy
        } else if parties.hosts[from] == parties.hosts[to] {
            StepClass::SameHost
        } else {
            StepClass::AcrossHosts
        };
        let step = number(self.records.len());
        self.records.push(Record { source: origin.device, destination, after: origin.after, class });
        step
    }
}

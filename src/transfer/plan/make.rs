//! The rules that choose which device copies which region to which.
//!
//! Every tile of the source that overlaps a tile of the destination makes one *region*, which all holders of
//! the destination tile need. The rules apply in this order to each region:
//!
//! 1. a device that holds it already takes it from itself;
//! 2. a task with a device that holds it takes it from that device;
//! 3. a host with a task that holds it takes it from that task, once for each task that needs it;
//! 4. any other host receives it once, from a host that holds it.
//!
//! Each of these costs several times the one before.
//!
//! If several hosts, tasks or devices hold a region, they send in turns (`turns.rs`), because the network of
//! a host is shared and every other task would wait for a busy holder. The turn follows from the number of
//! the choice, so it can be computed for one step without the others.
//!
//! Bytes that came to one device of a task or host are copied on from there, by later steps, so the fewest
//! bytes cross hosts. Each holder of a region sends it to `fan_out` hosts (or, on its own host, tasks) on
//! average; each of those sends it to the next `fan_out`, as a tree. `n` hosts are thus reached in about
//! `log2(n)` rounds, where otherwise a broadcast would take as long as one host needs to send everything. The
//! first recipient rotates with the region number, so that the same devices do not receive and copy on every
//! region. Begin at [`Maker::make`].

use super::Plan;
use super::holders::{HostHolders, TaskHolders};
use super::step::{BufferRole, StepClass};
use super::tiles::{NONE, Pair, number};
use super::turn::Turn;

/// One step of a region. All its other fields are computed from these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// The sending device.
    pub source: u32,
    /// The receiving device.
    pub destination: u32,
    /// The step of the same region that must be done before, counted from the region's first one, or
    /// [`NONE`].
    pub after: u32,
    pub class: StepClass,
}

impl Record {
    /// Returns the array that the step reads from: the source, or the destination, where an earlier step
    /// wrote the region.
    pub fn from(self) -> BufferRole {
        if self.after == NONE { BufferRole::Source } else { BufferRole::Destination }
    }
}

/// A device that has a region, and the step after which it has it.
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
    /// Whether the region is the whole of both tiles, and its index among the regions of its source tile.
    whole: bool,
    ordinal: u32,
    records: Vec<Record>,
    /// These are fields only to reuse their memory.
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

    /// Makes the steps of a region. A step comes after the one that it depends on.
    pub fn make(&mut self, pair: Pair) {
        self.pair = pair;
        self.whole = self.plan.rounds.is_whole(pair);
        self.records.clear();
        if !self.plan.turns.are_none() {
            self.ordinal = self.plan.rounds.find(pair.held, pair.wanted).unwrap_or(0);
        } else if self.plan.copies == 1 {
            // The result of the rules for one holder and one receiver; most plans of millions of steps have
            // no other regions.
            let holder = self.plan.holders.only(pair.held);
            self.step(Origin { device: holder, after: NONE }, self.plan.receivers.only(pair.wanted));
            return;
        }
        self.region();
    }

    /// Returns the steps of the last region.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Makes the steps by which all devices that are to hold the region get it.
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

    /// Applies rule 4 to the hosts in `away`.
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

    /// Makes the steps of a host that receives the region from elsewhere: one task receives it, and sends it
    /// to the others. Returns the device that has it first.
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

    /// Applies rules 1 to 3 to a host.
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

    /// Makes the steps of a task that receives the region from elsewhere: one device receives it, and the
    /// others copy it. Returns that device.
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

    /// Returns the sender for the recipient at `place`, if `roots` holders have the region: one of these
    /// (`None`), or an earlier recipient.
    fn parent(&self, place: usize, roots: usize) -> Option<usize> {
        place.checked_sub(roots.saturating_mul(self.fan_out)).map(|place| place / self.fan_out)
    }

    /// Returns the index of the recipient at `place` of `count` in the current region's order.
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

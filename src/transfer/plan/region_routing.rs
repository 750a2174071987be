//! The rules that choose, for each region, which devices send it and which receive it.
//!
//! A *region* is the overlap of a tile of the source with a tile of the destination. All devices that are to hold the
//! destination tile need the region. For each of them, the first of these rules that applies decides how it gets the
//! region:
//!
//! 1. If the device holds the region already, it copies the region from itself.
//! 2. If another device of the same task holds the region, the device gets it from that device.
//! 3. If another task on the same host holds the region, the device's task gets it within the host, once for all its
//!    devices.
//! 4. If no task on the host holds the region, the host receives it once, from another host.
//!
//! Each of these copies costs several times as much as the one before it in the list.
//!
//! If several hosts, tasks or devices hold a region, they take turns as senders (`sender_choices.rs`). The network of
//! a host is shared, so if one holder sent everything, every other task would wait for it. Each choice of a sender
//! has a number, and the sender is computed from this number alone. So the sender of one step can be computed without
//! the other steps.
//!
//! When a device has received bytes for its task or host, later steps copy these bytes from this device to the other
//! devices of the task or host. So the fewest possible bytes cross hosts. Each holder of a region sends it to
//! `fan_out` hosts on average (or to `fan_out` tasks on its own host). Each recipient sends it to the next `fan_out`,
//! so the copies form a tree. With the default fan-out of two, a broadcast reaches `n` hosts in about `log2(n)`
//! rounds. Without the tree, one host would have to send to all others, one after another. The first recipient
//! rotates from region to region; otherwise the same devices would receive every region first and pass it on. Begin
//! at [`RegionRouter::route_region`].

use super::Plan;
use super::holders::{TileHoldersInTask, TileHoldersOnHost};
use super::round_robin::RoundRobinIndex;
use super::step::{BufferRole, StepClass};
use super::tiles::{NONE, TilePair, saturating_u32};

/// One step of a region. All its other fields are computed from these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepRecord {
    /// The sending device.
    pub source: u32,
    /// The receiving device.
    pub destination: u32,
    /// The step of the same region that must be done before, counted from the region's first one, or
    /// [`NONE`].
    pub after: u32,
    pub class: StepClass,
}

impl StepRecord {
    /// Returns the array that the step reads from: the source, or the destination, where an earlier step
    /// wrote the region.
    pub fn source_role(self) -> BufferRole {
        if self.after == NONE { BufferRole::Source } else { BufferRole::Destination }
    }
}

/// A device that has a region, and the step after which it has it.
#[derive(Debug, Clone, Copy)]
struct RegionSource {
    device: u32,
    after: u32,
}

/// Makes the steps of one region after the other.
pub(super) struct RegionRouter<'a> {
    plan: &'a Plan,
    fan_out: usize,
    pair: TilePair,
    /// Whether the region is the whole of both tiles, and its index among the regions of its source tile.
    whole: bool,
    ordinal: u32,
    records: Vec<StepRecord>,
    /// These are fields only to reuse their memory.
    away: Vec<TileHoldersOnHost>,
    needy: Vec<TileHoldersInTask>,
    hosts_fed: Vec<RegionSource>,
    tasks_fed: Vec<RegionSource>,
}

impl<'a> RegionRouter<'a> {
    pub fn new(plan: &'a Plan) -> Self {
        Self {
            plan,
            fan_out: plan.options.fan_out.get() as usize,
            pair: TilePair { held: 0, wanted: 0, turn: 0 },
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
    pub fn route_region(&mut self, pair: TilePair) {
        self.pair = pair;
        self.whole = self.plan.region_order.covers_both_tiles(pair);
        self.records.clear();
        if !self.plan.sender_choices.has_no_alternatives() {
            self.ordinal = self.plan.region_order.index_in_source_tile(pair.held, pair.wanted).unwrap_or(0);
        } else if self.plan.copies == 1 {
            // The result of the rules for one holder and one receiver; most plans of millions of steps have
            // no other regions.
            let holder = self.plan.holders.only_holder(pair.held);
            self.add_step(
                RegionSource { device: holder, after: NONE },
                self.plan.receivers.only_holder(pair.wanted),
            );
            return;
        }
        self.apply_routing_rules();
    }

    /// Returns the steps of the last region.
    pub fn records(&self) -> &[StepRecord] {
        &self.records
    }

    /// Makes the steps by which all devices that are to hold the region get it.
    fn apply_routing_rules(&mut self) {
        let mut away = std::mem::take(&mut self.away);
        let plan = self.plan;
        for span in plan.receivers.hosts_holding_tile(self.pair.wanted) {
            match plan.holders.find_host(self.pair.held, span.host) {
                Some(holding) => self.add_steps_within_holding_host(span, holding),
                None => away.push(span.clone()),
            }
        }
        self.add_steps_to_lacking_hosts(&away);
        away.clear();
        self.away = away;
    }

    /// Applies rule 4 to the hosts in `away`.
    fn add_steps_to_lacking_hosts(&mut self, away: &[TileHoldersOnHost]) {
        if away.is_empty() {
            return;
        }
        let holders = &self.plan.holders;
        let roots = holders.hosts_holding_tile(self.pair.held).len();
        let turn = self.plan.sender_choices.first_choice(self.pair.held, self.ordinal);
        let mut fed = std::mem::take(&mut self.hosts_fed);
        for place in 0..away.len() {
            let origin = match self.sender_for_recipient(place, roots) {
                None => RegionSource {
                    device: holders.sender_of_all_holders(self.pair.held, turn.advanced_by(place)),
                    after: NONE,
                },
                Some(parent) => fed[parent],
            };
            let span = &away[self.rotated_index(place, away.len())];
            let entry = self.add_steps_to_host(span, origin);
            fed.push(entry);
        }
        fed.clear();
        self.hosts_fed = fed;
    }

    /// Makes the steps of a host that receives the region from elsewhere: one task receives it, and sends it
    /// to the others. Returns the device that has it first.
    fn add_steps_to_host(&mut self, span: &TileHoldersOnHost, origin: RegionSource) -> RegionSource {
        let groups = self.plan.receivers.tasks_on_host(span);
        let mut fed = std::mem::take(&mut self.tasks_fed);
        for place in 0..groups.len() {
            let from = match place {
                0 => origin,
                _ => fed[(place - 1) / self.fan_out],
            };
            let entry = self.add_steps_to_task(&groups[self.rotated_index(place, groups.len())], from);
            fed.push(entry);
        }
        let entry = fed[0];
        fed.clear();
        self.tasks_fed = fed;
        entry
    }

    /// Applies rules 1 to 3 to a host.
    fn add_steps_within_holding_host(&mut self, span: &TileHoldersOnHost, holding: u32) {
        let (holders, receivers) = (&self.plan.holders, &self.plan.receivers);
        let mut needy = std::mem::take(&mut self.needy);
        for group in receivers.tasks_on_host(span) {
            match holders.find_task(holding, group.task) {
                Some(held) => {
                    let devices = receivers.devices_in_task(group);
                    let turn =
                        RoundRobinIndex::first_choice_of_region(self.pair.held, self.ordinal, devices.len());
                    for (choice, &device) in devices.iter().enumerate() {
                        let own = self.plan.device_table.source[device as usize] == self.pair.held;
                        let from =
                            if own { device } else { holders.sender_in_task(held, turn.advanced_by(choice)) };
                        self.add_step(RegionSource { device: from, after: NONE }, device);
                    }
                }
                None => needy.push(group.clone()),
            }
        }
        let roots = holders.task_count(holding);
        let turn = RoundRobinIndex::first_choice_of_region(
            self.pair.held,
            self.ordinal,
            needy.len().min(roots.saturating_mul(self.fan_out)),
        );
        let mut fed = std::mem::take(&mut self.tasks_fed);
        for place in 0..needy.len() {
            let origin = match self.sender_for_recipient(place, roots) {
                None => RegionSource {
                    device: holders.sender_on_host(holding, turn.advanced_by(place)),
                    after: NONE,
                },
                Some(parent) => fed[parent],
            };
            let entry = self.add_steps_to_task(&needy[self.rotated_index(place, needy.len())], origin);
            fed.push(entry);
        }
        fed.clear();
        needy.clear();
        (self.tasks_fed, self.needy) = (fed, needy);
    }

    /// Makes the steps of a task that receives the region from elsewhere: one device receives it, and the
    /// others copy it. Returns that device.
    fn add_steps_to_task(&mut self, group: &TileHoldersInTask, origin: RegionSource) -> RegionSource {
        let devices = self.plan.receivers.devices_in_task(group);
        let first = self.rotated_index(0, devices.len());
        let after = self.add_step(origin, devices[first]);
        let entry = RegionSource { device: devices[first], after };
        for &device in devices[first + 1..].iter().chain(&devices[..first]) {
            self.add_step(entry, device);
        }
        entry
    }

    /// Returns the sender for the recipient at `place`, if `roots` holders have the region: one of these
    /// (`None`), or an earlier recipient.
    fn sender_for_recipient(&self, place: usize, roots: usize) -> Option<usize> {
        place.checked_sub(roots.saturating_mul(self.fan_out)).map(|place| place / self.fan_out)
    }

    /// Returns the index of the recipient at `place` of `count` in the current region's order.
    fn rotated_index(&self, place: usize, count: usize) -> usize {
        if count == 1 { 0 } else { (self.pair.turn as usize + place) % count }
    }

    fn add_step(&mut self, origin: RegionSource, destination: u32) -> u32 {
        let (from, to) = (origin.device as usize, destination as usize);
        let device_table = &self.plan.device_table;
        let class = if from == to && self.whole {
            StepClass::SameBuffer
        } else if device_table.tasks[from] == device_table.tasks[to] {
            StepClass::LocalCopy
        } else if device_table.hosts[from] == device_table.hosts[to] {
            StepClass::SameHost
        } else {
            StepClass::AcrossHosts
        };
        let step = saturating_u32(self.records.len());
        self.records.push(StepRecord { source: origin.device, destination, after: origin.after, class });
        step
    }
}

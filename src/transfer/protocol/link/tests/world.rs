//! The state of a simulation: the two sides, the frames between them, and a model of the outcomes that each launch
//! may have. Begin at `LinkSimulation::new`.

use super::*;
use crate::protocol::frame::{FrameKind, Header};
use crate::protocol::link::launch_definition::{DefinitionEntry, LaunchDefinition};
use crate::protocol::link::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// A launch, as its side knows it.
#[derive(Default)]
pub(super) struct SimulatedLaunch {
    pub(super) plan: usize,
    pub(super) at: GroupId,
    /// The connection that carries it.
    pub(super) on: usize,
    pub(super) sends: u64,
    pub(super) receives: u64,
    pub(super) matched: bool,
    pub(super) sent: bool,
    pub(super) differs: bool,
    /// The indices of the chunks that are in place.
    pub(super) landed: BTreeSet<u64>,
    pub(super) arrived: u64,
    pub(super) failed: bool,
    /// Whether `LinkSide::announce_group_quiescence` was called.
    pub(super) quiesced: bool,
    pub(super) peer_quiet: bool,
    pub(super) ready: (bool, bool),
    pub(super) fetching: bool,
    pub(super) over: bool,
    /// Whether its number was taken and withdrawn without a launch.
    pub(super) withdrawn: bool,
}

impl SimulatedLaunch {
    pub(super) fn is_complete(&self) -> bool {
        !self.failed && self.sent && self.matched && self.arrived == self.receives
    }
}

pub(super) struct SimulatedSide {
    pub(super) numbers: LaunchNumbers,
    /// The connection that the side uses.
    pub(super) knows: Option<usize>,
    /// The connections that the side keeps from ending.
    pub(super) kept: Vec<usize>,
    pub(super) launched: Vec<SimulatedLaunch>,
    /// The plans of each channel whose number is not yet taken.
    pub(super) planned: BTreeMap<u32, VecDeque<usize>>,
    /// The plans whose number is taken; they are launched later, in any order.
    pub(super) taken: Vec<(usize, GroupId)>,
    /// The definitions that are not withdrawn, with their connection.
    pub(super) defined: Vec<(usize, u32)>,
    pub(super) fetches: Vec<usize>,
}

/// A control frame as it was first sent.
pub(super) type SentControlFrame = (FrameKind, GroupId, u32, Vec<u8>);

/// A connection: a link on each side, and the frames between them.
pub(super) struct SimulatedConnection {
    pub(super) links: [LinkSide<usize>; 2],
    /// The sides that have ended it.
    pub(super) ended: [bool; 2],
    pub(super) lanes: Vec<SimulatedLane>,
    pub(super) next_lane: u16,
    /// The control frames in flight to each end; none while the control lane is lost.
    pub(super) control: Option<[VecDeque<ControlFrame>; 2]>,
    /// Every control frame that each side has sent, by number.
    pub(super) said: [HashMap<u32, SentControlFrame>; 2],
    pub(super) heard: [u32; 2],
}

/// A lane, as its two ends know it.
pub(super) struct SimulatedLane {
    pub(super) id: u16,
    /// Whether bytes still pass.
    pub(super) whole: bool,
    /// Whether the end has not yet detected that the lane is lost.
    pub(super) open: [bool; 2],
    /// The chunks in flight to each end: the header, and whether it is damaged.
    pub(super) wire: [VecDeque<(Header, bool)>; 2],
    /// The chunk that each end is receiving: its header, its launch, and whether it is damaged.
    pub(super) half: [Option<(Header, usize, bool)>; 2],
}

pub(super) struct PlannedTransfers {
    pub(super) channel: u32,
    pub(super) definitions: [Vec<DefinitionEntry>; 2],
    pub(super) same: bool,
}

pub(super) struct LinkSimulation {
    pub(super) random: fastrand::Rng,
    pub(super) lasting: bool,
    pub(super) sides: [SimulatedSide; 2],
    pub(super) plans: Vec<PlannedTransfers>,
    pub(super) terms: LinkTerms,
    pub(super) connections: Vec<SimulatedConnection>,
    pub(super) stopping: bool,
    pub(super) leaving: bool,
    pub(super) harm: bool,
    /// The number of connections that both sides ended; of refusals to end one because it was used; of
    /// connections that stayed because they were used before the decision; and of questions by both sides at
    /// once.
    pub(super) left: [usize; 4],
}

pub(super) fn plan_random_transfers(random: &mut fastrand::Rng) -> PlannedTransfers {
    let channel = random.u32(0..3);
    let count = random.u64(1..4);
    let mut entries: Vec<(u64, u32, u64, u64)> = (0..count)
        .map(|key| (key, random.u32(0..2), if random.u8(0..5) == 0 { 0 } else { random.u64(0..150) }, key))
        .collect();
    let mine = |list: &[(u64, u32, u64, u64)], here| {
        list.iter().map(|&(key, from, bytes, print)| transfer_entry(key, from, bytes, print, here)).collect()
    };
    let first = mine(&entries, 0);
    let same = random.u8(0..12) > 0;
    if !same {
        match random.u8(0..4) {
            0 => entries[0].0 += 100,
            1 => entries[0].2 += 1,
            2 => entries[0].3 += 1,
            _ => entries.push((50, 0, 10, 1)),
        }
    }
    PlannedTransfers { channel, definitions: [first, mine(&entries, 1)], same }
}

impl LinkSimulation {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let lasting = random.u8(0..3) == 0;
        let fetch = lasting && random.bool();
        let plans: Vec<_> = (0..random.usize(1..24)).map(|_| plan_random_transfers(&mut random)).collect();
        let side = || {
            let mut planned: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
            for (at, plan) in plans.iter().enumerate() {
                planned.entry(plan.channel).or_default().push_back(at);
            }
            SimulatedSide {
                numbers: LaunchNumbers::default(),
                knows: None,
                kept: Vec::new(),
                launched: Vec::new(),
                planned,
                taken: Vec::new(),
                defined: Vec::new(),
                fetches: Vec::new(),
            }
        };
        let sides = [side(), side()];
        let harm = random.u8(0..4) > 0;
        let stopping = random.u8(0..3) > 0;
        let leaving = random.u8(0..3) > 0;
        let terms = LinkTerms { chunk: CHUNK, fetch, pushes_unsourced: false, lasting };
        let connections = Vec::new();
        let mut story =
            Self { random, lasting, sides, plans, terms, connections, stopping, leaving, harm, left: [0; 4] };
        story.connect(0);
        story
    }

    /// A side makes a connection. The other side learns of it at once, and ends another one that it uses.
    pub(super) fn connect(&mut self, side: usize) -> usize {
        let on = self.connections.len();
        let links = [0, 1].map(|me: u32| {
            let numbers = self.sides[me as usize].numbers.clone();
            LinkSide::new(member(me), member(1 - me), self.terms, numbers)
        });
        self.connections.push(SimulatedConnection {
            links,
            ended: [false; 2],
            lanes: Vec::new(),
            next_lane: 0,
            control: Some(Default::default()),
            said: Default::default(),
            heard: [0; 2],
        });
        for _ in 0..self.random.usize(1..4) {
            self.open_lane(on);
        }
        if let Some(old) = self.sides[1 - side].knows {
            self.end_connection(1 - side, old);
        }
        self.sides.iter_mut().for_each(|side| side.knows = Some(on));
        on
    }

    /// A side ends a connection.
    pub(super) fn end_connection(&mut self, side: usize, on: usize) {
        let between = &mut self.connections[on];
        if !std::mem::replace(&mut between.ended[side], true) {
            assert!(!between.links[side].try_lease(), "it ends without this side's leave");
            assert!(between.links[side].take_launches().is_empty(), "a launch ends with its connection");
            self.left[0] += usize::from(between.ended == [true; 2]);
        }
        self.sides[side].knows.take_if(|knows| *knows == on);
    }

    pub(super) fn open_lane(&mut self, on: usize) {
        let between = &mut self.connections[on];
        let id = between.next_lane;
        between.next_lane += 1;
        let (wire, half) = Default::default();
        between.lanes.push(SimulatedLane { id, whole: true, open: [true; 2], wire, half });
    }

    pub(super) fn take_random_launch_number(&mut self, side: usize) {
        let channels: Vec<u32> =
            self.sides[side].planned.iter().filter(|(_, list)| !list.is_empty()).map(|(c, _)| *c).collect();
        let Some(channel) = self.random.choice(channels) else { return };
        let here = &mut self.sides[side];
        let Some(number) = here.planned.get_mut(&channel).and_then(VecDeque::pop_front) else { return };
        here.taken.push((number, here.numbers.take_next(channel)));
    }

    pub(super) fn withdraw_taken_number(&mut self, side: usize, (plan, at): (usize, GroupId)) {
        let here = &mut self.sides[side];
        let done =
            SimulatedLaunch { plan, at, ready: (true, true), withdrawn: true, ..SimulatedLaunch::default() };
        here.launched.push(SimulatedLaunch { failed: true, quiesced: true, peer_quiet: true, ..done });
        here.numbers.retire(at);
        // The peer learns of it at once, or when it launches its own.
        let at_once = self.random.bool();
        for between in self.connections.iter_mut().filter(|between| !between.ended[side]) {
            let link = &mut between.links[side];
            if at_once || link.groups.contains_key(&at) {
                link.withdraw_launch_number(at, NEVER);
            }
        }
    }

    /// Keeps the connection that a side is to launch on, and makes one if there is none. Returns none while
    /// the peer decides whether the existing one stays.
    pub(super) fn lease_connection_for_launch(&mut self, side: usize) -> Option<usize> {
        let Some(on) = self.sides[side].knows else {
            let on = self.connect(side);
            assert!(self.connections[on].links[side].try_lease());
            return Some(on);
        };
        if self.connections[on].links[side].try_lease() {
            return Some(on);
        }
        if self.connections[on].links[side].has_left() {
            self.sides[side].knows = None;
            return self.lease_connection_for_launch(side);
        }
        None
    }

    pub(super) fn toggle_random_lease(&mut self, side: usize) {
        let here = &mut self.sides[side];
        if here.kept.is_empty() || self.random.u8(0..3) == 0 {
            let kept = self.lease_connection_for_launch(side);
            self.sides[side].kept.extend(kept);
        } else {
            let on = here.kept.swap_remove(self.random.usize(0..here.kept.len()));
            self.connections[on].links[side].release_lease();
        }
    }

    /// Returns whether it did anything.
    pub(super) fn launch(&mut self, side: usize) -> bool {
        if self.sides[side].taken.is_empty() || self.random.bool() {
            self.take_random_launch_number(side);
        }
        let count = self.sides[side].taken.len();
        if count == 0 {
            return false;
        }
        let place = self.random.usize(0..count);
        if self.stopping && self.random.u8(0..12) == 0 {
            let taken = self.sides[side].taken.swap_remove(place);
            self.withdraw_taken_number(side, taken);
            return true;
        }
        let Some(on) = self.lease_connection_for_launch(side) else { return false };
        let (number, at) = self.sides[side].taken.swap_remove(place);
        let definition = LaunchDefinition::new(self.plans[number].definitions[side].clone());
        let (sends, receives) = (definition.sent, definition.received);
        let (here, link) = (&mut self.sides[side], &mut self.connections[on].links[side]);
        let definition = link.send_definition(definition);
        link.release_lease();
        let ready = (self.random.bool(), self.random.bool());
        let token = here.launched.len();
        let inline =
            (ready.0 && self.random.bool() && link.should_inline(sends)).then(|| vec![7; sends as usize]);
        let class = PriorityClass::ALL[self.random.usize(0..3)];
        let (source, destination) = ready;
        here.launched.push(SimulatedLaunch {
            plan: number,
            sends,
            receives,
            ready,
            on,
            ..SimulatedLaunch::default()
        });
        here.launched[token].at = at;
        assert!(link.launch(LaunchParameters { token, definition, at, class, source, destination, inline }));
        // A definition may be launched again until it is withdrawn.
        if !self.leaving && self.random.bool() || self.leaving && self.random.u8(0..10) > 0 {
            link.withdraw_definition(definition);
        } else {
            here.defined.push((on, definition));
        }
        self.perform_outputs(side, on);
        true
    }

    pub(super) fn withdraw_definition(&mut self, side: usize) {
        if let Some((on, definition)) = self.sides[side].defined.pop()
            && !self.connections[on].ended[side]
        {
            self.connections[on].links[side].withdraw_definition(definition);
        }
    }

    pub(super) fn link_of_launch(&mut self, side: usize, token: usize) -> &mut LinkSide<usize> {
        let on = self.sides[side].launched[token].on;
        &mut self.connections[on].links[side]
    }

    pub(super) fn cancel_launch(&mut self, side: usize, token: usize) {
        let launched = &self.sides[side].launched[token];
        let (on, at) = (launched.on, launched.at);
        if launched.withdrawn || self.connections[on].ended[side] {
            return;
        }
        if !self.connections[on].links[side].mark_group_cancelled(at, "enough") {
            self.record_peer_quiescence(side, token);
        }
        self.fail_launch(side, token);
    }

    /// Asserts that no byte can land at the peer any more, as a link has reported.
    pub(super) fn record_peer_quiescence(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        launched.peer_quiet = true;
        let at = launched.at;
        if let Some(other) = self.sides[1 - side].launched.iter().find(|other| other.at == at) {
            // If the lists differ, no byte ever lands.
            let over = other.quiesced || other.arrived == other.receives || !self.plans[other.plan].same;
            assert!(over, "a stop is proven while bytes can land");
        }
    }

    pub(super) fn fail_launch(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        if !launched.is_complete() {
            launched.failed = true;
        }
        // A launch that was complete stays so, but no new access begins.
        launched.failed |= launched.arrived < launched.receives;
        self.announce_quiescence_if_possible(side, token);
    }

    pub(super) fn announce_quiescence_if_possible(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        if launched.failed && !launched.fetching && !launched.quiesced {
            launched.quiesced = true;
            let at = launched.at;
            if let Some(token) = self.link_of_launch(side, token).announce_group_quiescence(at) {
                self.mark_launch_over(side, token);
            }
        }
    }

    /// Marks a launch as over: no further output names it.
    pub(super) fn mark_launch_over(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        assert!(!launched.over && (launched.is_complete() || launched.quiesced || launched.differs));
        launched.over = true;
    }
}

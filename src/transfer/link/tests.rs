//! Two links against each other in virtual time, with everything between them that a network can do.
//!
//! Each seed is one story: launches of both sides in any order, buffers that become ready late, lanes that overtake each
//! other, damage and die, a control connection that is lost and made anew, launches given up at any moment. A model beside
//! the links knows what each launch may have seen. `LINK_SEED=n` tells one story again.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::definition::{Entry, Source};
use super::*;
use crate::transfer::error::TransferKey;
use crate::transfer::frame::CONTROL_MAX;
use crate::transfer::identity::{DeviceId, Incarnation, TaskId};
use crate::transfer::layout::Fingerprint;

const CHUNK: u32 = 16;
const NEVER: &str = "never";

fn member(task: u32) -> Member {
    Member { task: TaskId(task), incarnation: Incarnation::new(u64::from(task) + 70).unwrap() }
}

/// A launch as its side sees it.
#[derive(Default)]
struct Launched {
    plan: usize,
    at: GroupId,
    sends: u64,
    receives: u64,
    matched: bool,
    sent: bool,
    differs: bool,
    /// First bytes of the chunks that are in place; the whole for what was fetched or came inline.
    landed: BTreeSet<u64>,
    arrived: u64,
    failed: bool,
    /// `Link::quiesced` was called.
    quiesced: bool,
    peer_quiet: bool,
    ready: (bool, bool),
    fetching: bool,
    over: bool,
    /// Its number was taken, and nothing was launched.
    withdrawn: bool,
}

impl Launched {
    const fn complete(&self) -> bool {
        !self.failed && self.sent && self.matched && self.arrived == self.receives
    }
}

struct Side {
    link: Link<usize>,
    launched: Vec<Launched>,
    /// What is planned and not yet asked for, of each channel.
    planned: BTreeMap<u32, VecDeque<usize>>,
    /// Plans that have their number, and are launched at some later time, in any order.
    taken: Vec<(usize, GroupId)>,
    fetches: Vec<usize>,
    /// Every control frame as it was first said, by its number.
    said: HashMap<u32, (Kind, GroupId, u32, Vec<u8>)>,
    heard: u32,
}

/// A lane as its two ends see it.
struct Lane {
    id: u16,
    /// Whether bytes still pass.
    whole: bool,
    /// Whether the end has not noticed that they do not.
    open: [bool; 2],
    /// Under way to each end: header, whether damaged.
    wire: [VecDeque<(Header, bool)>; 2],
    /// Half received at each end.
    half: [Option<(Header, usize, bool)>; 2],
}

struct Plan {
    channel: u32,
    definitions: [Vec<Entry>; 2],
    same: bool,
}

struct Story {
    random: fastrand::Rng,
    lasting: bool,
    sides: [Side; 2],
    plans: Vec<Plan>,
    lanes: Vec<Lane>,
    next_lane: u16,
    /// Control frames under way to each end; none while the connection is lost.
    control: Option<[VecDeque<Frame>; 2]>,
    stopping: bool,
    harm: bool,
}

fn entry(key: u64, from: u32, bytes: u64, fingerprint: u64, here: u32) -> Entry {
    Entry {
        key: TransferKey(key),
        from: DeviceId(from),
        to: DeviceId(1 - from),
        bytes,
        fingerprint: Fingerprint(fingerprint),
        outgoing: from == here,
        source: if from == here { Source::Region(1, 0) } else { Source::None },
    }
}

fn plan(random: &mut fastrand::Rng) -> Plan {
    let channel = random.u32(0..3);
    let count = random.u64(1..4);
    let mut entries: Vec<(u64, u32, u64, u64)> = (0..count)
        .map(|key| (key, random.u32(0..2), if random.u8(0..5) == 0 { 0 } else { random.u64(0..150) }, key))
        .collect();
    let mine = |list: &[(u64, u32, u64, u64)], here| {
        list.iter().map(|&(key, from, bytes, print)| entry(key, from, bytes, print, here)).collect()
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
    Plan { channel, definitions: [first, mine(&entries, 1)], same }
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let lasting = random.u8(0..3) == 0;
        let fetch = lasting && random.bool();
        let plans: Vec<_> = (0..random.usize(1..14)).map(|_| plan(&mut random)).collect();
        let side = |me: u32| {
            let mut planned: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
            for (at, plan) in plans.iter().enumerate() {
                planned.entry(plan.channel).or_default().push_back(at);
            }
            Side {
                link: Link::new(
                    member(me),
                    member(1 - me),
                    Terms { chunk: CHUNK, fetch, lasting },
                    Numbers::default(),
                ),
                launched: Vec::new(),
                planned,
                taken: Vec::new(),
                fetches: Vec::new(),
                said: HashMap::new(),
                heard: 0,
            }
        };
        let sides = [side(0), side(1)];
        let harm = random.u8(0..4) > 0;
        let stopping = random.u8(0..3) > 0;
        let mut story = Self {
            random,
            lasting,
            sides,
            plans,
            lanes: Vec::new(),
            next_lane: 0,
            control: Some(Default::default()),
            stopping,
            harm,
        };
        for _ in 0..story.random.usize(1..4) {
            story.open_lane();
        }
        story
    }

    fn open_lane(&mut self) {
        let id = self.next_lane;
        self.next_lane += 1;
        let (wire, half) = Default::default();
        self.lanes.push(Lane { id, whole: true, open: [true; 2], wire, half });
    }

    fn take(&mut self, side: usize) {
        let channels: Vec<u32> =
            self.sides[side].planned.iter().filter(|(_, list)| !list.is_empty()).map(|(c, _)| *c).collect();
        let Some(channel) = self.random.choice(channels) else { return };
        let here = &mut self.sides[side];
        let Some(number) = here.planned.get_mut(&channel).and_then(VecDeque::pop_front) else { return };
        here.taken.push((number, here.link.numbers.take(channel)));
    }

    fn withdraw(&mut self, side: usize, (plan, at): (usize, GroupId)) {
        let here = &mut self.sides[side];
        let done = Launched { plan, at, ready: (true, true), withdrawn: true, ..Launched::default() };
        here.launched.push(Launched { failed: true, quiesced: true, peer_quiet: true, ..done });
        if self.random.bool() {
            // Told at once, or when the peer launches its own.
            here.link.withdraw(at, NEVER);
        } else {
            here.link.numbers.close(at);
            if here.link.groups.contains_key(&at) {
                here.link.withdraw(at, NEVER);
            }
        }
    }

    fn launch(&mut self, side: usize) {
        if self.sides[side].taken.is_empty() || self.random.bool() {
            self.take(side);
        }
        let count = self.sides[side].taken.len();
        if count == 0 {
            return;
        }
        let place = self.random.usize(0..count);
        let (number, at) = self.sides[side].taken.swap_remove(place);
        if self.stopping && self.random.u8(0..12) == 0 {
            self.withdraw(side, (number, at));
            return;
        }
        let definition = Definition::new(self.plans[number].definitions[side].clone());
        let (sends, receives) = (definition.sent, definition.received);
        let here = &mut self.sides[side];
        let definition = here.link.define(definition);
        let ready = (self.random.bool(), self.random.bool());
        let token = here.launched.len();
        let inline =
            (ready.0 && self.random.bool() && here.link.inlines(sends)).then(|| vec![7; sends as usize]);
        let class = [Class::Latency, Class::Normal, Class::Bulk][self.random.usize(0..3)];
        let (source, destination) = ready;
        here.launched.push(Launched { plan: number, sends, receives, ready, ..Launched::default() });
        here.launched[token].at = at;
        assert!(here.link.launch(Launching { token, definition, at, class, source, destination, inline }));
        if self.random.bool() {
            here.link.undefine(definition);
        }
        self.perform(side);
    }

    fn give_up(&mut self, side: usize, token: usize) {
        let here = &mut self.sides[side];
        let launched = &here.launched[token];
        if launched.withdrawn {
            return;
        }
        if !here.link.stop(launched.at, "enough") {
            self.peer_is_quiet(side, token);
        }
        self.fail(side, token);
    }

    /// It is claimed that nothing can land at the peer any more.
    fn peer_is_quiet(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        launched.peer_quiet = true;
        let at = launched.at;
        if let Some(other) = self.sides[1 - side].launched.iter().find(|other| other.at == at) {
            // Of lists that differ nothing ever lands.
            let over = other.quiesced || other.arrived == other.receives || !self.plans[other.plan].same;
            assert!(over, "a stop is proven while bytes can land");
        }
    }

    fn fail(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        if !launched.complete() {
            launched.failed = true;
        }
        // What was complete stays so; but no visit begins any more.
        launched.failed |= launched.arrived < launched.receives;
        self.quiet(side, token);
    }

    fn quiet(&mut self, side: usize, token: usize) {
        let here = &mut self.sides[side];
        if here.launched[token].failed && !here.launched[token].fetching && !here.launched[token].quiesced {
            here.launched[token].quiesced = true;
            let over = here.link.quiesced(here.launched[token].at);
            if let Some(token) = over {
                self.over(side, token);
            }
        }
    }

    /// Nothing more will be said of a launch.
    fn over(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        assert!(!launched.over && (launched.complete() || launched.quiesced || launched.differs));
        launched.over = true;
    }

    /// Does what a link asks for.
    fn perform(&mut self, side: usize) {
        loop {
            let outputs = self.sides[side].link.outputs();
            if outputs.is_empty() {
                return self.sides[side].link.audit();
            }
            for output in outputs {
                self.one(side, output);
            }
        }
    }

    fn one(&mut self, side: usize, output: Output<usize>) {
        match output {
            Output::Matched(token) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(!launched.matched, "matched twice");
                assert!(self.plans[launched.plan].same, "what differs is matched");
                launched.matched = true;
            }
            Output::Inline(token, bytes) => {
                let launched = &mut self.sides[side].launched[token];
                if launched.failed {
                    return;
                }
                assert!(launched.matched && launched.arrived == 0 && !launched.quiesced);
                assert_eq!(bytes.len() as u64, launched.receives);
                launched.arrived = launched.receives;
                let at = launched.at;
                self.sides[side].link.received(at);
            }
            Output::Fetch(token, definition) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(launched.matched && launched.arrived == 0);
                assert_eq!(definition.received, launched.receives);
                if !launched.failed {
                    launched.fetching = true;
                    self.sides[side].fetches.push(token);
                }
            }
            Output::Sent(token) => {
                let launched = &mut self.sides[side].launched[token];
                launched.sent = true;
                let (at, sends) = (launched.at, launched.sends);
                let there = self.sides[1 - side].launched.iter().find(|other| other.at == at);
                assert!(
                    sends == 0 || there.is_some_and(|other| other.arrived == sends),
                    "sent before it is there"
                );
            }
            Output::StoppedByPeer(token, why) => {
                assert!(["enough", NEVER, FAILED_EARLIER].contains(&why.as_str()), "{why}");
                self.peer_is_quiet(side, token);
                self.fail(side, token);
            }
            Output::StopConfirmed(token) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(launched.failed || launched.complete(), "a stop that nobody asked for is confirmed");
                self.peer_is_quiet(side, token);
            }
            Output::Differ(token, _) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(!self.plans[launched.plan].same && launched.arrived == 0 && !launched.matched);
                launched.differs = true;
                launched.peer_quiet = true;
                self.fail(side, token);
            }
            Output::Damaged(token, _) => self.give_up(side, token),
            Output::Over(token) => self.over(side, token),
            Output::CloseLane(id) => {
                if let Some(at) = self.lanes.iter().position(|lane| lane.id == id && lane.open[side]) {
                    self.notice(side, at);
                }
                self.sides[side].link.lane_closed(id);
            }
            Output::Unregion(_) | Output::Switched => {}
        }
    }

    /// One end of a lane finds out that it is over.
    fn notice(&mut self, side: usize, at: usize) {
        let lane = &mut self.lanes[at];
        lane.whole = false;
        lane.open[side] = false;
        lane.wire[side].clear();
        let (id, half) = (lane.id, lane.half[side].take());
        if let Some((header, ..)) = half {
            self.sides[side].link.let_fall(&header);
        }
        self.sides[side].link.lane_lost(id);
    }

    /// An end of the control connection says something.
    fn say(&mut self, side: usize) -> bool {
        let Some(wire) = &mut self.control else { return false };
        let Some(frame) = self.sides[side].link.next_control(true) else { return false };
        let header = &frame.header;
        if header.control != 0 {
            let told = (header.kind, (header.channel, header.sequence), header.index, frame.payload.clone());
            let first = self.sides[side].said.entry(header.control).or_insert_with(|| told.clone());
            assert_eq!(*first, told, "a frame changed when it was said again");
        }
        assert!(frame.payload.len() <= CONTROL_MAX);
        wire[1 - side].push_back(frame);
        true
    }

    /// It hears something.
    fn hear(&mut self, side: usize) -> bool {
        let Some(frame) = self.control.as_mut().and_then(|wire| wire[side].pop_front()) else { return false };
        let bytes = frame.header.encode();
        let header = Header::decode(&bytes).unwrap();
        let told = (header.kind, (header.channel, header.sequence), header.index, frame.payload.clone());
        self.sides[side].link.receive(&header, frame.payload).expect("the peer keeps to the protocol");
        let heard = self.sides[side].link.heard();
        if heard != self.sides[side].heard {
            assert_eq!(heard, self.sides[side].heard + 1, "frames are heard in order");
            assert_eq!(self.sides[1 - side].said[&heard], told);
            self.sides[side].heard = heard;
        }
        self.perform(side);
        true
    }

    fn send_chunk(&mut self, side: usize, at: usize) -> bool {
        let lane = &mut self.lanes[at];
        if !lane.open[side] {
            return false;
        }
        let Some(push) = self.sides[side].link.next_chunk(lane.id) else { return false };
        assert_eq!(push.start, u64::from(push.header.index) * u64::from(CHUNK));
        assert!(!self.sides[side].launched[push.token].quiesced, "a chunk is sent after nothing is");
        let damaged = self.harm && self.random.u8(0..30) == 0;
        if lane.whole {
            lane.wire[1 - side].push_back((push.header, damaged));
        }
        true
    }

    fn land(&mut self, side: usize, at: usize) -> bool {
        let lane = &mut self.lanes[at];
        if !lane.open[side] {
            return false;
        }
        if let Some((header, token, damaged)) = lane.half[side].take() {
            let launched = &mut self.sides[side].launched[token];
            if launched.failed {
                self.sides[side].link.let_fall(&header);
            } else if damaged {
                self.sides[side].link.damaged(&header);
            } else if self.sides[side].link.landed(&header) {
                let launched = &mut self.sides[side].launched[token];
                assert!(!launched.quiesced, "a byte is accepted after nothing can land");
                assert!(launched.landed.insert(u64::from(header.index)), "a chunk is accepted twice");
                launched.arrived += u64::from(header.len);
            }
            self.perform(side);
            return true;
        }
        let Some((header, damaged)) = lane.wire[side].front().copied() else { return false };
        match self.sides[side].link.begin_landing(&header) {
            Landing::Early => return false,
            Landing::Nowhere => {}
            Landing::At(token, start) => {
                let launched = &self.sides[side].launched[token];
                assert_eq!(launched.at, (header.channel, header.sequence));
                assert!(!launched.quiesced && launched.matched && launched.ready.1);
                assert!(start + u64::from(header.len) <= launched.receives);
                lane.half[side] = Some((header, token, damaged));
            }
        }
        lane.wire[side].pop_front();
        true
    }

    fn fetch(&mut self, side: usize) -> bool {
        let here = &mut self.sides[side];
        if here.fetches.is_empty() {
            return false;
        }
        let token = here.fetches.swap_remove(self.random.usize(0..here.fetches.len()));
        let launched = &mut here.launched[token];
        launched.fetching = false;
        if launched.failed {
            self.quiet(side, token);
        } else if self.random.u8(0..3) == 0 {
            let at = launched.at;
            here.link.push_instead(at);
        } else {
            launched.arrived = launched.receives;
            let at = launched.at;
            here.link.received(at);
        }
        self.perform(side);
        true
    }

    fn lose_control(&mut self) {
        if !self.lasting {
            self.control = None;
        }
    }

    fn mend_control(&mut self) {
        if self.control.is_none() {
            let heard = [self.sides[0].link.heard(), self.sides[1].link.heard()];
            self.sides[0].link.control_again(heard[1]);
            self.sides[1].link.control_again(heard[0]);
            self.control = Some(Default::default());
        }
    }

    fn make_ready(&mut self, side: usize, token: usize) -> bool {
        let launched = &mut self.sides[side].launched[token];
        if launched.failed || launched.ready == (true, true) {
            return false;
        }
        let (source, destination) = if self.random.bool() { (true, true) } else { (false, true) };
        launched.ready.0 |= source;
        launched.ready.1 |= destination;
        let at = launched.at;
        self.sides[side].link.ready(at, source, destination);
        self.perform(side);
        true
    }

    fn any_launched(&mut self, side: usize) -> Option<usize> {
        let count = self.sides[side].launched.len();
        (count > 0).then(|| self.random.usize(0..count))
    }

    fn step(&mut self) {
        let side = self.random.usize(0..2);
        let lane = self.random.usize(0..self.lanes.len());
        match self.random.u8(0..100) {
            0..12 => self.launch(side),
            12..20 => {
                if let Some(token) = self.any_launched(side) {
                    self.make_ready(side, token);
                }
            }
            20..40 => drop(self.say(side)),
            40..60 => drop(self.hear(side)),
            60..70 => drop(self.send_chunk(side, lane)),
            70..86 => drop(self.land(side, lane)),
            86..90 => drop(self.fetch(side)),
            90..93 if self.stopping => {
                if let Some(token) = self.any_launched(side) {
                    self.give_up(side, token);
                    self.perform(side);
                }
            }
            93..95 if self.harm => {
                self.lanes[lane].whole = false;
                self.lanes[lane].wire = Default::default();
            }
            95..97 if !self.lanes[lane].whole && self.lanes[lane].open[side] => self.notice(side, lane),
            97 if self.lanes.len() < 40 => self.open_lane(),
            98 if self.harm => self.lose_control(),
            99 => self.mend_control(),
            _ => {}
        }
        self.sides[side].link.audit();
    }

    /// Lets everything that is under way come to its end, with no more harm.
    fn settle(&mut self) {
        self.harm = false;
        self.mend_control();
        for side in 0..2 {
            let here = |story: &Self| {
                let Side { planned, taken, .. } = &story.sides[side];
                !taken.is_empty() || planned.values().any(|list| !list.is_empty())
            };
            while here(self) {
                self.launch(side);
            }
        }
        if !self.lanes.iter().any(|lane| lane.whole && lane.open == [true; 2]) {
            self.open_lane();
        }
        for _round in 0..10_000 {
            let mut moved = false;
            for side in 0..2 {
                for lane in 0..self.lanes.len() {
                    if !self.lanes[lane].whole && self.lanes[lane].open[side] {
                        self.notice(side, lane);
                        moved = true;
                    }
                    moved |= self.send_chunk(side, lane);
                    moved |= self.land(side, lane);
                }
                for token in 0..self.sides[side].launched.len() {
                    moved |= self.make_ready(side, token);
                }
                moved |= self.fetch(side);
                moved |= self.say(side);
                moved |= self.hear(side);
            }
            if !moved {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn check(&self) {
        for (side, here) in self.sides.iter().enumerate() {
            let there = &self.sides[1 - side];
            for launched in &here.launched {
                let other = there.launched.iter().find(|other| other.at == launched.at).unwrap();
                assert!(launched.complete() != launched.failed, "{side} {:?} has no outcome", launched.at);
                if self.plans[launched.plan].same && !self.stopping && !launched.failed {
                    assert!(other.complete());
                }
                if launched.failed {
                    assert!(launched.quiesced && launched.peer_quiet, "{side} {:?}: no proof", launched.at);
                }
                if launched.differs {
                    assert!(other.failed && !self.plans[launched.plan].same);
                }
            }
            assert_eq!(here.link.launched(), 0);
            assert!(here.link.groups.is_empty() && !here.link.has_chunks() && here.link.partial.is_none());
            here.link.audit();
        }
    }
}

fn tell(seed: u64) {
    let mut story = Story::new(seed);
    for _ in 0..story.random.usize(20..600) {
        story.step();
    }
    story.settle();
    story.check();
}

#[test]
fn whatever_happens_between_two_links_every_launch_ends_as_it_should() {
    if let Ok(seed) = std::env::var("LINK_SEED") {
        return tell(seed.parse().unwrap());
    }
    for seed in 0..2500 {
        if let Err(panic) = std::panic::catch_unwind(|| tell(seed)) {
            println!("replay with LINK_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// What a link holds of what a peer sent, in bytes, roughly.
fn held(link: &Link<usize>) -> usize {
    let definition = |definition: &Arc<Definition>| 64 * (definition.entries.len() + 1);
    let of_groups = |group: &Group<usize>| {
        let remote = group.remote.as_ref();
        let inline = remote.and_then(|remote| remote.inline.as_ref()).map_or(0, Vec::len);
        size_of::<Group<usize>>() + inline + group.given_up.as_ref().map_or(0, String::len)
    };
    link.groups.values().map(of_groups).sum::<usize>()
        + link.remote.values().map(definition).sum::<usize>()
        + link.withdrawn.iter().map(definition).sum::<usize>()
        + link.control.unheard()
        + link.partial.as_ref().map_or(0, |(_, bytes)| bytes.len())
}

const KINDS: [Kind; 18] = [
    Kind::Define,
    Kind::Undefine,
    Kind::Go,
    Kind::Ready,
    Kind::Stop,
    Kind::Stopped,
    Kind::Done,
    Kind::Damaged,
    Kind::Lost,
    Kind::Have,
    Kind::Ping,
    Kind::Pong,
    Kind::Data,
    Kind::Ack,
    Kind::Region,
    Kind::Unregion,
    Kind::Push,
    Kind::Switch,
];

/// A link with a few launches, for a peer that knows no rules.
fn victim(random: &mut fastrand::Rng) -> Link<usize> {
    let terms = Terms { chunk: CHUNK, fetch: random.bool(), lasting: random.bool() };
    let mut link = Link::new(member(0), member(1), terms, Numbers::default());
    for token in 0..4 {
        let definition = link.define(Definition::new(vec![entry(1, 0, 90, 1, 0), entry(2, 1, 120, 2, 0)]));
        let (source, destination, class) = (true, random.bool(), Class::Normal);
        let at = link.numbers.take(0);
        assert!(link.launch(Launching { token, definition, at, class, source, destination, inline: None }));
    }
    link
}

#[test]
fn a_peer_that_knows_no_rules_makes_a_link_neither_panic_nor_grow() {
    let list = |here| Definition::new(vec![entry(1, 0, 90, 1, here), entry(2, 1, 120, 2, here)]).encode();
    let mut violations = 0;
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut link = victim(&mut random);
        let mut number = 0;
        for _ in 0..random.usize(1..300) {
            let kind = KINDS[random.usize(0..KINDS.len())];
            number += 1;
            let mut header = Header {
                flags: random.u8(0..32),
                lane: random.u16(0..3),
                channel: random.u32(0..2),
                index: random.u32(0..9),
                sequence: random.u64(0..6),
                control: number,
                ack: random.u32(0..40),
                ..Header::new(kind, member(1), member(0))
            };
            let mut payload = match random.u8(0..4) {
                0 => list(1),
                1 => vec![random.u8(..); random.usize(0..300)],
                _ => Vec::new(),
            };
            if kind == Kind::Define {
                header.flags &= !flag::MORE | if random.bool() { flag::MORE } else { 0 };
            }
            if random.u8(0..20) == 0 {
                header.index = random.u32(..);
                header.sequence = random.u64(..);
                payload.truncate(random.usize(0..=payload.len()));
            }
            if random.u8(0..40) == 0 {
                header.control = random.u32(..);
            }
            if kind == Kind::Data {
                header.len = random.u32(0..20);
                if let Landing::At(token, start) = link.begin_landing(&header) {
                    assert!(start + u64::from(header.len) <= 120);
                    match random.u8(0..3) {
                        0 => drop(link.landed(&header)),
                        1 => link.damaged(&header),
                        _ => link.let_fall(&header),
                    }
                    let _launch = token;
                }
                number -= 1;
            } else if link.receive(&header, payload).is_err() {
                violations += 1;
                break;
            }
            for output in link.outputs() {
                match output {
                    Output::StoppedByPeer(token, _) => drop(link.quiesced((0, token as u64))),
                    Output::Fetch(token, _) | Output::Inline(token, _) if random.bool() => {
                        link.received((0, token as u64))
                    }
                    Output::CloseLane(lane) => link.lane_closed(lane),
                    _ => {}
                }
            }
            while random.bool() && link.next_control(true).is_some() {}
            while random.bool() && link.next_chunk(1).is_some() {}
            link.audit();
        }
        assert!(held(&link) < 4 << 20, "seed {seed}: {} bytes", held(&link));
    }
    assert!(violations > 1000);
}

/// The frames of one round.
type Flood = Box<dyn FnMut(u64, Header) -> Vec<(Header, Vec<u8>)>>;

/// Sends frames of one kind until the link has had enough, or a million of them.
fn flood(lasting: bool, mut next: impl FnMut(u64, Header) -> Vec<(Header, Vec<u8>)>) -> (usize, bool) {
    let mut link: Link<usize> =
        Link::new(member(0), member(1), Terms { chunk: CHUNK, fetch: false, lasting }, Numbers::default());
    let mut control = 0;
    let mut most = 0;
    for round in 0..1_100_000 {
        for (mut header, payload) in next(round, Header::new(Kind::Ping, member(1), member(0))) {
            control += 1;
            header.control = control;
            let refused = link.receive(&header, payload).is_err();
            if round % (1 << 17) == 0 || refused {
                most = most.max(held(&link));
            }
            if refused {
                return (most, true);
            }
            link.outputs();
        }
    }
    (most.max(held(&link)), false)
}

#[test]
fn whatever_a_peer_sends_without_end_takes_only_so_much_memory() {
    const BOUND: usize = 400 << 20;
    let small = Definition::new(vec![entry(1, 1, 4000, 1, 1)]).encode();
    let wide: Vec<u8> = Definition::new((0..1000).map(|key| entry(key, 1, 10, 1, 1)).collect()).encode();
    let of = |kind, header: Header| Header { kind, ..header };
    let floods: [(&str, Flood); 6] = [
        ("pings", Box::new(move |_, header| vec![(header, Vec::new()); 4])),
        (
            "definitions of nothing",
            Box::new(move |n, header| {
                vec![(Header { index: n as u32 + 1, ..of(Kind::Define, header) }, Vec::new()); 1]
            }),
        ),
        ("launches with their bytes", {
            let small = small.clone();
            Box::new(move |n, header| {
                let define = (Header { index: 1, ..of(Kind::Define, header) }, small.clone());
                let header = Header { index: 1, flags: flag::INLINE, sequence: n, ..of(Kind::Go, header) };
                let go = (header, vec![1; 4000]);
                if n == 0 { vec![define, go] } else { vec![go] }
            })
        }),
        (
            "launches of lists that are withdrawn",
            Box::new(move |n, header| {
                let index = n as u32 + 1;
                let define = (Header { index, ..of(Kind::Define, header) }, wide.clone());
                let go = (Header { index, sequence: n, ..of(Kind::Go, header) }, Vec::new());
                let undefine = (Header { index, ..of(Kind::Undefine, header) }, Vec::new());
                vec![define, go, undefine]
            }),
        ),
        (
            "launches that are given up",
            Box::new(move |n, header| {
                vec![(Header { sequence: n, ..of(Kind::Stop, header) }, vec![b'x'; 2000])]
            }),
        ),
        (
            "one definition without end",
            Box::new(move |_, header| {
                vec![(Header { index: 1, flags: flag::MORE, ..of(Kind::Define, header) }, vec![0; 4800])]
            }),
        ),
    ];
    for (what, next) in floods {
        let (most, refused) = flood(what.len() % 2 == 0, next);
        println!("{what}: at most {} KiB, refused: {refused}", most >> 10);
        assert!(most < BOUND && refused, "{what}: {most} bytes, refused: {refused}");
    }
}

#[test]
fn what_has_come_of_a_long_stream_is_told_in_parts() {
    let terms = Terms { chunk: CHUNK, fetch: false, lasting: false };
    let total = 700_000 * u64::from(CHUNK);
    let mut sides = [0, 1].map(|me| {
        let mut link: Link<usize> = Link::new(member(me), member(1 - me), terms, Numbers::default());
        let definition = link.define(Definition::new(vec![entry(1, 0, total, 1, me)]));
        let (source, destination, class) = (true, true, Class::Normal);
        let at = link.numbers.take(0);
        assert!(link.launch(Launching {
            token: 0,
            definition,
            at,
            class,
            source,
            destination,
            inline: None
        }));
        link
    });
    fn exchange(sides: &mut [Link<usize>; 2]) {
        for _ in 0..4 {
            for side in 0..2 {
                while let Some(frame) = sides[side].next_control(true) {
                    assert!(Header::decode(&frame.header.encode()).is_ok(), "it is too long to be sent");
                    sides[1 - side].receive(&frame.header, frame.payload).unwrap();
                    for output in sides[1 - side].outputs() {
                        if let Output::CloseLane(lane) = output {
                            sides[1 - side].lane_closed(lane);
                        }
                    }
                }
            }
        }
    }
    exchange(&mut sides);
    let mut lost = Vec::new();
    let mut count = 0;
    while let Some(push) = sides[0].next_chunk(count % 2) {
        if push.header.index % 1000 == 7 && count % 2 == 1 {
            lost.push(push.header.index);
        } else {
            assert!(matches!(sides[1].begin_landing(&push.header), Landing::At(..)));
            assert!(sides[1].landed(&push.header));
        }
        count = count.wrapping_add(1);
    }
    sides[0].lane_lost(1);
    exchange(&mut sides);
    let mut again: Vec<u32> =
        std::iter::from_fn(|| sides[0].next_chunk(5)).map(|push| push.header.index).collect();
    again.sort_unstable();
    assert_eq!(again, lost);
}

/// Passes control frames until neither side has any.
fn talk(links: &mut [Link<u32>; 2]) {
    let mut silent = 0;
    for side in (0..2).cycle() {
        match links[side].next_control(true) {
            Some(frame) => {
                links[1 - side].receive(&frame.header, frame.payload).expect("nobody breaks a rule");
                silent = 0;
            }
            None if silent == 2 => return,
            None => silent += 1,
        }
    }
}

#[test]
fn sides_stay_in_step_when_their_connection_breaks_between_two_launches() {
    let numbers = [Numbers::default(), Numbers::default()];
    let terms = Terms { chunk: CHUNK, fetch: false, lasting: true };
    let connect = || {
        [0, 1].map(|me| {
            let mut link = Link::new(member(me), member(1 - me), terms, numbers[me as usize].clone());
            assert_eq!(link.define(Definition::new(vec![entry(1, 0, 10, 1, me)])), 1);
            link
        })
    };
    let launch = |link: &mut Link<u32>, token| {
        let at = link.numbers.take(0);
        let launching = Launching {
            token,
            definition: 1,
            at,
            class: Class::Normal,
            source: true,
            destination: true,
            inline: None,
        };
        link.launch(launching).then_some(at.1)
    };
    let mut first = connect();
    assert_eq!(launch(&mut first[0], 100), Some(0));
    talk(&mut first);
    assert_eq!(first[0].drain(), [100], "it fails with the connection");

    let mut second = connect();
    assert_eq!(launch(&mut second[1], 200), Some(0));
    talk(&mut second);
    assert!(matches!(&second[1].outputs()[..], [Output::StoppedByPeer(200, why)] if why.contains("earlier")));
    second[1].quiesced((0, 0));
    talk(&mut second);
    for side in [0, 1] {
        assert_eq!(launch(&mut second[side], 300), Some(1));
    }
    talk(&mut second);
    assert!(second.iter_mut().all(|link| link.outputs().contains(&Output::Matched(300))));
    second.iter().for_each(Link::audit);
}

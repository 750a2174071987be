//! Simulates two links against each other in virtual time, with all faults of a network between them.
//!
//! Each seed is one scenario. Both sides launch in any order, cancel launches at any moment, and ask to end
//! connections. Buffers become ready late. Frames on one lane overtake frames on another. Lanes corrupt data and
//! fail, and the control lane is lost and connected again. A model computes which outcomes each launch may have.
//! `LINK_SEED=n` replays one scenario. Begin at `LinkSimulation::perform_outputs` and the tests at the end of the
//! file.

use super::world::*;
use super::*;
use crate::protocol::frame::{CONTROL_MAX, Header};
use crate::protocol::link::link_side::*;
use crate::protocol::link::*;

impl LinkSimulation {
    /// Performs the outputs of a link.
    pub(super) fn perform_outputs(&mut self, side: usize, on: usize) {
        loop {
            let outputs = self.connections[on].links[side].take_outputs();
            if outputs.is_empty() {
                return self.connections[on].links[side].assert_invariants();
            }
            for output in outputs {
                self.perform_output(side, on, output);
            }
        }
    }

    fn perform_output(&mut self, side: usize, on: usize, output: LinkOutput<usize>) {
        match output {
            LinkOutput::Matched(token) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(!launched.matched, "matched twice");
                assert!(self.plans[launched.plan].same, "what differs is matched");
                launched.matched = true;
            }
            LinkOutput::Inline(token, bytes) => {
                let launched = &mut self.sides[side].launched[token];
                if launched.failed {
                    return;
                }
                assert!(launched.matched && launched.arrived == 0 && !launched.quiesced);
                assert_eq!(bytes.len() as u64, launched.receives);
                launched.arrived = launched.receives;
                let at = launched.at;
                self.link_of_launch(side, token).announce_received(at);
            }
            LinkOutput::Fetch(token, definition) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(launched.matched && launched.arrived == 0);
                assert_eq!(definition.received, launched.receives);
                if !launched.failed {
                    launched.fetching = true;
                    self.sides[side].fetches.push(token);
                }
            }
            LinkOutput::Progress(token, bytes) => {
                assert!(bytes <= self.sides[side].launched[token].sends);
            }
            LinkOutput::Sent(token, _) => self.check_sent(side, token),
            LinkOutput::StoppedByPeer(token, why) => {
                assert!(["enough", NEVER, FAILED_EARLIER].contains(&why.as_str()), "{why}");
                assert!(
                    self.stopping || self.may_be_cancelled_for_damage(token, side),
                    "nobody gave it up: {why}"
                );
                self.record_peer_quiescence(side, token);
                self.fail_launch(side, token);
            }
            LinkOutput::StopConfirmed(token) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(
                    launched.failed || launched.is_complete(),
                    "a stop that nobody asked for is confirmed"
                );
                self.record_peer_quiescence(side, token);
            }
            LinkOutput::Differ(token, _) => {
                let launched = &mut self.sides[side].launched[token];
                assert!(!self.plans[launched.plan].same && launched.arrived == 0 && !launched.matched);
                launched.differs = true;
                launched.peer_quiet = true;
                self.fail_launch(side, token);
            }
            LinkOutput::Damaged(token, _) => self.cancel_launch(side, token),
            LinkOutput::Over(token) => self.mark_launch_over(side, token),
            LinkOutput::CloseLane(id) => {
                let open = |lane: &SimulatedLane| lane.id == id && lane.open[side];
                if let Some(at) = self.connections[on].lanes.iter().position(open) {
                    self.detect_lane_loss(side, on, at);
                }
                self.connections[on].links[side].report_received_chunks(id);
            }
            LinkOutput::Left => {
                self.sides[side].knows.take_if(|knows| *knows == on);
                let there = &self.connections[on];
                assert!(
                    there.links.iter().all(|link| link.is_idle_while_leaving()),
                    "it ends while it is used"
                );
            }
            LinkOutput::Ended => {
                while self.send_control_frame(side, on) {}
                self.end_connection(side, on);
            }
            LinkOutput::Refused => self.left[1] += 1,
            LinkOutput::Stays => self.left[2] += 1,
            LinkOutput::Unregion(_) | LinkOutput::Switched => {}
        }
    }

    /// Records that all that a launch sends has been received.
    fn check_sent(&mut self, side: usize, token: usize) {
        let launched = &mut self.sides[side].launched[token];
        launched.sent = true;
        let (at, sends) = (launched.at, launched.sends);
        let there = self.sides[1 - side].launched.iter().find(|other| other.at == at);
        assert!(sends == 0 || there.is_some_and(|other| other.arrived == sends), "sent before it is there");
    }

    /// Returns whether the other side may have cancelled a launch because a chunk arrived damaged twice.
    fn may_be_cancelled_for_damage(&self, token: usize, side: usize) -> bool {
        let at = self.sides[side].launched[token].at;
        self.sides[1 - side].launched.iter().any(|other| other.at == at && other.failed)
    }

    /// One end of a lane detects that the lane is lost.
    fn detect_lane_loss(&mut self, side: usize, on: usize, at: usize) {
        let SimulatedConnection { lanes, links, .. } = &mut self.connections[on];
        let lane = &mut lanes[at];
        lane.whole = false;
        lane.open[side] = false;
        lane.wire[side].clear();
        let (id, half) = (lane.id, lane.half[side].take());
        if let Some((header, ..)) = half {
            links[side].abandon_chunk_receive(&header);
        }
        links[side].query_received_chunks(id);
    }

    /// A side sends one control frame. Returns whether it had one.
    fn send_control_frame(&mut self, side: usize, on: usize) -> bool {
        let SimulatedConnection { links, control, said, ended, .. } = &mut self.connections[on];
        let Some(wire) = control.as_mut().filter(|_| !ended[side]) else { return false };
        let Some(frame) = links[side].next_control_frame(true) else { return false };
        let header = &frame.header;
        if header.control != 0 {
            let told = (header.kind, (header.channel, header.sequence), header.index, frame.payload.clone());
            let first = said[side].entry(header.control).or_insert_with(|| told.clone());
            assert_eq!(*first, told, "a frame changed when it was said again");
        }
        assert!(frame.payload.len() <= CONTROL_MAX);
        wire[1 - side].push_back(frame);
        true
    }

    /// A side receives one control frame, or learns that the other side closed the connection. Returns
    /// whether it did.
    fn receive_control_frame(&mut self, side: usize, on: usize) -> bool {
        let SimulatedConnection { links, control, said, heard, ended, .. } = &mut self.connections[on];
        let Some(wire) = control else { return false };
        let Some(frame) = wire[side].pop_front() else {
            let closed = ended[1 - side] && !ended[side];
            if closed {
                self.end_connection(side, on);
            }
            return closed;
        };
        if ended[side] {
            return true;
        }
        let bytes = frame.header.encode();
        let header = Header::decode(&bytes).unwrap();
        let told = (header.kind, (header.channel, header.sequence), header.index, frame.payload.clone());
        links[side].receive_control_frame(&header, frame.payload).expect("the peer keeps to the protocol");
        let now = links[side].last_received_control_number();
        if now != heard[side] {
            assert_eq!(now, heard[side] + 1, "frames are heard in order");
            assert_eq!(said[1 - side][&now], told);
            heard[side] = now;
        }
        self.perform_outputs(side, on);
        true
    }

    fn send_chunk(&mut self, side: usize, on: usize, at: usize) -> bool {
        let SimulatedConnection { links, lanes, .. } = &mut self.connections[on];
        let lane = &mut lanes[at];
        if !lane.open[side] {
            return false;
        }
        let Some(push) = links[side].next_chunk(lane.id) else { return false };
        assert_eq!(push.start, u64::from(push.header.index) * u64::from(CHUNK));
        assert!(!self.sides[side].launched[push.token].quiesced, "a chunk is sent after nothing is");
        let damaged = self.harm && self.random.u8(0..30) == 0;
        if lane.whole {
            lane.wire[1 - side].push_back((push.header, damaged));
        }
        true
    }

    fn receive_chunk_step(&mut self, side: usize, on: usize, at: usize) -> bool {
        let SimulatedConnection { links, lanes, .. } = &mut self.connections[on];
        let (link, lane) = (&mut links[side], &mut lanes[at]);
        if !lane.open[side] {
            return false;
        }
        if let Some((header, token, damaged)) = lane.half[side].take() {
            let launched = &mut self.sides[side].launched[token];
            if launched.failed {
                link.abandon_chunk_receive(&header);
            } else if damaged {
                link.on_chunk_damaged(&header);
            } else if link.finish_chunk_receive(&header) {
                assert!(!launched.quiesced, "a byte is accepted after nothing can land");
                assert!(launched.landed.insert(u64::from(header.index)), "a chunk is accepted twice");
                launched.arrived += u64::from(header.len);
            }
            self.perform_outputs(side, on);
            return true;
        }
        let Some((header, damaged)) = lane.wire[side].front().copied() else { return false };
        match link.begin_chunk_receive(&header) {
            ChunkDestination::Early => return false,
            ChunkDestination::Nowhere => {}
            ChunkDestination::At(token, start) => {
                let launched = &self.sides[side].launched[token];
                assert_eq!((launched.at, launched.on), ((header.channel, header.sequence), on));
                assert!(!launched.quiesced && launched.matched && launched.ready.1);
                assert!(start + u64::from(header.len) <= launched.receives);
                lane.half[side] = Some((header, token, damaged));
            }
        }
        lane.wire[side].pop_front();
        true
    }

    fn finish_one_fetch(&mut self, side: usize) -> bool {
        let here = &mut self.sides[side];
        if here.fetches.is_empty() {
            return false;
        }
        let token = here.fetches.swap_remove(self.random.usize(0..here.fetches.len()));
        let launched = &mut here.launched[token];
        launched.fetching = false;
        let (at, on, failed) = (launched.at, launched.on, launched.failed);
        if !failed && self.random.u8(0..3) == 0 {
            let bytes = self.random.u64(..);
            self.link_of_launch(side, token).announce_fetch_progress(at, bytes);
        }
        if failed {
            self.announce_quiescence_if_possible(side, token);
        } else if self.random.u8(0..3) == 0 {
            self.link_of_launch(side, token).request_push(at);
        } else {
            let launched = &mut self.sides[side].launched[token];
            launched.arrived = launched.receives;
            self.link_of_launch(side, token).announce_received(at);
        }
        self.perform_outputs(side, on);
        true
    }

    fn lose_control_lane(&mut self, on: usize) {
        if !self.lasting {
            self.connections[on].control = None;
        }
    }

    fn reconnect_control_lane(&mut self, on: usize) {
        let SimulatedConnection { links, control, ended, .. } = &mut self.connections[on];
        if control.is_some() {
            return;
        }
        match *ended {
            [false, false] => {
                let heard =
                    [links[0].last_received_control_number(), links[1].last_received_control_number()];
                links[0].resend_control_after(heard[1]);
                links[1].resend_control_after(heard[0]);
                *control = Some(Default::default());
            }
            [true, true] => {}
            // The side that reconnects learns that the other side does not know the connection any more.
            [over, _] => self.end_connection(usize::from(over), on),
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
        let (at, on) = (launched.at, launched.on);
        self.link_of_launch(side, token).announce_buffers_ready(at, source, destination);
        self.perform_outputs(side, on);
        true
    }

    fn pick_random_launch(&mut self, side: usize) -> Option<usize> {
        let count = self.sides[side].launched.len();
        (count > 0).then(|| self.random.usize(0..count))
    }

    /// A side asks to end its connection, as it does if it has too many.
    fn ask_to_leave(&mut self, side: usize) {
        if let Some(on) = self.sides[side].knows {
            let asked = self.connections[on].links.iter().filter(|link| link.has_requested_leave()).count();
            self.connections[on].links[side].request_leave();
            self.left[3] += usize::from(
                asked == 1 && self.connections[on].links.iter().all(LinkSide::has_requested_leave),
            );
            self.perform_outputs(side, on);
        }
    }

    fn perform_random_step(&mut self) {
        let side = self.random.usize(0..2);
        // One of the newest connections: little happens on older ones.
        let last = self.connections.len().min(3);
        let on = self.connections.len() - 1 - self.random.usize(0..last);
        let lane = self.random.usize(0..self.connections[on].lanes.len());
        match self.random.u8(0..100) {
            0..10 => drop(self.launch(side)),
            10..12 if self.leaving => self.withdraw_definition(side),
            12..18 => {
                if let Some(token) = self.pick_random_launch(side) {
                    self.make_ready(side, token);
                }
            }
            18 if self.leaving => self.finish_launches_and_ask_to_leave(),
            19..21 if self.leaving => self.ask_to_leave(side),
            21..23 if self.leaving => self.toggle_random_lease(side),
            18..41 => drop(self.send_control_frame(side, on)),
            41..60 => drop(self.receive_control_frame(side, on)),
            60..70 => drop(self.send_chunk(side, on, lane)),
            70..86 => drop(self.receive_chunk_step(side, on, lane)),
            86..90 => drop(self.finish_one_fetch(side)),
            90..93 if self.stopping => {
                if let Some(token) = self.pick_random_launch(side) {
                    self.cancel_launch(side, token);
                    self.perform_outputs(side, self.sides[side].launched[token].on);
                }
            }
            93..95 if self.harm => {
                let lane = &mut self.connections[on].lanes[lane];
                lane.whole = false;
                lane.wire = Default::default();
            }
            95..97 => {
                let lost = &self.connections[on].lanes[lane];
                if !lost.whole && lost.open[side] {
                    self.detect_lane_loss(side, on, lane);
                }
            }
            97 if self.connections[on].lanes.len() < 40 => self.open_lane(on),
            98 if self.harm => self.lose_control_lane(on),
            99 => self.reconnect_control_lane(on),
            _ => {}
        }
        self.connections[on].links[side].assert_invariants();
    }

    /// Delivers one of each thing in flight to a side or on it. Returns whether there was any.
    fn deliver_everything_once(&mut self, side: usize) -> bool {
        let mut moved = false;
        for on in 0..self.connections.len() {
            for lane in 0..self.connections[on].lanes.len() {
                let lost = &self.connections[on].lanes[lane];
                if !lost.whole && lost.open[side] {
                    self.detect_lane_loss(side, on, lane);
                    moved = true;
                }
                moved |= self.send_chunk(side, on, lane);
                moved |= self.receive_chunk_step(side, on, lane);
            }
            moved |= self.send_control_frame(side, on);
            moved |= self.receive_control_frame(side, on);
        }
        for token in 0..self.sides[side].launched.len() {
            moved |= self.make_ready(side, token);
        }
        self.finish_one_fetch(side) || moved
    }

    /// Both sides launch what the other has launched, and wait until it has arrived. Then one of them, or
    /// both, asks to end the connection.
    fn finish_launches_and_ask_to_leave(&mut self) {
        for side in 0..2 {
            while !self.sides[side].defined.is_empty() {
                self.withdraw_definition(side);
            }
            while let Some(on) = self.sides[side].kept.pop() {
                self.connections[on].links[side].release_lease();
            }
        }
        for _ in 0..self.random.usize(10..120) {
            let count = [0, 1].map(|side: usize| self.sides[side].launched.len());
            if count[0] != count[1] {
                self.launch(usize::from(count[1] < count[0]));
            }
            self.deliver_everything_once(0);
            self.deliver_everything_once(1);
        }
        let side = self.random.usize(0..2);
        self.ask_to_leave(side);
        if self.random.bool() {
            self.ask_to_leave(1 - side);
        }
    }

    /// Lets everything in flight end, without further faults.
    fn finish_everything(&mut self) {
        self.harm = false;
        for side in 0..2 {
            while let Some(on) = self.sides[side].kept.pop() {
                self.connections[on].links[side].release_lease();
            }
            while !self.sides[side].defined.is_empty() {
                self.withdraw_definition(side);
            }
        }
        for _round in 0..10_000 {
            let mut moved = false;
            for side in 0..2 {
                moved |= self.launch(side);
                for on in 0..self.connections.len() {
                    self.reconnect_control_lane(on);
                    if !self.connections[on].lanes.iter().any(|lane| lane.whole && lane.open == [true; 2]) {
                        self.open_lane(on);
                    }
                }
                moved |= self.deliver_everything_once(side);
                let SimulatedSide { planned, taken, .. } = &self.sides[side];
                moved |= !taken.is_empty() || planned.values().any(|list| !list.is_empty());
            }
            if !moved {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn check_final_state(&self) {
        for (side, here) in self.sides.iter().enumerate() {
            let there = &self.sides[1 - side];
            for launched in &here.launched {
                let other = there.launched.iter().find(|other| other.at == launched.at).unwrap();
                assert!(launched.is_complete() != launched.failed, "{side} {:?} has no outcome", launched.at);
                if self.plans[launched.plan].same && !self.stopping && !launched.failed {
                    assert!(other.is_complete());
                }
                if launched.is_complete() {
                    assert_eq!(launched.on, other.on, "{:?} is on two connections", launched.at);
                }
                if launched.failed {
                    assert!(launched.quiesced && launched.peer_quiet, "{side} {:?}: no proof", launched.at);
                }
                if launched.differs {
                    assert!(other.failed && !self.plans[launched.plan].same);
                }
            }
            for between in self.connections.iter().filter(|between| !between.ended[side]) {
                let link = &between.links[side];
                assert_eq!(link.in_flight_count(), 0);
                assert!(link.groups.is_empty() && !link.has_chunks_to_send() && link.partial.is_none());
                assert!(
                    !link.has_left() && !link.has_requested_leave(),
                    "the end of a connection is not decided"
                );
                link.assert_invariants();
            }
        }
        // A connection that one side has ended is ended on both.
        assert!(self.connections.iter().all(|between| between.ended[0] == between.ended[1]));
    }
}

/// Plays the scenario of a seed. Returns the counts of [`LinkSimulation::left`].
fn run_scenario(seed: u64) -> [usize; 4] {
    let mut story = LinkSimulation::new(seed);
    for _ in 0..story.random.usize(20..600) {
        story.perform_random_step();
    }
    story.finish_everything();
    story.check_final_state();
    story.left
}

#[test]
fn whatever_happens_between_two_links_every_launch_ends_as_it_should() {
    if let Ok(seed) = std::env::var("LINK_SEED") {
        println!("{:?}", run_scenario(seed.parse().unwrap()));
        return;
    }
    let mut left = [0; 4];
    for seed in 0..2500 {
        match std::panic::catch_unwind(|| run_scenario(seed)) {
            Ok(some) => left.iter_mut().zip(some).for_each(|(all, some)| *all += some),
            Err(panic) => {
                println!("replay with LINK_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("connections let go of, refused, used meanwhile, asked about by both sides: {left:?}");
    assert!(left.iter().all(|some| *some > 100), "{left:?}");
}

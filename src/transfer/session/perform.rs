//! What a connection does because its link says so, and how what there is to say leaves.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::lane::Lane;
use crate::io::ring::Inbox;
use crate::launch::peer_launch::{Part, Stay, give_up};
use crate::protocol::link::{Difference, Output};
use crate::session::connection::Connection;
use muster_clock as clock;

/// Launches that send no more than this are sent by whoever launches them; others by the reactors.
const SEND_AT_ONCE: u64 = 64 << 10;

/// What is to be said to frames that came together: all of it leaves in as few calls of the system as it fits into.
#[derive(Default)]
pub struct Answers {
    /// Whether anything came: most of what a lane of chunks receives is answered by nothing.
    due: bool,
    /// Bytes that are to be sent now.
    sends: u64,
    /// Whether nobody uses the connection.
    unused: bool,
    /// Parts that are in place, of which the peer hears first.
    landed: Vec<Stay>,
}

impl Connection {
    /// Does what the link asks for, and sends what there is.
    pub(crate) fn settle(self: &Arc<Self>) {
        let mut answers = Answers::default();
        self.perform_all(&mut answers);
        self.answer(answers);
    }

    /// As [`settle`](Self::settle), but what there is to say leaves by the reactor, with whatever else there is by then.
    pub(crate) fn settle_elsewhere(self: &Arc<Self>) {
        let mut answers = Answers::default();
        self.perform_all(&mut answers);
        if !answers.landed.is_empty() {
            return self.answer(answers);
        }
        let chunks = lock(&self.link).has_chunks();
        for lane in self.lanes() {
            if lane.control || chunks {
                self.pump_elsewhere(&lane);
            }
        }
    }

    /// Does what the link asks for, until it asks for nothing.
    pub(crate) fn perform_all(self: &Arc<Self>, answers: &mut Answers) {
        answers.due = true;
        loop {
            let outputs = {
                let mut link = lock(&self.link);
                answers.unused = link.is_unused();
                link.outputs()
            };
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                self.perform(output, answers);
            }
        }
    }

    /// Says what there is to say to frames that came together, and tells of what they brought.
    pub fn answer(self: &Arc<Self>, answers: Answers) {
        let Answers { due, sends, unused, landed } = answers;
        if !due {
            return;
        }
        self.kick(sends);
        self.tell_of(landed);
        if unused && let Some(core) = self.core.upgrade() {
            core.is_unused();
        }
    }

    /// The peer has heard that these parts are here: whoever waits for one on this side may end the process at once.
    fn tell_of(&self, landed: Vec<Stay>) {
        for stay in landed {
            let part = stay.part();
            part.arrived(0, part.work.inbound.total());
        }
    }

    fn perform(self: &Arc<Self>, output: Output<Arc<Part>>, answers: &mut Answers) {
        match output {
            Output::Matched(part) => {
                part.match_found();
                self.wake_held();
                answers.sends += part.work.out.total();
            }
            Output::Inline(part, bytes) => self.put(&part, &bytes, answers),
            Output::Fetch(part, definition) => {
                if let Some(core) = self.core.upgrade() {
                    core.copiers.fetch(self, &part, &definition);
                }
            }
            Output::Sent(part, fetched) => {
                if fetched && let Some(span) = part.work.out.spans.first() {
                    let arena = span.buffer().region().shared().is_some();
                    let kind = if arena { TransportKind::Shm } else { TransportKind::Pvm };
                    part.moves_by(kind);
                    self.count(kind, false, part.work.out.total());
                }
                part.sent();
            }
            Output::StoppedByPeer(part, why) => {
                part.peer_is_quiet();
                part.fail(TransferError::Cancelled { by: self.peer.task, reason: why });
                self.wake_held();
            }
            Output::StopConfirmed(part) => part.peer_is_quiet(),
            Output::Differ(part, difference) => {
                let (channel, sequence) = part.at().unwrap_or_default();
                part.peer_is_quiet();
                part.fail(match difference {
                    Difference::Layout { key, here, there } => {
                        TransferError::LayoutMismatch { key, here, there }
                    }
                    Difference::Order { here, there } => {
                        TransferError::OrderMismatch { channel, sequence, here, there }
                    }
                });
            }
            Output::Damaged(part, chunk) => {
                give_up(&part, TransferError::Integrity { chunk, member: self.peer });
            }
            Output::CloseLane(id) => {
                // Its reactor says when nothing comes from it any more: this may be the very lane. Under the lock, so
                // that a lane that is just ending is told before it is out of the list, or not found.
                let lanes = self.lanes.read().unwrap_or_else(PoisonError::into_inner);
                let found = lanes.iter().find(|lane| lane.id == id).map(|lane| lane.end_for_peer());
                if found.is_none() {
                    lock(&self.lost).insert(id);
                }
                drop(lanes);
                if found.is_none() {
                    lock(&self.link).lane_closed(id);
                }
            }
            Output::Unregion(id) => {
                lock(&self.shared).remove(&id);
            }
            Output::Switched => {
                if let Some(inbox) = &self.inbox {
                    // Opening rings the bell: the reactor reads what is there already.
                    inbox.open();
                }
            }
            Output::Refused => {
                if let Some(core) = self.core.upgrade() {
                    core.make_room();
                }
            }
            Output::Left => {
                self.decided.notify_all();
                if let Some(core) = self.core.upgrade() {
                    core.has_left(self);
                }
            }
            Output::Stays => {
                self.decided.notify_all();
                if let Some(core) = self.core.upgrade() {
                    core.has_stayed(self);
                }
            }
            Output::Ended => {
                self.kick(0);
                self.end(self.has_made_room());
            }
            // Let go of outside of the lock: its memory may go with it.
            Output::Over(_) => {}
        }
    }

    /// Puts what came with a launch in place.
    fn put(self: &Arc<Self>, part: &Arc<Part>, bytes: &[u8], answers: &mut Answers) {
        let Some(stay) = part.stay() else { return };
        part.work.inbound.copy_in(0, bytes);
        let by = self.brings_by(self.inbox.as_ref().is_some_and(Inbox::is_open));
        part.moves_by(by);
        self.count(by, true, bytes.len() as u64);
        if let Some(at) = part.at() {
            lock(&self.link).received(at);
        }
        answers.landed.push(stay);
    }

    /// What carries the bytes that come with a launch, by a ring or not.
    pub(crate) const fn brings_by(&self, ring: bool) -> TransportKind {
        if ring { TransportKind::Shm } else { self.kind }
    }

    /// Sends what there is: control at once, on this thread; chunks on this thread only if they are few.
    pub(crate) fn kick(self: &Arc<Self>, sends: u64) {
        let (ring, control, chunks) = {
            let link = lock(&self.link);
            (link.has_for_ring(), link.has_control(), link.has_chunks())
        };
        if ring {
            self.fill_ring();
        }
        let control = control || ring && lock(&self.link).has_control();
        if !control && !chunks {
            return;
        }
        let lanes = self.lanes();
        let bulk = lanes.iter().any(|lane| !lane.control);
        for lane in &lanes {
            if lane.control && (control || !bulk) {
                // A lane on which nothing can be sent is its reactor's to end: what the peer said is read there first.
                if chunks && !bulk && sends > SEND_AT_ONCE || lane.pump_output().is_err() {
                    self.pump_elsewhere(lane);
                }
            } else if !lane.control && chunks {
                self.pump_elsewhere(lane);
            }
        }
    }

    /// Sees to it that what was said has left, if it can until then: the peer may have been told nothing yet of what has long
    /// been known here.
    pub fn say_all(self: &Arc<Self>, until: Instant) {
        const BETWEEN: Duration = Duration::from_micros(100);
        let says = || {
            let link = lock(&self.link);
            let waits = link.has_for_ring() || link.has_control();
            drop(link);
            waits || self.lanes().iter().any(|lane| lane.control && lane.is_sending())
        };
        while self.over.get().is_none() && says() && clock::monotonic() < until {
            self.kick(0);
            std::thread::park_timeout(BETWEEN);
        }
    }

    fn pump_elsewhere(&self, lane: &Arc<Lane>) {
        if let Some(core) = self.core.upgrade() {
            core.reactor(lane.id).pump(lane);
        }
    }

    /// Has the lanes look at what they are in the middle of.
    pub fn hurry(&self) {
        for lane in self.lanes() {
            self.pump_elsewhere(&lane);
        }
    }

    /// Has the lanes go on that wait to learn where a chunk belongs.
    pub(crate) fn wake_held(&self) {
        for lane in self.lanes() {
            if lane.is_held() {
                self.pump_elsewhere(&lane);
            }
        }
    }
}

//! What the lanes of a connection ask it and tell it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::engine::shared::Core;
use crate::io::lane::{Lane, LaneError};
use crate::io::ring::Outbox;
use crate::io::wire::{Wire, WireError};
use crate::launch::peer_launch::Part;
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::{Frame, Landing, Push, Violation};
use crate::session::connection::{Connection, Shared};
use crate::session::perform::Answers;

/// The most regions that a peer may share.
const REGIONS_MAX: usize = 4096;

impl Connection {
    /// Takes a lane in. The control lane of a connection that had one before says how far the peer has heard.
    pub fn add_lane(self: &Arc<Self>, core: &Core, lane: &Arc<Lane>, peer_heard: u32) -> std::io::Result<()> {
        if lane.control {
            // What the one before it still takes would be lost: from here on it takes nothing.
            for before in self.lanes().iter().filter(|before| before.control) {
                before.close();
                before.stop_sending();
            }
            lock(&self.link).control_again(peer_heard);
        }
        {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            if lock(&self.lost).contains(&lane.id) {
                // The peer was told already that nothing comes from it.
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
            lanes.push(Arc::clone(lane));
        }
        self.heard();
        if lane.control && self.inbox.is_some() {
            // Before anything is read: what is said after the switch to the peer's ring has no descriptors with it.
            core.reactor(lane.id).add_bell(self)?;
            lock(&self.link).offer_ring();
        }
        if let Err(error) = core.reactor(lane.id).add(lane) {
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(error);
        }
        if let Some(error) = self.over.get() {
            // Whoever ended it has let go of its lanes, perhaps before this one was among them.
            tracing::debug!(%error, "a lane came to a connection that is over");
            lane.close();
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        self.kick(0);
        Ok(())
    }

    /// The next control frame; one that carries a descriptor only if it would be the first of its call.
    pub fn next_control(&self, first: bool) -> Option<Frame> {
        let frame = lock(&self.link).next_control(first)?;
        if frame.header.kind == Kind::Switch {
            // What was said behind it waited for the socket. Nobody else comes to put it into the ring.
            self.fill_ring();
        }
        Some(frame)
    }

    /// The next chunk for a lane. The control lane carries chunks only where there is no other, and after what waits to be
    /// said.
    pub fn next_chunk(&self, lane: &Lane) -> Option<Push<Arc<Part>>> {
        if lane.control && self.lanes().iter().any(|lane| !lane.control && !lane.is_over()) {
            return None;
        }
        let mut link = lock(&self.link);
        // Said before the chunk could be sent, it goes before it: behind it on the same lane, the `Go` that the chunk is
        // held for would never be read.
        if lane.control && link.has_control() {
            return None;
        }
        link.next_chunk(lane.id)
    }

    /// Whether control frames wait for the lane that carries them.
    pub fn has_control(&self) -> bool {
        lock(&self.link).has_control()
    }

    /// Whether a frame is from this peer's life to this life.
    pub fn is_between(&self, header: &Header) -> bool {
        let ours =
            header.source == self.peer.incarnation.get() && header.destination == self.me.incarnation.get();
        if !ours && let Some(core) = self.core.upgrade() {
            core.counts.fenced.fetch_add(1, Ordering::Relaxed);
        }
        ours
    }

    /// A chunk is about to come.
    pub fn begin_landing(&self, header: &Header) -> Landing<Arc<Part>> {
        lock(&self.link).begin_landing(header)
    }

    /// A chunk will not come.
    pub fn let_fall(&self, header: &Header) {
        lock(&self.link).let_fall(header);
    }

    /// A chunk is there, whole or damaged.
    pub fn chunk_came(
        self: &Arc<Self>,
        kind: TransportKind,
        header: &Header,
        part: &Arc<Part>,
        start: u64,
        intact: bool,
    ) {
        let mut link = lock(&self.link);
        if intact {
            let counts = link.landed(header);
            drop(link);
            // The peer hears first that all is here: whoever waits for it on this side may end the process at once.
            self.settle();
            if counts {
                part.moves_by(kind);
                self.count(kind, true, u64::from(header.len));
                part.arrived(start, u64::from(header.len));
            }
        } else {
            link.damaged(header);
            drop(link);
            if let Some(core) = self.core.upgrade() {
                core.counts.damaged.fetch_add(1, Ordering::Relaxed);
            }
            self.settle();
        }
    }

    pub(crate) fn count(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.counters.add(kind, received, bytes);
        self.moved.add(kind, received, bytes);
    }

    /// Bytes left on a lane.
    pub fn count_sent(&self, kind: TransportKind, bytes: u64) {
        self.count(kind, false, bytes);
    }

    /// Bytes were fetched.
    pub fn count_received(&self, kind: TransportKind, bytes: u64) {
        self.count(kind, true, bytes);
    }

    /// A control frame came by a lane, perhaps with descriptors. What is to be said to it waits for
    /// [`answer`](Self::answer).
    pub fn control_frame(
        self: &Arc<Self>,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        answers: &mut Answers,
    ) -> Result<(), Violation> {
        match header.kind {
            Kind::Region | Kind::Descriptor => {
                let shared = descriptors.first().and_then(|file| Shared::of(file, header.sequence));
                let mut all = lock(&self.shared);
                if all.len() >= REGIONS_MAX {
                    return Err(Violation("too much memory is shared"));
                }
                all.insert(header.index, shared.map(Arc::new));
                drop(all);
                if lock(&self.awaited).take_if(|awaited| *awaited == header.index).is_some() {
                    self.serve_ring()?;
                }
            }
            Kind::Ring => {
                // Who has no ring of its own could not say that there is room in the other one.
                if self.inbox.is_some()
                    && let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(descriptors)
                    && let Some(outbox) = Outbox::of(&file, bell)
                    && self.outbox.set(outbox).is_ok()
                {
                    lock(&self.link).switch();
                }
            }
            _ => {}
        }
        lock(&self.link).receive(header, payload)?;
        self.perform_all(answers);
        Ok(())
    }

    /// Sends the beginning of a control frame with the descriptors that go with it.
    pub fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: Kind,
        region: u32,
    ) -> Result<usize, WireError> {
        let region = lock(&self.offered).get(&region).and_then(Weak::upgrade);
        let descriptors: Vec<BorrowedFd<'_>> = match (kind, &self.inbox, &region) {
            (Kind::Ring, Some(inbox), _) => inbox.descriptors().to_vec(),
            (Kind::Region | Kind::Descriptor, _, Some(region)) => region.shared().into_iter().collect(),
            _ => Vec::new(),
        };
        wire.send_with(bytes, &descriptors)
    }

    /// A lane is over. The connection is, when it was the last or the one for control and cannot be made anew.
    pub fn lane_over(self: &Arc<Self>, lane: &Arc<Lane>, error: &LaneError) {
        let asked = {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            lanes.retain(|other| !Arc::ptr_eq(other, lane));
            lane.is_ended_for_peer()
        };
        if self.over.get().is_some() {
            return;
        }
        let how = format!("lane {} of {}: {error}", lane.id, lane.kind);
        let Some(core) = self.core.upgrade() else { return };
        let garbled = matches!(error, LaneError::Frame(_));
        if garbled {
            core.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        // What came damaged where no checksum of a chunk tells is sent again on another lane, once.
        let again = garbled && self.nature.breaks && self.is_garbled_first();
        if garbled && !again || matches!(error, LaneError::Violation(_) | LaneError::Fenced) {
            self.end(TransferError::Transport { transport: lane.kind, member: self.peer, why: how });
            return;
        }
        // Both have let go of it, and the peer closes it. If this side is the one to mend it, the peer may not have heard.
        let mends = lane.control && self.dialled && self.nature.breaks;
        if !mends && lock(&self.link).is_gone() {
            if lane.control {
                self.end(self.has_made_room());
            }
            return;
        }
        core.counts.lanes_lost.fetch_add(1, Ordering::Relaxed);
        if !self.nature.breaks {
            self.peer_has_gone(how);
            return;
        }
        {
            let mut link = lock(&self.link);
            if asked {
                link.lane_closed(lane.id);
            }
            link.lane_lost(lane.id);
        }
        self.kick(0);
        core.lane_lost(self, lane, &how);
    }

    /// A frame came damaged. Whether it is the first since the peer was last heard in order.
    fn is_garbled_first(&self) -> bool {
        let heard = lock(&self.link).heard();
        lock(&self.garbled).replace(heard) != Some(heard)
    }
}

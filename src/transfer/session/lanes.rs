//! The interface of a connection to its lanes, and the consequences of a lost lane.
//!
//! [`crate::io::lane`] moves the bytes. Begin at [`Connection::add_lane`].
//!
//! - On the control lane no chunk precedes a control frame that was queued before it: a chunk that is held
//!   for its `Go` would keep the lane from reading that very `Go`. On other lanes a chunk that overtakes the
//!   `Go` of its group holds its lane, because a dropped chunk would never come again.
//! - A damaged header or control frame, which no chunk checksum covers, costs its lane, and its contents are
//!   sent again on another lane. A second one before another control frame arrived in order ends the
//!   connection.
//! - Bytes are counted for the peer's task as they move, because a connection may live shorter than the time
//!   between two scrapes.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use super::connection::Connection;
use super::ring_session::RingSession;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::fetch::PeerMemory;
use crate::io::lane::{Lane, LaneError, LaneHost, Replies};
use crate::io::reactor::BellHost;
use crate::io::ring::{RingInbox, RingOutbox};
use crate::io::wire::{Wire, WireError};
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::{Frame, Landing, Push, Violation};

/// The most regions that a peer may announce.
const REGIONS_MAX: usize = 4096;

impl Connection {
    /// Adds a lane. For a control lane that replaces another, `peer_heard` is the last control frame that the
    /// peer has received.
    pub fn add_lane(&self, lane: &Arc<Lane>, peer_heard: u32) -> std::io::Result<()> {
        if lane.control {
            // Frames that the previous control lane still took would be lost, so it stops sending first.
            for before in self.lanes().iter().filter(|before| before.control) {
                before.close();
                before.stop_sending();
            }
            lock(&self.link).resume_control(peer_heard);
        }
        {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            if lock(&self.lost_lanes).contains(&lane.id) {
                // The peer knows already that nothing arrives from this lane.
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
            lanes.push(Arc::clone(lane));
        }
        self.note_heard();
        if lane.control
            && let Some(bell) = self.inbox.as_ref().map(RingInbox::bell)
        {
            // The ring is offered before anything is read: after the switch to the peer's ring, frames carry
            // no descriptors.
            let host: Weak<dyn BellHost> = self.weak();
            self.io.reactor(lane.id).add_bell(bell, host)?;
            lock(&self.link).offer_ring();
        }
        if let Err(error) = self.io.reactor(lane.id).add(lane) {
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(error);
        }
        if let Some(error) = self.over.get() {
            // `close` closed the lanes of the connection, perhaps before this one was among them.
            tracing::debug!(%error, "a lane came to a connection that is over");
            lane.close();
            self.lanes
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|other| !Arc::ptr_eq(other, lane));
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        self.flush(0);
        Ok(())
    }

    /// Counts bytes that moved.
    pub(super) fn count(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.counters.add(kind, received, bytes);
        self.moved.add(kind, received, bytes);
    }

    /// Records a damaged frame. Returns whether it is the first since a control frame last arrived in order.
    fn is_first_damage(&self) -> bool {
        let heard = lock(&self.link).heard();
        lock(&self.last_damage).replace(heard) != Some(heard)
    }
}

impl LaneHost for Connection {
    fn mark_heard(&self) {
        self.note_heard();
    }

    fn reply(&self, replies: Replies) {
        self.send_replies(replies);
    }

    fn next_control(&self, first: bool) -> Option<Frame> {
        let frame = lock(&self.link).next_control(first)?;
        if frame.header.kind == Kind::Switch {
            // The frames behind the switch waited for the socket, and no later event would put them into the
            // ring.
            self.fill_ring();
        }
        Some(frame)
    }

    fn next_chunk(&self, lane: u16, control: bool) -> Option<Push<Arc<PeerLaunch>>> {
        if control && self.lanes().iter().any(|lane| !lane.control && !lane.is_over()) {
            return None;
        }
        let mut link = lock(&self.link);
        // A queued control frame goes before the chunk: behind the chunk on the same lane, the `Go` that the
        // chunk is held for would never be read.
        if control && link.has_control() {
            return None;
        }
        link.next_chunk(lane)
    }

    fn has_control(&self) -> bool {
        lock(&self.link).has_control()
    }

    fn is_between(&self, header: &Header) -> bool {
        let ours =
            header.source == self.peer.incarnation.get() && header.destination == self.me.incarnation.get();
        if !ours {
            self.counts.fenced.fetch_add(1, Ordering::Relaxed);
        }
        ours
    }

    fn begin_landing(&self, header: &Header) -> Landing<Arc<PeerLaunch>> {
        lock(&self.link).begin_landing(header)
    }

    fn abandon_chunk(&self, header: &Header) {
        lock(&self.link).abandon_chunk(header);
    }

    fn end_landing(
        &self,
        kind: TransportKind,
        header: &Header,
        launch: &Arc<PeerLaunch>,
        start: u64,
        intact: bool,
    ) {
        let mut link = lock(&self.link);
        if intact {
            let counts = link.landed(header);
            drop(link);
            // The peer learns first that all bytes have arrived, because the program on this side may exit at
            // once.
            self.perform();
            if counts {
                launch.set_transport(kind);
                self.count(kind, true, u64::from(header.len));
                launch.add_arrived(start, u64::from(header.len));
            }
        } else {
            link.damaged(header);
            drop(link);
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
            self.perform();
        }
    }

    fn count_sent(&self, kind: TransportKind, bytes: u64) {
        self.count(kind, false, bytes);
    }

    fn control_frame(
        &self,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        replies: &mut Replies,
    ) -> Result<(), Violation> {
        match header.kind {
            Kind::Region | Kind::Descriptor => {
                let shared = descriptors.first().and_then(|file| PeerMemory::map(file, header.sequence));
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
                // A side without a ring of its own could not tell the peer that its ring has room again.
                if self.inbox.is_some()
                    && let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(descriptors)
                    && let Some(outbox) = RingOutbox::of(&file, bell)
                    && self.outbox.set(outbox).is_ok()
                {
                    lock(&self.link).switch();
                }
            }
            _ => {}
        }
        lock(&self.link).receive(header, payload)?;
        self.perform_all(replies);
        Ok(())
    }

    fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: Kind,
        region: u32,
    ) -> Result<usize, WireError> {
        let region = lock(&self.offered).get(&region).and_then(Weak::upgrade);
        let descriptors: Vec<BorrowedFd<'_>> = match (kind, &self.inbox, &region) {
            (Kind::Ring, Some(inbox), _) => inbox.descriptors().collect(),
            (Kind::Region | Kind::Descriptor, _, Some(region)) => region.shared().into_iter().collect(),
            _ => Vec::new(),
        };
        wire.send_with(bytes, &descriptors)
    }

    fn lane_over(&self, lane: &Arc<Lane>, error: &LaneError) {
        let asked = {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            lanes.retain(|other| !Arc::ptr_eq(other, lane));
            lane.is_ended_for_peer()
        };
        if self.over.get().is_some() {
            return;
        }
        let how = format!("lane {} of {}: {error}", lane.id, lane.kind);
        let damaged = matches!(error, LaneError::Frame(_));
        if damaged {
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        // Frames that no chunk checksum covers are sent again on another lane, once.
        let again = damaged && self.capabilities.is_breakable && self.is_first_damage();
        if damaged && !again || matches!(error, LaneError::Violation(_) | LaneError::Fenced) {
            self.close(TransferError::Transport { transport: lane.kind, member: self.peer, why: how });
            return;
        }
        // Both sides have agreed to end the connection, and the peer closes it. If this side is the one that
        // reconnects the control lane, the peer may not have received the decision, so this side reconnects.
        let mends = lane.control && self.dialled && self.capabilities.is_breakable;
        if !mends && lock(&self.link).is_gone() {
            if lane.control {
                self.close(self.made_room_error());
            }
            return;
        }
        self.counts.lanes_lost.fetch_add(1, Ordering::Relaxed);
        if !self.capabilities.is_breakable {
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
        self.flush(0);
        self.tell_host(|host, connection| host.mend(connection, lane.control, &how));
    }
}

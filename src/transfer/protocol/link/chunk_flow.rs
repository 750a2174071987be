//! The flow of chunks on a link: which chunk to send next, where an arriving chunk is written, and which chunks and
//! control frames to send again.
//!
//! Lanes move the bytes. Begin at [`LinkSide::next_chunk_of`] and [`LinkSide::begin_chunk_receive`].

use std::sync::Arc;

#[cfg(any(test, feature = "fuzzing"))]
use super::chunks;
use super::chunks::{ChunkedReceiveState, InboundStream, NONE, OutboundStream, chunk_len};
use super::launch_definition::LaunchDefinition;

use super::chunk_scheduler::{GroupId, PriorityClass};
use super::interface::{ChunkDestination, ControlFrame, LinkOutput, OutgoingChunk, WaitersToWake};
use super::link_side::LinkSide;
use crate::protocol::frame::{FrameKind, Header};

/// The number of words, of 64 chunks each, in one `Have` frame.
const HAVE_WORDS: usize = 4096;

impl<T: Clone> LinkSide<T> {
    /// Returns whether there are chunks to send.
    pub fn has_chunks_to_send(&self) -> bool {
        !self.schedule.is_empty()
    }

    /// Returns whether there are control frames for the socket.
    pub fn has_control_frames_for_socket(&self) -> bool {
        !self.control.switched && !self.control.is_empty() || !self.control.descriptors.is_empty()
    }

    /// Returns whether there are control frames for the ring.
    pub fn has_control_frames_for_ring(&self) -> bool {
        self.control.switched && self.control.first_queued().is_some()
    }

    /// Returns the next control frame to send on the socket. Without `with_descriptors` it returns none that
    /// carries descriptors.
    pub fn next_control_frame(&mut self, with_descriptors: bool) -> Option<ControlFrame> {
        if let Some(Header { flags, index, sequence, .. }) = self.control.descriptors.front().copied() {
            if !with_descriptors {
                return None;
            }
            self.control.descriptors.pop_front();
            let header = Header { flags, index, sequence, ..self.new_header(FrameKind::Descriptor) };
            return Some(ControlFrame { header, payload: Vec::new() });
        }
        let brings = |frame: &ControlFrame| matches!(frame.header.kind, FrameKind::Region | FrameKind::Ring);
        if self.control.switched || !with_descriptors && self.control.first_queued().is_some_and(brings) {
            return None;
        }
        let bare = self.new_header(FrameKind::Ack);
        let frame = self.control.next(bare)?;
        self.control.switched = frame.header.kind == FrameKind::Switch;
        Some(frame)
    }

    /// Returns the next control frame for the ring if its payload fits into `room`, and whether there is one
    /// at all.
    pub fn next_control_frame_for_ring(&mut self, room: usize) -> (Option<ControlFrame>, bool) {
        let Some(first) = self.control.first_queued().filter(|_| self.control.switched) else {
            self.differed = false;
            return (None, false);
        };
        if first.payload.len() > room {
            return (None, true);
        }
        if first.header.kind == FrameKind::Region {
            self.control.descriptors.push_back(first.header);
        }
        let bare = self.new_header(FrameKind::Ack);
        (self.control.next(bare), true)
    }

    /// Returns the waiters that a frame in the ring must wake at once.
    pub fn waiters_to_wake(&self, header: &Header) -> WaitersToWake {
        // A peer that launches only to fetch sends another frame when it has fetched. Until then only this
        // side has work to do, unless the peer's list has nothing that can be fetched.
        let fetched = |definition: &Arc<LaunchDefinition>| {
            !self.terms.pushes_unsourced
                && definition.received > 0
                && definition.entries.iter().all(|entry| !entry.outgoing)
        };
        match header.kind {
            // The peer detects the difference only when it reads the frame.
            _ if self.differed => WaitersToWake::Everyone,
            // Until the frame of a launch follows, there is nothing to do with a list of transfers.
            FrameKind::Define | FrameKind::Undefine => WaitersToWake::Lazy,
            FrameKind::Done => WaitersToWake::SendWaiters,
            FrameKind::Go if self.terms.fetch && self.definitions.get(&header.index).is_some_and(fetched) => {
                WaitersToWake::Lazy
            }
            _ => WaitersToWake::Everyone,
        }
    }

    /// Returns every launch in flight.
    pub fn in_flight_tokens(&self) -> Vec<T> {
        self.groups
            .values()
            .filter_map(|group| group.local.as_ref().map(|local| local.token.clone()))
            .collect()
    }

    /// Returns the number of the peer's last control frame received.
    pub const fn last_received_control_number(&self) -> u32 {
        self.control.last_received()
    }

    /// Queues again the frames after `number`, the last one that the peer has received: the control lane was
    /// connected again.
    pub fn resend_control_after(&mut self, number: u32) {
        self.control.resend_after(number);
    }

    /// Returns the next chunk to send on `lane`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn next_chunk(&mut self, lane: u16) -> Option<OutgoingChunk<T>> {
        self.next_chunk_of(lane, |_| true)
    }

    /// Returns the next chunk to send on `lane` of a launch that is `wanted`. The turns of other launches stay theirs.
    pub fn next_chunk_of(&mut self, lane: u16, wanted: impl Fn(&T) -> bool) -> Option<OutgoingChunk<T>> {
        let mut passed_over = Vec::new();
        let found = self.take_next_chunk(lane, wanted, &mut passed_over);
        for (class, at) in passed_over {
            self.schedule.add(class, at);
        }
        found
    }

    fn take_next_chunk(
        &mut self,
        lane: u16,
        wanted: impl Fn(&T) -> bool,
        passed_over: &mut Vec<(PriorityClass, GroupId)>,
    ) -> Option<OutgoingChunk<T>> {
        while let Some((class, at)) = self.schedule.next() {
            let header = self.new_header(FrameKind::Data);
            let Some(group) = self.groups.get_mut(&at).filter(|group| group.stop.is_none()) else { continue };
            let (OutboundStream::Pushing(out), Some(local)) = (&mut group.out, &group.local) else {
                continue;
            };
            if !wanted(&local.token) {
                passed_over.push((class, at));
                continue;
            }
            let count = out.lanes.len() as u32;
            let index = match out.again.pop() {
                Some(index) => index,
                None if out.next < count => {
                    out.next += 1;
                    out.next - 1
                }
                None => continue,
            };
            out.lanes[index as usize] = lane;
            let len = chunk_len(out.total, self.terms.chunk, index);
            let token = local.token.clone();
            if out.next < count || !out.again.is_empty() {
                self.schedule.add(class, at);
            }
            let (channel, sequence) = at;
            let header = Header {
                channel,
                sequence,
                index,
                len,
                class: class as u8,
                ack: self.control.last_received(),
                ..header
            };
            return Some(OutgoingChunk {
                token,
                header,
                start: u64::from(index) * u64::from(self.terms.chunk),
            });
        }
        None
    }

    /// Returns the destination of a chunk that is about to arrive. If it has one, follow with
    /// [`LinkSide::finish_chunk_receive`], [`LinkSide::on_chunk_damaged`] or [`LinkSide::abandon_chunk_receive`].
    pub fn begin_chunk_receive(&mut self, header: &Header) -> ChunkDestination<T> {
        self.control.acknowledge(header.ack);
        let Some(group) = self.groups.get_mut(&(header.channel, header.sequence)) else {
            return ChunkDestination::Nowhere;
        };
        let (Some(local), None) = (&group.local, &group.stop) else { return ChunkDestination::Nowhere };
        let InboundStream::Landing(chunks) = &mut group.inbound else {
            return if group.matched { ChunkDestination::Nowhere } else { ChunkDestination::Early };
        };
        let index = header.index;
        if header.len == 0 || chunk_len(chunks.total, self.terms.chunk, index) != header.len {
            return ChunkDestination::Nowhere;
        }
        if chunks.landed.has(index) || !chunks.landing.set(index) {
            return ChunkDestination::Nowhere;
        }
        ChunkDestination::At(local.token.clone(), u64::from(index) * u64::from(self.terms.chunk))
    }

    fn chunked_receive_state_of(&mut self, at: GroupId) -> Option<&mut ChunkedReceiveState> {
        match &mut self.groups.get_mut(&at)?.inbound {
            InboundStream::Landing(chunks) => Some(chunks),
            _ => None,
        }
    }

    /// Records that a chunk is in place. Returns whether it counts: it does not if the group was cancelled
    /// meanwhile.
    pub fn finish_chunk_receive(&mut self, header: &Header) -> bool {
        let at = (header.channel, header.sequence);
        if self.groups.get(&at).is_none_or(|group| group.stop.is_some()) {
            return false;
        }
        let Some(chunks) = self.chunked_receive_state_of(at) else { return false };
        chunks.landing.unset(header.index);
        if chunks.landed.set(header.index) {
            chunks.left -= 1;
            if chunks.left == 0 {
                self.announce_received(at);
            }
        }
        true
    }

    /// Records that a chunk arrived damaged. The first time it is requested again; the second time the group
    /// cannot be completed.
    pub fn on_chunk_damaged(&mut self, header: &Header) {
        let at = (header.channel, header.sequence);
        let Some(chunks) = self.chunked_receive_state_of(at) else { return };
        chunks.landing.unset(header.index);
        if chunks.damaged.set(header.index) {
            let (channel, sequence) = at;
            self.queue_control_frame(
                Header { channel, sequence, index: header.index, ..self.new_header(FrameKind::Damaged) },
                Vec::new(),
            );
        } else if let Some(local) = self.groups.get(&at).and_then(|group| group.local.as_ref()) {
            self.outputs.push(LinkOutput::Damaged(local.token.clone(), header.index));
        }
    }

    /// Records that a chunk whose landing had begun will not arrive on this lane.
    pub fn abandon_chunk_receive(&mut self, header: &Header) {
        if let Some(chunks) = self.chunked_receive_state_of((header.channel, header.sequence)) {
            chunks.landing.unset(header.index);
        }
    }

    pub(super) fn on_resend_request(&mut self, at: GroupId, index: u32) {
        self.requeue_sent_chunks(at, |chunk, _| chunk == index);
    }

    pub(super) fn on_chunk_report(&mut self, at: GroupId, lane: u16, first: u32, bitmap: &[u8]) {
        self.requeue_sent_chunks(at, |chunk, by| {
            let bit = chunk.checked_sub(first).filter(|_| by == lane);
            bit.and_then(|bit| Some(bitmap.get(bit as usize / 8)? >> (bit % 8) & 1 == 0)).unwrap_or(false)
        });
    }

    /// Queues again the sent chunks that are `chosen`.
    fn requeue_sent_chunks(&mut self, at: GroupId, chosen: impl Fn(u32, u16) -> bool) {
        let Some(group) = self.groups.get_mut(&at).filter(|group| group.stop.is_none()) else { return };
        let (OutboundStream::Pushing(out), Some(local)) = (&mut group.out, &group.local) else { return };
        let idle = out.again.is_empty() && out.next as usize == out.lanes.len();
        for chunk in 0..out.next {
            let lane = &mut out.lanes[chunk as usize];
            if *lane != NONE && chosen(chunk, *lane) {
                *lane = NONE;
                out.again.push(chunk);
            }
        }
        if idle && !out.again.is_empty() {
            self.schedule.add(local.class, at);
        }
    }

    /// Records that a lane on which this side sent is lost, and asks the peer which chunks have arrived.
    pub fn query_received_chunks(&mut self, lane: u16) {
        self.queue_control_frame(Header { lane, ..self.new_header(FrameKind::Lost) }, Vec::new());
    }

    /// Records that nothing arrives any more from a lane that the peer has lost, and tells the peer which
    /// chunks have arrived.
    pub fn report_received_chunks(&mut self, lane: u16) {
        let mut told = Vec::new();
        for (at, group) in &self.groups {
            if let InboundStream::Landing(chunks) = &group.inbound
                && group.stop.is_none()
            {
                for (part, words) in chunks.landed.0.chunks(HAVE_WORDS).enumerate() {
                    let bitmap: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    told.push((*at, (part * HAVE_WORDS * 64) as u32, bitmap));
                }
            }
        }
        for ((channel, sequence), index, bitmap) in told {
            self.queue_control_frame(
                Header { channel, sequence, lane, index, ..self.new_header(FrameKind::Have) },
                bitmap,
            );
        }
    }

    /// Asserts the invariants of the link.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn assert_invariants(&self) {
        for group in self.groups.values() {
            if let InboundStream::Landing(chunks) = &group.inbound {
                let both = chunks.landed.0.iter().zip(&chunks.landing.0).any(|(a, b)| a & b != 0);
                assert!(!both, "a chunk lands that has landed");
                assert!(group.matched, "something lands in a group that is not matched");
                let landed: u32 = chunks.landed.0.iter().map(|word| word.count_ones()).sum();
                assert_eq!(landed + chunks.left, chunks::chunk_count(chunks.total, self.terms.chunk));
            }
        }
        let locals = self.groups.values().filter(|group| group.local.is_some()).count();
        assert_eq!(locals, self.launched, "launches are counted");
        let inline = self.groups.values().filter(|group| group.out == OutboundStream::Inline).count();
        assert_eq!(inline, self.inline_pending, "inline groups are counted");
        let held = self.groups.values().filter_map(|group| group.remote.as_ref()?.inline.as_ref()).count();
        assert_eq!(held, self.inline_held, "inline bytes are counted");
        self.assert_leave_invariants();
    }
}

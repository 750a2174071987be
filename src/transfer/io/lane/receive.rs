//! The receiving half of a lane: reads frame headers, and reads the bytes of chunks directly into their destination, or into
//! the slots of `staging.rs`.
//!
//! The session interprets frames. On wires that can break, chunks carry checksums if either side asks for them in the
//! handshake. So a receiver that asks for checksums gets them, whatever the sender's own setting is. The receiver
//! verifies the checksum of each frame whose header says that it has one. Begin at [`Lane::pump_input`].

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::input::{IncomingFrame, LaneInput};
use super::state::{Lane, LaneError, LaneHost, PendingReplies};
use crate::base::sync::lock;
use crate::io::staging::StagingSlot;
use crate::io::sys;
use crate::io::wire::{ReceivedCount, WireError};
use crate::launch::peer_launch::{AccessGuard, PeerLaunch};
use crate::memory::{ReadView, WriteView, total_len_of_views};
use crate::protocol::frame::{FrameError, FrameKind, HEADER, Header, crc32c_of, flag};
use crate::protocol::link::{ChunkDestination, ProtocolViolation};

/// The bytes that one lane may read before other lanes have their turn.
const TURN: usize = 4 << 20;

/// The most descriptors that may wait for their frames.
const DESCRIPTORS_MAX: usize = 64;

/// The result of a receiving step.
enum ReceiveStep {
    /// Go on with the next step.
    Go,
    /// The wire had no more bytes.
    Drained,
}

impl Lane {
    /// Receives the available bytes. Returns whether there may be more.
    pub fn pump_input(&self) -> Result<bool, LaneError> {
        let Some(host) = self.host() else { return Err(LaneError::Closed) };
        let mut input = lock(&self.input);
        let mut turn = 0;
        while turn < TURN {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            // Frames that arrived with one system call are answered with one.
            let mut replies = PendingReplies::default();
            let step = self.receive_unless_chunk_is_held(&*host, &mut input, &mut turn, &mut replies);
            host.send_pending_replies(replies);
            match step {
                Ok(ReceiveStep::Go) => {}
                Ok(ReceiveStep::Drained) | Err(LaneError::Wire(WireError::Later)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive_unless_chunk_is_held(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
        replies: &mut PendingReplies,
    ) -> Result<ReceiveStep, LaneError> {
        let (header, placed) = match &mut input.now {
            IncomingFrame::Held { header } => {
                let header = *header;
                (header, self.find_chunk_destination(host, header).unwrap_or(IncomingFrame::Held { header }))
            }
            IncomingFrame::AwaitsSlot { header, launch, start } => {
                let chunk = (*header, Arc::clone(launch), *start);
                (chunk.0, self.begin_staged_receive(host, chunk))
            }
            _ => return self.receive_part_of_frame(host, input, turn, replies),
        };
        input.now = placed;
        if matches!(input.now, IncomingFrame::Held { .. } | IncomingFrame::AwaitsSlot { .. }) {
            return Ok(ReceiveStep::Drained);
        }
        self.fill_body_from_bytes_read_ahead(host, input, header.len as usize, replies)?;
        self.receive_part_of_frame(host, input, turn, replies)
    }

    /// Counts received bytes. If the wire is dry, an edge of its descriptor reports the next ones.
    fn count_received(
        &self,
        host: &dyn LaneHost,
        received: ReceivedCount,
        turn: &mut usize,
    ) -> Result<ReceiveStep, LaneError> {
        let ReceivedCount { bytes, dry } = received;
        if bytes == 0 {
            return Err(LaneError::Closed);
        }
        *turn += bytes;
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        host.record_frame_received();
        Ok(if dry && !self.ending.load(Ordering::SeqCst) { ReceiveStep::Drained } else { ReceiveStep::Go })
    }

    fn receive_part_of_frame(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
        replies: &mut PendingReplies,
    ) -> Result<ReceiveStep, LaneError> {
        match &mut input.now {
            IncomingFrame::Held { .. } | IncomingFrame::AwaitsSlot { .. } => Ok(ReceiveStep::Drained),
            IncomingFrame::Header => {
                if input.unused_bytes_read_ahead().len() >= HEADER {
                    return self.begin_buffered_frames(host, input, replies);
                }
                input.compact();
                let LaneInput { ahead, to, descriptors, .. } = &mut *input;
                let received = self.wire.receive_with_descriptors(&mut ahead[*to..], descriptors)?;
                if descriptors.len() > DESCRIPTORS_MAX {
                    return Err(LaneError::Violation(ProtocolViolation(
                        "descriptors came that belong to nothing",
                    )));
                }
                let step = self.count_received(host, received, turn)?;
                input.to += received.bytes;
                self.begin_buffered_frames(host, input, replies)?;
                // The rest of a frame that has begun must be read, unless its destination is not known.
                Ok(
                    if matches!(input.now, IncomingFrame::Header)
                        && input.unused_bytes_read_ahead().len() < HEADER
                    {
                        step
                    } else {
                        ReceiveStep::Go
                    },
                )
            }
            IncomingFrame::Control { bytes, got, .. } => {
                let received = self.wire.receive(&mut [WriteView::of_slice(&mut bytes[*got..])])?;
                *got += received.bytes;
                self.count_received(host, received, turn)?;
                if *got == bytes.len()
                    && let IncomingFrame::Control { header, bytes, .. } =
                        std::mem::replace(&mut input.now, IncomingFrame::Header)
                {
                    self.process_control_frame(host, &header, bytes, &mut input.descriptors, replies)?;
                }
                Ok(ReceiveStep::Go)
            }
            IncomingFrame::Chunk { .. } => self.receive_chunk(host, input, turn),
            IncomingFrame::Discard { left } => {
                let bytes = self.wire.discard(*left)?;
                *left -= bytes;
                let over = *left == 0;
                self.count_received(host, ReceivedCount { bytes, dry: false }, turn)?;
                if over {
                    input.now = IncomingFrame::Header;
                }
                Ok(ReceiveStep::Go)
            }
        }
    }

    /// Receives more of a chunk, directly into its destination or into its slot.
    fn receive_chunk(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
    ) -> Result<ReceiveStep, LaneError> {
        let LaneInput { now, ahead, from, to, .. } = input;
        let IncomingFrame::Chunk { header, launch, start, got, slot } = now else {
            return Ok(ReceiveStep::Go);
        };
        let (header, launch, start) = (*header, Arc::clone(launch), *start);
        let left = header.len as usize - *got;
        let Some(guard) = launch.access() else {
            self.held.store(false, Ordering::SeqCst);
            host.abandon_chunk_receive(&header);
            *now = IncomingFrame::Discard { left };
            return Ok(ReceiveStep::Go);
        };
        let mut views = Vec::with_capacity(8);
        match slot {
            Some(slot) => views.push(slot.write_view(*got, left)),
            None => {
                let begin = start + *got as u64;
                guard.bytes().append_inbound_views(begin, left as u64, sys::PIECES_MAX, &mut views);
            }
        }
        let body = total_len_of_views(&views);
        // The next header is read with the chunk, but not on wires that carry descriptors, which this read
        // would drop.
        (*from, *to) = (0, 0);
        if body == left && !self.capabilities.shares_memory {
            views.push(WriteView::of_slice(&mut ahead[..HEADER]));
        }
        let received = self.wire.receive(&mut views)?;
        drop(views);
        let step = self.count_received(host, received, turn)?;
        *got += received.bytes.min(body);
        *to = received.bytes.saturating_sub(body);
        if *got == header.len as usize {
            let slot = slot.take();
            self.finish_chunk(host, (header, &launch, start), slot, &guard);
            *now = IncomingFrame::Header;
        }
        Ok(step)
    }

    /// Reports that a chunk is in place, and whether its checksum is right. From a slot, a GPU copies it first.
    fn finish_chunk(
        &self,
        host: &dyn LaneHost,
        (header, launch, start): (Header, &Arc<PeerLaunch>, u64),
        slot: Option<StagingSlot>,
        guard: &AccessGuard<'_>,
    ) {
        if let Some(slot) = slot {
            return self.finish_staged_chunk(host, (header, Arc::clone(launch), start), slot);
        }
        let intact = !header.has(flag::CHECKED)
            || guard.bytes().inbound_checksum(start, u64::from(header.len)) == header.payload_crc;
        host.end_chunk_receive(self.kind, &header, launch, start, intact);
    }

    /// Begins the frames whose headers were read ahead, and completes those that were read ahead entirely.
    fn begin_buffered_frames(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        replies: &mut PendingReplies,
    ) -> Result<ReceiveStep, LaneError> {
        while matches!(input.now, IncomingFrame::Header) && input.unused_bytes_read_ahead().len() >= HEADER {
            let mut bytes = [0; HEADER];
            bytes.copy_from_slice(&input.unused_bytes_read_ahead()[..HEADER]);
            let header = Header::decode(&bytes)?;
            input.consume_bytes_read_ahead(HEADER);
            let len = header.len as usize;
            input.now = self.begin_frame(host, header, &mut input.descriptors, replies)?;
            self.fill_body_from_bytes_read_ahead(host, input, len, replies)?;
        }
        Ok(ReceiveStep::Go)
    }

    /// Uses bytes that were read ahead as the begin of a frame's body.
    fn fill_body_from_bytes_read_ahead(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        len: usize,
        replies: &mut PendingReplies,
    ) -> Result<(), LaneError> {
        let there = input.unused_bytes_read_ahead().len().min(len);
        let (from, to) = (input.from, input.from + there);
        match &mut input.now {
            IncomingFrame::Header | IncomingFrame::Held { .. } | IncomingFrame::AwaitsSlot { .. } => {
                return Ok(());
            }
            IncomingFrame::Control { bytes, got, .. } => {
                bytes[..there].copy_from_slice(&input.ahead[from..to]);
                *got = there;
            }
            IncomingFrame::Discard { left } => *left -= there,
            IncomingFrame::Chunk { launch, start, got, slot, .. } => {
                let bytes = &input.ahead[from..to];
                if let Some(slot) = slot {
                    slot.write_view(0, there).copy_from(&ReadView::of_slice(bytes));
                } else if let Some(guard) = launch.access() {
                    guard.bytes().copy_in(*start, bytes);
                }
                *got = there;
            }
        }
        input.consume_bytes_read_ahead(there);
        if there < len {
            return Ok(());
        }
        match std::mem::replace(&mut input.now, IncomingFrame::Header) {
            IncomingFrame::Control { header, bytes, .. } => {
                self.process_control_frame(host, &header, bytes, &mut input.descriptors, replies)?;
            }
            IncomingFrame::Chunk { header, launch, start, slot, .. } => {
                if let Some(guard) = launch.access() {
                    self.finish_chunk(host, (header, &launch, start), slot, &guard);
                } else {
                    self.held.store(false, Ordering::SeqCst);
                    host.abandon_chunk_receive(&header);
                }
            }
            IncomingFrame::Header
            | IncomingFrame::Discard { .. }
            | IncomingFrame::Held { .. }
            | IncomingFrame::AwaitsSlot { .. } => {}
        }
        Ok(())
    }

    fn begin_frame(
        &self,
        host: &dyn LaneHost,
        header: Header,
        descriptors: &mut Vec<OwnedFd>,
        replies: &mut PendingReplies,
    ) -> Result<IncomingFrame, LaneError> {
        if !host.incarnations_match(&header) {
            return Err(LaneError::Fenced);
        }
        let len = header.len as usize;
        if header.kind == FrameKind::Data {
            return Ok(self.find_chunk_destination(host, header).unwrap_or(IncomingFrame::Held { header }));
        }
        if len == 0 {
            self.process_control_frame(host, &header, Vec::new(), descriptors, replies)?;
            return Ok(IncomingFrame::Header);
        }
        Ok(IncomingFrame::Control { header, bytes: vec![0; len], got: 0 })
    }

    /// Returns the state in which to receive a chunk; none if its destination is not known yet.
    fn find_chunk_destination(&self, host: &dyn LaneHost, header: Header) -> Option<IncomingFrame> {
        let mut landing = host.begin_chunk_receive(&header);
        if landing == ChunkDestination::Early {
            // From here on, a thread that learns the destination sees that this lane waits for it.
            self.held.store(true, Ordering::SeqCst);
            landing = host.begin_chunk_receive(&header);
            if landing == ChunkDestination::Early {
                return None;
            }
        }
        self.held.store(false, Ordering::SeqCst);
        Some(match landing {
            ChunkDestination::At(launch, start) if launch.lists.inbound.gpu().is_some() => {
                self.begin_staged_receive(host, (header, launch, start))
            }
            ChunkDestination::At(launch, start) => {
                IncomingFrame::Chunk { header, launch, start, got: 0, slot: None }
            }
            _ if header.len == 0 => IncomingFrame::Header,
            _ => IncomingFrame::Discard { left: header.len as usize },
        })
    }

    fn process_control_frame(
        &self,
        host: &dyn LaneHost,
        header: &Header,
        payload: Vec<u8>,
        descriptors: &mut Vec<OwnedFd>,
        replies: &mut PendingReplies,
    ) -> Result<(), LaneError> {
        if header.has(flag::CHECKED) && crc32c_of(&payload) != header.payload_crc {
            return Err(LaneError::Frame(FrameError::Damaged));
        }
        let wanted = match header.kind {
            FrameKind::Ring => 2,
            FrameKind::Region | FrameKind::Descriptor => 1,
            _ => 0,
        };
        let there = descriptors.len().min(wanted);
        let descriptors = descriptors.drain(..there).collect();
        Ok(host.process_control_frame(header, payload, descriptors, replies)?)
    }
}

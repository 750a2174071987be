//! The receiving half of a lane: it reads headers, and the bytes after them directly into their destination.
//!
//! The session interprets frames. Chunks carry checksums on wires that can break, if either side wants them:
//! a sender cannot overrule a receiver that wants them. Begin at [`Lane::pump_input`].

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::input::{LaneInput, Reading};
use super::state::{Lane, LaneError, LaneHost, Replies};
use crate::base::sync::lock;
use crate::io::sys;
use crate::io::wire::{Received, WireError};
use crate::launch::peer_launch::{AccessGuard, PeerLaunch};
use crate::memory::{WriteView, total};
use crate::protocol::frame::{FrameError, HEADER, Header, Kind, crc, flag};
use crate::protocol::link::{Landing, Violation};

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
            let mut replies = Replies::default();
            let step = self.receive_more(&*host, &mut input, &mut turn, &mut replies);
            host.reply(replies);
            match step {
                Ok(ReceiveStep::Go) => {}
                Ok(ReceiveStep::Drained) | Err(LaneError::Wire(WireError::Later)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive_more(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
        replies: &mut Replies,
    ) -> Result<ReceiveStep, LaneError> {
        if let Reading::Held { header } = input.now {
            let Some(placed) = self.place(host, header) else { return Ok(ReceiveStep::Drained) };
            input.now = placed;
            self.use_ahead(host, input, header.len as usize, replies)?;
        }
        self.receive_some(host, input, turn, replies)
    }

    /// Counts received bytes. If the wire is dry, an edge of its descriptor reports the next ones.
    fn count_received(
        &self,
        host: &dyn LaneHost,
        received: Received,
        turn: &mut usize,
    ) -> Result<ReceiveStep, LaneError> {
        let Received { bytes, dry } = received;
        if bytes == 0 {
            return Err(LaneError::Closed);
        }
        *turn += bytes;
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        host.mark_heard();
        Ok(if dry && !self.ending.load(Ordering::SeqCst) { ReceiveStep::Drained } else { ReceiveStep::Go })
    }

    fn receive_some(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
        replies: &mut Replies,
    ) -> Result<ReceiveStep, LaneError> {
        match &mut input.now {
            Reading::Held { .. } => Ok(ReceiveStep::Drained),
            Reading::Header => {
                if input.ahead().len() >= HEADER {
                    return self.begin_all(host, input, replies);
                }
                input.make_room();
                let LaneInput { ahead, to, descriptors, .. } = &mut *input;
                let received = self.wire.receive_with(&mut ahead[*to..], descriptors)?;
                if descriptors.len() > DESCRIPTORS_MAX {
                    return Err(LaneError::Violation(Violation("descriptors came that belong to nothing")));
                }
                let step = self.count_received(host, received, turn)?;
                input.to += received.bytes;
                self.begin_all(host, input, replies)?;
                // The rest of a frame that has begun must be read, unless its destination is not known.
                Ok(if matches!(input.now, Reading::Header) && input.ahead().len() < HEADER {
                    step
                } else {
                    ReceiveStep::Go
                })
            }
            Reading::Control { bytes, got, .. } => {
                let received = self.wire.receive(&mut [WriteView::of(&mut bytes[*got..])])?;
                *got += received.bytes;
                self.count_received(host, received, turn)?;
                if *got == bytes.len()
                    && let Reading::Control { header, bytes, .. } =
                        std::mem::replace(&mut input.now, Reading::Header)
                {
                    self.control_frame(host, &header, bytes, &mut input.descriptors, replies)?;
                }
                Ok(ReceiveStep::Go)
            }
            Reading::Chunk { .. } => self.receive_chunk(host, input, turn),
            Reading::Discard { left } => {
                let bytes = self.wire.discard(*left)?;
                *left -= bytes;
                let over = *left == 0;
                self.count_received(host, Received { bytes, dry: false }, turn)?;
                if over {
                    input.now = Reading::Header;
                }
                Ok(ReceiveStep::Go)
            }
        }
    }

    /// Receives more of a chunk, directly into its destination.
    fn receive_chunk(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        turn: &mut usize,
    ) -> Result<ReceiveStep, LaneError> {
        let Reading::Chunk { header, launch, start, got } = &mut input.now else {
            return Ok(ReceiveStep::Go);
        };
        let (header, launch, start) = (*header, Arc::clone(launch), *start);
        let len = header.len as usize;
        let Some(guard) = launch.access() else {
            host.abandon_chunk(&header);
            input.now = Reading::Discard { left: len - *got };
            return Ok(ReceiveStep::Go);
        };
        let mut done = *got;
        let mut views = Vec::with_capacity(8);
        let left = (len - done) as u64;
        guard.bytes().inbound(start + done as u64, left, sys::PIECES_MAX, &mut views);
        let body = total(&views);
        // The next header is read with the chunk, but not on wires that carry descriptors, which this read
        // would drop.
        (input.from, input.to) = (0, 0);
        if body as u64 == left && !self.capabilities.shares_memory {
            views.push(WriteView::of(&mut input.ahead[..HEADER]));
        }
        let received = self.wire.receive(&mut views)?;
        drop(views);
        let step = self.count_received(host, received, turn)?;
        done += received.bytes.min(body);
        input.to = received.bytes.saturating_sub(body);
        if done == len {
            self.finish_chunk(host, &header, &launch, &guard, start);
            drop(guard);
            input.now = Reading::Header;
        } else if let Reading::Chunk { got, .. } = &mut input.now {
            *got = done;
        }
        Ok(step)
    }

    /// Reports that a chunk is in place, and whether its checksum is right.
    fn finish_chunk(
        &self,
        host: &dyn LaneHost,
        header: &Header,
        launch: &Arc<PeerLaunch>,
        guard: &AccessGuard<'_>,
        start: u64,
    ) {
        let intact = !header.has(flag::CHECKED)
            || guard.bytes().inbound_checksum(start, u64::from(header.len)) == header.payload_crc;
        host.end_landing(self.kind, header, launch, start, intact);
    }

    /// Begins the frames whose headers were read ahead, and completes those that were read ahead entirely.
    fn begin_all(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        replies: &mut Replies,
    ) -> Result<ReceiveStep, LaneError> {
        while matches!(input.now, Reading::Header) && input.ahead().len() >= HEADER {
            let mut bytes = [0; HEADER];
            bytes.copy_from_slice(&input.ahead()[..HEADER]);
            let header = Header::decode(&bytes)?;
            input.take(HEADER);
            let len = header.len as usize;
            input.now = self.begin(host, header, &mut input.descriptors, replies)?;
            self.use_ahead(host, input, len, replies)?;
        }
        Ok(ReceiveStep::Go)
    }

    /// Uses bytes that were read ahead as the begin of a frame's body.
    fn use_ahead(
        &self,
        host: &dyn LaneHost,
        input: &mut LaneInput,
        len: usize,
        replies: &mut Replies,
    ) -> Result<(), LaneError> {
        let there = input.ahead().len().min(len);
        let (from, to) = (input.from, input.from + there);
        match &mut input.now {
            Reading::Header | Reading::Held { .. } => return Ok(()),
            Reading::Control { bytes, got, .. } => {
                bytes[..there].copy_from_slice(&input.ahead[from..to]);
                *got = there;
            }
            Reading::Discard { left } => *left -= there,
            Reading::Chunk { launch, start, got, .. } => {
                if let Some(guard) = launch.access() {
                    guard.bytes().copy_in(*start, &input.ahead[from..to]);
                }
                *got = there;
            }
        }
        input.take(there);
        if there < len {
            return Ok(());
        }
        match std::mem::replace(&mut input.now, Reading::Header) {
            Reading::Control { header, bytes, .. } => {
                self.control_frame(host, &header, bytes, &mut input.descriptors, replies)?;
            }
            Reading::Chunk { header, launch, start, .. } => {
                if let Some(guard) = launch.access() {
                    self.finish_chunk(host, &header, &launch, &guard, start);
                } else {
                    host.abandon_chunk(&header);
                }
            }
            Reading::Header | Reading::Discard { .. } | Reading::Held { .. } => {}
        }
        Ok(())
    }

    fn begin(
        &self,
        host: &dyn LaneHost,
        header: Header,
        descriptors: &mut Vec<OwnedFd>,
        replies: &mut Replies,
    ) -> Result<Reading, LaneError> {
        if !host.is_between(&header) {
            return Err(LaneError::Fenced);
        }
        let len = header.len as usize;
        if header.kind == Kind::Data {
            return Ok(self.place(host, header).unwrap_or(Reading::Held { header }));
        }
        if len == 0 {
            self.control_frame(host, &header, Vec::new(), descriptors, replies)?;
            return Ok(Reading::Header);
        }
        Ok(Reading::Control { header, bytes: vec![0; len], got: 0 })
    }

    /// Returns the state in which to receive a chunk; none if its destination is not known yet.
    fn place(&self, host: &dyn LaneHost, header: Header) -> Option<Reading> {
        let mut landing = host.begin_landing(&header);
        if landing == Landing::Early {
            // From here on, a thread that learns the destination sees that this lane waits for it.
            self.held.store(true, Ordering::SeqCst);
            landing = host.begin_landing(&header);
            if landing == Landing::Early {
                return None;
            }
        }
        self.held.store(false, Ordering::SeqCst);
        Some(match landing {
            Landing::At(launch, start) => Reading::Chunk { header, launch, start, got: 0 },
            _ if header.len == 0 => Reading::Header,
            _ => Reading::Discard { left: header.len as usize },
        })
    }

    fn control_frame(
        &self,
        host: &dyn LaneHost,
        header: &Header,
        payload: Vec<u8>,
        descriptors: &mut Vec<OwnedFd>,
        replies: &mut Replies,
    ) -> Result<(), LaneError> {
        if header.has(flag::CHECKED) && crc(&payload) != header.payload_crc {
            return Err(LaneError::Frame(FrameError::Damaged));
        }
        let wanted = match header.kind {
            Kind::Ring => 2,
            Kind::Region | Kind::Descriptor => 1,
            _ => 0,
        };
        let there = descriptors.len().min(wanted);
        let descriptors = descriptors.drain(..there).collect();
        Ok(host.control_frame(header, payload, descriptors, replies)?)
    }
}

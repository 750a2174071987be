//! The sending half of a lane: sends control frames first, and then chunks directly from their buffers, or from the slots of
//! `staging.rs`.
//!
//! The session decides what is sent ([`LaneHost`]). Begin at [`Lane::pump_output`].

use std::sync::atomic::Ordering;

use super::output::{ChunkBody, OutgoingFrame};
use super::state::{Lane, LaneError, LaneHost};
use crate::io::sys;
use crate::io::wire::WireError;
use crate::memory::ReadView;
use crate::protocol::frame::{FrameKind, HEADER, crc32c_of, flag};
use crate::protocol::link::ControlFrame;

impl Lane {
    /// Sends queued frames until there are none or the wire is full.
    pub fn pump_output(&self) -> Result<(), LaneError> {
        let Some(host) = self.host() else { return Err(LaneError::Closed) };
        self.output.run_unless_running(|output| self.send_until_blocked(&*host, output))
    }

    /// Sends until the wire is full, or nothing is queued.
    fn send_until_blocked(&self, host: &dyn LaneHost, output: &mut OutgoingFrame) -> Result<(), LaneError> {
        self.staged.drop_closing();
        loop {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            if matches!(output, OutgoingFrame::Idle) && !self.begin_next_frame(host, output) {
                return self.flush();
            }
            let sent = match self.send_part_of_frame(host, output) {
                Ok(sent) => sent,
                Err(WireError::Later) => return Ok(()),
                Err(error) => return Err(LaneError::Wire(error)),
            };
            self.bytes.fetch_add(sent as u64, Ordering::Relaxed);
        }
    }

    /// Flushes the bytes that the wire has buffered; an edge reports room for the rest.
    fn flush(&self) -> Result<(), LaneError> {
        if !self.capabilities.is_buffered {
            return Ok(());
        }
        match self.wire.flush() {
            Ok(()) | Err(WireError::Later) => Ok(()),
            Err(error) => Err(LaneError::Wire(error)),
        }
    }

    /// Begins the next frame, if there is one: control frames first.
    fn begin_next_frame(&self, host: &dyn LaneHost, output: &mut OutgoingFrame) -> bool {
        loop {
            if self.control && self.begin_control_frames(host, output) || self.begin_chunk_frame(host, output)
            {
                return true;
            }
            // A control frame was queued between the two, and the chunk waits for it.
            if !self.control || !host.has_queued_control_frames() {
                return false;
            }
        }
    }

    fn begin_control_frames(&self, host: &dyn LaneHost, output: &mut OutgoingFrame) -> bool {
        // All queued frames, up to a bound, leave with one system call.
        let mut bytes = Vec::new();
        let mut descriptor = None;
        while bytes.len() < 256 << 10 {
            let Some(frame) = host.next_control_frame(descriptor.is_none() && bytes.is_empty()) else {
                break;
            };
            if matches!(frame.header.kind, FrameKind::Region | FrameKind::Ring | FrameKind::Descriptor) {
                descriptor = Some((frame.header.kind, frame.header.index));
            }
            append_encoded_control_frame(&frame, &mut bytes);
            if descriptor.is_some() {
                break;
            }
        }
        if bytes.is_empty() {
            return false;
        }
        *output = OutgoingFrame::Bytes { bytes, sent: 0, descriptor };
        true
    }

    fn begin_chunk_frame(&self, host: &dyn LaneHost, output: &mut OutgoingFrame) -> bool {
        loop {
            // The copies of the next chunks begin before a staged one is sent, so that the GPU does not wait for the lane.
            if !self.staged.has_room() && self.begin_staged_frame(host, output) {
                return true;
            }
            let has_room = self.staged.has_room();
            let Some(push) = host.next_chunk(self.id, self.control, has_room) else {
                if self.begin_staged_frame(host, output) {
                    return true;
                }
                if !has_room && self.staged.has_room() {
                    continue;
                }
                return false;
            };
            if push.token.lists.outbound.gpu().is_some() {
                self.stage_chunk(host, push);
                continue;
            }
            // A chunk of a launch that was cancelled since does not begin.
            let Some(guard) = push.token.access_owned() else { continue };
            let (mut header, start) = (push.header, push.start);
            if self.checks {
                // The checksum brings the bytes into the cache, from which the kernel copies them a moment
                // later.
                header.flags |= flag::CHECKED;
                header.payload_crc = guard.bytes().outbound_checksum(start, u64::from(header.len));
            }
            let len = header.len as usize;
            let body = ChunkBody::InPlace(guard, start);
            *output = OutgoingFrame::Chunk { header: header.encode(), body, len, sent: 0 };
            return true;
        }
    }

    fn send_part_of_frame(
        &self,
        host: &dyn LaneHost,
        output: &mut OutgoingFrame,
    ) -> Result<usize, WireError> {
        match output {
            OutgoingFrame::Idle => Ok(0),
            OutgoingFrame::Bytes { bytes, sent, descriptor } => {
                let now = match *descriptor {
                    Some((kind, region)) if *sent == 0 => {
                        host.send_with_descriptors(&*self.wire, bytes, kind, region)?
                    }
                    _ => self.wire.send(&[ReadView::of_slice(&bytes[*sent..])])?,
                };
                *sent += now;
                if *sent == bytes.len() {
                    *output = OutgoingFrame::Idle;
                }
                Ok(now)
            }
            OutgoingFrame::Chunk { header, body, len, sent } => {
                let from = sent.saturating_sub(HEADER);
                let left = *len - from;
                let launch = body.launch();
                if launch.is_closing() {
                    // The launch was cancelled in the middle of a chunk: the frame is completed from a copy of its
                    // bytes, and the buffers or the slot are free.
                    let mut bytes = Vec::new();
                    if *sent > 0 {
                        bytes.extend_from_slice(&header[(*sent).min(HEADER)..]);
                        let mut views = Vec::new();
                        body.append_views(from, left, usize::MAX, &mut views);
                        views.iter().for_each(|view| view.with_bytes(|rest| bytes.extend_from_slice(rest)));
                    }
                    *output = if bytes.is_empty() {
                        OutgoingFrame::Idle
                    } else {
                        OutgoingFrame::Bytes { bytes, sent: 0, descriptor: None }
                    };
                    return Ok(0);
                }
                let mut views = Vec::with_capacity(8);
                if *sent < HEADER {
                    views.push(ReadView::of_slice(&header[*sent..]));
                }
                body.append_views(from, left, sys::PIECES_MAX, &mut views);
                let now = self.wire.send(&views)?;
                launch.set_transport(self.kind);
                launch.add_progress((now as u64).min(left as u64));
                drop(views);
                *sent += now;
                if *sent == HEADER + *len {
                    host.count_sent(self.kind, *len as u64);
                    *output = OutgoingFrame::Idle;
                }
                Ok(now)
            }
        }
    }
}

/// Appends an encoded control frame.
fn append_encoded_control_frame(frame: &ControlFrame, into: &mut Vec<u8>) {
    let mut header = frame.header;
    if !frame.payload.is_empty() {
        header.flags |= flag::CHECKED;
        header.payload_crc = crc32c_of(&frame.payload);
    }
    into.extend_from_slice(&header.encode());
    into.extend_from_slice(&frame.payload);
}

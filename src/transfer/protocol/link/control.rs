//! Control frames: each arrives once and in order, even if the connection that carried it is lost and made anew.
//!
//! It does not know what a frame says. Begin at [`Control::accept`].

use std::collections::VecDeque;

use super::message::{Frame, Violation};
use crate::protocol::frame::{Header, Kind};

/// After so many frames without one of its own to carry it, a side acknowledges on purpose.
const ACK_EVERY: u32 = 64;

/// What is to be said, what was said and not yet acknowledged, and what was heard.
pub struct Control {
    queue: VecDeque<Frame>,
    unacknowledged: VecDeque<Frame>,
    keeps: bool,
    /// Everything further goes to the ring.
    pub switched: bool,
    /// Regions, and their lengths, whose descriptors have to go by the socket.
    pub descriptors: VecDeque<(u32, u64)>,
    /// Bytes of all that was said and not yet taken or acknowledged.
    unacknowledged_bytes: usize,
    numbered: u32,
    heard: u32,
    acknowledged: u32,
}

fn size(frame: &Frame) -> usize {
    size_of::<Frame>() + frame.payload.len()
}

/// Frames are numbered from 1 on; 0 is no number.
const fn following(number: u32) -> u32 {
    match number.wrapping_add(1) {
        0 => 1,
        next => next,
    }
}

impl Control {
    /// Makes that of a link that keeps (or does not keep) what was not acknowledged.
    pub const fn new(keeps: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            keeps,
            switched: false,
            descriptors: VecDeque::new(),
            unacknowledged_bytes: 0,
            numbered: 0,
            heard: 0,
            acknowledged: 0,
        }
    }

    pub fn push(&mut self, mut frame: Frame) {
        self.numbered = following(self.numbered);
        frame.header.control = self.numbered;
        self.unacknowledged_bytes += size(&frame);
        self.queue.push_back(frame);
    }

    /// Returns the next frame to be sent on the control connection.
    pub fn next(&mut self, bare: Header) -> Option<Frame> {
        let mut frame = match self.queue.pop_front() {
            Some(frame) => frame,
            None if self.keeps && self.heard.wrapping_sub(self.acknowledged) >= ACK_EVERY => {
                Frame { header: Header { kind: Kind::Ack, ..bare }, payload: Vec::new() }
            }
            None => return None,
        };
        self.acknowledged = self.heard;
        frame.header.ack = self.heard;
        if frame.header.control != 0 {
            if self.keeps {
                self.unacknowledged.push_back(frame.clone());
            } else {
                self.unacknowledged_bytes -= size(&frame);
            }
        }
        Some(frame)
    }

    /// Returns the frame whose turn it is.
    pub fn first(&self) -> Option<&Frame> {
        self.queue.front()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && !(self.keeps && self.heard.wrapping_sub(self.acknowledged) >= ACK_EVERY)
    }

    /// Returns whether the frame is new. Drops what it acknowledges.
    pub fn accept(&mut self, header: &Header) -> Result<bool, Violation> {
        self.acknowledge(header.ack);
        if header.control == 0 {
            return Ok(true);
        }
        if header.control == following(self.heard) {
            self.heard = header.control;
            return Ok(true);
        }
        if self.heard.wrapping_sub(header.control) < u32::MAX / 2 {
            return Ok(false);
        }
        Err(Violation("control frames are missing"))
    }

    pub fn acknowledge(&mut self, number: u32) {
        while let Some(first) = self.unacknowledged.front()
            && number.wrapping_sub(first.header.control) < u32::MAX / 2
        {
            self.unacknowledged_bytes -= size(first);
            self.unacknowledged.pop_front();
        }
    }

    /// Bytes of all that was said and not yet heard, as far as is known.
    pub const fn unacknowledged_bytes(&self) -> usize {
        self.unacknowledged_bytes
    }

    /// Returns the number of the last frame that was heard.
    pub const fn heard(&self) -> u32 {
        self.heard
    }

    /// Puts back what the peer has not heard: the connection was made anew, and it has heard up to `number`.
    pub fn resend_after(&mut self, number: u32) {
        self.acknowledge(number);
        while let Some(frame) = self.unacknowledged.pop_back() {
            self.queue.push_front(frame);
        }
    }
}

//! The queue of control frames: numbers the frames, and sends them again after the control lane was lost and dialled
//! again. So each frame arrives once and in order.
//!
//! `receive.rs` interprets the frames. Begin at [`ControlQueue::push`] and [`ControlQueue::accept_frame_numbers`].

use std::collections::VecDeque;

use super::interface::{ControlFrame, ProtocolViolation};
use crate::protocol::frame::{FrameKind, Header};

/// The number of received frames after which a side sends an `Ack` if it has no other frame to carry the
/// acknowledgement.
const ACK_EVERY: u32 = 64;

/// The queue of control frames to send, the unacknowledged ones, and the number of the last one received.
pub struct ControlQueue {
    queue: VecDeque<ControlFrame>,
    unacknowledged: VecDeque<ControlFrame>,
    keeps: bool,
    /// Whether the `Switch` was sent: all later frames go to the ring.
    pub switched: bool,
    /// The headers of regions in the ring whose descriptors must go by the socket.
    pub descriptors: VecDeque<Header>,
    /// The bytes of all frames that are queued or unacknowledged.
    queued_or_unacknowledged_bytes: usize,
    numbered: u32,
    heard: u32,
    acknowledged: u32,
}

fn memory_of_frame(frame: &ControlFrame) -> usize {
    size_of::<ControlFrame>() + frame.payload.len()
}

/// Returns the next frame number. Numbers begin at 1; 0 means "no number".
const fn next_number(number: u32) -> u32 {
    match number.wrapping_add(1) {
        0 => 1,
        next => next,
    }
}

impl ControlQueue {
    /// Creates the control frames of a link that keeps, or does not keep, unacknowledged frames.
    pub const fn new(keeps: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            keeps,
            switched: false,
            descriptors: VecDeque::new(),
            queued_or_unacknowledged_bytes: 0,
            numbered: 0,
            heard: 0,
            acknowledged: 0,
        }
    }

    pub fn push(&mut self, mut frame: ControlFrame) {
        self.numbered = next_number(self.numbered);
        frame.header.control = self.numbered;
        self.queued_or_unacknowledged_bytes += memory_of_frame(&frame);
        self.queue.push_back(frame);
    }

    /// Returns the next frame to send on the control lane.
    pub fn next(&mut self, bare: Header) -> Option<ControlFrame> {
        let mut frame = match self.queue.pop_front() {
            Some(frame) => frame,
            None if self.keeps && self.heard.wrapping_sub(self.acknowledged) >= ACK_EVERY => {
                ControlFrame { header: Header { kind: FrameKind::Ack, ..bare }, payload: Vec::new() }
            }
            None => return None,
        };
        self.acknowledged = self.heard;
        frame.header.ack = self.heard;
        if frame.header.control != 0 {
            if self.keeps {
                self.unacknowledged.push_back(frame.clone());
            } else {
                self.queued_or_unacknowledged_bytes -= memory_of_frame(&frame);
            }
        }
        Some(frame)
    }

    /// Returns the first queued frame.
    pub fn first_queued(&self) -> Option<&ControlFrame> {
        self.queue.front()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && !(self.keeps && self.heard.wrapping_sub(self.acknowledged) >= ACK_EVERY)
    }

    /// Processes the numbers of a received frame: drops the frames that it acknowledges, and returns whether
    /// it is new.
    pub fn accept_frame_numbers(&mut self, header: &Header) -> Result<bool, ProtocolViolation> {
        self.acknowledge(header.ack);
        if header.control == 0 {
            return Ok(true);
        }
        if header.control == next_number(self.heard) {
            self.heard = header.control;
            return Ok(true);
        }
        if self.heard.wrapping_sub(header.control) < u32::MAX / 2 {
            return Ok(false);
        }
        Err(ProtocolViolation("control frames are missing"))
    }

    pub fn acknowledge(&mut self, number: u32) {
        while let Some(first) = self.unacknowledged.front()
            && number.wrapping_sub(first.header.control) < u32::MAX / 2
        {
            self.queued_or_unacknowledged_bytes -= memory_of_frame(first);
            self.unacknowledged.pop_front();
        }
    }

    /// Returns the bytes of all frames that are queued or unacknowledged.
    pub const fn queued_or_unacknowledged_bytes(&self) -> usize {
        self.queued_or_unacknowledged_bytes
    }

    /// Returns the number of the last frame received.
    pub const fn last_received(&self) -> u32 {
        self.heard
    }

    /// Queues again the frames after `number`, the last one that the peer has received: the control lane was
    /// connected again.
    pub fn resend_after(&mut self, number: u32) {
        self.acknowledge(number);
        while let Some(frame) = self.unacknowledged.pop_back() {
            self.queue.push_front(frame);
        }
    }
}

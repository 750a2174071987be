//! The input state of a lane: the frame that it is receiving, and the bytes that it has read ahead.
//!
//! `receive.rs` reads the bytes from the wire. Begin at [`IncomingFrame`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::io::staging::StagingSlot;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::frame::{HEADER, Header};

/// The bytes that a control lane reads ahead: many control frames arrive together.
const AHEAD_CONTROL: usize = 64 << 10;
/// The bytes that other lanes read ahead: the next header arrives with the end of a chunk, and no byte of a
/// chunk is copied twice.
const AHEAD_BULK: usize = HEADER;
/// The frame that is being received.
pub enum IncomingFrame {
    /// The header of the next frame.
    Header,
    /// The payload of a control frame.
    Control {
        /// The frame's header.
        header: Header,
        /// The payload.
        bytes: Vec<u8>,
        /// The number of bytes received.
        got: usize,
    },
    /// A chunk, received directly into its destination, or into a slot.
    Chunk {
        /// Its header.
        header: Header,
        /// The launch that it belongs to.
        launch: Arc<PeerLaunch>,
        /// Its first byte in the inbound stream.
        start: u64,
        /// The number of bytes received.
        got: usize,
        /// The slot, if some are bytes for a GPU.
        slot: Option<StagingSlot>,
    },
    /// A chunk with bytes of a GPU, for which there is no slot yet. The lane reads nothing more until there is.
    AwaitsSlot {
        /// Its header.
        header: Header,
        /// The launch that it belongs to.
        launch: Arc<PeerLaunch>,
        /// Its first byte in the inbound stream.
        start: u64,
    },
    /// Bytes that are discarded.
    Discard {
        /// The number of bytes still to discard.
        left: usize,
    },
    /// A chunk whose destination is not known yet. The lane reads nothing more until it is.
    Held {
        /// Its header.
        header: Header,
    },
}

impl IncomingFrame {
    /// Returns the header of a chunk whose landing has begun.
    pub const fn begun_chunk(&self) -> Option<&Header> {
        match self {
            Self::Chunk { header, .. } | Self::AwaitsSlot { header, .. } => Some(header),
            Self::Header | Self::Control { .. } | Self::Discard { .. } | Self::Held { .. } => None,
        }
    }
}

/// The input state: the frame that is being received, and the bytes that were read ahead of it.
pub struct LaneInput {
    /// The frame that is being received.
    pub now: IncomingFrame,
    /// The buffer for bytes read ahead.
    pub ahead: Box<[u8]>,
    /// The begin of the bytes in `ahead` that were read and not yet used.
    pub from: usize,
    /// The end of these bytes.
    pub to: usize,
    /// The descriptors that arrived before their frames.
    pub descriptors: Vec<OwnedFd>,
}

impl LaneInput {
    /// Creates the state of a lane on which nothing has arrived yet.
    pub fn new(control: bool) -> Self {
        let ahead = vec![0; if control { AHEAD_CONTROL } else { AHEAD_BULK }].into_boxed_slice();
        Self { now: IncomingFrame::Header, ahead, from: 0, to: 0, descriptors: Vec::new() }
    }

    /// Returns the bytes that were read ahead and not yet used.
    pub fn unused_bytes_read_ahead(&self) -> &[u8] {
        &self.ahead[self.from..self.to]
    }

    /// Drops `len` bytes that were read ahead.
    pub fn consume_bytes_read_ahead(&mut self, len: usize) {
        self.from += len;
    }

    /// Moves the bytes that were read ahead to the begin of the buffer.
    pub fn compact(&mut self) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
    }
}

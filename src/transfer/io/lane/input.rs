//! The input state of a lane: the frame that it is receiving, and the bytes that it read ahead.
//!
//! It reads nothing itself: `receive.rs` does. Begin at [`Reading`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::frame::{HEADER, Header};

/// Read ahead on lanes of control frames: many come at once.
const AHEAD_CONTROL: usize = 64 << 10;
/// Read ahead on other lanes: the next header comes with the end of a chunk, and no byte of a chunk is copied twice.
const AHEAD_BULK: usize = HEADER;
/// What is being received.
pub enum Reading {
    /// The header of the next frame.
    Header,
    /// The payload of a control frame.
    Control {
        /// The frame's header.
        header: Header,
        /// The payload.
        bytes: Vec<u8>,
        /// How much of it is there.
        got: usize,
    },
    /// A chunk, straight into its place.
    Chunk {
        /// Its header.
        header: Header,
        /// Where it belongs.
        launch: Arc<PeerLaunch>,
        /// Its first byte in the stream.
        start: u64,
        /// How much of it is there.
        got: usize,
    },
    /// Bytes that belong nowhere.
    Discard {
        /// How many are to come.
        left: usize,
    },
    /// A chunk whose place is not known yet: nothing more is read until it is.
    Held {
        /// Its header.
        header: Header,
    },
}

/// What is being received, and what was read ahead of it: a wire is read for frames, not for bytes.
pub struct LaneInput {
    /// What is being received now.
    pub now: Reading,
    /// Bytes read ahead.
    pub ahead: Box<[u8]>,
    /// What of `ahead` was read and not yet used.
    pub from: usize,
    /// See `from`.
    pub to: usize,
    /// Descriptors that came, and the frames that they belong to have not.
    pub descriptors: Vec<OwnedFd>,
}

impl LaneInput {
    /// Makes that of a lane on which nothing has come yet.
    pub fn new(control: bool) -> Self {
        let ahead = vec![0; if control { AHEAD_CONTROL } else { AHEAD_BULK }].into_boxed_slice();
        Self { now: Reading::Header, ahead, from: 0, to: 0, descriptors: Vec::new() }
    }

    /// Returns what was read ahead and not yet used.
    pub fn ahead(&self) -> &[u8] {
        &self.ahead[self.from..self.to]
    }

    /// Drops so much of what was read ahead.
    pub fn take(&mut self, len: usize) {
        self.from += len;
    }

    /// Makes room for more, after what is there.
    pub fn make_room(&mut self) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
    }
}

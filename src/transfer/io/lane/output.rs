//! The output state of a lane: the frame that it is sending.
//!
//! `send.rs` sends the frame. Begin at [`OutgoingFrame`].

use std::sync::Arc;

use crate::io::staging::StagingSlot;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::frame::{FrameKind, HEADER};

/// The frame that is being sent.
pub enum OutgoingFrame {
    /// Nothing.
    Idle,
    /// Control frames, or the copied rest of a chunk whose buffers were released.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
        /// The number of bytes sent.
        sent: usize,
        /// The kind and the number of the frame whose descriptors go with the first byte.
        descriptor: Option<(FrameKind, u32)>,
    },
    /// A chunk, sent directly from its buffers.
    Chunk {
        /// Its header.
        header: [u8; HEADER],
        /// The guard of its bytes.
        guard: OwnedAccessGuard,
        /// Its first byte in the outbound stream.
        start: u64,
        /// Its length in bytes.
        len: usize,
        /// The number of bytes sent, including the header.
        sent: usize,
    },
    /// A chunk with bytes of a GPU, sent from its slot. The buffers of the launch are not used any more.
    StagedChunk {
        /// Its header.
        header: [u8; HEADER],
        /// The launch.
        launch: Arc<PeerLaunch>,
        /// The slot.
        slot: StagingSlot,
        /// Its length in bytes.
        len: usize,
        /// The number of bytes sent, including the header.
        sent: usize,
    },
}

impl OutgoingFrame {
    /// Returns the frame that sends the copied rest of a chunk, which may be empty.
    pub fn of_rest(bytes: Vec<u8>) -> Self {
        if bytes.is_empty() { Self::Idle } else { Self::Bytes { bytes, sent: 0, descriptor: None } }
    }
}

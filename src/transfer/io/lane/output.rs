//! The output state of a lane: the frame that it is sending.
//!
//! It sends nothing itself: `send.rs` does. Begin at [`LaneOutput`].

use crate::launch::peer_launch::OwnedAccessGuard;
use crate::protocol::frame::{HEADER, Kind};

/// What is being sent.
pub enum LaneOutput {
    /// Nothing.
    Idle,
    /// Control frames, or what is left of a chunk whose buffers are not used any more.
    Bytes {
        /// All of them.
        bytes: Vec<u8>,
        /// How many of them have left.
        sent: usize,
        /// The kind and the number of the frame whose descriptors go with the first byte.
        descriptor: Option<(Kind, u32)>,
    },
    /// A chunk, straight out of its buffers.
    Chunk {
        /// Its header.
        header: [u8; HEADER],
        /// Keeps its bytes.
        guard: OwnedAccessGuard,
        /// Its first byte in the stream.
        start: u64,
        /// How long it is.
        len: usize,
        /// How much of the header and of it has left.
        sent: usize,
    },
}

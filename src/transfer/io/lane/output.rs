//! The output state of a lane: the frame that it is sending.
//!
//! `send.rs` sends the frame. Begin at [`OutgoingFrame`].

use std::sync::Arc;

use crate::io::staging::StagingSlot;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::memory::ReadView;
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
    /// A chunk.
    Chunk {
        /// Its header.
        header: [u8; HEADER],
        /// Where its bytes are.
        body: ChunkBody,
        /// Its length in bytes.
        len: usize,
        /// The number of bytes sent, including the header.
        sent: usize,
    },
}

/// The bytes of a chunk that is being sent.
pub enum ChunkBody {
    /// In the buffers of the launch, from this byte of the outbound stream on, under the guard of the launch.
    InPlace(OwnedAccessGuard, u64),
    /// In a slot, because some are bytes of a GPU. The buffers of the launch are not used any more.
    Staged(Arc<PeerLaunch>, StagingSlot),
}

impl ChunkBody {
    /// Returns the launch.
    pub const fn launch(&self) -> &Arc<PeerLaunch> {
        match self {
            Self::InPlace(guard, _) => guard.launch(),
            Self::Staged(launch, _) => launch,
        }
    }

    /// Appends views of the `len` bytes from `from` on, until `into` has `most`.
    pub fn append_views<'a>(&'a self, from: usize, len: usize, most: usize, into: &mut Vec<ReadView<'a>>) {
        match self {
            Self::InPlace(guard, start) => {
                guard.bytes().append_outbound_views(start + from as u64, len as u64, most, into);
            }
            Self::Staged(_, slot) => into.push(slot.read_view(from, len)),
        }
    }
}

//! A buffer for the bytes of an incomplete frame or header block. A header block is charged to the budget of its
//! connection. A frame is charged to a pool that all connections share, and a short frame is not charged.
//!
//! `state_budget.rs` has the budget and the pools. Begin at [`ChargedBuffer::append`].

use super::frame::{ConnectionError, ErrorCode};
use super::state_budget::StateMemoryBudget;

/// The memory of an incomplete frame that is not charged: every frame fits except long SETTINGS and HEADERS.
const UNCHARGED: usize = 4 << 10;

/// Bytes whose memory is charged until [`Self::release`].
///
/// The default is a buffer for one frame. It is not charged to the connection's budget, and a short frame not at all: a
/// connection that has used up its budget must still be able to send the frames that free some of it.
#[derive(Debug, Default)]
pub(super) struct ChargedBuffer {
    bytes: Vec<u8>,
    charged: usize,
    is_header_block: bool,
}

impl ChargedBuffer {
    /// Returns a buffer for a header block, which the connection's budget bounds.
    pub(super) fn for_header_block() -> Self {
        Self { is_header_block: true, ..Self::default() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Adds bytes; their memory is charged before it is allocated.
    pub(super) fn append(
        &mut self,
        piece: &[u8],
        budget: &mut StateMemoryBudget,
    ) -> Result<(), ConnectionError> {
        // The buffer grows by doubling.
        let room = 2 * (self.bytes.len() + piece.len());
        let uncharged = if self.is_header_block { 0 } else { UNCHARGED };
        let room = room.saturating_sub(self.charged + uncharged);
        let charged = if self.is_header_block { budget.charge(room) } else { budget.charge_frame(room) };
        if charged.is_err() {
            return Err(ConnectionError::new(
                ErrorCode::EnhanceYourCalm,
                "no memory is left for a frame or a header block",
            ));
        }
        self.charged += room;
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    /// Fills the buffer up to `length` bytes from the front of `input`; returns whether it now has `length` bytes.
    pub(super) fn fill_up_to(
        &mut self,
        input: &mut &[u8],
        length: usize,
        budget: &mut StateMemoryBudget,
    ) -> Result<bool, ConnectionError> {
        let missing = length.saturating_sub(self.bytes.len()).min(input.len());
        let (taken, rest) = input.split_at_checked(missing).unwrap_or_default();
        self.append(taken, budget)?;
        *input = rest;
        Ok(self.bytes.len() >= length)
    }

    pub(super) fn release(self, budget: &mut StateMemoryBudget) {
        if self.is_header_block {
            budget.release(self.charged);
        } else {
            budget.release_frame();
        }
    }
}

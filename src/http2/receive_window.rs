//! The receive window of a stream or of a connection (RFC 9113, section 6.9).
//!
//! The window counts received bytes, and the [`Http2Sender`](super::Http2Sender) sends window updates. Begin at
//! [`ReceiveWindow::consume`].

use serde::{Deserialize, Serialize};

/// A receive window, as the peer knows it, and the consumed bytes that were not announced to the peer yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ReceiveWindow {
    /// At most 2³¹ − 1, and negative by at most one frame.
    left: i32,
    unannounced: u32,
}

impl ReceiveWindow {
    pub(super) fn new(size: u32) -> Self {
        Self { left: i32::try_from(size).unwrap_or(i32::MAX), unannounced: 0 }
    }

    /// Counts the payload of a DATA frame; returns `false` if the peer had no window for it.
    pub(super) fn consume(&mut self, bytes: usize) -> bool {
        self.left = self.left.saturating_sub(i32::try_from(bytes).unwrap_or(i32::MAX));
        self.left >= 0
    }

    /// Takes back consumed bytes; returns the window update to send, once at least `step` bytes are unannounced.
    pub(super) fn release(&mut self, bytes: usize, step: u32) -> Option<u32> {
        self.unannounced = self.unannounced.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if self.unannounced < step {
            return None;
        }
        let more = std::mem::take(&mut self.unannounced);
        self.left = self.left.saturating_add_unsigned(more);
        Some(more)
    }
}

//! One stream in progress: the input that is still expected from the peer, and the output that waits.
//!
//! Begin at [`StreamState`]; [`StreamOutput`] has the waiting frames.

use std::num::NonZero;

use serde::{Deserialize, Serialize};

use super::receive_window::ReceiveWindow;
use super::send_queue::StreamOutput;

/// The state of a stream in progress.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) input: StreamInput,
    pub(super) output: StreamOutput,
    /// The caller's number for the stream.
    pub(super) slot: Option<u64>,
    /// The bytes charged for its answer.
    pub(super) charged: usize,
}

/// The peer's side of a stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StreamInput {
    pub(super) window: ReceiveWindow,
    /// Whether the peer has ended its side.
    is_ended: bool,
    /// One more than the missing bytes of the body, if the request announced its length. It takes eight bytes, not sixteen:
    /// a peer may have very many streams in progress.
    content_left_plus_one: Option<NonZero<u64>>,
}

impl StreamInput {
    pub(super) fn new(window: u32, is_ended: bool, content: Option<u64>) -> Self {
        let mut input = Self { window: ReceiveWindow::new(window), is_ended, content_left_plus_one: None };
        input.set_content_left(content);
        input
    }

    /// Returns the missing bytes of the body, if the request announced its length.
    fn content_left(&self) -> Option<u64> {
        self.content_left_plus_one.map(|left| left.get() - 1)
    }

    fn set_content_left(&mut self, left: Option<u64>) {
        self.content_left_plus_one = left.map(|left| NonZero::<u64>::MIN.saturating_add(left));
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Counts received bytes of the body; returns `false` if they do not match the announced length.
    pub(super) fn count_body_bytes(&mut self, bytes: usize, ended: bool) -> bool {
        self.is_ended |= ended;
        let Some(left) = self.content_left() else { return true };
        let Some(rest) = left.checked_sub(bytes as u64) else { return false };
        self.set_content_left(Some(rest));
        !ended || rest == 0
    }

    /// Counts bytes of the body that the caller read from the socket itself. If they are more than the request
    /// announced, the request counts as malformed wherever its body ends.
    pub(super) fn count_body_bytes_read_directly(&mut self, bytes: usize) {
        let left = self.content_left().map(|left| left.checked_sub(bytes as u64).unwrap_or(u64::MAX));
        self.set_content_left(left);
    }

    /// Ends the peer's side by trailers; returns `false`, and does nothing, if a part of the body is missing.
    pub(super) fn end_by_trailers(&mut self) -> bool {
        let complete = self.content_left().is_none_or(|left| left == 0);
        self.is_ended |= complete;
        complete
    }
}

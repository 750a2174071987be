//! One stream in progress: the input that is still expected from the peer, and the output that waits.
//!
//! Begin at [`StreamState`]; [`StreamOutput`] has the waiting frames.

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
#[derive(Debug)]
pub(super) struct StreamInput {
    pub(super) window: ReceiveWindow,
    /// Whether the peer has ended its side.
    is_ended: bool,
    /// The missing bytes of the body, if the request announced its length.
    content_left: Option<u64>,
}

impl StreamInput {
    pub(super) fn new(window: u32, is_ended: bool, content: Option<u64>) -> Self {
        Self { window: ReceiveWindow::new(window), is_ended, content_left: content }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Counts received bytes of the body; returns `false` if they do not match the announced length.
    pub(super) fn count_body_bytes(&mut self, bytes: usize, ended: bool) -> bool {
        self.is_ended |= ended;
        let Some(left) = &mut self.content_left else { return true };
        let Some(rest) = left.checked_sub(bytes as u64) else { return false };
        *left = rest;
        !ended || rest == 0
    }

    /// Counts bytes of the body that the caller read from the socket itself. If they are more than the request
    /// announced, the request counts as malformed wherever its body ends.
    pub(super) fn count_body_bytes_read_directly(&mut self, bytes: usize) {
        self.content_left = self.content_left.map(|left| left.checked_sub(bytes as u64).unwrap_or(u64::MAX));
    }

    /// Ends the peer's side by trailers; returns `false`, and does nothing, if a part of the body is missing.
    pub(super) fn end_by_trailers(&mut self) -> bool {
        let complete = self.content_left.is_none_or(|left| left == 0);
        self.is_ended |= complete;
        complete
    }
}

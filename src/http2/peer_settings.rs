//! The settings of the peer that restrict what the server sends (RFC 9113, section 6.5.2).
//!
//! This module reads SETTINGS frames. The [`Http2Sender`](super::Http2Sender) applies changed settings to streams
//! in progress. Begin at [`PeerSettings::apply_settings_frame`].

use serde::{Deserialize, Serialize};

use super::frame::{
    ConnectionError, ErrorCode, INITIAL_MAX_FRAME, INITIAL_WINDOW, MAX_FRAME, MAX_WINDOW, setting,
};

/// The settings of the peer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PeerSettings {
    initial_window: i64,
    frame: usize,
}

impl PeerSettings {
    /// Returns the settings of a peer that has announced none.
    pub(super) fn new() -> Self {
        Self { initial_window: INITIAL_WINDOW, frame: INITIAL_MAX_FRAME }
    }

    /// Returns the send window of a new stream.
    pub(super) fn initial_stream_window(&self) -> i64 {
        self.initial_window
    }

    /// Returns the greatest payload of a frame.
    pub(super) fn max_frame_payload(&self) -> usize {
        self.frame
    }

    /// Reads a SETTINGS frame; frames that the server sends stay within `frame_max`. Returns the number of
    /// settings, and by how much the send windows of streams in progress change. Several changes of the window in
    /// one frame are one change, because each change costs a step for each stream.
    pub(super) fn apply_settings_frame(
        &mut self,
        payload: &[u8],
        frame_max: u32,
    ) -> Result<(usize, i64), ConnectionError> {
        let (settings, []) = payload.as_chunks::<6>() else {
            return Err(ConnectionError::frame_size_error("settings that are cut short"));
        };
        let before = self.initial_window;
        for [i0, i1, v0, v1, v2, v3] in settings {
            let value = u32::from_be_bytes([*v0, *v1, *v2, *v3]);
            match u16::from_be_bytes([*i0, *i1]) {
                setting::ENABLE_PUSH if value > 1 => {
                    return Err(ConnectionError::protocol_error("a setting that is neither on nor off"));
                }
                setting::INITIAL_WINDOW_SIZE if i64::from(value) > MAX_WINDOW => {
                    let what = "an initial window that must not be";
                    return Err(ConnectionError::new(ErrorCode::FlowControl, what));
                }
                setting::INITIAL_WINDOW_SIZE => self.initial_window = i64::from(value),
                setting::MAX_FRAME_SIZE => {
                    let frame = value as usize;
                    if !(INITIAL_MAX_FRAME..=MAX_FRAME).contains(&frame) {
                        return Err(ConnectionError::protocol_error("a frame size that must not be"));
                    }
                    // A huge frame of one stream would delay all others.
                    self.frame = frame.min(frame_max as usize);
                }
                _ => {}
            }
        }
        Ok((settings.len(), self.initial_window - before))
    }
}

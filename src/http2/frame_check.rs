//! Checks a frame by its header alone: whether the frame is permitted at this time, on this stream, and with this
//! length.
//!
//! Begin at [`check_frame`].

use super::AnnouncedSettings;
use super::frame::{ConnectionError, ErrorCode, FrameHeader, StreamId, flag, kind};

/// The greatest length of a SETTINGS frame.
const SETTINGS_BYTES_MAX: usize = 4 << 10;
/// The number of bytes by which an encoded header block may exceed the permitted header list.
const BLOCK_SLACK: usize = 48 << 10;

/// Returns the greatest length of an encoded header block.
pub(super) fn max_header_block_bytes(settings: &AnnouncedSettings) -> usize {
    settings.header_list as usize + BLOCK_SLACK
}

/// Returns whether the payload of a frame is passed through: DATA, GOAWAY and unknown types are not kept
/// until they are complete.
pub(super) fn is_passed_through(frame: FrameHeader) -> bool {
    matches!(frame.kind, kind::DATA | kind::GOAWAY | kind::CONTINUATION.. if frame.kind != kind::CONTINUATION)
}

/// Checks a frame. `has_settings` says whether the peer has sent its settings, `block` is the stream of the
/// incomplete header block.
#[inline]
pub(super) fn check_frame(
    frame: FrameHeader,
    has_settings: bool,
    block: Option<StreamId>,
    settings: &AnnouncedSettings,
) -> Result<(), ConnectionError> {
    if !has_settings && (frame.kind != kind::SETTINGS || frame.has_flag(flag::ACK)) {
        return Err(ConnectionError::protocol_error("it does not begin with its settings"));
    }
    if let Some(stream) = block
        && (frame.kind != kind::CONTINUATION || frame.stream != stream)
    {
        return Err(ConnectionError::protocol_error("something stands between the pieces of a header block"));
    }
    if frame.length > settings.frame as usize {
        return Err(ConnectionError::frame_size_error("a frame that is larger than announced"));
    }
    let of_stream = frame.stream != 0;
    let (shortest, longest, on_stream) = match frame.kind {
        kind::DATA => (0, usize::MAX, Some(true)),
        kind::HEADERS | kind::CONTINUATION => (0, max_header_block_bytes(settings), Some(true)),
        kind::PRIORITY => (5, 5, Some(true)),
        kind::RST_STREAM => (4, 4, Some(true)),
        kind::SETTINGS if frame.has_flag(flag::ACK) => (0, 0, Some(false)),
        kind::SETTINGS => (0, SETTINGS_BYTES_MAX, Some(false)),
        kind::PING => (8, 8, Some(false)),
        kind::GOAWAY => (8, usize::MAX, Some(false)),
        kind::PUSH_PROMISE => return Err(ConnectionError::protocol_error("a client that pushes")),
        kind::WINDOW_UPDATE => (4, 4, None),
        _ => (0, usize::MAX, None),
    };
    if on_stream.is_some_and(|on_stream| on_stream != of_stream) {
        return Err(ConnectionError::protocol_error("a frame on a stream that it cannot be on"));
    }
    if (shortest..=longest).contains(&frame.length) {
        return Ok(());
    }
    let too_much = |what| ConnectionError::new(ErrorCode::EnhanceYourCalm, what);
    Err(match frame.kind {
        kind::HEADERS | kind::CONTINUATION => too_much("a header block that is larger than can make sense"),
        kind::SETTINGS if !frame.has_flag(flag::ACK) => too_much("more settings than can make sense"),
        _ => ConnectionError::frame_size_error("a frame whose length its kind cannot have"),
    })
}

//! The layout of frames: types, flags, settings, error codes (RFC 9113, sections 4, 6 and 7).
//!
//! `receiver.rs` checks the order of frames. Begin at [`FrameHeader`].

use std::fmt;

/// The connection preface, which every client sends first (RFC 9113, 3.4).
pub(crate) static PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The number of a stream. Streams of clients have odd numbers.
pub(crate) type StreamId = u32;

/// The length of a frame header, in bytes.
pub(super) const FRAME_HEADER_LEN: usize = 9;

/// Frame types, by number (RFC 9113, 6).
pub(super) mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Flags of frames.
pub(super) mod flag {
    pub const END_STREAM: u8 = 1;
    pub const ACK: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const PADDED: u8 = 8;
    pub const PRIORITY: u8 = 0x20;
}

/// Settings, by number (RFC 9113, 6.5.2).
pub(super) mod setting {
    pub const HEADER_TABLE_SIZE: u16 = 1;
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// The initial window of a connection and of a stream, before any settings (RFC 9113, 6.9.2).
pub(super) const INITIAL_WINDOW: i64 = 65_535;
pub(super) const INITIAL_MAX_FRAME: usize = 16_384;
/// The largest window (RFC 9113, 6.9.1).
pub(super) const MAX_WINDOW: i64 = (1 << 31) - 1;
/// The largest frame payload (RFC 9113, 4.2).
pub(super) const MAX_FRAME: usize = (1 << 24) - 1;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: StreamId,
}

impl FrameHeader {
    pub(super) fn parse(bytes: [u8; FRAME_HEADER_LEN]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes;
        Self {
            length: u32::from_be_bytes([0, l0, l1, l2]) as usize,
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]) & 0x7fff_ffff,
        }
    }

    pub(super) fn has_flag(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Appends a frame header.
pub(super) fn put_frame_header(to: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: StreamId) {
    let [_, l0, l1, l2] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let [s0, s1, s2, s3] = stream.to_be_bytes();
    to.extend_from_slice(&[l0, l1, l2, kind, flags, s0, s1, s2, s3]);
}

/// The error code of a stream or a connection (RFC 9113, 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorCode {
    NoError = 0,
    Protocol = 1,
    Internal = 2,
    FlowControl = 3,
    StreamClosed = 5,
    FrameSize = 6,
    RefusedStream = 7,
    Compression = 9,
    EnhanceYourCalm = 11,
}

/// A peer's violation that ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectionError {
    pub(crate) reason: ErrorCode,
    pub(crate) what: &'static str,
}

impl ConnectionError {
    pub(crate) fn new(reason: ErrorCode, what: &'static str) -> Self {
        Self { reason, what }
    }

    pub(super) fn protocol_error(what: &'static str) -> Self {
        Self::new(ErrorCode::Protocol, what)
    }

    pub(super) fn frame_size_error(what: &'static str) -> Self {
        Self::new(ErrorCode::FrameSize, what)
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the peer broke HTTP/2: {} ({:?})", self.what, self.reason)
    }
}

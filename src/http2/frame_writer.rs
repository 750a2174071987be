//! Writes the frames that the server sends into the output buffer.
//!
//! The [`Http2Sender`](super::Http2Sender) decides which frames are sent, and keeps within the peer's windows.
//! Begin at [`OutputBuffer::put_headers`].

use bytes::Bytes;

use super::frame::{ErrorCode, INITIAL_WINDOW, StreamId, flag, kind, put_frame_header, setting};
use super::output_buffer::COPY_MAX;
use super::{AnnouncedSettings, OutputBuffer};

impl OutputBuffer {
    /// Writes the server's settings, and the window update that enlarges the connection's window to their value.
    pub(super) fn put_settings(&mut self, settings: AnnouncedSettings) {
        let AnnouncedSettings { streams, frame, stream_window, connection_window, header_list, .. } =
            settings;
        let all = [
            // A dynamic table would cost memory on idle connections and make the meaning of a block depend on
            // earlier ones.
            (setting::HEADER_TABLE_SIZE, 0),
            (setting::MAX_CONCURRENT_STREAMS, streams),
            (setting::INITIAL_WINDOW_SIZE, stream_window),
            (setting::MAX_FRAME_SIZE, frame),
            (setting::MAX_HEADER_LIST_SIZE, header_list),
        ];
        self.write_with(|to| {
            put_frame_header(to, all.len() * 6, kind::SETTINGS, 0, 0);
            for (id, value) in all {
                to.extend_from_slice(&id.to_be_bytes());
                to.extend_from_slice(&value.to_be_bytes());
            }
        });
        let more = i64::from(connection_window) - INITIAL_WINDOW;
        if let Ok(more @ 1..) = u32::try_from(more) {
            self.put_window_update(0, more);
        }
    }

    pub(super) fn put_settings_ack(&mut self) {
        self.put_frame(kind::SETTINGS, flag::ACK, 0, &[]);
    }

    pub(super) fn put_window_update(&mut self, stream: StreamId, more: u32) {
        self.put_frame(kind::WINDOW_UPDATE, 0, stream, &more.to_be_bytes());
    }

    /// Writes a header block in frames of at most `frame_max` bytes; with `end` it ends the stream.
    pub(super) fn put_headers(&mut self, stream: StreamId, block: &[u8], end: bool, frame_max: usize) {
        let end = if end { flag::END_STREAM } else { 0 };
        if block.len() <= frame_max {
            return self.put_frame(kind::HEADERS, end | flag::END_HEADERS, stream, block);
        }
        let last = block.len().div_ceil(frame_max) - 1;
        for (n, piece) in block.chunks(frame_max).enumerate() {
            let done = if n == last { flag::END_HEADERS } else { 0 };
            let (kind, flags) = if n == 0 { (kind::HEADERS, end | done) } else { (kind::CONTINUATION, done) };
            self.put_frame(kind, flags, stream, piece);
        }
    }

    /// Writes data in frames of at most `frame_max` bytes.
    pub(super) fn put_data(&mut self, stream: StreamId, part: &Bytes, frame_max: usize) {
        let mut place = 0;
        while place < part.len() {
            let end = part.len().min(place + frame_max);
            if part.len() <= COPY_MAX {
                self.put_frame(kind::DATA, 0, stream, part.get(place..end).unwrap_or_default());
            } else {
                self.write_with(|to| put_frame_header(to, end - place, kind::DATA, 0, stream));
                self.append(&part.slice(place..end));
            }
            place = end;
        }
    }

    /// Writes data that every peer takes in one frame.
    pub(super) fn put_short_data(&mut self, stream: StreamId, data: &[u8]) {
        debug_assert!(data.len() <= COPY_MAX, "{} bytes are not a few", data.len());
        self.put_frame(kind::DATA, 0, stream, data);
    }

    /// Writes the end of a stream without trailers.
    pub(super) fn put_end_of_stream(&mut self, stream: StreamId) {
        self.put_frame(kind::DATA, flag::END_STREAM, stream, &[]);
    }

    pub(super) fn put_rst_stream(&mut self, stream: StreamId, reason: ErrorCode) {
        self.put_frame(kind::RST_STREAM, 0, stream, &(reason as u32).to_be_bytes());
    }

    pub(super) fn put_ping(&mut self, flags: u8, payload: &[u8]) {
        self.put_frame(kind::PING, flags, 0, payload);
    }

    pub(super) fn put_goaway(&mut self, last: StreamId, reason: ErrorCode, what: &str) {
        self.write_with(|to| {
            put_frame_header(to, 8 + what.len(), kind::GOAWAY, 0, 0);
            to.extend_from_slice(&last.to_be_bytes());
            to.extend_from_slice(&(reason as u32).to_be_bytes());
            to.extend_from_slice(what.as_bytes());
        });
    }

    fn put_frame(&mut self, kind: u8, flags: u8, stream: StreamId, payload: &[u8]) {
        self.write_with(|to| {
            put_frame_header(to, payload.len(), kind, flags, stream);
            to.extend_from_slice(payload);
        });
    }
}

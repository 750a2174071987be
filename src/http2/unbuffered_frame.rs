//! Handles the frames that need not be complete before they are processed. The payload of DATA is passed on as it
//! arrives. The payload of GOAWAY and of unknown types is skipped.
//!
//! Data is counted against the receive windows. Begin at [`UnbufferedFrame::begin`] and
//! [`UnbufferedFrame::pass_payload_on`].

use serde::{Deserialize, Serialize};

use super::abuse_score::points;
use super::frame::{ConnectionError, ErrorCode, FrameHeader, StreamId, flag, kind};
use super::receive_event::{ReceiveEvent, ReceiveResult};
use super::sender::Http2Sender;

/// A frame of which a part has not arrived, or not been passed on.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct UnbufferedFrame {
    stream: StreamId,
    content: UnbufferedPayload,
    /// The number of missing bytes of data; other payload is skipped.
    data: usize,
    /// The number of missing bytes of padding or of ignored payload; `usize::MAX` before the padding length has
    /// arrived.
    skipped: usize,
    /// Whether the frame ends its stream.
    ends: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum UnbufferedPayload {
    Data,
    /// Data of a stream that does not take it any more.
    Discarded,
    GoAway,
    Unknown,
}

impl UnbufferedFrame {
    /// Begins a frame. If the frame is a violation on its stream, the event is the reset of the stream.
    pub(super) fn begin<'a, H>(
        frame: FrameHeader,
        sender: &mut Http2Sender,
    ) -> Result<(Self, Option<ReceiveEvent<'a, H>>), ConnectionError> {
        let mut passing = Self {
            stream: frame.stream,
            content: UnbufferedPayload::Unknown,
            data: 0,
            skipped: frame.length,
            ends: false,
        };
        let mut event = None;
        match frame.kind {
            kind::GOAWAY => passing.content = UnbufferedPayload::GoAway,
            kind::DATA => {
                (passing.content, event) = admit_data(frame, sender)?;
                passing.ends = frame.has_flag(flag::END_STREAM);
                passing.data = frame.length;
                passing.skipped = 0;
                if frame.has_flag(flag::PADDED) {
                    if frame.length == 0 {
                        return Err(ConnectionError::frame_size_error("padding without room for its length"));
                    }
                    passing.skipped = usize::MAX;
                }
            }
            _ => sender.abuse.add_points(points::FRAME),
        }
        Ok((passing, event))
    }

    /// Returns whether all of the frame has arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.data == 0 && self.skipped == 0
    }

    /// Returns the stream whose data comes next, and how much of it comes without interruption.
    pub(super) fn expected_data(&self) -> Option<(StreamId, usize)> {
        (self.content == UnbufferedPayload::Data && self.skipped == 0).then_some((self.stream, self.data))
    }

    /// Records that `bytes` of the expected data were read directly from the socket.
    pub(super) fn consume_expected_data(&mut self, bytes: usize, sender: &mut Http2Sender) {
        self.data = self.data.saturating_sub(bytes);
        if let Some(stream) = sender.streams.get_mut(self.stream) {
            stream.input.count_body_bytes_read_directly(bytes);
        }
    }

    /// Passes on the available payload.
    pub(super) fn pass_payload_on<'a, H>(
        &mut self,
        input: &mut &'a [u8],
        sender: &mut Http2Sender,
    ) -> ReceiveResult<'a, H> {
        if self.skipped == usize::MAX {
            let Some((padding, rest)) = input.split_first() else { return Ok(None) };
            *input = rest;
            self.skipped = usize::from(*padding);
            let Some(data) = self.data.checked_sub(1 + self.skipped) else {
                return Err(ConnectionError::protocol_error("more padding than there is frame"));
            };
            self.data = data;
            sender.release_windows(self.stream, 1 + self.skipped);
        }
        let (bytes, rest) = input.split_at(self.data.min(input.len()));
        self.data -= bytes.len();
        *input = rest;
        if self.data == 0 {
            let (skipped, rest) = input.split_at(self.skipped.min(input.len()));
            self.skipped -= skipped.len();
            *input = rest;
        }
        Ok(self.payload_event(bytes, sender))
    }

    /// Returns the event of the payload that was taken from the input.
    fn payload_event<'a, H>(
        &mut self,
        bytes: &'a [u8],
        sender: &mut Http2Sender,
    ) -> Option<ReceiveEvent<'a, H>> {
        match self.content {
            UnbufferedPayload::GoAway => return self.is_complete().then_some(ReceiveEvent::GoAway),
            UnbufferedPayload::Unknown => return None,
            UnbufferedPayload::Discarded => {
                sender.release_connection_window(bytes.len());
                return None;
            }
            UnbufferedPayload::Data => {}
        }
        let ended = self.is_complete() && self.ends;
        if bytes.is_empty() && !ended {
            return None;
        }
        let Some(stream) = sender.streams.get_mut(self.stream) else {
            // The request was answered or cancelled meanwhile.
            sender.release_connection_window(bytes.len());
            return None;
        };
        if stream.input.count_body_bytes(bytes.len(), ended) {
            return Some(ReceiveEvent::Data { stream: self.stream, bytes, ended });
        }
        sender.release_connection_window(bytes.len());
        self.content = UnbufferedPayload::Discarded;
        Some(ReceiveEvent::reset_malformed_stream(self.stream, sender))
    }
}

/// Counts data against the receive windows, and decides whether its stream takes it. The event is the reset of a
/// stream that violated the protocol.
fn admit_data<'a, H>(
    frame: FrameHeader,
    sender: &mut Http2Sender,
) -> Result<(UnbufferedPayload, Option<ReceiveEvent<'a, H>>), ConnectionError> {
    let too_much = |what| ConnectionError::new(ErrorCode::FlowControl, what);
    let ended = frame.has_flag(flag::END_STREAM);
    if !sender.receive_window.consume(frame.length) {
        return Err(too_much("more data than the connection's window allows"));
    }
    if !sender.streams.was_opened(frame.stream) {
        return Err(ConnectionError::protocol_error("data on a stream that was never opened"));
    }
    if frame.length == 0 && !ended {
        sender.abuse.add_points(points::EMPTY);
    }
    let Some(stream) = sender.streams.get_mut(frame.stream) else {
        if !sender.streams.was_cut_short(frame.stream, ended) {
            sender.abuse.add_points(points::SETTINGS);
            sender.output.put_rst_stream(frame.stream, ErrorCode::StreamClosed);
        }
        return Ok((UnbufferedPayload::Discarded, None));
    };
    if stream.input.is_ended() {
        let event = ReceiveEvent::reset_stream(frame.stream, ErrorCode::StreamClosed, sender);
        return Ok((UnbufferedPayload::Discarded, Some(event)));
    }
    if !stream.input.window.consume(frame.length) {
        return Err(too_much("more data than a stream's window allows"));
    }
    Ok((UnbufferedPayload::Data, None))
}

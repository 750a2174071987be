//! The receiving half of a connection: parses received bytes into frames, and turns frames into events.
//!
//! The receiver answers the peer only through the [`Http2Sender`]. The length of a frame is checked as soon as its
//! header is read (`frame_check.rs`). DATA is passed on as it arrives (`unbuffered_frame.rs`). Most other frames must
//! be complete before they are processed. `header_reader.rs` reads header blocks. Begin at
//! [`Http2Receiver::next_event`].

use serde::{Deserialize, Serialize};

use super::abuse_score::points;
use super::charged_buffer::ChargedBuffer;
use super::frame::{ConnectionError, ErrorCode, FRAME_HEADER_LEN, FrameHeader, StreamId, flag, kind};
use super::frame_check::{check_frame, is_passed_through};
use super::header_reader::{HeaderReader, depends_on_itself};
use super::hpack::HpackDecoder;
use super::receive_event::{ReceiveEvent, ReceiveResult};
use super::request_head::{FromRequestHead, HeaderBlockCache};
use super::sender::Http2Sender;
use super::unbuffered_frame::UnbufferedFrame;

/// The receiving half of a connection whose preface has been read.
#[derive(Debug, Default)]
pub(crate) struct Http2Receiver {
    headers: HeaderReader,
    /// The received beginning of an incomplete frame.
    partial: ChargedBuffer,
    passing: Option<UnbufferedFrame>,
    /// Whether the peer has sent its settings, which must come first.
    has_settings: bool,
    /// The number of completed frames; while it does not change, an incomplete frame makes no progress.
    frames: u64,
}

/// The state of a receiver, from which another process goes on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedReceiver {
    decoder: Option<HpackDecoder>,
    passing: Option<UnbufferedFrame>,
    has_settings: bool,
    frames: u64,
}

/// The kind of input that has begun and is incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncompleteInput {
    /// The peer's settings, which have not arrived.
    Settings,
    /// A frame or a header block that is processed as a whole.
    Frame,
    /// A frame that is passed on as it arrives.
    UnbufferedFrame,
}

impl IncompleteInput {
    /// Returns the violation of a peer that leaves this input incomplete for too long.
    pub(crate) fn timeout_violation(self) -> &'static str {
        match self {
            Self::Settings => "its settings did not come in time",
            Self::Frame => "a frame or a header block was not completed in time",
            Self::UnbufferedFrame => "data that was begun was not completed in time",
        }
    }
}

impl Http2Receiver {
    /// Returns its state, without the incomplete frame; `None` within a header block.
    pub(crate) fn save(&self) -> Option<SavedReceiver> {
        if self.headers.incomplete_block().is_some() {
            return None;
        }
        Some(SavedReceiver {
            decoder: self.headers.decoder().saved(),
            passing: self.passing,
            has_settings: self.has_settings,
            frames: self.frames,
        })
    }

    /// Returns the receiver of a connection whose state was saved. The incomplete frame is received again.
    pub(crate) fn restore(saved: SavedReceiver) -> Self {
        let SavedReceiver { decoder, passing, has_settings, frames } = saved;
        let headers = HeaderReader::with_decoder(decoder.unwrap_or_else(HpackDecoder::without_table));
        Self { headers, partial: ChargedBuffer::default(), passing, has_settings, frames }
    }

    /// Returns the received beginning of an incomplete frame.
    pub(crate) fn incomplete_frame(&self) -> &[u8] {
        self.partial.bytes()
    }

    /// Returns the incomplete input, and a number that changes with each completed frame.
    pub(crate) fn incomplete_input(&self) -> Option<(IncompleteInput, u64)> {
        let block = self.headers.incomplete_block();
        let what = if !self.has_settings {
            IncompleteInput::Settings
        } else if block.is_some() || !self.partial.bytes().is_empty() {
            IncompleteInput::Frame
        } else if self.passing.is_some() {
            IncompleteInput::UnbufferedFrame
        } else {
            return None;
        };
        // The frames of a header block count as one: a peer that keeps sending them makes no progress.
        Some((what, block.map_or(self.frames, |(_, since)| since)))
    }

    /// Returns whether the next event needs no further input: a passed-through frame is complete, and its end
    /// was not reported yet, because other work came first.
    pub(crate) fn has_pending_event(&self) -> bool {
        self.passing.as_ref().is_some_and(UnbufferedFrame::is_complete)
    }

    /// Returns the stream whose data comes next, and how much of it comes without interruption.
    pub(crate) fn expected_data(&self) -> Option<(StreamId, usize)> {
        self.passing.as_ref()?.expected_data()
    }

    /// Records that `bytes` of the expected data were read directly from the socket.
    pub(crate) fn consume_expected_data(&mut self, bytes: usize, sender: &mut Http2Sender) {
        if let Some(passing) = &mut self.passing {
            passing.consume_expected_data(bytes, sender);
        }
    }

    /// Returns the next event in `input`, which is advanced past it. Returns `None` at the end of the input,
    /// or when the peer has caused so much work that answers should be sent first.
    ///
    /// # Errors
    /// If the peer violates the protocol in a way that ends the connection.
    pub(crate) fn next_event<'a, H: FromRequestHead>(
        &mut self,
        input: &mut &'a [u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        loop {
            if sender.should_yield() {
                return Ok(None);
            }
            sender.count_work(1);
            let event = if let Some(passing) = &mut self.passing {
                let before = input.len();
                let event = passing.pass_payload_on(input, sender)?;
                if passing.is_complete() {
                    self.passing = None;
                    self.frames += 1;
                } else if event.is_none() && input.len() == before {
                    return Ok(None);
                }
                event
            } else if !self.partial.bytes().is_empty() {
                let Some(frame) = self.complete_frame(input, sender)? else { return Ok(None) };
                let partial = std::mem::take(&mut self.partial);
                let payload = partial.bytes().get(FRAME_HEADER_LEN..).unwrap_or_default();
                let event = self.on_frame(frame, payload, sender, cache)?;
                partial.release(&mut sender.budget);
                event
            } else if input.is_empty() {
                return Ok(None);
            } else {
                let Some((head, rest)) = input.split_first_chunk::<FRAME_HEADER_LEN>() else {
                    self.partial.append(std::mem::take(input), &mut sender.budget)?;
                    return Ok(None);
                };
                let frame = self.read_frame_header(*head, sender)?;
                if is_passed_through(frame) {
                    *input = rest;
                    self.begin_unbuffered_frame(frame, sender)?
                } else {
                    let Some((payload, after)) = rest.split_at_checked(frame.length) else {
                        self.partial.append(std::mem::take(input), &mut sender.budget)?;
                        return Ok(None);
                    };
                    *input = after;
                    self.on_frame(frame, payload, sender, cache)?
                }
            };
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    #[inline]
    fn read_frame_header(
        &self,
        head: [u8; FRAME_HEADER_LEN],
        sender: &Http2Sender,
    ) -> Result<FrameHeader, ConnectionError> {
        let frame = FrameHeader::parse(head);
        let block = self.headers.incomplete_block().map(|(stream, _)| stream);
        check_frame(frame, self.has_settings, block, sender.announced_settings())?;
        Ok(frame)
    }

    /// Completes the frame whose beginning has been received. Of a frame that is passed through, the header is
    /// enough.
    fn complete_frame(
        &mut self,
        input: &mut &[u8],
        sender: &mut Http2Sender,
    ) -> Result<Option<FrameHeader>, ConnectionError> {
        self.partial.fill_up_to(input, FRAME_HEADER_LEN, &mut sender.budget)?;
        let Some(head) = self.partial.bytes().first_chunk::<FRAME_HEADER_LEN>() else { return Ok(None) };
        let frame = self.read_frame_header(*head, sender)?;
        let whole = FRAME_HEADER_LEN + frame.length;
        let ready = is_passed_through(frame) || self.partial.fill_up_to(input, whole, &mut sender.budget)?;
        Ok(ready.then_some(frame))
    }

    fn begin_unbuffered_frame<'a, H>(
        &mut self,
        frame: FrameHeader,
        sender: &mut Http2Sender,
    ) -> ReceiveResult<'a, H> {
        let (passing, event) = UnbufferedFrame::begin(frame, sender)?;
        self.passing = Some(passing);
        Ok(event)
    }

    /// Processes a complete frame.
    fn on_frame<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        payload: &[u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        self.frames += 1;
        match frame.kind {
            kind::HEADERS => return self.headers.on_headers(frame, self.frames, payload, sender, cache),
            kind::CONTINUATION => return self.headers.on_continuation(frame, payload, sender, cache),
            kind::RST_STREAM => return on_rst_stream(frame, sender),
            kind::WINDOW_UPDATE => return on_window_update(frame, payload, sender),
            kind::SETTINGS => {
                self.has_settings = true;
                if frame.has_flag(flag::ACK) {
                    // The server sent only one SETTINGS frame, and that disables the table.
                    self.headers.disable_dynamic_table();
                } else {
                    sender.apply_settings(payload)?;
                }
            }
            kind::PING => sender.on_ping(frame.has_flag(flag::ACK), payload),
            kind::PRIORITY => {
                sender.abuse.add_points(points::FRAME);
                if depends_on_itself(frame, payload) {
                    let what = "a stream that depends on itself";
                    return ReceiveEvent::reset_stream_or_fail(frame.stream, sender, what).map(Some);
                }
            }
            // Only the header of the frame had arrived; its payload is passed through.
            _ if is_passed_through(frame) => return self.begin_unbuffered_frame(frame, sender),
            _ => {}
        }
        Ok(None)
    }
}

fn on_rst_stream<'a, H>(frame: FrameHeader, sender: &mut Http2Sender) -> ReceiveResult<'a, H> {
    if !sender.streams.was_opened(frame.stream) {
        return Err(ConnectionError::protocol_error("a reset of a stream that was never opened"));
    }
    sender.abuse.add_points(points::FRAME);
    let slot = sender.slot_of_stream(frame.stream);
    if sender.remove_stream(frame.stream) {
        return Ok(Some(ReceiveEvent::Reset { stream: frame.stream, slot }));
    }
    sender.streams.was_cut_short(frame.stream, true);
    Ok(None)
}

fn on_window_update<'a, H>(
    frame: FrameHeader,
    payload: &[u8],
    sender: &mut Http2Sender,
) -> ReceiveResult<'a, H> {
    let Ok(more) = <[u8; 4]>::try_from(payload) else {
        return Err(ConnectionError::frame_size_error("a window update that is not of four bytes"));
    };
    let more = u32::from_be_bytes(more) & 0x7fff_ffff;
    let stream = (frame.stream != 0).then_some(frame.stream);
    if stream.is_some_and(|stream| !sender.streams.was_opened(stream)) {
        return Err(ConnectionError::protocol_error("a window update of a stream that was never opened"));
    }
    sender.abuse.add_points(points::FRAME);
    if more == 0 {
        let what = "a window update by nothing";
        return ReceiveEvent::reset_stream_or_fail(frame.stream, sender, what).map(Some);
    }
    if sender.streams.get(frame.stream).is_some_and(|stream| stream.output.window_would_overflow(more)) {
        return Ok(Some(ReceiveEvent::reset_stream(frame.stream, ErrorCode::FlowControl, sender)));
    }
    sender.on_window_update(stream, more)?;
    Ok(None)
}

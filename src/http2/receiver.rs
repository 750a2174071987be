//! The receiving half of a connection: bytes to events, protocol checks, receive windows.
//!
//! It answers the peer only through the [`Sender`]. A frame that must be complete before it is processed is bounded
//! by its kind as soon as its header is read; DATA is passed on as it arrives. Begin at [`Receiver::next`].

use std::sync::Arc;

use super::abuse_score::points;
use super::frame::{ErrorCode, FRAME_HEADER_LEN, FrameHeader, StreamId, flag, kind};
use super::hpack::Decoder;
use super::request_head::{FromRequestHead, HeaderBlockCache, HeaderError};
use super::sender::{STREAM_BYTES, Sender};
use super::{ConnectionError, Settings};

/// An event caused by the peer.
#[derive(Debug)]
pub(crate) enum ReceiveEvent<'a, H> {
    /// A new request.
    Request {
        stream: StreamId,
        head: Arc<H>,
        /// Whether the request has no body.
        ended: bool,
    },
    /// A part of a request's body. It counts against the windows until it is released.
    Data {
        stream: StreamId,
        bytes: &'a [u8],
        /// Whether the body ends here.
        ended: bool,
    },
    /// A request that ended early, because the peer cancelled it or violated the protocol. The caller knows
    /// it by its slot.
    Reset { stream: StreamId, slot: Option<u64> },
    /// The peer will send no further requests.
    GoAway,
}

/// The greatest length of a SETTINGS frame.
const SETTINGS_BYTES_MAX: usize = 4 << 10;
/// The number of bytes by which an encoded header block may exceed the permitted header list.
const BLOCK_SLACK: usize = 48 << 10;
/// The greatest number of frames of one header block.
const CONTINUATIONS_MAX: u32 = 64;

/// An incomplete header block.
#[derive(Debug)]
struct HeaderBlock {
    stream: StreamId,
    ended: bool,
    depends_on_itself: bool,
    bytes: Vec<u8>,
    /// The number of bytes charged to the connection's budget.
    charged: usize,
    pieces: u32,
    /// The value of [`Receiver::frames`] when it began.
    since: u64,
}

/// A frame whose payload is passed on, or skipped, as it arrives.
#[derive(Debug, Clone, Copy)]
struct PassthroughFrame {
    stream: StreamId,
    /// The number of missing bytes of data; other payload is skipped.
    data: usize,
    /// The number of missing bytes of padding or of ignored payload.
    skipped: usize,
    /// Whether the frame ends its stream.
    ends: bool,
    /// Whether its data is discarded.
    ignored: bool,
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(crate) struct Receiver {
    decoder: Decoder,
    /// The received beginning of an incomplete frame.
    partial: Vec<u8>,
    block: Option<Box<HeaderBlock>>,
    passing: Option<PassthroughFrame>,
    /// Whether the peer has sent its settings, which must come first.
    has_settings: bool,
    /// The number of completed frames; while it does not change, an incomplete frame makes no progress.
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
    Passthrough,
}

impl IncompleteInput {
    /// Returns the violation of a peer that leaves this input incomplete for too long.
    pub(crate) fn fault(self) -> &'static str {
        match self {
            Self::Settings => "its settings did not come in time",
            Self::Frame => "a frame or a header block was not completed in time",
            Self::Passthrough => "data that was begun was not completed in time",
        }
    }
}

/// An event, or `None` if the step caused none.
type ReceiveResult<'a, H> = Result<Option<ReceiveEvent<'a, H>>, ConnectionError>;

impl Receiver {
    /// Returns the receiving half of a connection whose preface has been read.
    pub(crate) fn new() -> Self {
        Self {
            decoder: Decoder::default(),
            partial: Vec::new(),
            block: None,
            passing: None,
            has_settings: false,
            frames: 0,
        }
    }

    /// Returns the incomplete input, and a number that changes with each completed frame.
    pub(crate) fn unfinished(&self) -> Option<(IncompleteInput, u64)> {
        let what = if !self.has_settings {
            IncompleteInput::Settings
        } else if self.block.is_some() || !self.partial.is_empty() {
            IncompleteInput::Frame
        } else if self.passing.is_some() {
            IncompleteInput::Passthrough
        } else {
            return None;
        };
        // The frames of a header block count as one: a peer that keeps sending them makes no progress.
        Some((what, self.block.as_ref().map_or(self.frames, |block| block.since)))
    }

    /// Returns whether the next event needs no further input: a passed-through frame is complete, and its end
    /// was not reported yet, because other work came first.
    pub(crate) fn owes_event(&self) -> bool {
        self.passing.as_ref().is_some_and(|passing| passing.data == 0 && passing.skipped == 0)
    }

    /// Returns the next event in `input`, which is advanced past it. Returns `None` at the end of the input,
    /// or when the peer has caused so much work that answers should be sent first.
    ///
    /// # Errors
    /// If the peer violates the protocol in a way that ends the connection.
    pub(crate) fn next<'a, H: FromRequestHead>(
        &mut self,
        input: &mut &'a [u8],
        sender: &mut Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        loop {
            if sender.should_yield() {
                return Ok(None);
            }
            sender.count_work(1);
            if let Some(passing) = self.passing.take() {
                let before = input.len();
                let event = self.pass_through(passing, input, sender)?;
                if event.is_some() {
                    return Ok(event);
                }
                if self.passing.is_some() && input.len() == before {
                    return Ok(None);
                }
                continue;
            }
            if !self.partial.is_empty() {
                let Some(frame) = self.complete(input, &sender.settings)? else { return Ok(None) };
                let payload = std::mem::take(&mut self.partial);
                let event =
                    self.take(frame, payload.get(FRAME_HEADER_LEN..).unwrap_or_default(), sender, cache)?;
                if event.is_some() {
                    return Ok(event);
                }
                continue;
            }
            let Some((head, rest)) = input.split_first_chunk::<FRAME_HEADER_LEN>() else {
                self.partial.extend_from_slice(input);
                *input = &[];
                return Ok(None);
            };
            let frame = FrameHeader::read(*head);
            self.check(frame, &sender.settings)?;
            if self.is_passed_through(frame) {
                *input = rest;
                if let Some(event) = self.begin_passing(frame, sender)? {
                    return Ok(Some(event));
                }
                continue;
            }
            let Some((payload, after)) = rest.split_at_checked(frame.length) else {
                self.partial.extend_from_slice(input);
                *input = &[];
                return Ok(None);
            };
            *input = after;
            let event = self.take(frame, payload, sender, cache)?;
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// Returns the stream whose data comes next, and how much of it comes without interruption.
    pub(crate) fn expected_data(&self) -> Option<(StreamId, usize)> {
        let passing = self.passing.filter(|passing| passing.skipped == 0 && !passing.ignored)?;
        Some((passing.stream, passing.data))
    }

    /// Records that `bytes` of the expected data were read directly from the socket.
    pub(crate) fn consume_expected(&mut self, bytes: usize, sender: &mut Sender) {
        if let Some(passing) = &mut self.passing {
            passing.data = passing.data.saturating_sub(bytes);
            if let Some(stream) = sender.streams.get_mut(&passing.stream) {
                // If more data came than the head announced, the request is malformed at any end.
                stream.content_left =
                    stream.content_left.map(|left| left.checked_sub(bytes as u64).unwrap_or(u64::MAX));
            }
        }
    }

    /// Completes the frame whose beginning has been received.
    fn complete(
        &mut self,
        input: &mut &[u8],
        settings: &Settings,
    ) -> Result<Option<FrameHeader>, ConnectionError> {
        let Some(frame) = self.fill(input, FRAME_HEADER_LEN).then(|| self.frame_head()).flatten() else {
            return Ok(None);
        };
        self.check(frame, settings)?;
        if self.is_passed_through(frame) {
            return Ok(Some(frame));
        }
        Ok(self.fill(input, FRAME_HEADER_LEN + frame.length).then_some(frame))
    }

    fn frame_head(&self) -> Option<FrameHeader> {
        self.partial.first_chunk::<FRAME_HEADER_LEN>().map(|head| FrameHeader::read(*head))
    }

    /// Takes missing bytes from the input; returns whether `length` bytes of the frame are there.
    fn fill(&mut self, input: &mut &[u8], length: usize) -> bool {
        let missing = length.saturating_sub(self.partial.len()).min(input.len());
        let (taken, rest) = input.split_at_checked(missing).unwrap_or_default();
        self.partial.extend_from_slice(taken);
        *input = rest;
        self.partial.len() >= length
    }

    /// Returns whether the payload of a frame is passed through: DATA, GOAWAY and unknown types are not kept
    /// until they are complete.
    fn is_passed_through(&self, frame: FrameHeader) -> bool {
        matches!(frame.kind, kind::DATA | kind::GOAWAY | kind::CONTINUATION.. if frame.kind != kind::CONTINUATION)
    }

    /// Checks whether this frame is permitted now, and in this length.
    fn check(&self, frame: FrameHeader, settings: &Settings) -> Result<(), ConnectionError> {
        if !self.has_settings && (frame.kind != kind::SETTINGS || frame.has(flag::ACK)) {
            return Err(ConnectionError::protocol("it does not begin with its settings"));
        }
        if let Some(block) = &self.block
            && (frame.kind != kind::CONTINUATION || frame.stream != block.stream)
        {
            return Err(ConnectionError::protocol("something stands between the pieces of a header block"));
        }
        if frame.length > settings.frame as usize {
            return Err(ConnectionError::size("a frame that is larger than announced"));
        }
        let of_stream = frame.stream != 0;
        let (lengths, on_stream) = match frame.kind {
            kind::DATA => (0..=usize::MAX, Some(true)),
            kind::HEADERS | kind::CONTINUATION => {
                (0..=settings.header_list as usize + BLOCK_SLACK, Some(true))
            }
            kind::PRIORITY => (5..=5, Some(true)),
            kind::RST_STREAM => (4..=4, Some(true)),
            kind::SETTINGS if frame.has(flag::ACK) => (0..=0, Some(false)),
            kind::SETTINGS => (0..=SETTINGS_BYTES_MAX, Some(false)),
            kind::PING => (8..=8, Some(false)),
            kind::GOAWAY => (8..=usize::MAX, Some(false)),
            kind::PUSH_PROMISE => return Err(ConnectionError::protocol("a client that pushes")),
            kind::WINDOW_UPDATE => (4..=4, None),
            _ => (0..=usize::MAX, None),
        };
        if on_stream.is_some_and(|on_stream| on_stream != of_stream) {
            return Err(ConnectionError::protocol("a frame on a stream that it cannot be on"));
        }
        if lengths.contains(&frame.length) {
            return Ok(());
        }
        Err(match frame.kind {
            kind::HEADERS | kind::CONTINUATION => ConnectionError::new(
                ErrorCode::EnhanceYourCalm,
                "a header block that is larger than can make sense",
            ),
            kind::SETTINGS if !frame.has(flag::ACK) => {
                ConnectionError::new(ErrorCode::EnhanceYourCalm, "more settings than can make sense")
            }
            _ => ConnectionError::size("a frame whose length its kind cannot have"),
        })
    }

    fn begin_passing<'a, H>(&mut self, frame: FrameHeader, sender: &mut Sender) -> ReceiveResult<'a, H> {
        let is_data = frame.kind == kind::DATA;
        let data = if is_data { frame.length } else { 0 };
        let mut passing = PassthroughFrame {
            stream: frame.stream,
            data,
            skipped: frame.length - data,
            ends: is_data && frame.has(flag::END_STREAM),
            ignored: false,
        };
        let mut broken = None;
        match frame.kind {
            kind::GOAWAY => {
                // Stream 0 with an end marks GOAWAY: no data has it.
                passing.stream = 0;
                passing.ends = true;
            }
            kind::DATA => {
                (passing.ignored, broken) = self.admit_data(frame, sender)?;
                if frame.has(flag::PADDED) {
                    if frame.length == 0 {
                        return Err(ConnectionError::size("padding without room for its length"));
                    }
                    // The amount of data is unknown before the padding length has arrived.
                    passing.skipped = usize::MAX;
                }
            }
            _ => {
                // An unknown type: it must be taken neither for GOAWAY nor for data.
                passing.stream = 0;
                sender.abuse.add(points::FRAME);
            }
        }
        self.passing = Some(passing);
        Ok(broken.map(|slot| ReceiveEvent::Reset { stream: frame.stream, slot }))
    }

    /// Counts data against the receive windows. Returns whether the data is discarded, and the slot of a
    /// stream that violated the protocol.
    #[expect(clippy::option_option, reason = "a stream that was broken need not have a slot")]
    fn admit_data(
        &mut self,
        frame: FrameHeader,
        sender: &mut Sender,
    ) -> Result<(bool, Option<Option<u64>>), ConnectionError> {
        let length = frame.length as i64;
        let ended = frame.has(flag::END_STREAM);
        sender.receive_window -= length;
        if sender.receive_window < 0 {
            return Err(ConnectionError::new(
                ErrorCode::FlowControl,
                "more data than the connection's window allows",
            ));
        }
        if frame.stream > sender.last_stream || frame.stream.is_multiple_of(2) {
            return Err(ConnectionError::protocol("data on a stream that was never opened"));
        }
        if frame.length == 0 && !ended {
            sender.abuse.add(points::EMPTY);
        }
        let Some(stream) = sender.streams.get_mut(&frame.stream) else {
            if !sender.was_cut_short(frame.stream, ended) {
                sender.abuse.add(points::SETTINGS);
                sender.put_reset(frame.stream, ErrorCode::StreamClosed);
            }
            return Ok((true, None));
        };
        if stream.is_half_closed_remote {
            let slot = sender.slot(frame.stream);
            sender.reset(frame.stream, ErrorCode::StreamClosed);
            return Ok((true, Some(slot)));
        }
        stream.receive_window -= length;
        if stream.receive_window < 0 {
            return Err(ConnectionError::new(
                ErrorCode::FlowControl,
                "more data than a stream's window allows",
            ));
        }
        Ok((false, None))
    }

    /// Passes on the available payload of a frame.
    fn pass_through<'a, H>(
        &mut self,
        mut passing: PassthroughFrame,
        input: &mut &'a [u8],
        sender: &mut Sender,
    ) -> ReceiveResult<'a, H> {
        if passing.skipped == usize::MAX {
            let Some((padding, rest)) = input.split_first() else {
                self.passing = Some(passing);
                return Ok(None);
            };
            *input = rest;
            passing.skipped = usize::from(*padding);
            let Some(data) = passing.data.checked_sub(1 + passing.skipped) else {
                return Err(ConnectionError::protocol("more padding than there is frame"));
            };
            passing.data = data;
            sender.release(passing.stream, 1 + passing.skipped);
        }
        let (bytes, rest) = input.split_at(passing.data.min(input.len()));
        passing.data -= bytes.len();
        *input = rest;
        if passing.data == 0 {
            let (skipped, rest) = input.split_at(passing.skipped.min(input.len()));
            passing.skipped -= skipped.len();
            *input = rest;
        }
        let ended = passing.data == 0 && passing.skipped == 0;
        if ended {
            self.frames += 1;
        } else {
            self.passing = Some(passing);
        }
        if passing.stream == 0 {
            return Ok((ended && passing.ends).then_some(ReceiveEvent::GoAway));
        }
        if passing.ignored {
            sender.release_connection(bytes.len());
            return Ok(None);
        }
        let ended = ended && passing.ends;
        if bytes.is_empty() && !ended {
            return Ok(None);
        }
        let Some(stream) = sender.streams.get_mut(&passing.stream) else {
            // The request was answered or cancelled meanwhile.
            sender.release_connection(bytes.len());
            return Ok(None);
        };
        stream.is_half_closed_remote |= ended;
        if !stream.consume_content(bytes.len(), ended) {
            sender.release_connection(bytes.len());
            if let Some(rest) = &mut self.passing {
                rest.ignored = true;
            }
            return Ok(Some(reset_malformed(passing.stream, sender)));
        }
        Ok(Some(ReceiveEvent::Data { stream: passing.stream, bytes, ended }))
    }

    /// Processes a complete frame.
    fn take<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        payload: &[u8],
        sender: &mut Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        self.frames += 1;
        match frame.kind {
            kind::HEADERS => return self.headers(frame, payload, sender, cache),
            kind::CONTINUATION => return self.continuation(frame, payload, sender, cache),
            kind::RST_STREAM => return reset(frame, sender),
            kind::SETTINGS => {
                self.has_settings = true;
                if frame.has(flag::ACK) {
                    // The server sent only one SETTINGS frame, and that disables the table.
                    self.decoder.disable_table();
                } else {
                    sender.apply_settings(payload)?;
                }
            }
            kind::PING if frame.has(flag::ACK) => sender.on_ping_ack(payload),
            kind::PING => {
                sender.abuse.add(points::EMPTY);
                sender.send_ping_ack(payload);
            }
            kind::WINDOW_UPDATE => return window_update(frame, payload, sender),
            kind::PRIORITY => {
                sender.abuse.add(points::FRAME);
                if depends_on_itself(frame, payload) {
                    return stream_or_connection_error(
                        frame.stream,
                        sender,
                        "a stream that depends on itself",
                    );
                }
            }
            // Only the header of the frame had arrived; its payload is passed through.
            _ if self.is_passed_through(frame) => return self.begin_passing(frame, sender),
            _ => {}
        }
        Ok(None)
    }

    fn headers<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        mut payload: &[u8],
        sender: &mut Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        if frame.has(flag::PADDED) {
            let short = || ConnectionError::protocol("more padding than there is frame");
            let (padding, rest) = payload.split_first().ok_or_else(short)?;
            let left = rest.len().checked_sub(usize::from(*padding)).ok_or_else(short)?;
            payload = rest.get(..left).unwrap_or_default();
        }
        let mut depends_on_itself = false;
        if frame.has(flag::PRIORITY) {
            let Some((priority, rest)) = payload.split_first_chunk::<5>() else {
                return Err(ConnectionError::size("headers without room for their priority"));
            };
            depends_on_itself = self::depends_on_itself(frame, priority);
            payload = rest;
        }
        let ended = frame.has(flag::END_STREAM);
        if frame.has(flag::END_HEADERS) {
            let flaw = depends_on_itself.then_some(HeaderError::Malformed);
            return self.head(frame.stream, ended, flaw, payload, sender, cache);
        }
        let mut block = Box::new(HeaderBlock {
            stream: frame.stream,
            ended,
            depends_on_itself,
            bytes: Vec::new(),
            charged: 0,
            pieces: 0,
            since: self.frames,
        });
        block.add(payload, sender)?;
        self.block = Some(block);
        Ok(None)
    }

    fn continuation<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        payload: &[u8],
        sender: &mut Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        let Some(mut block) = self.block.take() else {
            return Err(ConnectionError::protocol("a continuation of nothing"));
        };
        sender.abuse.add(points::FRAME);
        block.add(payload, sender)?;
        if !frame.has(flag::END_HEADERS) {
            self.block = Some(block);
            return Ok(None);
        }
        let flaw = block.depends_on_itself.then_some(HeaderError::Malformed);
        let event = self.head(block.stream, block.ended, flaw, &block.bytes, sender, cache);
        sender.budget.release(block.charged);
        event
    }

    /// Processes a complete header block: a new request, or the trailers of one.
    fn head<'a, H: FromRequestHead>(
        &mut self,
        stream: StreamId,
        ended: bool,
        flaw: Option<HeaderError>,
        block: &[u8],
        sender: &mut Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        if stream.is_multiple_of(2) {
            return Err(ConnectionError::protocol("a client that opens a stream of the server's"));
        }
        sender.count_work(HEAD_WORK + block.len() / 4);
        let most = sender.settings.header_list as usize;
        if stream <= sender.last_stream {
            // The trailers are not used, but decoding them may change the table.
            let head = self.decoder.read(block, most)?.finish_trailers();
            return trailers(stream, ended, flaw.or(head.error), sender);
        }
        let known = if self.decoder.is_stateless() { cache.lookup(block) } else { None };
        let head = match known {
            Some(head) => Ok(head),
            None => {
                let head = self.decoder.read(block, most)?;
                sender.count_work(head.size() / 4);
                let head = head.finish_request();
                match head.error {
                    Some(flaw) => Err(flaw),
                    None => {
                        let head = Arc::new(H::from(head));
                        if self.decoder.is_stateless() {
                            cache.insert(block, &head);
                        }
                        Ok(head)
                    }
                }
            }
        };
        sender.record_stream_id(stream);
        if sender.is_closing() || sender.streams.len() >= sender.settings.streams as usize {
            sender.abuse.add(points::REFUSED);
            sender.refuse(stream, ended, ErrorCode::RefusedStream);
            return Ok(None);
        }
        let head = match (flaw, head) {
            (None, Ok(head)) => head,
            (Some(flaw), _) | (None, Err(flaw)) => {
                sender.abuse.add(points::BAD_HEADERS);
                match flaw {
                    HeaderError::Malformed => sender.refuse(stream, ended, ErrorCode::Protocol),
                    HeaderError::TooLong => sender.refuse_with_headers(stream, ended, TOO_LONG),
                }
                return Ok(None);
            }
        };
        let announced = head.content_length();
        if ended && announced.is_some_and(|length| length != 0) {
            sender.abuse.add(points::BAD_HEADERS);
            sender.refuse(stream, ended, ErrorCode::Protocol);
            return Ok(None);
        }
        if sender.budget.charge(STREAM_BYTES).is_err() {
            sender.abuse.add(points::REFUSED);
            sender.refuse(stream, ended, ErrorCode::EnhanceYourCalm);
            return Ok(None);
        }
        sender.open(stream, ended, announced);
        Ok(Some(ReceiveEvent::Request { stream, head, ended }))
    }
}

/// The work of decoding a header block, in steps, besides that for its bytes.
const HEAD_WORK: usize = 4;
/// `:status: 431`
const TOO_LONG: &[u8] = b"\x08\x03431";

impl HeaderBlock {
    /// Adds a fragment; memory is charged before it is allocated.
    fn add(&mut self, piece: &[u8], sender: &mut Sender) -> Result<(), ConnectionError> {
        self.pieces += 1;
        let length = self.bytes.len() + piece.len();
        if self.pieces > CONTINUATIONS_MAX || length > sender.settings.header_list as usize + BLOCK_SLACK {
            return Err(ConnectionError::new(ErrorCode::EnhanceYourCalm, "a header block that has no end"));
        }
        // The buffer grows by doubling.
        let room = (2 * length).saturating_sub(self.charged);
        if sender.budget.charge(room).is_err() {
            return Err(ConnectionError::new(
                ErrorCode::EnhanceYourCalm,
                "no memory is left for a header block",
            ));
        }
        self.charged += room;
        self.bytes.extend_from_slice(piece);
        Ok(())
    }
}

/// Returns whether the priority at the start of a frame makes its stream depend on itself.
fn depends_on_itself(frame: FrameHeader, priority: &[u8]) -> bool {
    let on = priority.first_chunk().map(|on| u32::from_be_bytes(*on) & 0x7fff_ffff);
    on == Some(frame.stream)
}

/// Resets a stream with a malformed request, and reports that.
fn reset_malformed<'a, H>(id: StreamId, sender: &mut Sender) -> ReceiveEvent<'a, H> {
    let slot = sender.slot(id);
    sender.abuse.add(points::BAD_HEADERS);
    sender.reset(id, ErrorCode::Protocol);
    ReceiveEvent::Reset { stream: id, slot }
}

/// Resets a stream, if it is open; otherwise the violation ends the connection.
fn stream_or_connection_error<'a, H>(
    id: StreamId,
    sender: &mut Sender,
    what: &'static str,
) -> ReceiveResult<'a, H> {
    if sender.streams.contains_key(&id) {
        return Ok(Some(reset_malformed(id, sender)));
    }
    Err(ConnectionError::protocol(what))
}

fn trailers<'a, H>(
    id: StreamId,
    ended: bool,
    flaw: Option<HeaderError>,
    sender: &mut Sender,
) -> ReceiveResult<'a, H> {
    let Some(stream) = sender.streams.get_mut(&id) else {
        if sender.was_cut_short(id, ended) {
            // The request was answered or cancelled meanwhile.
            return Ok(None);
        }
        return Err(if sender.was_skipped(id) {
            ConnectionError::protocol("a stream whose number is lower than that of one before it")
        } else {
            ConnectionError::new(ErrorCode::StreamClosed, "headers on a stream that is closed")
        });
    };
    if stream.is_half_closed_remote {
        let slot = sender.slot(id);
        sender.reset(id, ErrorCode::StreamClosed);
        return Ok(Some(ReceiveEvent::Reset { stream: id, slot }));
    }
    if !ended || flaw.is_some() || !stream.consume_content(0, true) {
        return Ok(Some(reset_malformed(id, sender)));
    }
    stream.is_half_closed_remote = true;
    Ok(Some(ReceiveEvent::Data { stream: id, bytes: &[], ended: true }))
}

fn reset<'a, H>(frame: FrameHeader, sender: &mut Sender) -> ReceiveResult<'a, H> {
    if frame.stream > sender.last_stream || frame.stream.is_multiple_of(2) {
        return Err(ConnectionError::protocol("a reset of a stream that was never opened"));
    }
    sender.abuse.add(points::FRAME);
    let slot = sender.slot(frame.stream);
    if sender.remove_stream(frame.stream) {
        return Ok(Some(ReceiveEvent::Reset { stream: frame.stream, slot }));
    }
    sender.was_cut_short(frame.stream, true);
    Ok(None)
}

fn window_update<'a, H>(frame: FrameHeader, payload: &[u8], sender: &mut Sender) -> ReceiveResult<'a, H> {
    let Ok(more) = <[u8; 4]>::try_from(payload) else {
        return Err(ConnectionError::size("a window update that is not of four bytes"));
    };
    let more = u32::from_be_bytes(more) & 0x7fff_ffff;
    if frame.stream != 0 && (frame.stream > sender.last_stream || frame.stream.is_multiple_of(2)) {
        return Err(ConnectionError::protocol("a window update of a stream that was never opened"));
    }
    sender.abuse.add(points::FRAME);
    if more == 0 {
        return stream_or_connection_error(frame.stream, sender, "a window update by nothing");
    }
    if sender.would_overflow(frame.stream, more) {
        let slot = sender.slot(frame.stream);
        sender.reset(frame.stream, ErrorCode::FlowControl);
        return Ok(Some(ReceiveEvent::Reset { stream: frame.stream, slot }));
    }
    sender.on_window_update((frame.stream != 0).then_some(frame.stream), more)?;
    Ok(None)
}

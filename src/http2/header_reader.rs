//! Reads header blocks: decodes HEADERS and CONTINUATION frames into the heads and the trailers of requests.
//!
//! The reader owns the HPACK decoder and the incomplete header block. `request_admission.rs` decides whether a
//! request is accepted. Begin at [`HeaderReader::on_headers`].

use std::sync::Arc;

use super::abuse_score::points;
use super::charged_buffer::ChargedBuffer;
use super::frame::{ConnectionError, ErrorCode, FrameHeader, StreamId, flag};
use super::frame_check::max_header_block_bytes;
use super::hpack::HpackDecoder;
use super::receive_event::ReceiveResult;
use super::request_admission::{end_request_by_trailers, open_request_stream};
use super::request_head::{FromRequestHead, HeaderBlockCache, HeaderError};
use super::sender::Http2Sender;

/// The greatest number of frames of one header block.
const CONTINUATIONS_MAX: u32 = 64;
/// The work of decoding a header block, in steps, besides that for its bytes.
const HEAD_WORK: usize = 4;

/// The reader of header blocks of a connection.
#[derive(Debug, Default)]
pub(super) struct HeaderReader {
    decoder: HpackDecoder,
    block: Option<Box<IncompleteHeaderBlock>>,
}

/// The stream that a header block is about.
#[derive(Debug, Clone, Copy)]
struct HeaderBlockTarget {
    stream: StreamId,
    /// Whether the block ends the peer's side of the stream.
    ended: bool,
    depends_on_itself: bool,
}

/// An incomplete header block.
#[derive(Debug)]
struct IncompleteHeaderBlock {
    target: HeaderBlockTarget,
    buffer: ChargedBuffer,
    pieces: u32,
    /// The number of completed frames of the connection when it began.
    since: u64,
}

impl HeaderReader {
    /// Returns a reader at the beginning of a block.
    pub(super) fn with_decoder(decoder: HpackDecoder) -> Self {
        Self { decoder, block: None }
    }

    pub(super) fn decoder(&self) -> &HpackDecoder {
        &self.decoder
    }

    /// Forbids the header table: the peer has acknowledged that the server keeps none.
    pub(super) fn disable_dynamic_table(&mut self) {
        self.decoder.disable_dynamic_table();
    }

    /// Returns the stream of the incomplete block, and the number of frames that were complete when it began.
    pub(super) fn incomplete_block(&self) -> Option<(StreamId, u64)> {
        self.block.as_ref().map(|block| (block.target.stream, block.since))
    }

    /// Handles a HEADERS frame, the `number`th frame of the connection.
    pub(super) fn on_headers<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        number: u64,
        mut payload: &[u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        if frame.has_flag(flag::PADDED) {
            let short = || ConnectionError::protocol_error("more padding than there is frame");
            let (padding, rest) = payload.split_first().ok_or_else(short)?;
            let left = rest.len().checked_sub(usize::from(*padding)).ok_or_else(short)?;
            payload = rest.get(..left).unwrap_or_default();
        }
        let ended = frame.has_flag(flag::END_STREAM);
        let mut target = HeaderBlockTarget { stream: frame.stream, ended, depends_on_itself: false };
        if frame.has_flag(flag::PRIORITY) {
            let Some((priority, rest)) = payload.split_first_chunk::<5>() else {
                return Err(ConnectionError::frame_size_error("headers without room for their priority"));
            };
            target.depends_on_itself = depends_on_itself(frame, priority);
            payload = rest;
        }
        if frame.has_flag(flag::END_HEADERS) {
            return self.read_header_block(target, payload, sender, cache);
        }
        let mut block = Box::new(IncompleteHeaderBlock {
            target,
            buffer: ChargedBuffer::for_header_block(),
            pieces: 0,
            since: number,
        });
        block.append_fragment(payload, sender)?;
        self.block = Some(block);
        Ok(None)
    }

    /// Handles a CONTINUATION frame.
    pub(super) fn on_continuation<'a, H: FromRequestHead>(
        &mut self,
        frame: FrameHeader,
        payload: &[u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        let Some(mut block) = self.block.take() else {
            return Err(ConnectionError::protocol_error("a continuation of nothing"));
        };
        sender.abuse.add_points(points::FRAME);
        block.append_fragment(payload, sender)?;
        if !frame.has_flag(flag::END_HEADERS) {
            self.block = Some(block);
            return Ok(None);
        }
        let event = self.read_header_block(block.target, block.buffer.bytes(), sender, cache);
        block.buffer.release(&mut sender.budget);
        event
    }

    /// Reads a complete header block: a new request, or the trailers of one.
    fn read_header_block<'a, H: FromRequestHead>(
        &mut self,
        target: HeaderBlockTarget,
        block: &[u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> ReceiveResult<'a, H> {
        let HeaderBlockTarget { stream, ended, depends_on_itself } = target;
        if stream.is_multiple_of(2) {
            return Err(ConnectionError::protocol_error("a client that opens a stream of the server's"));
        }
        sender.count_work(HEAD_WORK + block.len() / 4);
        let flaw = depends_on_itself.then_some(HeaderError::Malformed);
        if sender.streams.was_opened(stream) {
            // The trailers are not used, but decoding them may change the table.
            let most = sender.announced_settings().header_list as usize;
            let trailers = self.decoder.decode_block(block, most)?.finish_trailers();
            return end_request_by_trailers(stream, ended, flaw.or(trailers.error), sender);
        }
        let head = self.decode_or_look_up_head(block, sender, cache)?;
        Ok(open_request_stream(stream, ended, flaw.map_or(head, Err), sender))
    }

    /// Returns the head of a request, or its flaw.
    fn decode_or_look_up_head<H: FromRequestHead>(
        &mut self,
        block: &[u8],
        sender: &mut Http2Sender,
        cache: &mut HeaderBlockCache<H>,
    ) -> Result<Result<Arc<H>, HeaderError>, ConnectionError> {
        if self.decoder.is_stateless()
            && let Some(head) = cache.lookup(block)
        {
            return Ok(Ok(head));
        }
        let head = self.decoder.decode_block(block, sender.announced_settings().header_list as usize)?;
        sender.count_work(head.list_size() / 4);
        let head = head.finish_request();
        if let Some(flaw) = head.error {
            return Ok(Err(flaw));
        }
        let head = Arc::new(H::from(head));
        if self.decoder.is_stateless() {
            cache.insert(block, &head);
        }
        Ok(Ok(head))
    }
}

impl IncompleteHeaderBlock {
    /// Adds a fragment.
    fn append_fragment(&mut self, piece: &[u8], sender: &mut Http2Sender) -> Result<(), ConnectionError> {
        self.pieces += 1;
        let length = self.buffer.bytes().len() + piece.len();
        if self.pieces > CONTINUATIONS_MAX || length > max_header_block_bytes(sender.announced_settings()) {
            return Err(ConnectionError::new(ErrorCode::EnhanceYourCalm, "a header block that has no end"));
        }
        self.buffer.append(piece, &mut sender.budget)
    }
}

/// Returns whether the priority at the start of a frame makes its stream depend on itself.
pub(super) fn depends_on_itself(frame: FrameHeader, priority: &[u8]) -> bool {
    let on = priority.first_chunk().map(|on| u32::from_be_bytes(*on) & 0x7fff_ffff);
    on == Some(frame.stream)
}

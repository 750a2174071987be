//! The receiving half of a connection: from bytes to events.

use std::sync::Arc;

use super::frame::{FrameHead, HEAD, Reason, StreamId, flag, kind};
use super::head::{Flaw, Head, Memo};
use super::hpack::Decoder;
use super::send::Sender;
use super::{Fault, Settings};

/// What a peer does.
#[derive(Debug)]
pub(crate) enum Event<'a, H> {
    /// A new request.
    Request {
        stream: StreamId,
        head: Arc<H>,
        /// That is all of it.
        ended: bool,
    },
    /// A part of a request's body. It counts against the windows until it is released.
    Data {
        stream: StreamId,
        bytes: &'a [u8],
        /// There is no more to come.
        ended: bool,
    },
    /// The peer gives up a request, which the user knows under this number.
    Reset { stream: StreamId, slot: Option<u64> },
    /// The peer will make no further requests.
    Left,
}

/// Longer control frames make no sense.
const CONTROL: usize = 4 << 10;
/// The block of a head, coded, may be this much longer than the list it stands for.
const BLOCK_SLACK: usize = 48 << 10;
/// So many pieces a block may come in.
const PIECES: u32 = 64;

/// A header block that is not complete.
#[derive(Debug)]
struct Block {
    stream: StreamId,
    ended: bool,
    bytes: Vec<u8>,
    pieces: u32,
}

/// The payload of a frame that is passed on, or over, as it comes.
#[derive(Debug, Clone, Copy)]
struct Passing {
    stream: StreamId,
    /// Of data; whatever else comes is skipped.
    data: usize,
    /// Of padding, or of what nobody reads.
    skipped: usize,
    /// It ends its stream.
    ends: bool,
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(crate) struct Receiver {
    decoder: Decoder,
    /// The beginning of a frame whose end is not there.
    partial: Vec<u8>,
    block: Option<Box<Block>>,
    passing: Option<Passing>,
    /// The peer has sent its settings, as it must before all else.
    introduced: bool,
}

/// A step that gave nothing to tell of, or an event.
type Step<'a, H> = Result<Option<Event<'a, H>>, Fault>;

impl Receiver {
    /// The receiving half of a connection whose preface has been read.
    pub(crate) fn new() -> Self {
        Self {
            decoder: Decoder::default(),
            partial: Vec::new(),
            block: None,
            passing: None,
            introduced: false,
        }
    }

    /// The next event in `input`, which is cut to what is left of it. `None` once nothing is left, or when the peer has
    /// caused so much that something else should be done before the rest is looked at.
    ///
    /// # Errors
    /// If the peer breaks the protocol in a way that the connection does not survive.
    pub(crate) fn next<'a, H: From<Head>>(
        &mut self,
        input: &mut &'a [u8],
        sender: &mut Sender,
        memo: &mut Memo<H>,
    ) -> Step<'a, H> {
        loop {
            if sender.is_busy() {
                sender.rest();
                return Ok(None);
            }
            if let Some(passing) = self.passing.take() {
                let before = input.len();
                let event = self.pass(passing, input, sender)?;
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
                let event = self.take(frame, payload.get(HEAD..).unwrap_or_default(), sender, memo)?;
                if event.is_some() {
                    return Ok(event);
                }
                continue;
            }
            let Some((head, rest)) = input.split_first_chunk::<HEAD>() else {
                self.partial.extend_from_slice(input);
                *input = &[];
                return Ok(None);
            };
            let frame = FrameHead::read(*head);
            self.check(frame, &sender.settings)?;
            if self.is_passed(frame) {
                *input = rest;
                self.begin_passing(frame, sender)?;
                continue;
            }
            let Some((payload, after)) = rest.split_at_checked(frame.length) else {
                self.partial.extend_from_slice(input);
                *input = &[];
                return Ok(None);
            };
            *input = after;
            let event = self.take(frame, payload, sender, memo)?;
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// The stream whose data comes next, and how much of it with nothing between.
    pub(crate) fn expects(&self) -> Option<(StreamId, usize)> {
        self.passing.filter(|passing| passing.skipped == 0).map(|passing| (passing.stream, passing.data))
    }

    /// Notes that `bytes` of the data that was expected were read without coming through here.
    pub(crate) fn took(&mut self, bytes: usize) {
        if let Some(passing) = &mut self.passing {
            passing.data = passing.data.saturating_sub(bytes);
        }
    }

    /// Completes the frame whose beginning is there.
    fn complete(&mut self, input: &mut &[u8], settings: &Settings) -> Result<Option<FrameHead>, Fault> {
        let Some(frame) = self.fill(input, HEAD).then(|| self.frame_head()).flatten() else {
            return Ok(None);
        };
        self.check(frame, settings)?;
        if self.is_passed(frame) {
            return Ok(Some(frame));
        }
        Ok(self.fill(input, HEAD + frame.length).then_some(frame))
    }

    fn frame_head(&self) -> Option<FrameHead> {
        self.partial.first_chunk::<HEAD>().map(|head| FrameHead::read(*head))
    }

    /// Whether there are `length` bytes of a frame, after taking what is missing.
    fn fill(&mut self, input: &mut &[u8], length: usize) -> bool {
        let missing = length.saturating_sub(self.partial.len()).min(input.len());
        let (taken, rest) = input.split_at_checked(missing).unwrap_or_default();
        self.partial.extend_from_slice(taken);
        *input = rest;
        self.partial.len() >= length
    }

    /// Data, and what this server does not know, is not kept until it is complete.
    fn is_passed(&self, frame: FrameHead) -> bool {
        matches!(frame.kind, kind::DATA | kind::GOAWAY | kind::CONTINUATION.. if frame.kind != kind::CONTINUATION)
    }

    /// Whether this frame may come now, and be so long.
    fn check(&self, frame: FrameHead, settings: &Settings) -> Result<(), Fault> {
        if !self.introduced && (frame.kind != kind::SETTINGS || frame.has(flag::ACK)) {
            return Err(Fault::protocol("it does not begin with its settings"));
        }
        if let Some(block) = &self.block
            && (frame.kind != kind::CONTINUATION || frame.stream != block.stream)
        {
            return Err(Fault::protocol("something stands between the pieces of a header block"));
        }
        if frame.length > settings.frame as usize {
            return Err(Fault::size("a frame that is larger than announced"));
        }
        let of_stream = frame.stream != 0;
        let (most, on_stream) = match frame.kind {
            kind::DATA => (usize::MAX, Some(true)),
            kind::HEADERS | kind::CONTINUATION => (settings.header_list as usize + BLOCK_SLACK, Some(true)),
            kind::PRIORITY | kind::RST_STREAM => (CONTROL, Some(true)),
            kind::SETTINGS | kind::PING => (CONTROL, Some(false)),
            kind::GOAWAY => (usize::MAX, Some(false)),
            kind::PUSH_PROMISE => return Err(Fault::protocol("a client that pushes")),
            kind::WINDOW_UPDATE => (CONTROL, None),
            _ => (usize::MAX, None),
        };
        if on_stream.is_some_and(|on_stream| on_stream != of_stream) {
            return Err(Fault::protocol("a frame on a stream that it cannot be on"));
        }
        if frame.length > most {
            return Err(Fault::new(Reason::EnhanceYourCalm, "a frame that is larger than can make sense"));
        }
        Ok(())
    }

    fn begin_passing(&mut self, frame: FrameHead, sender: &mut Sender) -> Result<(), Fault> {
        let (data, ends) = match frame.kind {
            kind::DATA => (frame.length, frame.has(flag::END_STREAM)),
            _ => (0, false),
        };
        let mut passing = Passing { stream: frame.stream, data, skipped: frame.length - data, ends };
        if frame.kind == kind::GOAWAY {
            // Marked by a stream that cannot be.
            passing.stream = 0;
            passing.ends = true;
        }
        if frame.kind == kind::DATA {
            self.count(frame, sender)?;
            if frame.has(flag::PADDED) {
                if frame.length == 0 {
                    return Err(Fault::size("padding without room for its length"));
                }
                // How much of it is data is not known before the next byte.
                passing.skipped = usize::MAX;
            }
        }
        self.passing = Some(passing);
        Ok(())
    }

    /// Counts data against the windows that it may use.
    fn count(&mut self, frame: FrameHead, sender: &mut Sender) -> Result<(), Fault> {
        let length = frame.length as i64;
        sender.receive_window -= length;
        if sender.receive_window < 0 {
            return Err(Fault::new(Reason::FlowControl, "more data than the connection's window allows"));
        }
        if frame.stream > sender.last || frame.stream.is_multiple_of(2) {
            return Err(Fault::protocol("data on a stream that was never opened"));
        }
        let Some(stream) = sender.streams.get_mut(&frame.stream) else { return Ok(()) };
        stream.receive_window -= length;
        if stream.receive_window < 0 {
            return Err(Fault::new(Reason::FlowControl, "more data than a stream's window allows"));
        }
        if stream.heard {
            return Err(Fault::new(Reason::StreamClosed, "data on a stream that the peer has ended"));
        }
        Ok(())
    }

    /// Passes on what is there of a frame.
    fn pass<'a, H>(
        &mut self,
        mut passing: Passing,
        input: &mut &'a [u8],
        sender: &mut Sender,
    ) -> Step<'a, H> {
        if passing.skipped == usize::MAX {
            let Some((padding, rest)) = input.split_first() else {
                self.passing = Some(passing);
                return Ok(None);
            };
            *input = rest;
            passing.skipped = usize::from(*padding);
            let Some(data) = passing.data.checked_sub(1 + passing.skipped) else {
                return Err(Fault::protocol("more padding than there is frame"));
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
        if !ended {
            self.passing = Some(passing);
        }
        if passing.stream == 0 {
            return Ok((ended && passing.ends).then_some(Event::Left));
        }
        let ended = ended && passing.ends;
        if bytes.is_empty() && !ended {
            return Ok(None);
        }
        match sender.streams.get_mut(&passing.stream) {
            None => {
                // It was answered, or given up, meanwhile.
                sender.release_connection(bytes.len());
                Ok(None)
            }
            Some(stream) => {
                stream.heard |= ended;
                Ok(Some(Event::Data { stream: passing.stream, bytes, ended }))
            }
        }
    }

    /// Takes a whole frame.
    fn take<'a, H: From<Head>>(
        &mut self,
        frame: FrameHead,
        payload: &[u8],
        sender: &mut Sender,
        memo: &mut Memo<H>,
    ) -> Step<'a, H> {
        match frame.kind {
            kind::HEADERS => return self.headers(frame, payload, sender, memo),
            kind::CONTINUATION => return self.continuation(frame, payload, sender, memo),
            kind::RST_STREAM => return reset(frame, payload, sender),
            kind::SETTINGS => {
                self.introduced = true;
                match (frame.has(flag::ACK), payload) {
                    (false, payload) => sender.adopt(payload)?,
                    (true, []) => {}
                    (true, _) => return Err(Fault::size("an acknowledgement with contents")),
                }
            }
            kind::PING => match (payload.len(), frame.has(flag::ACK)) {
                (8, false) => sender.pong(payload),
                (8, true) => sender.ponged(payload),
                _ => return Err(Fault::size("a ping that is not of eight bytes")),
            },
            kind::WINDOW_UPDATE => window_update(frame, payload, sender)?,
            kind::PRIORITY if payload.len() != 5 => {
                return Err(Fault::size("a priority that is not of five bytes"));
            }
            // A frame whose beginning came alone, and whose payload is passed on.
            _ if self.is_passed(frame) => self.begin_passing(frame, sender)?,
            _ => {}
        }
        Ok(None)
    }

    fn headers<'a, H: From<Head>>(
        &mut self,
        frame: FrameHead,
        mut payload: &[u8],
        sender: &mut Sender,
        memo: &mut Memo<H>,
    ) -> Step<'a, H> {
        if frame.has(flag::PADDED) {
            let short = || Fault::protocol("more padding than there is frame");
            let (padding, rest) = payload.split_first().ok_or_else(short)?;
            let left = rest.len().checked_sub(usize::from(*padding)).ok_or_else(short)?;
            payload = rest.get(..left).unwrap_or_default();
        }
        if frame.has(flag::PRIORITY) {
            payload = payload.get(5..).ok_or(Fault::size("headers without room for their priority"))?;
        }
        let ended = frame.has(flag::END_STREAM);
        if frame.has(flag::END_HEADERS) {
            return self.head(frame.stream, ended, payload, sender, memo);
        }
        self.block =
            Some(Box::new(Block { stream: frame.stream, ended, bytes: payload.to_vec(), pieces: 1 }));
        Ok(None)
    }

    fn continuation<'a, H: From<Head>>(
        &mut self,
        frame: FrameHead,
        payload: &[u8],
        sender: &mut Sender,
        memo: &mut Memo<H>,
    ) -> Step<'a, H> {
        let Some(mut block) = self.block.take() else {
            return Err(Fault::protocol("a continuation of nothing"));
        };
        block.bytes.extend_from_slice(payload);
        block.pieces += 1;
        if block.pieces > PIECES || block.bytes.len() > sender.settings.header_list as usize + BLOCK_SLACK {
            return Err(Fault::new(Reason::EnhanceYourCalm, "a header block that has no end"));
        }
        if frame.has(flag::END_HEADERS) {
            return self.head(block.stream, block.ended, &block.bytes, sender, memo);
        }
        self.block = Some(block);
        Ok(None)
    }

    /// Takes a whole header block: a new request, or the trailers of one.
    fn head<'a, H: From<Head>>(
        &mut self,
        stream: StreamId,
        ended: bool,
        block: &[u8],
        sender: &mut Sender,
        memo: &mut Memo<H>,
    ) -> Step<'a, H> {
        let known = if self.decoder.is_stateless() { memo.recall(block) } else { None };
        let head = match known {
            Some(head) => Ok(head),
            None => {
                let most = sender.settings.header_list as usize;
                let head = self.decoder.read(block, most);
                let head = head.map_err(|garbled| Fault::new(Reason::Compression, garbled.0))?;
                match head.flaw {
                    Some(flaw) => Err(flaw),
                    None if head.method.is_empty() && stream > sender.last => Err(Flaw::Malformed),
                    None => {
                        let head = Arc::new(H::from(head));
                        if self.decoder.is_stateless() {
                            memo.remember(block, &head);
                        }
                        Ok(head)
                    }
                }
            }
        };
        if stream <= sender.last {
            return trailers(stream, ended, sender);
        }
        if stream.is_multiple_of(2) {
            return Err(Fault::protocol("a client that opens a stream of the server's"));
        }
        if sender.is_closing() {
            return Ok(None);
        }
        sender.last = stream;
        if sender.streams.len() >= sender.settings.streams as usize {
            sender.put_reset(stream, Reason::RefusedStream);
            return Ok(None);
        }
        match head {
            Ok(head) => {
                sender.open(stream, ended);
                Ok(Some(Event::Request { stream, head, ended }))
            }
            Err(Flaw::Malformed) => {
                sender.put_reset(stream, Reason::Protocol);
                Ok(None)
            }
            Err(Flaw::TooLong) => {
                sender.open(stream, ended);
                // `:status: 431`
                sender.head(stream, b"\x08\x03431", true);
                Ok(None)
            }
        }
    }
}

fn trailers<'a, H>(id: StreamId, ended: bool, sender: &mut Sender) -> Step<'a, H> {
    let Some(stream) = sender.streams.get_mut(&id) else {
        // It was answered, or given up, meanwhile.
        return Ok(None);
    };
    if stream.heard {
        return Err(Fault::new(Reason::StreamClosed, "headers on a stream that the peer has ended"));
    }
    if !ended {
        return Err(Fault::protocol("headers in the middle of a request"));
    }
    stream.heard = true;
    Ok(Some(Event::Data { stream: id, bytes: &[], ended: true }))
}

fn reset<'a, H>(frame: FrameHead, payload: &[u8], sender: &mut Sender) -> Step<'a, H> {
    if payload.len() != 4 {
        return Err(Fault::size("a reset that is not of four bytes"));
    }
    if frame.stream > sender.last || frame.stream.is_multiple_of(2) {
        return Err(Fault::protocol("a reset of a stream that was never opened"));
    }
    let slot = sender.slot(frame.stream);
    if sender.forget(frame.stream) {
        return Ok(Some(Event::Reset { stream: frame.stream, slot }));
    }
    Ok(None)
}

fn window_update(frame: FrameHead, payload: &[u8], sender: &mut Sender) -> Result<(), Fault> {
    let Ok(more) = <[u8; 4]>::try_from(payload) else {
        return Err(Fault::size("a window update that is not of four bytes"));
    };
    let more = u32::from_be_bytes(more) & 0x7fff_ffff;
    if more == 0 {
        return Err(Fault::protocol("a window update by nothing"));
    }
    if frame.stream > sender.last {
        return Err(Fault::protocol("a window update of a stream that was never opened"));
    }
    sender.widen((frame.stream != 0).then_some(frame.stream), more)
}

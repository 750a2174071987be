//! The sending half of a connection: its streams, their windows and what waits for them.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use bytes::Bytes;

use super::frame::{
    DEFAULT_FRAME, DEFAULT_WINDOW, Fault, LARGEST_FRAME, LARGEST_WINDOW, Reason, StreamId, flag, kind,
    put_head, setting,
};
use super::{Output, Settings};

/// Something to be sent on a stream.
#[derive(Debug)]
enum Item {
    Data(Bytes),
    /// A header block; it ends the stream if so marked.
    Block(Vec<u8>, bool),
    /// The stream's end, without trailers.
    End,
}

/// A stream in progress.
#[derive(Debug)]
pub(super) struct Stream {
    /// What the peer takes.
    window: i64,
    /// What the peer may still send.
    pub(super) receive_window: i64,
    /// What was received and used, and the peer does not know of yet.
    credit: u32,
    /// The peer has sent everything.
    pub(super) heard: bool,
    /// What its user calls it.
    slot: Option<u64>,
    waiting: Option<VecDeque<Item>>,
    /// It stands in the queue.
    queued: bool,
}

/// Spreads the numbers of streams.
#[derive(Default)]
pub(super) struct StreamHasher(u64);

impl Hasher for StreamHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) output: Output,
    pub(super) settings: Settings,
    pub(super) streams: HashMap<StreamId, Stream, BuildHasherDefault<StreamHasher>>,
    /// What the peer takes on the whole connection.
    window: i64,
    initial_window: i64,
    frame: usize,
    /// What was received and used on the connection, and the peer does not know of yet.
    credit: u32,
    /// What the peer may still send on the connection.
    pub(super) receive_window: i64,
    /// Streams with something to send that wait for their turn, and for the connection's window; the next one first.
    blocked: VecDeque<StreamId>,
    /// Bytes of data that wait for windows.
    waiting: usize,
    /// Data was sent that the peer's host may have no room for.
    large: bool,
    /// What the peer has made the server do that nothing came out of, since this was last looked at.
    labour: usize,
    /// The last stream that the peer has opened.
    pub(super) last: StreamId,
    leaving: Leaving,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// Announced; streams that were on their way already are still taken.
    Announced,
    /// No further streams are taken.
    Last,
}

/// Data up to this length fits into what any host keeps for a process that does not read.
const LARGE: usize = 16 << 10;

/// So many bytes of its own, and so many steps that nothing comes out of, a peer may cause before others get their turn.
const COPIED: usize = 128 << 10;
const LABOUR: usize = 64 << 10;

/// What the ping says that follows the announcement.
const LEAVE: [u8; 8] = *b"leaving\0";

impl Sender {
    /// The sending half of a new connection, which begins with the server's settings.
    pub(crate) fn new(settings: Settings) -> Self {
        let mut sender = Self {
            output: Output::default(),
            settings,
            streams: HashMap::default(),
            window: DEFAULT_WINDOW,
            initial_window: DEFAULT_WINDOW,
            frame: DEFAULT_FRAME,
            credit: 0,
            receive_window: i64::from(settings.connection_window),
            blocked: VecDeque::new(),
            waiting: 0,
            large: false,
            labour: 0,
            last: 0,
            leaving: Leaving::No,
        };
        sender.greet();
        sender
    }

    fn greet(&mut self) {
        let Settings { streams, frame, stream_window, connection_window, header_list } = self.settings;
        let all = [
            // Tables of headers would be memory that idle connections hold, and blocks that mean something else each
            // time.
            (setting::HEADER_TABLE_SIZE, 0),
            (setting::MAX_CONCURRENT_STREAMS, streams),
            (setting::INITIAL_WINDOW_SIZE, stream_window),
            (setting::MAX_FRAME_SIZE, frame),
            (setting::MAX_HEADER_LIST_SIZE, header_list),
        ];
        self.output.gather(|to| {
            put_head(to, all.len() * 6, kind::SETTINGS, 0, 0);
            for (id, value) in all {
                to.extend_from_slice(&id.to_be_bytes());
                to.extend_from_slice(&value.to_be_bytes());
            }
        });
        let more = i64::from(connection_window) - DEFAULT_WINDOW;
        if let Ok(more @ 1..) = u32::try_from(more) {
            self.put_window_update(0, more);
        }
    }

    fn put_window_update(&mut self, stream: StreamId, more: u32) {
        self.output.gather(|to| {
            put_head(to, 4, kind::WINDOW_UPDATE, 0, stream);
            to.extend_from_slice(&more.to_be_bytes());
        });
    }

    /// How many bytes the peer has not taken yet.
    pub(crate) fn unsent(&self) -> usize {
        self.output.len() + self.waiting
    }

    /// Whether there was a large answer since this was last asked.
    pub(crate) fn had_large(&mut self) -> bool {
        std::mem::take(&mut self.large)
    }

    /// Whether the peer has caused so much that it is to be sent, or others served, before the peer is heard further.
    pub(super) fn is_busy(&self) -> bool {
        self.output.copied() > COPIED || self.labour > LABOUR
    }

    /// What was caused so far is forgiven.
    pub(super) fn rest(&mut self) {
        self.labour = 0;
    }

    /// How many streams are in progress.
    pub(crate) fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Gives a stream the number under which its user knows it.
    pub(crate) fn assign(&mut self, stream: StreamId, slot: u64) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.slot = Some(slot);
        }
    }

    /// The number that a stream was given.
    pub(crate) fn slot(&self, stream: StreamId) -> Option<u64> {
        self.streams.get(&stream)?.slot
    }

    pub(super) fn open(&mut self, id: StreamId, heard: bool) {
        let stream = Stream {
            window: self.initial_window,
            receive_window: i64::from(self.settings.stream_window),
            credit: 0,
            heard,
            slot: None,
            waiting: None,
            queued: false,
        };
        self.streams.insert(id, stream);
    }

    /// Whether no further streams are taken.
    pub(super) fn is_closing(&self) -> bool {
        self.leaving == Leaving::Last
    }

    // --- what users send

    /// Sends a whole answer: its head, its data and its trailers.
    pub(crate) fn answer(
        &mut self,
        stream: StreamId,
        head: &[u8],
        data: impl IntoIterator<Item = Bytes>,
        trailers: &[u8],
    ) {
        self.head(stream, head, false);
        for part in data {
            self.data(stream, part);
        }
        self.trailers(stream, trailers);
    }

    /// Sends a head, which may be all there is.
    pub(crate) fn head(&mut self, stream: StreamId, block: &[u8], end: bool) {
        self.block(stream, block, end);
    }

    /// Sends trailers, and with them the end.
    pub(crate) fn trailers(&mut self, stream: StreamId, block: &[u8]) {
        self.block(stream, block, true);
    }

    fn block(&mut self, id: StreamId, block: &[u8], end: bool) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Some(waiting) = &mut stream.waiting {
            waiting.push_back(Item::Block(block.to_vec(), end));
            return;
        }
        self.put_block(id, block, end);
        if end {
            self.ended(id);
        }
    }

    fn put_block(&mut self, id: StreamId, block: &[u8], end: bool) {
        let end = if end { flag::END_STREAM } else { 0 };
        let frame = self.frame;
        self.output.gather(|to| {
            if block.len() <= frame {
                put_head(to, block.len(), kind::HEADERS, end | flag::END_HEADERS, id);
                return to.extend_from_slice(block);
            }
            let last = block.len().div_ceil(frame) - 1;
            for (n, piece) in block.chunks(frame).enumerate() {
                let done = if n == last { flag::END_HEADERS } else { 0 };
                let (kind, flags) =
                    if n == 0 { (kind::HEADERS, end | done) } else { (kind::CONTINUATION, done) };
                put_head(to, piece.len(), kind, flags, id);
                to.extend_from_slice(piece);
            }
        });
    }

    /// Sends data.
    pub(crate) fn data(&mut self, id: StreamId, part: Bytes) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if part.is_empty() {
            return;
        }
        self.large |= part.len() > LARGE;
        if let Some(waiting) = &mut stream.waiting {
            self.waiting += part.len();
            return waiting.push_back(Item::Data(part));
        }
        let length = part.len() as i64;
        if length <= stream.window && length <= self.window {
            stream.window -= length;
            self.window -= length;
            return self.put_data(id, &part);
        }
        self.waiting += part.len();
        stream.waiting = Some(VecDeque::from([Item::Data(part)]));
        self.queue(id);
        self.pump();
    }

    fn put_data(&mut self, id: StreamId, part: &Bytes) {
        let mut place = 0;
        while place < part.len() {
            let end = part.len().min(place + self.frame);
            self.output.gather(|to| put_head(to, end - place, kind::DATA, 0, id));
            self.output.put(&part.slice(place..end));
            place = end;
        }
    }

    /// Ends a stream without trailers.
    pub(crate) fn end(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Some(waiting) = &mut stream.waiting {
            return waiting.push_back(Item::End);
        }
        self.put_end(id);
        self.ended(id);
    }

    fn put_end(&mut self, id: StreamId) {
        self.output.gather(|to| put_head(to, 0, kind::DATA, flag::END_STREAM, id));
    }

    /// The answer is complete. A peer that is still sending is told that nobody listens.
    fn ended(&mut self, id: StreamId) {
        if self.streams.remove(&id).is_some_and(|stream| !stream.heard) {
            self.put_reset(id, Reason::NoError);
        }
    }

    /// Breaks a stream off.
    pub(crate) fn reset(&mut self, id: StreamId, reason: Reason) {
        if self.forget(id) {
            self.put_reset(id, reason);
        }
    }

    pub(super) fn put_reset(&mut self, id: StreamId, reason: Reason) {
        self.output.gather(|to| {
            put_head(to, 4, kind::RST_STREAM, 0, id);
            to.extend_from_slice(&(reason as u32).to_be_bytes());
        });
    }

    /// Forgets a stream, and what it had to send; whether there was one.
    pub(super) fn forget(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.streams.remove(&id) else { return false };
        for item in stream.waiting.into_iter().flatten() {
            if let Item::Data(part) = item {
                self.waiting -= part.len();
            }
        }
        // A peer that opens streams and gives them up leaves numbers behind.
        if self.blocked.len() > 2 * self.streams.len() + 64 {
            self.blocked.retain(|id| self.streams.contains_key(id));
        }
        true
    }

    // --- what the peer allows

    /// Sends what windows have room for, a frame of each stream in turn. What is left in the queue then waits for the
    /// connection's window; streams whose own window is used up leave it.
    fn pump(&mut self) {
        while let Some(id) = self.blocked.pop_front() {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.queued = false;
            let Some(waiting) = &mut stream.waiting else { continue };
            match waiting.front_mut() {
                None => stream.waiting = None,
                Some(Item::Data(_)) if self.window <= 0 => {
                    stream.queued = true;
                    return self.blocked.push_front(id);
                }
                Some(Item::Data(_)) if stream.window <= 0 => {}
                Some(Item::Data(part)) => {
                    let room = stream.window.min(self.window).min(self.frame as i64) as usize;
                    let piece = part.split_to(part.len().min(room));
                    if part.is_empty() {
                        waiting.pop_front();
                    }
                    stream.window -= piece.len() as i64;
                    self.window -= piece.len() as i64;
                    self.waiting -= piece.len();
                    self.put_data(id, &piece);
                    self.queue(id);
                }
                Some(Item::Block(..) | Item::End) => {
                    let end = match waiting.pop_front() {
                        Some(Item::Block(block, end)) => {
                            self.put_block(id, &block, end);
                            end
                        }
                        _ => {
                            self.put_end(id);
                            true
                        }
                    };
                    if end {
                        self.ended(id);
                    } else {
                        self.queue(id);
                    }
                }
            }
        }
    }

    /// Puts a stream that has something to send at the end of the queue.
    fn queue(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.waiting.is_some()
            && !std::mem::replace(&mut stream.queued, true)
        {
            self.blocked.push_back(id);
        }
    }

    /// The peer takes more on the connection (`None`) or on a stream.
    pub(super) fn widen(&mut self, stream: Option<StreamId>, more: u32) -> Result<(), Fault> {
        let more = i64::from(more);
        match stream {
            None => {
                self.window += more;
                if self.window > LARGEST_WINDOW {
                    return Err(Fault::new(Reason::FlowControl, "the connection's window overflows"));
                }
            }
            Some(id) => {
                let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
                stream.window += more;
                if stream.window > LARGEST_WINDOW {
                    return Err(Fault::new(Reason::FlowControl, "a stream's window overflows"));
                }
                self.queue(id);
            }
        }
        self.pump();
        Ok(())
    }

    /// Takes over the peer's settings, and says so.
    pub(super) fn adopt(&mut self, payload: &[u8]) -> Result<(), Fault> {
        let (settings, []) = payload.as_chunks::<6>() else {
            return Err(Fault::size("settings that are cut short"));
        };
        for [i0, i1, v0, v1, v2, v3] in settings {
            let value = u32::from_be_bytes([*v0, *v1, *v2, *v3]);
            match u16::from_be_bytes([*i0, *i1]) {
                setting::INITIAL_WINDOW_SIZE => self.change_windows(i64::from(value))?,
                setting::MAX_FRAME_SIZE => {
                    let frame = value as usize;
                    if !(DEFAULT_FRAME..=LARGEST_FRAME).contains(&frame) {
                        return Err(Fault::protocol("a frame size that must not be"));
                    }
                    // A huge frame of one stream would keep all others waiting.
                    self.frame = frame.min(self.settings.frame as usize);
                }
                _ => {}
            }
        }
        self.output.gather(|to| put_head(to, 0, kind::SETTINGS, flag::ACK, 0));
        self.pump();
        Ok(())
    }

    fn change_windows(&mut self, initial: i64) -> Result<(), Fault> {
        if initial > LARGEST_WINDOW {
            return Err(Fault::new(Reason::FlowControl, "an initial window that must not be"));
        }
        let more = initial - self.initial_window;
        self.initial_window = initial;
        self.labour += self.streams.len();
        for stream in self.streams.values_mut() {
            stream.window += more;
            if stream.window > LARGEST_WINDOW {
                return Err(Fault::new(Reason::FlowControl, "a stream's window overflows"));
            }
        }
        let waiting = self.streams.iter().filter(|(_, stream)| stream.waiting.is_some() && !stream.queued);
        let mut waiting: Vec<StreamId> = waiting.map(|(id, _)| *id).collect();
        waiting.sort_unstable();
        for id in waiting {
            self.queue(id);
        }
        Ok(())
    }

    pub(super) fn pong(&mut self, payload: &[u8]) {
        self.output.gather(|to| {
            put_head(to, payload.len(), kind::PING, flag::ACK, 0);
            to.extend_from_slice(payload);
        });
    }

    // --- what the peer may send

    /// What was received on a stream is used: the peer may send as much more.
    pub(crate) fn release(&mut self, id: StreamId, bytes: usize) {
        self.release_connection(bytes);
        let half = self.settings.stream_window / 2;
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.credit = stream.credit.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if stream.credit >= half && !stream.heard {
            let more = std::mem::take(&mut stream.credit);
            stream.receive_window += i64::from(more);
            self.put_window_update(id, more);
        }
    }

    /// What was received on the connection is used, whatever became of its stream.
    pub(crate) fn release_connection(&mut self, bytes: usize) {
        self.credit = self.credit.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if self.credit >= self.settings.connection_window / 4 {
            let more = std::mem::take(&mut self.credit);
            self.receive_window += i64::from(more);
            self.put_window_update(0, more);
        }
    }

    // --- the end

    /// Announces that the connection will close once everything that is in progress is done.
    pub(crate) fn leave(&mut self) {
        if self.leaving != Leaving::No {
            return;
        }
        self.leaving = Leaving::Announced;
        self.put_goaway(LARGEST_WINDOW as u32, Reason::NoError);
        // When the answer to this is here, everything that was sent before the peer knew is here too.
        self.output.gather(|to| {
            put_head(to, LEAVE.len(), kind::PING, 0, 0);
            to.extend_from_slice(&LEAVE);
        });
    }

    pub(super) fn ponged(&mut self, payload: &[u8]) {
        if self.leaving == Leaving::Announced && *payload == LEAVE {
            self.leaving = Leaving::Last;
            self.put_goaway(self.last, Reason::NoError);
        }
    }

    /// Whether everything that was in progress when the server announced its leave is done.
    pub(crate) fn has_left(&self) -> bool {
        self.leaving == Leaving::Last && self.streams.is_empty()
    }

    /// Says what the peer did wrong.
    pub(crate) fn accuse(&mut self, fault: Fault) {
        self.put_goaway(self.last, fault.reason);
    }

    fn put_goaway(&mut self, last: StreamId, reason: Reason) {
        self.output.gather(|to| {
            put_head(to, 8, kind::GOAWAY, 0, 0);
            to.extend_from_slice(&last.to_be_bytes());
            to.extend_from_slice(&(reason as u32).to_be_bytes());
        });
    }
}

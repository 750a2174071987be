//! The sending half of a connection: streams, flow-control windows, queued frames, GOAWAY, and the count of work.
//!
//! It writes to no socket: [`OutputBuffer`] does. Begin at [`Sender::answer`].

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::abuse_score::{AbuseScore, points};
use super::frame::{
    ConnectionError, ErrorCode, INITIAL_MAX_FRAME, INITIAL_WINDOW, MAX_FRAME, MAX_WINDOW, StreamId, flag,
    kind, put_frame_header, setting,
};
use super::state_budget::{OverBudget, StateBudget, StatePool};
use super::{OutputBuffer, Settings};

/// A frame that waits to be sent on a stream.
#[derive(Debug)]
enum QueuedFrame {
    Data(Bytes),
    /// A header block; `true` if it ends the stream.
    Block(Vec<u8>, bool),
    /// The end of the stream, without trailers.
    End,
}

/// The state of a stream in progress.
#[derive(Debug)]
pub(super) struct StreamState {
    /// The send window.
    window: i64,
    /// The receive window.
    pub(super) receive_window: i64,
    /// The bytes that were consumed and not returned to the peer's window yet.
    unannounced_credit: u32,
    /// Whether the peer has ended its side.
    pub(super) is_half_closed_remote: bool,
    /// The missing bytes of the body, if the request announced its length.
    pub(super) content_left: Option<u64>,
    /// The caller's number for the stream.
    slot: Option<u64>,
    /// The bytes charged for its answer.
    charged: usize,
    waiting: Option<VecDeque<QueuedFrame>>,
    /// Whether the stream is in the send queue.
    is_queued: bool,
}

impl StreamState {
    /// Counts received bytes of the body; returns `false` if they do not match the announced length.
    pub(super) fn consume_content(&mut self, bytes: usize, ended: bool) -> bool {
        let Some(left) = &mut self.content_left else { return true };
        let Some(rest) = left.checked_sub(bytes as u64) else { return false };
        *left = rest;
        !ended || rest == 0
    }
}

/// Hashes stream numbers under a key of the connection. A peer chooses the numbers, and must not be able to
/// choose colliding ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamHash {
    key: [u64; 2],
}

impl StreamHash {
    fn new() -> Self {
        let random = RandomState::new();
        Self { key: [random.hash_one(0_u64), random.hash_one(1_u64) | 1] }
    }
}

impl BuildHasher for StreamHash {
    type Hasher = StreamHasher;

    fn build_hasher(&self) -> StreamHasher {
        StreamHasher { key: self.key, hash: 0 }
    }
}

pub(super) struct StreamHasher {
    key: [u64; 2],
    hash: u64,
}

impl Hasher for StreamHasher {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        // Both halves of the product together depend on every bit of the number and of the key. The second
        // multiplication spreads them, because numbers in equal steps would still give hashes in equal steps.
        let product = u128::from(self.hash ^ self.key[0] ^ u64::from(number)) * u128::from(self.key[1]);
        let folded = (product as u64 ^ (product >> 64) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.hash = folded ^ folded >> 32;
    }
}

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) output: OutputBuffer,
    pub(super) settings: Settings,
    pub(super) streams: HashMap<StreamId, StreamState, StreamHash>,
    /// The send window of the connection.
    window: i64,
    initial_window: i64,
    frame: usize,
    /// The bytes that were consumed on the connection and not returned to the peer's window yet.
    unannounced_credit: u32,
    /// The receive window of the connection.
    pub(super) receive_window: i64,
    /// The streams that have frames to send and wait for their turn or for the connection's window; the next
    /// one first.
    send_queue: VecDeque<StreamId>,
    /// The bytes of data that wait for windows.
    queued_bytes: usize,
    /// The bytes of data that were sent.
    data_sent: u64,
    /// Whether data was sent for which the peer's host may have no room.
    has_sent_large: bool,
    /// The steps of work caused by the peer since the last yield.
    work: usize,
    /// The steps of work since the clock was last checked.
    work_of_turn: usize,
    /// The memory budget of the peer's state.
    pub(crate) budget: StateBudget,
    /// The bytes charged for answers of ended streams, each with the output offset after which nothing of the
    /// answer waits.
    charged: VecDeque<(u64, usize)>,
    pub(super) abuse: AbuseScore,
    /// The last stream that the peer opened.
    pub(super) last_stream: StreamId,
    /// The last stream that was accepted; streams after the final GOAWAY are not.
    last_taken: StreamId,
    /// Most connections have none.
    closed_streams: Option<Box<ClosedStreams>>,
    goaway: GoawayState,
}

/// Closed and skipped streams, to decide what a peer may still send on them.
#[derive(Debug, Default)]
struct ClosedStreams {
    /// Streams that ended here while the peer was still sending, the latest last: frames that were on their
    /// way are no violation.
    cut_short: VecDeque<StreamId>,
    /// Skipped stream numbers, the latest last: each range from its first number to the one before its
    /// second.
    skipped: VecDeque<(StreamId, StreamId)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GoawayState {
    No,
    /// GOAWAY is announced; streams that were on their way are still accepted.
    Announced,
    /// The final GOAWAY is sent; no further streams are accepted.
    Last,
}

/// The length of data that fits into any host's receive buffer while the process does not read.
const LARGE: usize = 16 << 10;

/// The bytes of copied output after which a turn yields, so that answers are sent and the clock is checked.
const COPIED: usize = 128 << 10;
/// The steps of work after which a turn yields.
const WORK_PER_TURN: usize = 4 << 10;
/// The number of cut-short streams that are remembered.
const CUT_SHORT: usize = 256;
/// The number of ranges of skipped stream numbers that are remembered.
const SKIPPED: usize = 16;
/// The memory of a stream: its entries in the tables of streams, calls, deadlines and queues.
pub(super) const STREAM_BYTES: usize = 1 << 10;
/// The capacity that a connection without streams keeps at most.
const STREAMS_KEPT: usize = 256;
/// The number of sent bytes of data that removes one point of the abuse score.
const BYTES_PER_CREDIT: usize = 1 << 10;

/// The payload of the ping that follows the announcing GOAWAY.
const SHUTDOWN_PING: [u8; 8] = *b"leaving\0";

impl Sender {
    /// Returns the sending half of a new connection, which begins with the server's settings.
    pub(crate) fn new(settings: Settings, pool: Arc<StatePool>) -> Self {
        let mut sender = Self {
            output: OutputBuffer::default(),
            settings,
            streams: HashMap::with_hasher(StreamHash::new()),
            window: INITIAL_WINDOW,
            initial_window: INITIAL_WINDOW,
            frame: INITIAL_MAX_FRAME,
            unannounced_credit: 0,
            receive_window: i64::from(settings.connection_window),
            send_queue: VecDeque::new(),
            queued_bytes: 0,
            data_sent: 0,
            has_sent_large: false,
            work: 0,
            work_of_turn: 0,
            budget: StateBudget::new(settings.state_bytes, pool),
            charged: VecDeque::new(),
            abuse: AbuseScore::default(),
            last_stream: 0,
            last_taken: 0,
            closed_streams: None,
            goaway: GoawayState::No,
        };
        sender.send_settings();
        sender
    }

    fn send_settings(&mut self) {
        let Settings { streams, frame, stream_window, connection_window, header_list, .. } = self.settings;
        let all = [
            // A dynamic table would cost memory on idle connections and make the meaning of a block depend on
            // earlier ones.
            (setting::HEADER_TABLE_SIZE, 0),
            (setting::MAX_CONCURRENT_STREAMS, streams),
            (setting::INITIAL_WINDOW_SIZE, stream_window),
            (setting::MAX_FRAME_SIZE, frame),
            (setting::MAX_HEADER_LIST_SIZE, header_list),
        ];
        self.output.write_with(|to| {
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

    fn put_window_update(&mut self, stream: StreamId, more: u32) {
        self.output.write_with(|to| {
            put_frame_header(to, 4, kind::WINDOW_UPDATE, 0, stream);
            to.extend_from_slice(&more.to_be_bytes());
        });
    }

    /// Returns the number of bytes that the peer has not taken yet.
    pub(crate) fn unsent(&self) -> usize {
        self.output.len() + self.queued_bytes
    }

    /// Returns the bytes of data that wait for windows, and those that have been sent.
    pub(crate) fn data_progress(&self) -> (usize, u64) {
        (self.queued_bytes, self.data_sent)
    }

    /// Returns whether a large answer was sent since the last call.
    pub(crate) fn take_sent_large(&mut self) -> bool {
        std::mem::take(&mut self.has_sent_large)
    }

    /// Returns whether the peer has caused so much work that its answers are sent, and the clock is checked,
    /// before more input is processed.
    pub(crate) fn should_yield(&self) -> bool {
        self.output.copied() > COPIED || self.work > WORK_PER_TURN
    }

    /// Counts steps of work caused by the peer. One step is about a tenth of a microsecond.
    pub(crate) fn count_work(&mut self, steps: usize) {
        self.work += steps;
    }

    /// Ends a batch: counts its work towards the turn.
    pub(crate) fn end_batch(&mut self) {
        self.work_of_turn += std::mem::take(&mut self.work);
    }

    /// Releases the charges of answers that have been sent completely.
    pub(crate) fn release_sent_answers(&mut self) {
        while let Some((end, bytes)) = self.charged.front().copied()
            && end <= self.output.start()
        {
            self.charged.pop_front();
            self.budget.release_answer(bytes);
        }
    }

    /// Charges for an answer before it is encoded.
    pub(crate) fn charge_answer(&mut self, id: StreamId, bytes: usize) -> Result<(), OverBudget> {
        self.budget.charge_answer(bytes)?;
        match self.streams.get_mut(&id) {
            Some(stream) => stream.charged += bytes,
            None => self.budget.release_answer(bytes),
        }
        Ok(())
    }

    /// Returns whether enough work was done since the last such result to check the clock.
    pub(crate) fn is_clock_check_due(&mut self) -> bool {
        let due = self.work_of_turn + self.work > WORK_PER_TURN / 2;
        if due {
            self.work_of_turn = 0;
        }
        due
    }

    /// Returns whether the abuse score is high enough to compare it with the time.
    pub(crate) fn may_exceed_abuse_limit(&self) -> bool {
        self.abuse.needs_clock_check()
    }

    /// Checks the abuse score against the elapsed time; `now` counts from any fixed moment.
    ///
    /// # Errors
    /// If the score is beyond its limit.
    pub(crate) fn check_abuse(&mut self, now: Duration) -> Result<(), ConnectionError> {
        if self.abuse.exceeds_limit(now) {
            let what = "too many frames that ask for nothing: resets, pings, settings, empty data or refused headers";
            return Err(ConnectionError::new(ErrorCode::EnhanceYourCalm, what));
        }
        Ok(())
    }

    /// Returns the number of streams in progress.
    pub(crate) fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Assigns the caller's number to a stream.
    pub(crate) fn assign_slot(&mut self, stream: StreamId, slot: u64) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.slot = Some(slot);
        }
    }

    /// Returns the caller's number of a stream.
    pub(crate) fn slot(&self, stream: StreamId) -> Option<u64> {
        self.streams.get(&stream)?.slot
    }

    /// Records the number of a stream that the peer opens.
    pub(super) fn record_stream_id(&mut self, id: StreamId) {
        if id > self.last_stream + 2 {
            let first = if self.last_stream == 0 { 1 } else { self.last_stream + 2 };
            if first < id {
                let skipped = &mut self.closed_streams.get_or_insert_default().skipped;
                if skipped.len() == SKIPPED {
                    skipped.pop_front();
                }
                skipped.push_back((first, id));
            }
        }
        self.last_stream = id;
        if self.goaway != GoawayState::Last {
            self.last_taken = id;
        }
    }

    /// Returns whether this stream number was skipped, so that the stream never existed.
    pub(super) fn was_skipped(&self, id: StreamId) -> bool {
        let Some(strays) = &self.closed_streams else { return false };
        strays.skipped.iter().any(|(first, end)| (*first..*end).contains(&id))
    }

    /// Returns whether a stream ended here while the peer was sending on it. If the peer has `ended` it too,
    /// the record is dropped.
    pub(super) fn was_cut_short(&mut self, id: StreamId, ended: bool) -> bool {
        let Some(strays) = &mut self.closed_streams else { return false };
        let Some(place) = strays.cut_short.iter().rposition(|cut| *cut == id) else { return false };
        if ended {
            strays.cut_short.remove(place);
        }
        true
    }

    pub(super) fn record_cut_short(&mut self, id: StreamId) {
        let cut_short = &mut self.closed_streams.get_or_insert_default().cut_short;
        if cut_short.len() == CUT_SHORT {
            cut_short.pop_front();
        }
        cut_short.push_back(id);
    }

    /// Opens a stream, for which [`STREAM_BYTES`] have been charged.
    pub(super) fn open(&mut self, id: StreamId, heard: bool, announced: Option<u64>) {
        let stream = StreamState {
            window: self.initial_window,
            receive_window: i64::from(self.settings.stream_window),
            unannounced_credit: 0,
            is_half_closed_remote: heard,
            content_left: announced,
            slot: None,
            charged: 0,
            waiting: None,
            is_queued: false,
        };
        self.streams.insert(id, stream);
    }

    fn remove(&mut self, id: StreamId) -> Option<StreamState> {
        let stream = self.streams.remove(&id)?;
        self.budget.release(STREAM_BYTES);
        if self.streams.is_empty() && self.streams.capacity() > STREAMS_KEPT {
            // This capacity is no longer charged to any stream.
            self.streams.shrink_to(0);
        }
        if stream.charged > 0 {
            // The answer may still be in the output.
            self.charged.push_back((self.output.end(), stream.charged));
        }
        Some(stream)
    }

    /// Returns whether no further streams are accepted.
    pub(super) fn is_closing(&self) -> bool {
        self.goaway == GoawayState::Last
    }

    // --- sending

    /// Sends a complete answer: head, data and trailers.
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

    /// Sends a head; with `end` it is the whole response.
    pub(crate) fn head(&mut self, stream: StreamId, block: &[u8], end: bool) {
        self.block(stream, block, end);
    }

    /// Sends trailers, which end the stream.
    pub(crate) fn trailers(&mut self, stream: StreamId, block: &[u8]) {
        self.block(stream, block, true);
    }

    fn block(&mut self, id: StreamId, block: &[u8], end: bool) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Some(waiting) = &mut stream.waiting {
            waiting.push_back(QueuedFrame::Block(block.to_vec(), end));
            return;
        }
        self.put_block(id, block, end);
        if end {
            self.ended(id);
        }
    }

    fn put_block(&mut self, id: StreamId, block: &[u8], end: bool) {
        let end = if end { flag::END_STREAM } else { 0 };
        self.abuse.credit(points::REFUSED);
        let frame = self.frame;
        self.output.write_with(|to| {
            if block.len() <= frame {
                put_frame_header(to, block.len(), kind::HEADERS, end | flag::END_HEADERS, id);
                return to.extend_from_slice(block);
            }
            let last = block.len().div_ceil(frame) - 1;
            for (n, piece) in block.chunks(frame).enumerate() {
                let done = if n == last { flag::END_HEADERS } else { 0 };
                let (kind, flags) =
                    if n == 0 { (kind::HEADERS, end | done) } else { (kind::CONTINUATION, done) };
                put_frame_header(to, piece.len(), kind, flags, id);
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
        self.has_sent_large |= part.len() > LARGE;
        if let Some(waiting) = &mut stream.waiting {
            self.queued_bytes += part.len();
            return waiting.push_back(QueuedFrame::Data(part));
        }
        let length = part.len() as i64;
        if length <= stream.window && length <= self.window {
            stream.window -= length;
            self.window -= length;
            return self.put_data(id, &part);
        }
        self.queued_bytes += part.len();
        stream.waiting = Some(VecDeque::from([QueuedFrame::Data(part)]));
        self.enqueue(id);
        self.send_queued();
    }

    fn put_data(&mut self, id: StreamId, part: &Bytes) {
        self.data_sent += part.len() as u64;
        self.abuse.credit(u32::try_from(part.len() / BYTES_PER_CREDIT).unwrap_or(u32::MAX));
        let mut place = 0;
        while place < part.len() {
            let end = part.len().min(place + self.frame);
            self.output.write_with(|to| put_frame_header(to, end - place, kind::DATA, 0, id));
            self.output.put(&part.slice(place..end));
            place = end;
        }
    }

    /// Ends a stream without trailers.
    pub(crate) fn end(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Some(waiting) = &mut stream.waiting {
            return waiting.push_back(QueuedFrame::End);
        }
        self.put_end(id);
        self.ended(id);
    }

    fn put_end(&mut self, id: StreamId) {
        self.output.write_with(|to| put_frame_header(to, 0, kind::DATA, flag::END_STREAM, id));
    }

    /// Removes a stream whose answer is complete. A peer that is still sending receives RST_STREAM with
    /// NO_ERROR (RFC 9113, 8.1).
    fn ended(&mut self, id: StreamId) {
        if self.remove(id).is_some_and(|stream| !stream.is_half_closed_remote) {
            self.record_cut_short(id);
            self.put_reset(id, ErrorCode::NoError);
        }
    }

    /// Resets a stream.
    pub(crate) fn reset(&mut self, id: StreamId, reason: ErrorCode) {
        let heard = self.streams.get(&id).is_none_or(|stream| stream.is_half_closed_remote);
        if self.remove_stream(id) {
            if !heard {
                self.record_cut_short(id);
            }
            self.put_reset(id, reason);
        }
    }

    /// Refuses a stream that was not opened, with a response of headers only.
    pub(super) fn refuse_with_headers(&mut self, id: StreamId, ended: bool, block: &[u8]) {
        self.put_block(id, block, true);
        if !ended {
            self.record_cut_short(id);
            self.put_reset(id, ErrorCode::NoError);
        }
    }

    /// Refuses a stream that was not opened.
    pub(super) fn refuse(&mut self, id: StreamId, ended: bool, reason: ErrorCode) {
        if !ended {
            self.record_cut_short(id);
        }
        self.put_reset(id, reason);
    }

    pub(super) fn put_reset(&mut self, id: StreamId, reason: ErrorCode) {
        self.output.write_with(|to| {
            put_frame_header(to, 4, kind::RST_STREAM, 0, id);
            to.extend_from_slice(&(reason as u32).to_be_bytes());
        });
    }

    /// Removes a stream and its queued frames; returns whether it existed.
    pub(super) fn remove_stream(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.remove(id) else { return false };
        for item in stream.waiting.into_iter().flatten() {
            if let QueuedFrame::Data(part) = item {
                self.queued_bytes -= part.len();
            }
        }
        // A peer that opens and cancels streams leaves their numbers in the queue.
        if self.send_queue.len() > 2 * self.streams.len() + 64 {
            self.send_queue.retain(|id| self.streams.contains_key(id));
            self.send_queue.shrink_to(2 * self.send_queue.len() + 64);
        }
        true
    }

    // --- send windows

    /// Returns whether queued frames could be sent at once that were deferred because of too much work.
    pub(crate) fn can_resume(&self) -> bool {
        let blocked = self.send_queue.front().and_then(|id| self.streams.get(id));
        let waits_for_window = blocked.is_some_and(|stream| {
            matches!(stream.waiting.as_ref().and_then(VecDeque::front), Some(QueuedFrame::Data(_)))
                && self.window <= 0
        });
        !self.send_queue.is_empty() && !waits_for_window
    }

    /// Continues sending deferred frames.
    pub(crate) fn resume(&mut self) {
        if !self.send_queue.is_empty() {
            self.send_queued();
        }
    }

    /// Sends what the windows permit, one frame of each stream in turn. The rest of the queue then waits for
    /// the connection's window, or for [`Sender::resume`] if the work was much. Streams whose own window is
    /// used up leave the queue.
    fn send_queued(&mut self) {
        while !self.should_yield()
            && let Some(id) = self.send_queue.pop_front()
        {
            self.work += 1;
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.is_queued = false;
            let Some(waiting) = &mut stream.waiting else { continue };
            match waiting.front_mut() {
                None => stream.waiting = None,
                Some(QueuedFrame::Data(_)) if self.window <= 0 => {
                    stream.is_queued = true;
                    return self.send_queue.push_front(id);
                }
                Some(QueuedFrame::Data(_)) if stream.window <= 0 => {}
                Some(QueuedFrame::Data(part)) => {
                    let room = stream.window.min(self.window).min(self.frame as i64) as usize;
                    let piece = part.split_to(part.len().min(room));
                    if part.is_empty() {
                        waiting.pop_front();
                    }
                    stream.window -= piece.len() as i64;
                    self.window -= piece.len() as i64;
                    self.queued_bytes -= piece.len();
                    self.put_data(id, &piece);
                    self.enqueue(id);
                }
                Some(QueuedFrame::Block(..) | QueuedFrame::End) => {
                    let end = match waiting.pop_front() {
                        Some(QueuedFrame::Block(block, end)) => {
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
                        self.enqueue(id);
                    }
                }
            }
        }
    }

    /// Adds a stream with frames to send to the end of the queue.
    fn enqueue(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.waiting.is_some()
            && !std::mem::replace(&mut stream.is_queued, true)
        {
            self.send_queue.push_back(id);
        }
    }

    /// Applies a WINDOW_UPDATE of the connection (`None`) or of a stream.
    pub(super) fn on_window_update(
        &mut self,
        stream: Option<StreamId>,
        more: u32,
    ) -> Result<(), ConnectionError> {
        let more = i64::from(more);
        match stream {
            None => {
                self.window += more;
                if self.window > MAX_WINDOW {
                    return Err(ConnectionError::new(
                        ErrorCode::FlowControl,
                        "the connection's window overflows",
                    ));
                }
            }
            Some(id) => {
                let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
                stream.window += more;
                self.enqueue(id);
            }
        }
        self.send_queued();
        Ok(())
    }

    /// Returns whether a stream's window would overflow if it grew by `more`.
    pub(super) fn would_overflow(&self, id: StreamId, more: u32) -> bool {
        self.streams.get(&id).is_some_and(|stream| stream.window + i64::from(more) > MAX_WINDOW)
    }

    /// Applies the peer's settings and acknowledges them.
    pub(super) fn apply_settings(&mut self, payload: &[u8]) -> Result<(), ConnectionError> {
        let (settings, []) = payload.as_chunks::<6>() else {
            return Err(ConnectionError::size("settings that are cut short"));
        };
        let mut initial_window = None;
        for [i0, i1, v0, v1, v2, v3] in settings {
            let value = u32::from_be_bytes([*v0, *v1, *v2, *v3]);
            match u16::from_be_bytes([*i0, *i1]) {
                setting::ENABLE_PUSH if value > 1 => {
                    return Err(ConnectionError::protocol("a setting that is neither on nor off"));
                }
                setting::INITIAL_WINDOW_SIZE if i64::from(value) > MAX_WINDOW => {
                    return Err(ConnectionError::new(
                        ErrorCode::FlowControl,
                        "an initial window that must not be",
                    ));
                }
                setting::INITIAL_WINDOW_SIZE => initial_window = Some(i64::from(value)),
                setting::MAX_FRAME_SIZE => {
                    let frame = value as usize;
                    if !(INITIAL_MAX_FRAME..=MAX_FRAME).contains(&frame) {
                        return Err(ConnectionError::protocol("a frame size that must not be"));
                    }
                    // A huge frame of one stream would delay all others.
                    self.frame = frame.min(self.settings.frame as usize);
                }
                _ => {}
            }
        }
        self.abuse.add(points::SETTINGS);
        self.work += settings.len();
        // Several changes of the window in one frame have one effect: each effect costs a step for each
        // stream.
        if let Some(initial) = initial_window.filter(|initial| *initial != self.initial_window) {
            self.adjust_stream_windows(initial)?;
        }
        self.output.write_with(|to| put_frame_header(to, 0, kind::SETTINGS, flag::ACK, 0));
        self.send_queued();
        Ok(())
    }

    fn adjust_stream_windows(&mut self, initial: i64) -> Result<(), ConnectionError> {
        let more = initial - self.initial_window;
        self.initial_window = initial;
        self.work += self.streams.len();
        self.abuse.add(u32::try_from(self.streams.len() / 64).unwrap_or(u32::MAX));
        for stream in self.streams.values_mut() {
            stream.window += more;
            if stream.window > MAX_WINDOW {
                return Err(ConnectionError::new(ErrorCode::FlowControl, "a stream's window overflows"));
            }
        }
        if more < 0 {
            return Ok(());
        }
        let opened = |stream: &StreamState| {
            stream.window > 0 && stream.window <= more && stream.waiting.is_some() && !stream.is_queued
        };
        let mut waiting: Vec<StreamId> =
            self.streams.iter().filter(|(_, stream)| opened(stream)).map(|(id, _)| *id).collect();
        waiting.sort_unstable();
        for id in waiting {
            self.enqueue(id);
        }
        Ok(())
    }

    pub(super) fn send_ping_ack(&mut self, payload: &[u8]) {
        self.output.write_with(|to| {
            put_frame_header(to, payload.len(), kind::PING, flag::ACK, 0);
            to.extend_from_slice(payload);
        });
    }

    // --- receive windows

    /// Returns consumed bytes to the windows of a stream and of the connection.
    pub(crate) fn release(&mut self, id: StreamId, bytes: usize) {
        self.release_connection(bytes);
        self.release_stream(id, bytes);
    }

    /// Returns consumed bytes to the window of a stream only; the connection's window has them already.
    pub(crate) fn release_stream(&mut self, id: StreamId, bytes: usize) {
        let half = self.settings.stream_window / 2;
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.unannounced_credit =
            stream.unannounced_credit.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if stream.unannounced_credit >= half && !stream.is_half_closed_remote {
            let more = std::mem::take(&mut stream.unannounced_credit);
            stream.receive_window += i64::from(more);
            self.put_window_update(id, more);
        }
    }

    /// Returns consumed bytes to the connection's window, whatever became of their stream.
    pub(crate) fn release_connection(&mut self, bytes: usize) {
        self.unannounced_credit =
            self.unannounced_credit.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if self.unannounced_credit >= self.settings.connection_window / 4 {
            let more = std::mem::take(&mut self.unannounced_credit);
            self.receive_window += i64::from(more);
            self.put_window_update(0, more);
        }
    }

    // --- shutdown

    /// Announces that the connection will close after the streams in progress.
    pub(crate) fn begin_shutdown(&mut self) {
        if self.goaway != GoawayState::No {
            return;
        }
        self.goaway = GoawayState::Announced;
        self.put_goaway(MAX_WINDOW as u32, ErrorCode::NoError);
        // When the ping is acknowledged, every stream that the peer opened before it saw GOAWAY has arrived.
        self.output.write_with(|to| {
            put_frame_header(to, SHUTDOWN_PING.len(), kind::PING, 0, 0);
            to.extend_from_slice(&SHUTDOWN_PING);
        });
    }

    pub(super) fn on_ping_ack(&mut self, payload: &[u8]) {
        if self.goaway == GoawayState::Announced && *payload == SHUTDOWN_PING {
            self.goaway = GoawayState::Last;
            self.put_goaway(self.last_taken, ErrorCode::NoError);
        }
    }

    /// Returns whether all streams have ended since the final GOAWAY.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.goaway == GoawayState::Last && self.streams.is_empty()
    }

    /// Sends GOAWAY with the peer's violation.
    pub(crate) fn send_goaway(&mut self, fault: ConnectionError) {
        self.put_goaway_with_text(self.last_taken, fault.reason, fault.what);
    }

    fn put_goaway(&mut self, last: StreamId, reason: ErrorCode) {
        self.put_goaway_with_text(last, reason, "");
    }

    fn put_goaway_with_text(&mut self, last: StreamId, reason: ErrorCode, what: &str) {
        self.output.write_with(|to| {
            put_frame_header(to, 8 + what.len(), kind::GOAWAY, 0, 0);
            to.extend_from_slice(&last.to_be_bytes());
            to.extend_from_slice(&(reason as u32).to_be_bytes());
            to.extend_from_slice(what.as_bytes());
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn no_numbers_of_streams_collide_by_design() {
        let numbers = |step: u32| (0..16_384_u32).map(move |n| 1 + n.wrapping_mul(step) % (1 << 31));
        for step in [2, 1 << 16, 1 << 17, 3 << 20] {
            let hash = StreamHash::new();
            let distinct: HashSet<u32> = numbers(step).collect();
            // The table takes its positions from the lowest bits.
            let places: HashSet<u64> = distinct.iter().map(|id| hash.hash_one(id) & 0x7fff).collect();
            // The number of positions that this many random numbers occupy.
            let fair = (1 << 15) as f64 * (1.0 - (-(distinct.len() as f64) / f64::from(1 << 15)).exp());
            assert!(
                places.len() as f64 > 0.9 * fair,
                "{} places for {} numbers",
                places.len(),
                distinct.len()
            );
        }
        let [one, other] = [StreamHash::new(), StreamHash::new()].map(|hash| hash.hash_one(1_u32));
        assert_ne!(one, other, "each connection has its own key");
    }

    /// A socket that accepts this number of bytes and no more.
    struct Room(usize);

    impl tokio::io::AsyncWrite for Room {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.0 == 0 {
                return Poll::Pending;
            }
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            Poll::Ready(Ok(taken))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// The memory of an answer, which reports when it is freed.
    struct Answer(Vec<u8>, Arc<AtomicBool>);

    impl AsRef<[u8]> for Answer {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Answer {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }

    /// An answer stays charged while its memory is held. The charge is released, once, when all of the answer
    /// has been sent, whatever comes after it in the output.
    #[test]
    fn the_charge_of_an_answer_is_given_back_when_the_answer_has_left() {
        let settings = Settings {
            streams: 1_000,
            frame: 1 << 20,
            stream_window: 1 << 20,
            connection_window: 1 << 20,
            header_list: 1 << 14,
            state_bytes: 1 << 20,
        };
        for seed in 0..100 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let pool = StatePool::new(1 << 40);
            let mut sender = Sender::new(settings, Arc::clone(&pool));
            // Each answer: its stream, its charge, whether its memory is free, and the end of the output at
            // its end.
            let mut answers: Vec<(StreamId, usize, Arc<AtomicBool>, Option<u64>)> = Vec::new();
            let mut released_early = 0;
            for step in 0..400 {
                match rng.u8(0..8) {
                    0 | 1 => {
                        let id = 2 * answers.len() as StreamId + 1;
                        let length = rng.usize(1..200_000);
                        sender.open(id, true, None);
                        sender.charge_answer(id, length).expect("the pool is large");
                        let freed = Arc::new(AtomicBool::new(false));
                        let body = Bytes::from_owner(Answer(vec![0; length], Arc::clone(&freed)));
                        let cut = rng.usize(0..length);
                        sender.answer(id, b"head", [body.slice(..cut), body.slice(cut..)], b"trailers");
                        answers.push((id, length, freed, None));
                    }
                    2 => {
                        let id = 2 * rng.u32(0..answers.len() as u32 + 1) + 1;
                        sender.reset(id, ErrorCode::RefusedStream);
                    }
                    3 => sender.on_window_update(None, rng.u32(1..200_000)).expect("no overflow"),
                    4 => {
                        let id = 2 * rng.u32(0..answers.len() as u32 + 1) + 1;
                        sender.on_window_update(Some(id), rng.u32(1..200_000)).expect("no overflow");
                    }
                    _ => {
                        let mut socket = Room(rng.usize(1..100_000));
                        let mut cx = Context::from_waker(Waker::noop());
                        assert!(!matches!(
                            sender.output.poll_send(&mut cx, &mut socket),
                            Poll::Ready(Err(_))
                        ));
                        if rng.bool() {
                            sender.output.take_sent();
                        }
                    }
                }
                sender.end_batch();
                sender.resume();
                sender.release_sent_answers();
                for (id, .., end) in &mut answers {
                    if end.is_none() && !sender.streams.contains_key(id) {
                        *end = Some(sender.output.end());
                    }
                }
                let sum = |counts: &dyn Fn(&AtomicBool, Option<u64>) -> bool| -> usize {
                    let of = answers.iter().filter(|(.., freed, end)| counts(freed, *end));
                    of.map(|(_, charge, ..)| charge).sum()
                };
                let held = sum(&|freed, _| !freed.load(Ordering::Relaxed));
                let waiting = sum(&|_, end| end.is_none_or(|end| end > sender.output.start()));
                let charged = pool.taken();
                assert!(
                    (held..=waiting).contains(&charged),
                    "seed {seed}, step {step}: {held}, {charged}, {waiting}"
                );
                released_early += usize::from(
                    charged < answers.iter().map(|(_, charge, ..)| charge).sum() && !sender.output.is_empty(),
                );
            }
            assert!(released_early > 0, "seed {seed}: something is given back while other output waits");
            drop(sender);
            assert_eq!(pool.taken(), 0);
        }
    }
}

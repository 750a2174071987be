//! The frames that wait for the peer's windows, and the order in which they are sent.
//!
//! The streams take turns, with one frame in each turn. A stream whose own window is used up leaves the queue until
//! the window opens. The [`Http2Sender`](super::Http2Sender) writes the frames. Begin at [`SendQueue::next_frame`].

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes};
use serde::{Deserialize, Serialize};

use super::frame::{ConnectionError, ErrorCode, INITIAL_WINDOW, MAX_WINDOW, StreamId};

/// A frame that waits to be sent on a stream.
#[derive(Debug)]
pub(super) enum QueuedFrame {
    Data(Bytes),
    /// A header block; `true` if it ends the stream.
    Block(Vec<u8>, bool),
    /// The end of the stream, without trailers.
    End,
}

/// The frames of a stream that wait.
#[derive(Debug, Default)]
struct WaitingFrames {
    frames: VecDeque<QueuedFrame>,
    /// Whether the log of a kept connection has the frames, but for what was sent of them since.
    is_logged: bool,
    sent: SentFrames,
}

/// The part of a stream's waiting frames that was sent since the log of a kept connection was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SentFrames {
    /// The bytes of data.
    bytes: usize,
    /// The number of frames without data.
    others: usize,
}

/// The change of a stream's waiting frames that the log of a kept connection lacks.
pub(crate) enum QueueChange<'a> {
    /// Nothing.
    None,
    /// A part of the frames was sent.
    Sent(SentFrames),
    /// All that wait.
    All(SavedFrames, Vec<&'a [u8]>),
}

/// The lengths of waiting frames, whose bytes follow one another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedFrames(Vec<SavedFrame>);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum SavedFrame {
    Data(usize),
    Block(usize, bool),
    End,
}

/// The waiting frames of a stream, from which another process goes on.
#[derive(Debug, Default)]
pub(crate) struct RestoredFrames(VecDeque<QueuedFrame>);

fn save_frames(frames: &VecDeque<QueuedFrame>) -> (SavedFrames, Vec<&[u8]>) {
    let lengths = frames.iter().map(|frame| match frame {
        QueuedFrame::Data(part) => SavedFrame::Data(part.len()),
        QueuedFrame::Block(block, ends) => SavedFrame::Block(block.len(), *ends),
        QueuedFrame::End => SavedFrame::End,
    });
    let bytes = frames.iter().map(|frame| match frame {
        QueuedFrame::Data(part) => part.as_ref(),
        QueuedFrame::Block(block, _) => block.as_slice(),
        QueuedFrame::End => &[],
    });
    (SavedFrames(lengths.collect()), bytes.collect())
}

impl RestoredFrames {
    /// Reads frames whose bytes are `bytes`; `None` if the lengths do not match.
    pub(crate) fn read(saved: &SavedFrames, mut bytes: &[u8]) -> Option<Self> {
        let mut take = |length: usize| {
            let (taken, rest) = bytes.split_at_checked(length)?;
            bytes = rest;
            Some(taken)
        };
        let frames = saved.0.iter().map(|frame| {
            Some(match *frame {
                SavedFrame::Data(length) => QueuedFrame::Data(Bytes::copy_from_slice(take(length)?)),
                SavedFrame::Block(length, ends) => QueuedFrame::Block(take(length)?.to_vec(), ends),
                SavedFrame::End => QueuedFrame::End,
            })
        });
        frames.collect::<Option<VecDeque<_>>>().map(Self)
    }

    /// Returns the lengths and the bytes of the frames.
    pub(crate) fn save(&self) -> (SavedFrames, Vec<&[u8]>) {
        save_frames(&self.0)
    }

    /// Returns the number of bytes of the frames.
    pub(crate) fn bytes(&self) -> usize {
        self.save().1.iter().map(|part| part.len()).sum()
    }

    /// Removes what was sent.
    pub(crate) fn remove_sent(&mut self, sent: SentFrames) {
        let SentFrames { mut bytes, mut others } = sent;
        while let Some(frame) = self.0.front_mut() {
            match frame {
                QueuedFrame::Data(part) if bytes > 0 => {
                    let taken = bytes.min(part.len());
                    part.advance(taken);
                    bytes -= taken;
                    if !part.is_empty() {
                        return;
                    }
                }
                QueuedFrame::Block(..) | QueuedFrame::End if others > 0 => others -= 1,
                _ => return,
            }
            self.0.pop_front();
        }
    }
}

/// The server's side of one stream: its send window, and the frames that wait.
#[derive(Debug)]
pub(super) struct StreamOutput {
    window: i64,
    /// The frames that wait; on most streams none ever do, and a peer may have very many streams in progress.
    waiting: Option<Box<WaitingFrames>>,
    /// Whether the stream is in the queue.
    is_queued: bool,
}

impl StreamOutput {
    pub(super) fn new(window: i64) -> Self {
        Self { window, waiting: None, is_queued: false }
    }

    pub(super) fn window(&self) -> i64 {
        self.window
    }

    /// Returns whether frames wait, so that others wait behind them.
    pub(super) fn has_waiting_frames(&self) -> bool {
        self.waiting.is_some()
    }

    /// Adds a frame without data behind those that wait.
    pub(super) fn push_frame(&mut self, frame: QueuedFrame) {
        if let Some(waiting) = &mut self.waiting {
            waiting.frames.push_back(frame);
            waiting.is_logged = false;
        }
    }

    /// Returns what the log of a kept connection does not have, with `anew` all frames.
    pub(super) fn queue_change(&self, anew: bool) -> QueueChange<'_> {
        let Some(waiting) = &self.waiting else { return QueueChange::None };
        if waiting.is_logged && !anew {
            let is_sent = waiting.sent != SentFrames::default();
            return if is_sent { QueueChange::Sent(waiting.sent) } else { QueueChange::None };
        }
        let (frames, bytes) = save_frames(&waiting.frames);
        QueueChange::All(frames, bytes)
    }

    /// Records that the log of a kept connection has the waiting frames.
    pub(super) fn mark_queue_logged(&mut self) {
        if let Some(waiting) = &mut self.waiting {
            (waiting.is_logged, waiting.sent) = (true, SentFrames::default());
        }
    }

    /// Returns whether the window would overflow if it grew by `more`.
    pub(super) fn window_would_overflow(&self, more: u32) -> bool {
        self.window + i64::from(more) > MAX_WINDOW
    }
}

/// The next step of the stream whose turn it is.
pub(super) enum QueueTurn {
    /// This frame may be sent. The windows are already reduced by it.
    Send(QueuedFrame),
    /// The stream has nothing that may be sent, and left the queue.
    Nothing,
    /// The connection's window is used up: no stream sends data before it opens.
    Blocked,
}

/// The send window of a connection, and the streams that have frames to send.
#[derive(Debug)]
pub(super) struct SendQueue {
    /// The streams that wait for their turn or for the connection's window; the next one first.
    streams: VecDeque<StreamId>,
    window: i64,
    /// The bytes of data that wait.
    bytes: usize,
    /// The number of streams with frames that wait.
    streams_with_frames: usize,
}

impl SendQueue {
    pub(super) fn new() -> Self {
        Self::with_window(INITIAL_WINDOW)
    }

    /// Returns an empty queue.
    pub(super) fn with_window(window: i64) -> Self {
        Self { streams: VecDeque::new(), window, bytes: 0, streams_with_frames: 0 }
    }

    /// Returns the send window of the connection.
    pub(super) fn window(&self) -> i64 {
        self.window
    }

    /// Returns the bytes of data that wait for windows.
    pub(super) fn waiting_data_bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Takes `bytes` from both windows, if both have room for all of them and no frame of the stream waits.
    pub(super) fn try_take_windows(&mut self, stream: &mut StreamOutput, bytes: usize) -> bool {
        let length = bytes as i64;
        let fits = stream.waiting.is_none() && length <= stream.window && length <= self.window;
        if fits {
            stream.window -= length;
            self.window -= length;
        }
        fits
    }

    /// Adds data behind the frames of its stream that wait. Returns `true` if none waited: then the stream has
    /// entered the queue.
    pub(super) fn push_data(&mut self, id: StreamId, stream: &mut StreamOutput, part: Bytes) -> bool {
        self.bytes += part.len();
        if let Some(waiting) = &mut stream.waiting {
            waiting.frames.push_back(QueuedFrame::Data(part));
            waiting.is_logged = false;
            return false;
        }
        let frames = VecDeque::from([QueuedFrame::Data(part)]);
        stream.waiting = Some(Box::new(WaitingFrames { frames, ..WaitingFrames::default() }));
        self.streams_with_frames += 1;
        self.enqueue_stream(id, stream);
        true
    }

    /// Adds frames to a stream again that waited in a former process.
    pub(super) fn restore_frames(&mut self, id: StreamId, stream: &mut StreamOutput, frames: RestoredFrames) {
        for frame in &frames.0 {
            if let QueuedFrame::Data(part) = frame {
                self.bytes += part.len();
            }
        }
        let waiting = WaitingFrames { frames: frames.0, is_logged: true, ..WaitingFrames::default() };
        stream.waiting = Some(Box::new(waiting));
        self.streams_with_frames += 1;
        self.enqueue_stream(id, stream);
    }

    /// Returns the number of streams with frames that wait.
    pub(super) fn streams_with_frames(&self) -> usize {
        self.streams_with_frames
    }

    /// Records that a stream has ended.
    pub(super) fn record_ended_stream(&mut self, stream: &StreamOutput) {
        self.streams_with_frames -= usize::from(stream.waiting.is_some());
    }

    /// Adds a stream with frames to send to the end of the queue.
    fn enqueue_stream(&mut self, id: StreamId, stream: &mut StreamOutput) {
        if stream.waiting.is_some() && !std::mem::replace(&mut stream.is_queued, true) {
            self.streams.push_back(id);
        }
    }

    /// Returns the stream whose turn it is. Numbers of streams that have ended are among them.
    pub(super) fn front_stream(&self) -> Option<StreamId> {
        self.streams.front().copied()
    }

    /// Takes the stream whose turn it is.
    pub(super) fn pop_stream(&mut self) -> Option<StreamId> {
        self.streams.pop_front()
    }

    /// Takes the next frame of a stream that was popped, with at most `frame_max` bytes of data.
    pub(super) fn next_frame(
        &mut self,
        id: StreamId,
        stream: &mut StreamOutput,
        frame_max: usize,
    ) -> QueueTurn {
        stream.is_queued = false;
        let Some(waiting) = &mut stream.waiting else { return QueueTurn::Nothing };
        let WaitingFrames { frames, sent, .. } = &mut **waiting;
        let frame = match frames.front_mut() {
            None => {
                stream.waiting = None;
                self.streams_with_frames -= 1;
                return QueueTurn::Nothing;
            }
            Some(QueuedFrame::Data(_)) if self.window <= 0 => {
                stream.is_queued = true;
                self.streams.push_front(id);
                return QueueTurn::Blocked;
            }
            Some(QueuedFrame::Data(_)) if stream.window <= 0 => return QueueTurn::Nothing,
            Some(QueuedFrame::Data(part)) => {
                let room = stream.window.min(self.window).min(frame_max as i64) as usize;
                let piece = part.split_to(part.len().min(room));
                if part.is_empty() {
                    frames.pop_front();
                }
                sent.bytes += piece.len();
                stream.window -= piece.len() as i64;
                self.window -= piece.len() as i64;
                self.bytes -= piece.len();
                QueuedFrame::Data(piece)
            }
            Some(QueuedFrame::Block(..) | QueuedFrame::End) => {
                sent.others += 1;
                match frames.pop_front() {
                    Some(frame @ QueuedFrame::Block(_, false)) => frame,
                    // The stream ends.
                    last => return last.map_or(QueueTurn::Nothing, QueueTurn::Send),
                }
            }
        };
        self.enqueue_stream(id, stream);
        QueueTurn::Send(frame)
    }

    /// Returns whether `front`, the stream whose turn it is, is not blocked by the connection's window.
    pub(super) fn can_send(&self, front: Option<&StreamOutput>) -> bool {
        let first = front.and_then(|stream| stream.waiting.as_ref()?.frames.front());
        let is_blocked = self.window <= 0 && matches!(first, Some(QueuedFrame::Data(_)));
        !self.streams.is_empty() && !is_blocked
    }

    /// Forgets the waiting frames of a stream that was removed. `streams` is the number of those in progress.
    pub(super) fn discard_stream(
        &mut self,
        stream: StreamOutput,
        streams: usize,
        is_open: impl Fn(StreamId) -> bool,
    ) {
        for frame in stream.waiting.into_iter().flat_map(|waiting| waiting.frames) {
            if let QueuedFrame::Data(part) = frame {
                self.bytes -= part.len();
            }
        }
        // A peer that opens and cancels streams leaves their numbers in the queue.
        if self.streams.len() > 2 * streams + 64 {
            self.streams.retain(|id| is_open(*id));
            self.streams.shrink_to(2 * self.streams.len() + 64);
        }
    }

    /// Opens the connection's window.
    pub(super) fn grow_connection_window(&mut self, more: u32) -> Result<(), ConnectionError> {
        self.window += i64::from(more);
        if self.window > MAX_WINDOW {
            return Err(ConnectionError::new(ErrorCode::FlowControl, "the connection's window overflows"));
        }
        Ok(())
    }

    /// Opens the window of a stream, which must not overflow by it ([`StreamOutput::window_would_overflow`]).
    pub(super) fn grow_stream_window(&mut self, id: StreamId, stream: &mut StreamOutput, more: u32) {
        stream.window += i64::from(more);
        self.enqueue_stream(id, stream);
    }

    /// Adds `more`, which may be negative, to the windows of all streams.
    pub(super) fn adjust_stream_windows<'a>(
        &mut self,
        streams: impl Iterator<Item = (StreamId, &'a mut StreamOutput)>,
        more: i64,
    ) -> Result<(), ConnectionError> {
        let mut opened = Vec::new();
        for (id, stream) in streams {
            stream.window += more;
            if stream.window > MAX_WINDOW {
                return Err(ConnectionError::new(ErrorCode::FlowControl, "a stream's window overflows"));
            }
            let opens = stream.window > 0 && stream.window <= more;
            if opens && stream.waiting.is_some() && !std::mem::replace(&mut stream.is_queued, true) {
                opened.push(id);
            }
        }
        opened.sort_unstable();
        self.streams.extend(opened);
        Ok(())
    }
}

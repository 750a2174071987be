//! The frames that wait for the peer's windows, and the order in which they are sent.
//!
//! The streams take turns, with one frame in each turn. A stream whose own window is used up leaves the queue until
//! the window opens. The [`Http2Sender`](super::Http2Sender) writes the frames. Begin at [`SendQueue::next_frame`].

use std::collections::VecDeque;

use bytes::Bytes;

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

/// The server's side of one stream: its send window, and the frames that wait.
#[derive(Debug)]
pub(super) struct StreamOutput {
    window: i64,
    /// The frames that wait; on most streams none ever do, and a peer may have very many streams in progress.
    #[expect(
        clippy::box_collection,
        reason = "eight bytes in a stream without waiting frames, not thirty-two"
    )]
    waiting: Option<Box<VecDeque<QueuedFrame>>>,
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
        self.waiting.get_or_insert_default().push_back(frame);
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
}

impl SendQueue {
    pub(super) fn new() -> Self {
        Self::with_window(INITIAL_WINDOW)
    }

    /// Returns an empty queue.
    pub(super) fn with_window(window: i64) -> Self {
        Self { streams: VecDeque::new(), window, bytes: 0 }
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
            waiting.push_back(QueuedFrame::Data(part));
            return false;
        }
        stream.waiting = Some(Box::new(VecDeque::from([QueuedFrame::Data(part)])));
        self.enqueue_stream(id, stream);
        true
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
        let frame = match waiting.front_mut() {
            None => {
                stream.waiting = None;
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
                    waiting.pop_front();
                }
                stream.window -= piece.len() as i64;
                self.window -= piece.len() as i64;
                self.bytes -= piece.len();
                QueuedFrame::Data(piece)
            }
            Some(QueuedFrame::Block(..) | QueuedFrame::End) => match waiting.pop_front() {
                Some(frame @ QueuedFrame::Block(_, false)) => frame,
                // The stream ends.
                last => return last.map_or(QueueTurn::Nothing, QueueTurn::Send),
            },
        };
        self.enqueue_stream(id, stream);
        QueueTurn::Send(frame)
    }

    /// Returns whether `front`, the stream whose turn it is, is not blocked by the connection's window.
    pub(super) fn can_send(&self, front: Option<&StreamOutput>) -> bool {
        let first = front.and_then(|stream| stream.waiting.as_ref()?.front());
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
        for frame in stream.waiting.into_iter().flat_map(|waiting| *waiting) {
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

//! The sending half of a connection: turns answers into frames, within the windows and settings of the peer.
//!
//! The sender owns the state that both halves share: the streams, the windows, and the count of the work that the
//! peer causes. The [`OutputBuffer`] writes to the socket. Frames wait in the [`SendQueue`] until the peer's
//! windows permit them. Begin at [`Http2Sender::send_response`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::abuse_score::{AbuseScore, points};
use super::frame::{ConnectionError, ErrorCode, MAX_WINDOW, StreamId, flag};
use super::goaway::{GoawayTracker, SHUTDOWN_PING};
use super::peer_settings::PeerSettings;
use super::receive_window::ReceiveWindow;
use super::send_queue::{QueueTurn, QueuedFrame, SendQueue, StreamOutput};
use super::sender_changes::SenderChanges;
use super::state_budget::{OverBudget, StateMemoryBudget, StateMemoryPool};
use super::stream::{StreamInput, StreamState};
use super::stream_table::StreamTable;
use super::work_meter::WorkMeter;
use super::{AnnouncedSettings, OutputBuffer};

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Http2Sender {
    pub(crate) output: OutputBuffer,
    /// The memory budget of the peer's state.
    pub(crate) budget: StateMemoryBudget,
    pub(super) abuse: AbuseScore,
    pub(super) streams: StreamTable,
    /// The receive window of the connection.
    pub(super) receive_window: ReceiveWindow,
    pub(super) settings: AnnouncedSettings,
    pub(super) peer: PeerSettings,
    pub(super) queue: SendQueue,
    pub(super) goaway: GoawayTracker,
    work: WorkMeter,
    /// The bytes of data that were sent.
    data_sent: u64,
    /// Whether data was sent for which the peer's host may have no room.
    has_sent_large: bool,
    /// The changes that the log lacks, if the connection is kept.
    pub(super) changes: Option<Box<SenderChanges>>,
}

/// The length of data that fits into any host's receive buffer while the process does not read.
const LARGE: usize = 16 << 10;
/// The bytes of copied output after which a turn yields, so that answers are sent and the clock is checked.
const COPIED: usize = 128 << 10;
/// The memory of a stream: its entries in the tables of streams, calls, deadlines and queues.
pub(super) const STREAM_BYTES: usize = 1 << 10;
/// The number of sent bytes of data that removes one point of the abuse score.
const BYTES_PER_CREDIT: usize = 1 << 10;

impl Http2Sender {
    /// Returns the sending half of a new connection, which begins with the server's settings.
    pub(crate) fn new(settings: AnnouncedSettings, pool: Arc<StateMemoryPool>) -> Self {
        let mut output = OutputBuffer::default();
        output.put_settings(settings);
        Self {
            output,
            budget: StateMemoryBudget::new(settings.state_bytes, pool),
            abuse: AbuseScore::default(),
            streams: StreamTable::new(),
            receive_window: ReceiveWindow::new(settings.connection_window),
            settings,
            peer: PeerSettings::new(),
            queue: SendQueue::new(),
            goaway: GoawayTracker::default(),
            work: WorkMeter::default(),
            data_sent: 0,
            has_sent_large: false,
            changes: None,
        }
    }

    /// Returns the server's settings.
    pub(super) fn announced_settings(&self) -> &AnnouncedSettings {
        &self.settings
    }

    // --- progress and bounds

    /// Returns the number of bytes that the peer has not taken yet.
    pub(crate) fn unsent_bytes(&self) -> usize {
        self.output.len() + self.queue.waiting_data_bytes()
    }

    /// Returns the bytes of data that wait for windows, and those that have been sent.
    pub(crate) fn waiting_and_sent_data_bytes(&self) -> (usize, u64) {
        (self.queue.waiting_data_bytes(), self.data_sent)
    }

    /// Returns whether a large answer was sent since the last call.
    pub(crate) fn take_large_answer_sent(&mut self) -> bool {
        std::mem::take(&mut self.has_sent_large)
    }

    /// Returns whether the turn is over, or the peer has caused so much work that its answers are sent before more
    /// input is processed.
    pub(crate) fn should_yield(&self) -> bool {
        self.output.waiting_copied_bytes() > COPIED || self.work.should_yield()
    }

    /// Counts steps of work caused by the peer. One step is about a tenth of a microsecond.
    pub(crate) fn count_work(&mut self, steps: usize) {
        self.work.count(steps);
    }

    /// Ends a batch: counts its work towards the turn.
    pub(crate) fn end_batch(&mut self) {
        self.work.end_batch();
    }

    /// Begins a turn.
    pub(crate) fn begin_turn(&mut self) {
        self.work.begin_turn();
    }

    /// Ends the turn: nothing more is processed until the next one begins.
    pub(crate) fn end_turn(&mut self) {
        self.work.end_turn();
    }

    /// Returns whether the turn is over.
    pub(crate) fn is_turn_over(&self) -> bool {
        self.work.is_turn_over()
    }

    /// Returns whether enough work was done since the last such result to check the clock.
    pub(crate) fn is_clock_check_due(&mut self) -> bool {
        self.work.is_clock_check_due()
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

    /// Charges for an answer before it is encoded.
    pub(crate) fn charge_answer(&mut self, id: StreamId, bytes: usize) -> Result<(), OverBudget> {
        self.budget.charge_answer(bytes)?;
        match self.streams.get_mut(id) {
            Some(stream) => stream.charged += bytes,
            None => self.budget.release_answer(bytes),
        }
        Ok(())
    }

    /// Releases the charges of answers that have been sent completely.
    pub(crate) fn release_sent_answers(&mut self) {
        self.budget.release_sent_answers(self.output.offset_of_first_waiting_byte());
    }

    // --- streams

    /// Returns the number of streams in progress.
    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// Assigns the caller's number to a stream.
    pub(crate) fn assign_slot(&mut self, stream: StreamId, slot: u64) {
        if let Some(stream) = self.streams.get_mut(stream) {
            stream.slot = Some(slot);
        }
    }

    /// Returns the caller's number of a stream.
    pub(crate) fn slot_of_stream(&self, stream: StreamId) -> Option<u64> {
        self.streams.get(stream)?.slot
    }

    /// Records the number of a stream that the peer opens. Returns whether the stream may be accepted.
    pub(super) fn record_opened_stream(&mut self, id: StreamId) -> bool {
        self.streams.record_opened_stream(id);
        self.goaway.record_opened_stream(id);
        !self.goaway.has_sent_final_goaway() && self.streams.len() < self.settings.streams as usize
    }

    /// Opens a stream; `content` is the announced length of its body.
    pub(super) fn open_stream(
        &mut self,
        id: StreamId,
        ended: bool,
        content: Option<u64>,
    ) -> Result<(), OverBudget> {
        self.budget.charge(STREAM_BYTES)?;
        let stream = StreamState {
            input: StreamInput::new(self.settings.stream_window, ended, content),
            output: StreamOutput::new(self.peer.initial_stream_window()),
            slot: None,
            charged: 0,
        };
        self.streams.insert(id, stream);
        Ok(())
    }

    fn take_stream_state(&mut self, id: StreamId) -> Option<StreamState> {
        let stream = self.streams.remove(id)?;
        self.queue.record_ended_stream(&stream.output);
        if stream.output.has_waiting_frames() {
            self.record_queue_change(id);
        }
        self.budget.release(STREAM_BYTES);
        // The answer may still be in the output.
        self.budget.release_answer_after_offset(self.output.offset_after_last_waiting_byte(), stream.charged);
        Some(stream)
    }

    /// Removes a stream and its queued frames; returns whether it existed.
    pub(super) fn remove_stream(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.take_stream_state(id) else { return false };
        self.queue.discard_stream(stream.output, self.streams.len(), |id| self.streams.contains(id));
        true
    }

    /// Removes a stream whose answer is complete. A peer that is still sending receives RST_STREAM with
    /// NO_ERROR (RFC 9113, 8.1).
    fn on_stream_answered(&mut self, id: StreamId) {
        if let Some(stream) = self.take_stream_state(id) {
            self.stop_peer_sending(id, stream.input.is_ended());
        }
    }

    /// Tells a peer that has not `ended` its request to send no more of it.
    fn stop_peer_sending(&mut self, id: StreamId, ended: bool) {
        if !ended {
            self.streams.record_cut_short(id);
            self.output.put_rst_stream(id, ErrorCode::NoError);
        }
    }

    /// Resets a stream.
    pub(crate) fn reset_stream(&mut self, id: StreamId, reason: ErrorCode) {
        let ended = self.streams.get(id).is_none_or(|stream| stream.input.is_ended());
        if self.remove_stream(id) {
            self.refuse_stream(id, ended, reason);
        }
    }

    /// Refuses a stream that was not opened.
    pub(super) fn refuse_stream(&mut self, id: StreamId, ended: bool, reason: ErrorCode) {
        if !ended {
            self.streams.record_cut_short(id);
        }
        self.output.put_rst_stream(id, reason);
    }

    /// Refuses a stream that was not opened, with a response of headers only.
    pub(super) fn refuse_stream_with_headers(&mut self, id: StreamId, ended: bool, block: &[u8]) {
        self.send_header_block(id, block, true);
        self.stop_peer_sending(id, ended);
    }

    // --- answers

    /// Sends a complete answer: head, data and trailers.
    pub(crate) fn send_response(
        &mut self,
        stream: StreamId,
        head: &[u8],
        data: impl IntoIterator<Item = Bytes>,
        trailers: &[u8],
    ) {
        self.send_response_head(stream, head, false);
        for part in data {
            self.send_data(stream, part);
        }
        self.send_trailers(stream, trailers);
    }

    /// Sends a complete answer with a few bytes of data, which get memory of their own only if they must wait.
    pub(crate) fn send_short_response(&mut self, id: StreamId, head: &[u8], data: &[u8], trailers: &[u8]) {
        self.send_response_head(id, head, false);
        if let Some(stream) = self.streams.get_mut(id) {
            if self.queue.try_take_windows(&mut stream.output, data.len()) {
                self.count_sent_data(data.len());
                self.output.put_short_data(id, data);
            } else {
                self.send_data(id, Bytes::copy_from_slice(data));
            }
        }
        self.send_trailers(id, trailers);
    }

    /// Sends a head; with `end` it is the whole response.
    pub(crate) fn send_response_head(&mut self, id: StreamId, block: &[u8], end: bool) {
        let Some(stream) = self.streams.get_mut(id) else { return };
        if stream.output.has_waiting_frames() {
            stream.output.push_frame(QueuedFrame::Block(block.to_vec(), end));
            return self.record_queue_change(id);
        }
        self.send_header_block(id, block, end);
        if end {
            self.on_stream_answered(id);
        }
    }

    /// Sends trailers, which end the stream.
    pub(crate) fn send_trailers(&mut self, stream: StreamId, block: &[u8]) {
        self.send_response_head(stream, block, true);
    }

    fn send_header_block(&mut self, id: StreamId, block: &[u8], end: bool) {
        self.abuse.remove_points(points::REFUSED);
        self.output.put_headers(id, block, end, self.peer.max_frame_payload());
    }

    /// Sends data.
    pub(crate) fn send_data(&mut self, id: StreamId, part: Bytes) {
        let Some(stream) = self.streams.get_mut(id) else { return };
        if part.is_empty() {
            return;
        }
        self.has_sent_large |= part.len() > LARGE;
        if self.queue.try_take_windows(&mut stream.output, part.len()) {
            return self.put_data(id, &part);
        }
        let is_first = self.queue.push_data(id, &mut stream.output, part);
        self.record_queue_change(id);
        if is_first {
            self.send_queued();
        }
    }

    /// Records that the waiting frames of a stream have changed, if the connection is kept.
    fn record_queue_change(&mut self, id: StreamId) {
        if let Some(changes) = &mut self.changes
            && changes.queues.last() != Some(&id)
        {
            changes.queues.push(id);
        }
    }

    fn count_sent_data(&mut self, length: usize) {
        self.data_sent += length as u64;
        self.abuse.remove_points(u32::try_from(length / BYTES_PER_CREDIT).unwrap_or(u32::MAX));
    }

    fn put_data(&mut self, id: StreamId, part: &Bytes) {
        self.count_sent_data(part.len());
        self.output.put_data(id, part, self.peer.max_frame_payload());
    }

    /// Ends a stream without trailers.
    pub(crate) fn end_stream(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id) else { return };
        if stream.output.has_waiting_frames() {
            stream.output.push_frame(QueuedFrame::End);
            return self.record_queue_change(id);
        }
        self.output.put_end_of_stream(id);
        self.on_stream_answered(id);
    }

    // --- send windows

    /// Returns whether queued frames could be sent at once that were deferred because of too much work.
    pub(crate) fn can_resume_sending(&self) -> bool {
        let front = self.queue.front_stream().and_then(|id| self.streams.get(id));
        self.queue.can_send(front.map(|stream| &stream.output))
    }

    /// Continues sending deferred frames.
    pub(crate) fn resume_sending(&mut self) {
        if !self.queue.is_empty() {
            self.send_queued();
        }
    }

    /// Sends what the windows permit, one frame of each stream in turn. The rest of the queue then waits for
    /// the connection's window, or for [`Http2Sender::resume_sending`] if the work was much.
    fn send_queued(&mut self) {
        while !self.should_yield()
            && let Some(id) = self.queue.pop_stream()
        {
            self.work.count(1);
            let Some(stream) = self.streams.get_mut(id) else { continue };
            let turn = self.queue.next_frame(id, &mut stream.output, self.peer.max_frame_payload());
            self.record_queue_change(id);
            match turn {
                QueueTurn::Nothing => {}
                QueueTurn::Blocked => return,
                QueueTurn::Send(QueuedFrame::Data(part)) => self.put_data(id, &part),
                QueueTurn::Send(QueuedFrame::Block(block, end)) => {
                    self.send_header_block(id, &block, end);
                    if end {
                        self.on_stream_answered(id);
                    }
                }
                QueueTurn::Send(QueuedFrame::End) => {
                    self.output.put_end_of_stream(id);
                    self.on_stream_answered(id);
                }
            }
        }
    }

    /// Applies a WINDOW_UPDATE of the connection (`None`) or of a stream.
    pub(super) fn on_window_update(
        &mut self,
        stream: Option<StreamId>,
        more: u32,
    ) -> Result<(), ConnectionError> {
        match stream {
            None => self.queue.grow_connection_window(more)?,
            Some(id) => {
                let Some(stream) = self.streams.get_mut(id) else { return Ok(()) };
                self.queue.grow_stream_window(id, &mut stream.output, more);
                if let Some(changes) = &mut self.changes {
                    changes.windows.push(id);
                }
            }
        }
        self.resume_sending();
        Ok(())
    }

    /// Applies the peer's settings and acknowledges them.
    pub(super) fn apply_settings(&mut self, payload: &[u8]) -> Result<(), ConnectionError> {
        let (count, more) = self.peer.apply_settings_frame(payload, self.settings.frame)?;
        self.abuse.add_points(points::SETTINGS);
        self.work.count(count);
        if more != 0 {
            self.work.count(self.streams.len());
            self.abuse.add_points(u32::try_from(self.streams.len() / 64).unwrap_or(u32::MAX));
            let outputs = self.streams.iter_mut().map(|(id, stream)| (id, &mut stream.output));
            self.queue.adjust_stream_windows(outputs, more)?;
            if let Some(changes) = &mut self.changes {
                changes.all_windows = true;
            }
        }
        self.output.put_settings_ack();
        self.send_queued();
        Ok(())
    }

    // --- receive windows

    /// Returns consumed bytes to the windows of a stream and of the connection.
    pub(crate) fn release_windows(&mut self, id: StreamId, bytes: usize) {
        self.release_connection_window(bytes);
        self.release_stream_window(id, bytes);
    }

    /// Returns consumed bytes to the window of a stream only; the connection's window has them already.
    pub(crate) fn release_stream_window(&mut self, id: StreamId, bytes: usize) {
        if let Some(stream) = self.streams.get_mut(id)
            && !stream.input.is_ended()
            && let Some(more) = stream.input.window.release(bytes, self.settings.stream_window / 2)
        {
            self.output.put_window_update(id, more);
        }
    }

    /// Returns consumed bytes to the connection's window, whatever became of their stream.
    pub(crate) fn release_connection_window(&mut self, bytes: usize) {
        if let Some(more) = self.receive_window.release(bytes, self.settings.connection_window / 4) {
            self.output.put_window_update(0, more);
        }
    }

    // --- shutdown

    /// Announces that the connection will close after the streams in progress.
    pub(crate) fn begin_shutdown(&mut self) {
        if self.goaway.begin_shutdown() {
            self.output.put_goaway(MAX_WINDOW as u32, ErrorCode::NoError, "");
            self.output.put_ping(0, &SHUTDOWN_PING);
        }
    }

    /// Handles a PING frame.
    pub(super) fn on_ping(&mut self, is_ack: bool, payload: &[u8]) {
        if !is_ack {
            self.abuse.add_points(points::EMPTY);
            self.output.put_ping(flag::ACK, payload);
        } else if self.goaway.on_shutdown_ping_ack(payload) {
            self.output.put_goaway(self.goaway.last_accepted_stream(), ErrorCode::NoError, "");
        }
    }

    /// Returns whether all streams have ended since the final GOAWAY.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.goaway.has_sent_final_goaway() && self.streams.len() == 0
    }

    /// Sends GOAWAY with the peer's violation.
    pub(crate) fn send_goaway(&mut self, fault: ConnectionError) {
        self.output.put_goaway(self.goaway.last_accepted_stream(), fault.reason, fault.what);
    }
}

//! The state of an [`Http2Sender`] for the log of a kept connection, and the sender that another process makes of it.
//!
//! Begin at [`Http2Sender::save`] and [`Http2Sender::restore`].

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::abuse_score::AbuseScore;
use super::frame::StreamId;
use super::goaway::GoawayTracker;
use super::peer_settings::PeerSettings;
use super::receive_window::ReceiveWindow;
use super::send_queue::{QueueChange, RestoredFrames, SendQueue, StreamOutput};
use super::sender::Http2Sender;
use super::sender_changes::SenderChanges;
use super::state_budget::{OverBudget, StateMemoryPool};
use super::stream::StreamInput;
use super::stream_table::{StreamNumbers, StreamTable};
use super::{AnnouncedSettings, OutputBuffer};

/// The state of a sender without streams and output.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSender {
    numbers: StreamNumbers,
    receive_window: ReceiveWindow,
    send_window: i64,
    peer: PeerSettings,
    goaway: GoawayTracker,
    abuse: u32,
}

impl SavedSender {
    /// Returns the last stream that the peer has opened.
    pub(crate) fn last_stream(&self) -> StreamId {
        self.numbers.last
    }
}

/// The state of a stream without its frames.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedStream {
    input: StreamInput,
    send_window: i64,
}

impl Http2Sender {
    /// Returns its state.
    pub(crate) fn save(&self) -> SavedSender {
        SavedSender {
            numbers: self.streams.numbers().clone(),
            receive_window: self.receive_window.clone(),
            send_window: self.queue.window(),
            peer: self.peer.clone(),
            goaway: self.goaway.clone(),
            abuse: self.abuse.present_points(),
        }
    }

    /// Returns the sender of a connection whose state was saved, of which `sent` bytes were sent and `waiting` were not.
    pub(crate) fn restore(
        settings: AnnouncedSettings,
        pool: Arc<StateMemoryPool>,
        saved: SavedSender,
        sent: u64,
        waiting: &[u8],
    ) -> Self {
        let SavedSender { numbers, receive_window, send_window, peer, goaway, abuse } = saved;
        let mut sender = Self::new(settings, pool);
        sender.output = OutputBuffer::with_waiting(sent, waiting);
        sender.abuse = AbuseScore::with_points(abuse);
        sender.streams = StreamTable::with_numbers(numbers);
        (sender.receive_window, sender.peer, sender.goaway) = (receive_window, peer, goaway);
        sender.queue = SendQueue::with_window(send_window);
        sender
    }

    /// Returns the state of a stream.
    pub(crate) fn save_stream(&self, id: StreamId) -> Option<SavedStream> {
        let stream = self.streams.get(id)?;
        Some(SavedStream { input: stream.input.clone(), send_window: stream.output.window() })
    }

    /// Opens a stream again, with the frames that wait.
    pub(crate) fn restore_stream(
        &mut self,
        id: StreamId,
        saved: SavedStream,
        frames: Option<RestoredFrames>,
    ) -> Result<(), OverBudget> {
        self.open_stream(id, false, None)?;
        if let Some(stream) = self.streams.get_mut(id) {
            stream.input = saved.input;
            stream.output = StreamOutput::new(saved.send_window);
            if let Some(frames) = frames {
                self.queue.restore_frames(id, &mut stream.output, frames);
            }
        }
        Ok(())
    }

    /// Returns the number of streams with frames that wait for a window.
    pub(crate) fn streams_with_frames(&self) -> usize {
        self.queue.streams_with_frames()
    }

    /// Returns the streams with frames that wait for a window.
    pub(crate) fn queued_streams(&self) -> Vec<StreamId> {
        let queued = self.streams.iter().filter(|(_, stream)| stream.output.has_waiting_frames());
        queued.map(|(id, _)| id).collect()
    }

    /// Returns what the log does not have of the waiting frames of a stream, with `anew` all of them; `None` if no frame of the
    /// stream waits.
    pub(crate) fn queue_change(&self, id: StreamId, anew: bool) -> Option<QueueChange<'_>> {
        let stream = self.streams.get(id)?;
        stream.output.has_waiting_frames().then(|| stream.output.queue_change(anew))
    }

    /// Records that the log has the waiting frames of a stream.
    pub(crate) fn mark_queue_logged(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.output.mark_queue_logged();
        }
    }

    /// Records changes from now on.
    pub(crate) fn watch_changes(&mut self) {
        self.changes = Some(Box::default());
    }

    /// Returns whether a setting has changed all send windows.
    pub(crate) fn changes_all_windows(&self) -> bool {
        self.changes.as_ref().is_some_and(|changes| changes.all_windows)
    }

    /// Returns the number of changes of single streams.
    pub(crate) fn change_count(&self) -> usize {
        self.changes.as_ref().map_or(0, |changes| changes.windows.len() + changes.queues.len())
    }

    /// Takes the changes.
    pub(crate) fn take_changes(&mut self) -> SenderChanges {
        self.changes.as_deref_mut().map(std::mem::take).unwrap_or_default()
    }
}

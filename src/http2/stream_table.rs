//! The streams of a connection by number: the streams in progress, and a bounded record of closed and skipped ones.
//!
//! The table tells whether a stream was opened, was skipped, or ended while the peer was still sending. The
//! [`Http2Receiver`](super::Http2Receiver) decides how to treat a frame on such a stream. Begin at [`StreamTable`].

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::frame::StreamId;
use super::stream::StreamState;
use super::stream_hash::StreamHash;

/// The number of cut-short streams that are remembered.
const CUT_SHORT: usize = 256;
/// The number of ranges of skipped stream numbers that are remembered.
const SKIPPED: usize = 16;
/// The capacity that a connection without streams keeps at most.
const STREAMS_KEPT: usize = 256;

/// The streams of a connection.
#[derive(Debug)]
pub(super) struct StreamTable {
    /// The stream that was opened last, if it is in progress. Most calls are answered before the next one begins, so
    /// they never enter the map.
    newest: Option<(StreamId, StreamState)>,
    /// All other streams in progress.
    older: HashMap<StreamId, StreamState, StreamHash>,
    numbers: StreamNumbers,
}

/// The numbers of streams, without those in progress.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StreamNumbers {
    /// The last stream that the peer opened.
    pub(super) last: StreamId,
    /// Most connections have none.
    closed: Option<Box<ClosedStreams>>,
}

/// Closed and skipped streams, to decide what a peer may still send on them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct ClosedStreams {
    /// Streams that ended here while the peer was still sending, the latest last: frames that were on their
    /// way are no violation.
    cut_short: VecDeque<StreamId>,
    /// Skipped stream numbers, the latest last: each range from its first number to the one before its
    /// second.
    skipped: VecDeque<(StreamId, StreamId)>,
}

impl StreamTable {
    pub(super) fn new() -> Self {
        Self::with_numbers(StreamNumbers { last: 0, closed: None })
    }

    /// Returns a table without streams in progress.
    pub(super) fn with_numbers(numbers: StreamNumbers) -> Self {
        Self { newest: None, older: HashMap::with_hasher(StreamHash::new()), numbers }
    }

    pub(super) fn numbers(&self) -> &StreamNumbers {
        &self.numbers
    }

    // --- streams in progress

    pub(super) fn len(&self) -> usize {
        usize::from(self.newest.is_some()) + self.older.len()
    }

    pub(super) fn get(&self, id: StreamId) -> Option<&StreamState> {
        match &self.newest {
            Some((newest, stream)) if *newest == id => Some(stream),
            _ => self.older.get(&id),
        }
    }

    pub(super) fn get_mut(&mut self, id: StreamId) -> Option<&mut StreamState> {
        match &mut self.newest {
            Some((newest, stream)) if *newest == id => Some(stream),
            _ => self.older.get_mut(&id),
        }
    }

    pub(super) fn contains(&self, id: StreamId) -> bool {
        self.get(id).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (StreamId, &StreamState)> {
        let newest = self.newest.iter().map(|(id, stream)| (*id, stream));
        newest.chain(self.older.iter().map(|(id, stream)| (*id, stream)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (StreamId, &mut StreamState)> {
        let newest = self.newest.iter_mut().map(|(id, stream)| (*id, stream));
        newest.chain(self.older.iter_mut().map(|(id, stream)| (*id, stream)))
    }

    pub(super) fn insert(&mut self, id: StreamId, stream: StreamState) {
        if let Some((older, stream)) = self.newest.replace((id, stream)) {
            self.older.insert(older, stream);
        }
    }

    pub(super) fn remove(&mut self, id: StreamId) -> Option<StreamState> {
        if let Some((_, stream)) = self.newest.take_if(|(newest, _)| *newest == id) {
            return Some(stream);
        }
        let stream = self.older.remove(&id)?;
        if self.older.is_empty() && self.older.capacity() > STREAMS_KEPT {
            // This capacity is no longer charged to any stream.
            self.older.shrink_to(0);
        }
        Some(stream)
    }

    // --- numbers

    /// Returns whether the peer has opened this stream, or skipped its number.
    pub(super) fn was_opened(&self, id: StreamId) -> bool {
        id <= self.numbers.last && !id.is_multiple_of(2)
    }

    /// Records the number of a stream that the peer opens.
    pub(super) fn record_opened_stream(&mut self, id: StreamId) {
        if id > self.numbers.last + 2 {
            let first = if self.numbers.last == 0 { 1 } else { self.numbers.last + 2 };
            if first < id {
                let skipped = &mut self.numbers.closed.get_or_insert_default().skipped;
                if skipped.len() == SKIPPED {
                    skipped.pop_front();
                }
                skipped.push_back((first, id));
            }
        }
        self.numbers.last = id;
    }

    /// Returns whether this stream number was skipped, so that the stream never existed.
    pub(super) fn was_skipped(&self, id: StreamId) -> bool {
        let Some(closed) = &self.numbers.closed else { return false };
        closed.skipped.iter().any(|(first, end)| (*first..*end).contains(&id))
    }

    /// Records that a stream ends here while the peer is sending on it.
    pub(super) fn record_cut_short(&mut self, id: StreamId) {
        let cut_short = &mut self.numbers.closed.get_or_insert_default().cut_short;
        if cut_short.len() == CUT_SHORT {
            cut_short.pop_front();
        }
        cut_short.push_back(id);
    }

    /// Returns whether a stream ended here while the peer was sending on it. If the peer has `ended` it too,
    /// the record is dropped.
    pub(super) fn was_cut_short(&mut self, id: StreamId, ended: bool) -> bool {
        let Some(closed) = &mut self.numbers.closed else { return false };
        let Some(place) = closed.cut_short.iter().rposition(|cut| *cut == id) else { return false };
        if ended {
            closed.cut_short.remove(place);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::send_queue::StreamOutput;
    use super::super::stream::StreamInput;
    use super::*;

    /// Returns a stream that is known by its slot.
    fn stream(slot: u64) -> StreamState {
        let (input, output) = (StreamInput::new(1, false, None), StreamOutput::new(1));
        StreamState { input, output, slot: Some(slot), charged: 0 }
    }

    #[test]
    fn streams_are_found_in_any_order_of_their_ends() {
        let ids = [1, 3, 5, 7];
        for first_ended in ids {
            let mut table = StreamTable::new();
            for id in ids {
                table.insert(id, stream(id.into()));
                assert_eq!(table.get_mut(id).and_then(|stream| stream.slot), Some(id.into()));
            }
            assert_eq!(table.remove(first_ended).and_then(|stream| stream.slot), Some(first_ended.into()));
            assert!(table.remove(first_ended).is_none() && !table.contains(first_ended));
            table.insert(9, stream(9));
            let left: Vec<_> = ids.into_iter().filter(|id| *id != first_ended).chain([9]).collect();
            assert_eq!(table.len(), left.len());
            let mut found: Vec<_> = table.iter_mut().map(|(id, _)| id).collect();
            found.sort_unstable();
            assert_eq!(found, left);
            for id in left {
                assert_eq!(table.get(id).and_then(|stream| stream.slot), Some(id.into()));
                assert!(table.remove(id).is_some());
            }
            assert_eq!(table.len(), 0);
        }
    }
}

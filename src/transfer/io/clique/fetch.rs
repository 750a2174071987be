//! The receives of one launch over a clique of GPUs, cut into pieces. Begin at [`CliqueFetch::new`].

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::clique_message::{CliquePiece, PIECE_MAX};
use crate::protocol::link::GroupId;
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// One receive of the launch: bytes that are contiguous on both sides.
struct ReceiveRun {
    receive: u32,
    /// The offset of its first byte in the inbound stream.
    start: u64,
    len: u64,
    sender_gpu: u32,
    receiver_gpu: u32,
}

/// A piece that was asked for.
struct AskedPiece {
    piece: CliquePiece,
    /// The offset in the inbound stream.
    start: u64,
    is_in_batch: bool,
}

/// The receives of one launch.
pub struct CliqueFetch {
    pub launch: Arc<PeerLaunch>,
    runs: Vec<ReceiveRun>,
    /// The next piece: the index of a run, and the offset in it.
    next: (usize, u64),
    /// The pieces that were asked for and have not ended, by receive and offset in it.
    asked: BTreeMap<(u32, u64), AskedPiece>,
    landed: u64,
}

impl CliqueFetch {
    /// Returns the receives of a launch whose bytes come from the sources of the peer's definition; none if some are not in memory of
    /// GPUs on both sides.
    pub fn new(launch: &Arc<PeerLaunch>, definition: &LaunchDefinition) -> Option<Self> {
        let (mut runs, mut start) = (Vec::new(), 0);
        for (receive, span, source) in launch.lists.receives_with_sources(definition) {
            let FetchSource::Gpu(sender_gpu) = source else { return None };
            let (receiver_gpu, len) = (span.device_memory()?.gpu().ordinal(), span.len() as u64);
            runs.push(ReceiveRun { receive: receive as u32, start, len, sender_gpu, receiver_gpu });
            start += len;
        }
        // The definition has as many entries as the launch has receives.
        let is_whole = start == launch.lists.inbound.total();
        is_whole.then(|| Self {
            launch: Arc::clone(launch),
            runs,
            next: (0, 0),
            asked: BTreeMap::new(),
            landed: 0,
        })
    }

    /// Takes the next piece, which is asked for from now on; none if there is none, or the launch is closing.
    pub fn take_piece(&mut self, group: GroupId, is_to_leader: bool) -> Option<CliquePiece> {
        let (at, from) = self.next;
        let run = self.runs.get(at).filter(|_| !self.launch.is_closing())?;
        let len = (run.len - from).min(u64::from(PIECE_MAX)) as u32;
        let piece = CliquePiece {
            group,
            is_to_leader,
            receive: run.receive,
            from,
            len,
            sender_gpu: run.sender_gpu,
            receiver_gpu: run.receiver_gpu,
        };
        let end = from + u64::from(len);
        self.next = if end == run.len { (at + 1, 0) } else { (at, end) };
        let asked = AskedPiece { piece, start: run.start + from, is_in_batch: false };
        self.asked.insert((piece.receive, from), asked);
        Some(piece)
    }

    /// Records that a batch has a piece. Returns false if it was not asked for, or a batch had it before.
    pub fn put_in_batch(&mut self, piece: &CliquePiece) -> bool {
        let asked = self.asked.get_mut(&(piece.receive, piece.from)).filter(|asked| asked.piece == *piece);
        asked.is_some_and(|asked| !std::mem::replace(&mut asked.is_in_batch, true))
    }

    /// Returns whether no byte is in place, and none can come: no piece is in a batch.
    pub fn has_not_begun(&self) -> bool {
        self.landed == 0 && self.asked.values().all(|asked| !asked.is_in_batch)
    }

    /// Records that a piece has ended, with its bytes in place or without. Returns its offset in the inbound stream, and whether
    /// all bytes are in place now.
    pub fn end_piece(&mut self, piece: &CliquePiece, is_in_place: bool) -> Option<(u64, bool)> {
        let AskedPiece { start, .. } = self.asked.remove(&(piece.receive, piece.from))?;
        if is_in_place {
            self.landed += u64::from(piece.len);
        }
        Some((start, self.landed == self.launch.lists.inbound.total()))
    }

    /// Returns whether no piece is asked for that has not ended.
    pub fn is_idle(&self) -> bool {
        self.asked.is_empty()
    }
}

//! The chunks of a lane whose bytes a GPU copies to slots before the lane sends them.
//!
//! `staging.rs` asks for the copies. Begin at [`StagedChunks`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::io::staging::StagingSlot;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::frame::Header;

/// The most chunks of a lane that are staged, besides the one that it sends: those that the GPU copies meanwhile.
const STAGED_MAX: usize = 4;

/// A chunk to send.
pub struct StagedChunk {
    /// Its header, without checksum.
    pub header: Header,
    /// Its first byte in the outbound stream.
    pub start: u64,
    /// The launch that it belongs to.
    pub launch: Arc<PeerLaunch>,
    state: Mutex<StagedState>,
}

/// Where a chunk is on its way to the lane.
pub enum StagedState {
    /// There is no slot for it yet.
    NeedsSlot,
    /// A GPU copies it.
    Copying,
    /// The slot has its bytes.
    Ready(StagingSlot),
    /// The lane has it, or its launch is over.
    Over,
}

impl StagedChunk {
    /// Sets the state. The slot of the former state is given back.
    pub fn set_state(&self, state: StagedState) {
        let before = std::mem::replace(&mut *lock(&self.state), state);
        drop(before);
    }
}

/// The chunks of a lane that are staged, in the order in which the link gave them.
#[derive(Default)]
pub struct StagedChunks {
    all: Mutex<VecDeque<Arc<StagedChunk>>>,
    /// The length of the list. Only the thread that sends on the lane changes it, so that this thread needs no lock to see
    /// that there are none.
    count: AtomicUsize,
}

impl StagedChunks {
    /// Drops the chunks. A copy that is under way keeps its slot until it ends.
    pub fn clear(&self) {
        let dropped = std::mem::take(&mut *lock(&self.all));
        self.count.store(0, Ordering::Relaxed);
        drop(dropped);
    }

    /// Adds a chunk that needs a slot.
    pub fn add(&self, header: Header, start: u64, launch: Arc<PeerLaunch>) -> Arc<StagedChunk> {
        let state = Mutex::new(StagedState::NeedsSlot);
        let chunk = Arc::new(StagedChunk { header, start, launch, state });
        lock(&self.all).push_back(Arc::clone(&chunk));
        self.count.fetch_add(1, Ordering::Relaxed);
        chunk
    }

    /// Returns whether there is room for another one.
    pub fn has_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) < STAGED_MAX
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Drops the chunks whose launch is over, also while another frame is being sent.
    pub fn drop_closing(&self) {
        if self.is_empty() {
            return;
        }
        let mut all = lock(&self.all);
        let (dropped, kept) = std::mem::take(&mut *all)
            .into_iter()
            .partition::<VecDeque<_>, _>(|chunk| chunk.launch.is_closing());
        *all = kept;
        self.count.store(all.len(), Ordering::Relaxed);
        drop(all);
        dropped.iter().for_each(|chunk| chunk.set_state(StagedState::Over));
    }

    /// Takes the first chunk that can be sent, and drops those whose launch is over.
    pub fn take_ready(&self) -> Option<(Arc<StagedChunk>, StagingSlot)> {
        let mut dropped = Vec::new();
        let mut all = lock(&self.all);
        let mut at = 0;
        let mut found = None;
        while at < all.len() && found.is_none() {
            let chunk = &all[at];
            let mut state = lock(&chunk.state);
            let is_over = chunk.launch.is_closing() || matches!(*state, StagedState::Over);
            if !is_over && !matches!(*state, StagedState::Ready(_)) {
                at += 1;
                continue;
            }
            let before = std::mem::replace(&mut *state, StagedState::Over);
            drop(state);
            let chunk = all.remove(at);
            match (before, chunk) {
                (StagedState::Ready(slot), Some(chunk)) if !is_over => found = Some((chunk, slot)),
                over => dropped.push(over),
            }
        }
        self.count.store(all.len(), Ordering::Relaxed);
        drop(all);
        // Dropped without the lock, because a slot that is given back calls those that wait for it.
        drop(dropped);
        found
    }

    /// Returns the chunks for which there was no slot.
    pub fn needing_slots(&self) -> Vec<Arc<StagedChunk>> {
        let all = lock(&self.all);
        let needs = |chunk: &&Arc<StagedChunk>| matches!(*lock(&chunk.state), StagedState::NeedsSlot);
        all.iter().filter(needs).cloned().collect()
    }
}

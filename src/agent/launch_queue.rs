//! The queue of an engine's launches that wait until their peers are members.
//!
//! `waiting_launches.rs` adds launches, and gives each launch its *places*: its numbers on the channels with its
//! peers. Begin at [`WaitingLaunches`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::pending_launch::{PendingState, lock};
use crate::transfer::{PeerTask, TransferError};

/// The launches of an engine that wait for a place.
#[derive(Default)]
pub(super) struct WaitingLaunches {
    /// How many wait, those included that are over.
    pub(super) count: Arc<AtomicUsize>,
    pub(super) queue: Mutex<LaunchQueue>,
}

/// The order in which they wait, and the tokio tasks that wait for their peers.
#[derive(Default)]
pub(super) struct LaunchQueue {
    /// Of each peer, the last launch that waits for a place with it. The channel closes when that launch has the place.
    pub(super) last: HashMap<PeerTask, watch::Receiver<()>>,
    pub(super) launches: Vec<Weak<PendingState>>,
    pub(super) tasks: JoinSet<()>,
    /// Whether the engine has ended, and no launch may wait any more.
    pub(super) is_closed: bool,
}

impl WaitingLaunches {
    /// Fails all that wait. No launch waits from now on.
    pub fn stop(&self) {
        let closed = LaunchQueue { is_closed: true, ..LaunchQueue::default() };
        let queue = std::mem::replace(&mut *lock(&self.queue), closed);
        for launch in queue.launches.iter().filter_map(Weak::upgrade) {
            launch.fail(&TransferError::Closed);
        }
    }

    /// Returns whether any launch waits.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }
}

impl LaunchQueue {
    /// Returns whether a launch waits for a place with a peer.
    pub fn is_waited_for(&self, peer: PeerTask) -> bool {
        self.last.get(&peer).is_some_and(|last| last.has_changed().is_ok())
    }

    /// Forgets what has its places.
    pub fn forget_settled_launches(&mut self) {
        while self.tasks.try_join_next().is_some() {}
        self.last.retain(|_, last| last.has_changed().is_ok());
        self.launches.retain(|launch| launch.strong_count() > 0);
    }
}

//! The launches of an engine that wait until their peers are members, as the engine's host keeps them.
//!
//! `waiting_launches.rs` adds them, and gives them their places. Begin at [`WaitingLaunches`].

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::transfer::PeerTask;

/// The launches of an engine that wait for their peers.
#[derive(Default)]
pub(super) struct WaitingLaunches {
    pub(super) count: AtomicUsize,
    pub(super) queue: Mutex<LaunchQueue>,
}

/// The order in which they wait, and the tasks that wait for their peers.
#[derive(Default)]
pub(super) struct LaunchQueue {
    /// Of each peer, the last launch that waits for it. The channel closes when that launch has its place.
    pub(super) last: HashMap<PeerTask, watch::Receiver<()>>,
    pub(super) tasks: JoinSet<()>,
}

impl WaitingLaunches {
    /// Ends all that wait.
    pub fn stop(&self) {
        *lock(&self.queue) = LaunchQueue::default();
    }
}

impl LaunchQueue {
    /// Returns whether a launch waits for a peer.
    pub fn is_waited_for(&self, peer: &PeerTask) -> bool {
        self.last.get(peer).is_some_and(|last| last.has_changed().is_ok())
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

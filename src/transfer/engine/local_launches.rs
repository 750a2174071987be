//! The launches in flight that copy within this task. Begin at [`LocalLaunches`].

use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::weak_list::WeakList;
use crate::launch::outcome::LaunchPart as _;
use crate::launch::peer_launch::PeerLaunch;

/// The launches in flight that copy within this task.
#[derive(Default)]
pub struct LocalLaunches(Mutex<WeakList<PeerLaunch>>);

impl LocalLaunches {
    /// Adds one.
    pub fn add(&self, part: &Arc<PeerLaunch>) {
        lock(&self.0).add(Arc::downgrade(part));
    }

    /// Returns those that are in flight.
    pub fn in_flight(&self) -> Vec<Arc<PeerLaunch>> {
        let mut parts = lock(&self.0).upgrade_all();
        // A part that is dropped here may call the program, so it is dropped without the lock.
        parts.retain(|part| !part.is_settled());
        parts
    }
}

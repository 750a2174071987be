//! The launches in flight that copy within this task. Begin at [`LocalLaunches`].

use std::sync::{Arc, Mutex, Weak};

use crate::base::sync::lock;
use crate::launch::peer_launch::PeerLaunch;

/// The launches in flight that copy within this task.
#[derive(Default)]
pub struct LocalLaunches(Mutex<Vec<Weak<PeerLaunch>>>);

impl LocalLaunches {
    /// Adds one.
    pub fn add(&self, part: &Arc<PeerLaunch>) {
        let mut all = lock(&self.0);
        if all.len() == all.capacity() {
            all.retain(|part| part.strong_count() > 0);
        }
        all.push(Arc::downgrade(part));
    }

    /// Returns those that are in flight.
    pub fn in_flight(&self) -> Vec<Arc<PeerLaunch>> {
        let mut all = lock(&self.0);
        let in_flight = all.iter().filter_map(Weak::upgrade).collect();
        all.retain(|part| part.strong_count() > 0);
        drop(all);
        in_flight
    }
}

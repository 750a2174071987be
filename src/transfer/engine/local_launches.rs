//! The launches in flight that copy within this task. Begin at [`LocalLaunches`].

use std::sync::{Arc, Mutex, Weak};

use crate::base::sync::lock;
use crate::launch::outcome::LaunchPart as _;
use crate::launch::peer_launch::PeerLaunch;

/// The launches in flight that copy within this task.
#[derive(Default)]
pub struct LocalLaunches(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    parts: Vec<Weak<PeerLaunch>>,
    /// The number of those that were in flight when those that were over were last removed.
    lived: usize,
}

/// The number of parts below which none is removed.
const FEW: usize = 16;

impl LocalLaunches {
    /// Adds one.
    pub fn add(&self, part: &Arc<PeerLaunch>) {
        let mut all = lock(&self.0);
        // Those that are over are removed before they are more than those in flight.
        if all.parts.len() >= FEW.max(2 * all.lived) {
            all.parts.retain(|part| part.strong_count() > 0);
            all.lived = all.parts.len();
        }
        all.parts.push(Arc::downgrade(part));
    }

    /// Returns those that are in flight.
    pub fn in_flight(&self) -> Vec<Arc<PeerLaunch>> {
        let mut parts: Vec<_> = lock(&self.0).parts.iter().filter_map(Weak::upgrade).collect();
        // A part that is dropped here may call the program, so it is dropped without the lock.
        parts.retain(|part| !part.is_settled());
        parts
    }
}

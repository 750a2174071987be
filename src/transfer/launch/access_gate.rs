//! The gate of one part of a launch: counts the guards that use the part's bytes, and admits no further guard once it
//! has closed.
//!
//! The gate only counts. `peer_launch.rs` makes the guards, and only their holders access the bytes. Begin at
//! [`AccessGate::enter`].

use std::sync::atomic::Ordering;

use crate::base::sync::AtomicU32;

/// The count of the guards that use the bytes of a launch, and whether the gate is closed.
#[derive(Debug, Default)]
pub struct AccessGate(AtomicU32);

const CLOSED: u32 = 1 << 31;

impl AccessGate {
    /// Enters, and returns whether the gate was open. The caller must [`leave`](Self::leave) in either case.
    pub fn enter(&self) -> bool {
        // The count comes before the check, so that a thread that closes the gate between the two sees the
        // count and waits. A caller that is turned away must therefore leave too: it may be the last one.
        self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0
    }

    /// Leaves, and returns whether the caller was the last one of a closed gate.
    pub fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Closes the gate, and returns whether it was open.
    pub fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & CLOSED == 0
    }

    /// Returns whether the gate is closed and no guard is inside.
    pub fn is_closed_and_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    /// Returns whether the gate is closed.
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_that_is_turned_away_may_be_the_last_to_leave() {
        let gate = AccessGate::default();
        assert!(gate.enter());
        assert!(gate.close() && !gate.is_closed_and_empty());
        // The second caller is turned away while the first is inside; the one that leaves last is the last of
        // the gate.
        assert!(!gate.enter());
        assert!(!gate.leave());
        assert!(gate.leave() && gate.is_closed_and_empty());
    }
}

//! The gate in front of the bytes of a launch: it counts the guards inside, until it is closed.
//!
//! It knows no bytes: the guards that it counts do. Begin at [`AccessGate::enter`].

use std::sync::atomic::Ordering;

use crate::base::sync::AtomicU32;

/// Counts the guards that use the bytes of a launch, and lets in no more once it is closed.
#[derive(Debug, Default)]
pub struct AccessGate(AtomicU32);

const CLOSED: u32 = 1 << 31;

impl AccessGate {
    /// Enters, and returns whether the caller may stay. Either way it has to [`leave`](Self::leave).
    pub fn enter(&self) -> bool {
        // Counted before it is looked at: a closing between the two sees the count and waits for it. So a caller that is
        // turned away leaves like all others: it may be the last.
        self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0
    }

    /// Ends a visit. Returns whether it was the last one of a closed gate.
    pub fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Closes it, and returns whether it was open.
    pub fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & CLOSED == 0
    }

    /// Returns whether it is closed and no guard is inside.
    pub fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    /// Returns whether it is closed.
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
        assert!(gate.close() && !gate.is_quiet());
        // The second is turned away while the first is inside: the one that leaves later is the last.
        assert!(!gate.enter());
        assert!(!gate.leave());
        assert!(gate.leave() && gate.is_quiet());
    }
}

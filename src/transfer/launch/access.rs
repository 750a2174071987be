//! Says who may use the bytes of a launch.

use std::sync::atomic::{AtomicU32, Ordering};

/// Says who may use the bytes of a part: visits are counted until it is closed.
#[derive(Debug, Default)]
pub struct Pad(AtomicU32);

const CLOSED: u32 = 1 << 31;

impl Pad {
    /// Begins a visit; whether it may go on. It is to be ended either way.
    pub fn enter(&self) -> bool {
        // Counted first, then looked at: a closing that comes between sees the visit and waits for it. So whoever is
        // turned away has to leave like all others: they may be the last.
        self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0
    }

    /// Ends a visit. Whether it was the last one of a closed pad.
    pub fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Whether this call closed it.
    pub fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & CLOSED == 0
    }

    /// Whether it is closed and nobody is inside.
    pub fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_turned_away_may_be_the_last_to_leave() {
        let pad = Pad::default();
        assert!(pad.enter());
        assert!(pad.close() && !pad.is_quiet());
        // Turned away while the first is still there: one of the two is the last, whichever leaves first.
        assert!(!pad.enter());
        assert!(!pad.leave());
        assert!(pad.leave() && pad.is_quiet());
    }
}

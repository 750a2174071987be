//! The memory budget of a connection's state, charged before anything is allocated, and the pool behind it.
//!
//! Streams, header blocks in assembly, deferred requests, unread bytes of bodies and long listings are
//! charged here. A connection has a small allowance of its own; beyond it the bytes come in steps from a pool that
//! all connections share, so a connection with a few calls never touches the pool. A call or body without room is
//! refused with RESOURCE_EXHAUSTED and the bound; a stream is reset; a header block ends the connection with
//! ENHANCE_YOUR_CALM. Begin at [`StateBudget::charge`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that a connection may use without taking from the pool.
const ALLOWANCE: usize = 16 << 10;
/// The step in which a connection takes bytes from the pool and returns them.
const STEP: usize = 64 << 10;

/// The pool of memory for the state of all connections.
#[derive(Debug)]
pub(crate) struct StatePool {
    taken: AtomicUsize,
    most: usize,
}

impl StatePool {
    /// Returns a pool of `most` bytes.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), most })
    }

    /// Returns the number of bytes that connections have taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    fn try_take(&self, bytes: usize) -> bool {
        let within = |taken: usize| taken.checked_add(bytes).filter(|sum| *sum <= self.most);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The bound that a charge would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverBudget {
    /// The connection's bound, in bytes.
    Connection(usize),
    /// The bound of all connections together, in bytes.
    Server(usize),
}

impl fmt::Display for OverBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection(most) => {
                write!(
                    f,
                    "the requests in progress on this connection take more than its {most} bytes of memory"
                )
            }
            Self::Server(most) => {
                write!(
                    f,
                    "the requests and answers in progress on all connections take the server's {most} bytes of memory for them"
                )
            }
        }
    }
}

/// The memory budget of one connection's state.
#[derive(Debug)]
pub(crate) struct StateBudget {
    used: usize,
    /// The allowance and the bytes taken from the pool.
    granted: usize,
    /// The bytes charged for answers.
    answers: usize,
    most: usize,
    pool: Arc<StatePool>,
}

impl StateBudget {
    /// Returns a budget of `most` bytes.
    pub(crate) fn new(most: usize, pool: Arc<StatePool>) -> Self {
        Self { used: 0, granted: ALLOWANCE.min(most), answers: 0, most, pool }
    }

    /// Returns the bytes in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Charges `bytes` that are about to be allocated.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), OverBudget> {
        let used = self.used.saturating_add(bytes);
        if used > self.granted {
            if used > self.most {
                return Err(OverBudget::Connection(self.most));
            }
            let step = (used - self.granted).max(STEP).min(self.most - self.granted);
            if !self.pool.try_take(step) {
                return Err(OverBudget::Server(self.pool.most));
            }
            self.granted += step;
        }
        self.used = used;
        Ok(())
    }

    /// Charges `bytes` that are about to be allocated for an answer. An answer may be larger than a
    /// connection's bound for requests, so only the pool bounds it.
    pub(crate) fn charge_answer(&mut self, bytes: usize) -> Result<(), OverBudget> {
        if !self.pool.try_take(bytes) {
            return Err(OverBudget::Server(self.pool.most));
        }
        self.answers += bytes;
        Ok(())
    }

    /// Releases `bytes` of answers that have been sent.
    pub(crate) fn release_answer(&mut self, bytes: usize) {
        let bytes = bytes.min(self.answers);
        self.answers -= bytes;
        self.pool.give_back(bytes);
    }

    /// Releases `bytes` that are free again.
    pub(crate) fn release(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        // One step is kept, so that a connection near a boundary does not use the pool each time.
        let keep = self.used.saturating_add(STEP).max(ALLOWANCE.min(self.most));
        if self.granted > keep + STEP {
            self.pool.give_back(self.granted - keep);
            self.granted = keep;
        }
    }
}

impl Drop for StateBudget {
    fn drop(&mut self) {
        self.pool.give_back(self.granted.saturating_sub(ALLOWANCE.min(self.most)) + self.answers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_hold_and_everything_comes_back() {
        let pool = StatePool::new(1 << 20);
        let mut one = StateBudget::new(512 << 10, Arc::clone(&pool));
        assert_eq!(one.charge(ALLOWANCE), Ok(()));
        assert_eq!(pool.taken(), 0, "the allowance is the connection's own");
        let mut charged = ALLOWANCE;
        while one.charge(1000).is_ok() {
            charged += 1000;
        }
        assert_eq!(one.charge(1000), Err(OverBudget::Connection(512 << 10)));
        assert!(charged > (512 << 10) - 1000 && one.used() == charged);
        assert!(pool.taken() <= 512 << 10);

        let mut others: Vec<_> = (0..3).map(|_| StateBudget::new(512 << 10, Arc::clone(&pool))).collect();
        let refused: Vec<_> = others.iter_mut().map(|other| other.charge(400 << 10)).collect();
        assert_eq!(refused, [Ok(()), Err(OverBudget::Server(1 << 20)), Err(OverBudget::Server(1 << 20))]);
        assert_eq!(others[1].charge(ALLOWANCE), Ok(()), "an exhausted pool leaves everybody the allowance");
        one.release(charged);
        assert_eq!(one.charge_answer(400 << 10), Ok(()), "an answer may be larger than all else");
        assert_eq!(one.charge_answer(800 << 10), Err(OverBudget::Server(1 << 20)));
        one.release_answer(300 << 10);
        assert_eq!(others[1].charge(400 << 10), Ok(()), "what was given back serves others");
        drop((one, others));
        assert_eq!(pool.taken(), 0);
    }
}

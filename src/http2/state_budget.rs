//! The budget for the memory of a connection's state, and the pools that all connections share. Memory is charged to
//! the budget before it is allocated.
//!
//! These are charged: the header table, streams, incomplete header blocks, deferred requests, the unread bytes of
//! bodies, calls to auxiliary services, the keys of waiting calls, and long buffers of unsent output or unread input.
//! Each connection has a small allowance, so a connection with a few calls never uses the pool of state. Beyond the
//! allowance, a connection takes bytes from this pool in large steps. A listing of keys may be larger than the budget
//! of a connection, so a long listing is charged to the pool alone. Long incomplete frames have a pool of their own.
//!
//! If there is no memory for a call or a body, the call is refused with RESOURCE_EXHAUSTED, and the answer names the
//! bound. If there is no memory for a stream, the stream is reset. If there is no memory for a frame or a header
//! block, the connection ends with ENHANCE_YOUR_CALM. Begin at [`StateMemoryBudget::charge`].

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::hpack::TABLE_BYTES;

/// The bytes that a connection may use without taking from the pool, its header table among them.
const ALLOWANCE: usize = TABLE_BYTES + (16 << 10);
/// The step in which a connection takes bytes from the pool and returns them.
const STEP: usize = 64 << 10;

/// The bytes of long incomplete frames, of all connections. They are apart from the pool of state: a connection that has a
/// call refused for want of memory must still be able to send frames.
const FRAMES_BYTES: usize = 64 << 20;

/// The memory that all connections share.
#[derive(Debug)]
pub(crate) struct StateMemoryPool {
    state: BytePool,
    frames: BytePool,
}

impl StateMemoryPool {
    /// Returns a pool of `most` bytes of state.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Self::with_frame_limit(most, FRAMES_BYTES)
    }

    /// Returns a pool of `most` bytes of state and `frames` bytes of incomplete frames.
    pub(super) fn with_frame_limit(most: usize, frames: usize) -> Arc<Self> {
        Arc::new(Self { state: BytePool::new(most), frames: BytePool::new(frames) })
    }

    /// Returns the number of bytes that connections have taken.
    pub(crate) fn taken_bytes(&self) -> usize {
        self.state.taken.load(Ordering::Relaxed) + self.frames.taken.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct BytePool {
    taken: AtomicUsize,
    most: usize,
}

impl BytePool {
    fn new(most: usize) -> Self {
        Self { taken: AtomicUsize::new(0), most }
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
pub(crate) struct StateMemoryBudget {
    used: usize,
    /// The allowance and the bytes taken from the pool.
    granted: usize,
    /// The bytes charged for answers.
    answers: usize,
    /// The bytes charged for an incomplete frame.
    frame: usize,
    /// Those of ended streams, each with the output offset after which nothing of the answer waits.
    leaving: VecDeque<(u64, usize)>,
    most: usize,
    pool: Arc<StateMemoryPool>,
}

impl StateMemoryBudget {
    /// Returns a budget of `most` bytes, of which the header table is charged from the beginning.
    pub(crate) fn new(most: usize, pool: Arc<StateMemoryPool>) -> Self {
        Self {
            used: TABLE_BYTES,
            granted: ALLOWANCE.min(most),
            answers: 0,
            frame: 0,
            leaving: VecDeque::new(),
            most,
            pool,
        }
    }

    /// Returns the bytes in use.
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> usize {
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
            if !self.pool.state.try_take(step) {
                return Err(OverBudget::Server(self.pool.state.most));
            }
            self.granted += step;
        }
        self.used = used;
        Ok(())
    }

    /// Charges `bytes` that are about to be allocated for an answer. An answer may be larger than a
    /// connection's bound for requests, so only the pool bounds it.
    pub(crate) fn charge_answer(&mut self, bytes: usize) -> Result<(), OverBudget> {
        if !self.pool.state.try_take(bytes) {
            return Err(OverBudget::Server(self.pool.state.most));
        }
        self.answers += bytes;
        Ok(())
    }

    /// Releases `bytes` of an answer once the output has been sent up to `offset`.
    pub(super) fn release_answer_after_offset(&mut self, offset: u64, bytes: usize) {
        if bytes > 0 {
            self.leaving.push_back((offset, bytes));
        }
    }

    /// Releases the answers that are sent, now that the output has been sent up to `offset`.
    pub(super) fn release_sent_answers(&mut self, offset: u64) {
        while let Some((end, bytes)) = self.leaving.front().copied()
            && end <= offset
        {
            self.leaving.pop_front();
            self.release_answer(bytes);
        }
    }

    /// Releases `bytes` of an answer at once.
    pub(crate) fn release_answer(&mut self, bytes: usize) {
        let bytes = bytes.min(self.answers);
        self.answers -= bytes;
        self.pool.state.give_back(bytes);
    }

    /// Charges `bytes` of an incomplete frame.
    pub(super) fn charge_frame(&mut self, bytes: usize) -> Result<(), OverBudget> {
        // Most frames are short: they do not touch what all connections share.
        if bytes > 0 && !self.pool.frames.try_take(bytes) {
            return Err(OverBudget::Server(self.pool.frames.most));
        }
        self.frame += bytes;
        Ok(())
    }

    /// Releases the bytes of the incomplete frame.
    pub(super) fn release_frame(&mut self) {
        if self.frame > 0 {
            self.pool.frames.give_back(std::mem::take(&mut self.frame));
        }
    }

    /// Releases `bytes` that are free again.
    pub(crate) fn release(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        // One step is kept, so that a connection near a boundary does not use the pool each time.
        let keep = self.used.saturating_add(STEP).max(ALLOWANCE.min(self.most));
        if self.granted > keep + STEP {
            self.pool.state.give_back(self.granted - keep);
            self.granted = keep;
        }
    }
}

impl Drop for StateMemoryBudget {
    fn drop(&mut self) {
        self.pool.state.give_back(self.granted.saturating_sub(ALLOWANCE.min(self.most)) + self.answers);
        self.release_frame();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_hold_and_everything_comes_back() {
        let pool = StateMemoryPool::new(1 << 20);
        let mut one = StateMemoryBudget::new(512 << 10, Arc::clone(&pool));
        assert_eq!(one.charge(ALLOWANCE - TABLE_BYTES), Ok(()));
        assert_eq!(pool.taken_bytes(), 0, "the allowance is the connection's own");
        let mut charged = ALLOWANCE;
        while one.charge(1000).is_ok() {
            charged += 1000;
        }
        assert_eq!(one.charge(1000), Err(OverBudget::Connection(512 << 10)));
        assert!(charged > (512 << 10) - 1000 && one.used_bytes() == charged);
        assert!(pool.taken_bytes() <= 512 << 10);

        let mut others: Vec<_> =
            (0..3).map(|_| StateMemoryBudget::new(512 << 10, Arc::clone(&pool))).collect();
        let refused: Vec<_> = others.iter_mut().map(|other| other.charge(400 << 10)).collect();
        assert_eq!(refused, [Ok(()), Err(OverBudget::Server(1 << 20)), Err(OverBudget::Server(1 << 20))]);
        assert_eq!(
            others[1].charge(ALLOWANCE - TABLE_BYTES),
            Ok(()),
            "an exhausted pool leaves everybody the allowance"
        );
        one.release(charged - TABLE_BYTES);
        assert_eq!(one.charge_answer(400 << 10), Ok(()), "an answer may be larger than all else");
        assert_eq!(one.charge_answer(800 << 10), Err(OverBudget::Server(1 << 20)));
        one.release_answer(300 << 10);
        assert_eq!(others[1].charge(400 << 10), Ok(()), "what was given back serves others");
        drop((one, others));
        assert_eq!(pool.taken_bytes(), 0);
    }
}

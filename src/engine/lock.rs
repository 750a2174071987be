//! The lock of the driver, and measurements of the times for which threads wait for it and hold it.
//!
//! Every access to the locked state takes the lock through this module. There is one method for each kind of use (a
//! single input, bulk work, a read), so each kind is measured separately. Begin at [`EngineLockTimes`].

use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, PoisonError};

use super::{Engine, State};
use crate::meter;

/// The times for which the engine's lock is waited for and held.
#[derive(Debug, Default)]
pub struct EngineLockTimes {
    /// For inputs about one task or one key; one in many is timed.
    pub inputs: meter::LockTimes,
    /// For all other inputs; each is timed.
    pub bulk: meter::LockTimes,
    /// For readers (pages, scrapes, detectors), which take a copy; each is timed.
    pub reads: meter::LockTimes,
}

/// The locked state.
pub(super) struct LockedState<'a> {
    // Declared before the lock, so that it is dropped before it: only the holder of the lock adds times.
    _held: meter::LockHold<'a>,
    state: MutexGuard<'a, State>,
}

impl Deref for LockedState<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for LockedState<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Engine {
    /// Returns the times for which the lock is waited for and held.
    #[must_use]
    pub fn lock_times(&self) -> &EngineLockTimes {
        &self.locks
    }

    pub(super) fn lock(&self) -> LockedState<'_> {
        self.lock_timed(self.locks.inputs.begin_sampled_wait(&self.clock))
    }

    pub(super) fn lock_for_bulk_work(&self) -> LockedState<'_> {
        self.lock_timed(self.locks.bulk.begin_timed_wait(&self.clock))
    }

    pub(super) fn lock_for_read(&self) -> LockedState<'_> {
        self.lock_timed(self.locks.reads.begin_timed_wait(&self.clock))
    }

    fn lock_timed<'a>(&'a self, waiting: meter::LockWait<'a>) -> LockedState<'a> {
        // A panic inside a transition has been reported; the tables that it left are the best that there are.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        LockedState { _held: waiting.begin_hold(), state }
    }
}

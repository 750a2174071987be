//! Runs work that any thread may request, on one thread at a time. A thread that requests work while another thread
//! is working does not wait: the working thread does the requested work before it stops.
//!
//! This module does not depend on what the work is. Begin at [`ExclusiveWork::run_unless_running`].

use std::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};

use crate::base::sync::{AtomicBool, Mutex, MutexGuard, fence_after_read_modify_write, lock};

/// The state that the work needs, and whether more work is due.
#[derive(Debug)]
pub struct ExclusiveWork<T> {
    state: Mutex<T>,
    again: AtomicBool,
}

impl<T> ExclusiveWork<T> {
    /// Makes one at rest.
    pub fn new(state: T) -> Self {
        Self { state: Mutex::new(state), again: AtomicBool::new(false) }
    }

    /// Does the work that there is, unless another thread is at it: that one looks again before it leaves. The caller writes
    /// its request before the call.
    ///
    /// # Errors
    /// The error of the work, which is not tried again.
    pub fn run_unless_running<E>(&self, mut work: impl FnMut(&mut T) -> Result<(), E>) -> Result<(), E> {
        loop {
            let mut state = match self.try_lock_state() {
                Some(state) => state,
                None => {
                    self.again.swap(true, Ordering::SeqCst);
                    // The thread that is at it leaves, passes its fence and looks. Either it sees `again`, or its leaving is
                    // seen here.
                    fence_after_read_modify_write();
                    match self.try_lock_state() {
                        Some(state) => state,
                        None => return Ok(()),
                    }
                }
            };
            self.again.store(false, Ordering::SeqCst);
            let outcome = work(&mut state);
            drop(state);
            outcome?;
            // To unlock is a read-modify-write operation.
            fence_after_read_modify_write();
            if !self.again.load(Ordering::SeqCst) {
                return Ok(());
            }
        }
    }

    /// Returns the state, unless a thread is at work.
    pub fn try_lock_state(&self) -> Option<MutexGuard<'_, T>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the state, once no thread is at work.
    pub fn wait_idle(&self) -> MutexGuard<'_, T> {
        lock(&self.state)
    }
}

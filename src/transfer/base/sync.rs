//! Locks that ignore poisoning: their holders leave nothing half done.
//!
//! It waits for nothing but the lock. Begin at [`lock`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked while it held the lock has ended between two whole changes: what it guards still holds.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Locks that ignore poisoning.
//!
//! It waits for nothing but the lock. Begin at [`lock`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even if it is poisoned: a thread that panics while it holds one of these locks leaves the
/// data consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

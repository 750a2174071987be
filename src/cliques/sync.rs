//! Locks that a panic of their holder does not poison. Begin at [`lock`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also if a holder has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

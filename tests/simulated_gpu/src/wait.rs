//! Waiting inside the library: one condition variable for everything that happens in this process.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a wait looks at what another process may have changed.
const POLL: Duration = Duration::from_millis(1);

/// Counts what has happened in this process.
static HAPPENED: Mutex<u64> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

/// Locks a mutex whether or not a thread panicked with it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes every wait of this process.
pub fn wake_all_waits() {
    *lock(&HAPPENED) += 1;
    CHANGED.notify_all();
}

/// Waits until a condition holds. It is evaluated after every announcement, and every millisecond.
pub fn wait_until(mut condition: impl FnMut() -> bool) {
    loop {
        let seen = *lock(&HAPPENED);
        if condition() {
            return;
        }
        let happened = lock(&HAPPENED);
        drop(CHANGED.wait_timeout_while(happened, POLL, |now| *now == seen));
    }
}

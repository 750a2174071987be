//! Locks whose holders do not leave things half done, and work that is done by several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked while it held the lock has ended between two whole changes: what it guards still holds.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something with each of several things, with up to eight at a time: on threads of its own, and on this one, which
/// comes back when all is done.
pub fn with_all<T: Sync>(things: &[T], work: impl Fn(&T) + Sync) {
    const AT_ONCE: usize = 8;
    let next = AtomicUsize::new(0);
    let some = || {
        while let Some(thing) = things.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(thing);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..things.len().min(AT_ONCE) {
            // Where there is no thread to be had, this one does it all.
            let _one_more =
                std::thread::Builder::new().name("muster-with-all".to_owned()).spawn_scoped(scope, some);
        }
        some();
    });
}

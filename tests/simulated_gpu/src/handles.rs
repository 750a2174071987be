//! Handles of streams, events, allocations and communicators: numbers in the shape of pointers, none of them used twice.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The first handle. Smaller numbers are null, the default streams, and contexts.
const FIRST: usize = 0x1000_0000;
const DISTANCE: usize = 16;

/// Returns a handle that was never used.
pub fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(FIRST);
    NEXT.fetch_add(DISTANCE, SeqCst)
}

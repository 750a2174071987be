//! Recognizes a process that was forked after its parent had used the library. Such a process has none of the
//! library's threads.
//!
//! `boundary.rs` makes this check before every function of the interface. Begin at [`check_not_forked`].

use std::sync::atomic::{AtomicU32, Ordering};

use super::status::{CallError, MusterStatus};

/// The process that used the library first; 0 before.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Refuses a call in a process that was forked after the library was used.
pub fn check_not_forked() -> Result<(), CallError> {
    let own = std::process::id();
    match PROCESS.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(()),
        Err(first) if first == own => Ok(()),
        Err(_) => Err(CallError::new(
            MusterStatus::Forked,
            "muster was used before this process was forked, and its threads exist only in the parent: use muster only in \
             the child, or start another program with exec",
        )),
    }
}

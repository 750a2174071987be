//! Locks that ignore poisoning, a memory fence, and the synchronisation types of the engine's concurrent code. In
//! tests under `--cfg loom`, these types are those of [loom](https://docs.rs/loom).
//!
//! Under `--cfg loom`, the tests of this crate run the engine's concurrent code in loom. Loom tries all interleavings
//! of the threads up to a bound on preemptions, and all values that the memory model lets each thread read. The code
//! that runs in loom is in `io/ring.rs`, `io/exclusive_work.rs`, `session/ring_session.rs`, `session/spin_wait.rs`,
//! `launch/access_gate.rs`, `launch/outcome.rs` and `launch/peer_launch.rs`. The models of this code are in
//! `tests/models`. This command runs the models in seconds and prints the number of executions:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p muster-transfer --lib models -- --nocapture
//! ```
//!
//! Begin at [`lock`] and [`fence_after_read_modify_write`].

use std::sync::{Mutex as StdMutex, MutexGuard as StdMutexGuard, PoisonError};

#[cfg(not(all(test, loom)))]
pub use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, fence};
#[cfg(not(all(test, loom)))]
pub use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

#[cfg(all(test, loom))]
pub use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, fence};
#[cfg(all(test, loom))]
pub use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(all(test, loom))]
pub use loom_types::OnceLock;

/// Locks. A thread that panicked while it held the lock has ended between two whole changes: what it guards still holds.
pub fn lock<L: Lock + ?Sized>(mutex: &L) -> L::Guard<'_> {
    mutex.lock_ignoring_poison()
}

/// A mutex.
pub trait Lock {
    /// The guard of a held lock.
    type Guard<'a>
    where
        Self: 'a;

    /// Locks it, whether a holder has panicked or not.
    fn lock_ignoring_poison(&self) -> Self::Guard<'_>;
}

impl<T> Lock for StdMutex<T> {
    type Guard<'a>
        = StdMutexGuard<'a, T>
    where
        T: 'a;

    fn lock_ignoring_poison(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Lock> Lock for std::sync::Arc<L> {
    type Guard<'a>
        = L::Guard<'a>
    where
        L: 'a;

    fn lock_ignoring_poison(&self) -> Self::Guard<'_> {
        L::lock_ignoring_poison(self)
    }
}

/// Orders an atomic read-modify-write operation of this thread before everything that it reads and writes afterwards, as
/// `fence(SeqCst)` does. Where two threads each write one word and then read the other's, both have it between the two.
///
/// On x86 every such operation is a full barrier already, and this costs nothing. Elsewhere it is the fence.
#[inline(always)]
pub fn fence_after_read_modify_write() {
    #[cfg(all(any(target_arch = "x86", target_arch = "x86_64"), not(all(test, loom))))]
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    #[cfg(not(all(any(target_arch = "x86", target_arch = "x86_64"), not(all(test, loom)))))]
    fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(all(test, loom))]
pub mod loom_types {
    //! Additions to loom.

    use std::sync::atomic::Ordering;

    use super::{AtomicBool, Lock, PoisonError};

    impl<T> Lock for loom::sync::Mutex<T> {
        type Guard<'a>
            = loom::sync::MutexGuard<'a, T>
        where
            T: 'a;

        fn lock_ignoring_poison(&self) -> Self::Guard<'_> {
            self.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// A cell that is set once. A thread sees the value as late as the memory model permits.
    #[derive(Debug)]
    pub struct OnceLock<T> {
        is_set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub fn new() -> Self {
            Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        pub fn set(&self, value: T) -> Result<(), T> {
            self.value.set(value)?;
            self.is_set.store(true, Ordering::Release);
            Ok(())
        }

        pub fn get(&self) -> Option<&T> {
            if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self::new()
        }
    }
}

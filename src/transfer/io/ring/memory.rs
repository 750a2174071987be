//! The memory of a ring, and the operations that wake the threads at its two ends.
//!
//! [`SharedRingMemory`] is the memory that two processes share. The algorithm in `ring.rs` uses only the trait
//! [`RingMemory`]: real rings need the processor's atomics, and the models of the algorithm need those of loom. Begin
//! at [`RingMemory`].

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

use crate::memory::Mapping;

const WRITTEN: usize = 0;
const READ: usize = 64;
const SLEEP: usize = 128;
const WAITING: usize = 192;
const REVOKED: usize = 256;
pub(super) const FRAMES: usize = 4096;
pub(super) const CAPACITY: usize = 256 << 10;

/// A word that both sides read and write.
pub trait SharedWord {
    /// The content.
    type Value: Copy;

    fn load(&self, order: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value, order: Ordering);
    fn swap(&self, value: Self::Value, order: Ordering) -> Self::Value;
    /// Returns whether it held `current`, and holds `new` now.
    fn compare_and_set(&self, current: Self::Value, new: Self::Value) -> bool;
}

macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl SharedWord for $atomic {
            type Value = $value;

            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }

            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }

            #[inline(always)]
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }

            #[inline(always)]
            fn compare_and_set(&self, current: $value, new: $value) -> bool {
                self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            }
        }
    };
}

word!(std::sync::atomic::AtomicU32, u32);
word!(std::sync::atomic::AtomicU64, u64);
#[cfg(all(test, loom))]
word!(loom::sync::atomic::AtomicU32, u32);
#[cfg(all(test, loom))]
word!(loom::sync::atomic::AtomicU64, u64);

/// The memory of a ring, and what wakes the threads at its two ends.
pub trait RingMemory {
    /// A word of 32 bits.
    type Word: SharedWord<Value = u32>;
    /// A word of 64 bits.
    type Counter: SharedWord<Value = u64>;
    /// Bytes of frames that fit.
    const CAPACITY: usize;

    /// How many bytes were ever written.
    fn bytes_written(&self) -> &Self::Counter;
    /// How many bytes were ever read.
    fn bytes_read(&self) -> &Self::Counter;
    /// How the reader sleeps. It is only ever swapped, so that all threads agree on the order of its values.
    fn reader_sleep_word(&self) -> &Self::Word;
    /// Whether the writer waits for room.
    fn writer_waiting_word(&self) -> &Self::Word;
    /// Whether the reader has taken back the memory that it shares.
    fn memory_revoked_word(&self) -> &Self::Word;

    /// Copies frames from `at` on, which do not pass the end.
    fn copy_out(&self, at: usize, into: &mut [u8]);
    /// Copies frames to `at` and on, which do not pass the end.
    fn copy_in(&self, at: usize, bytes: &[u8]);

    /// Sleeps until it is woken or the time is over, if the word `reader_sleep_word` still says `how`.
    fn wait(&self, how: u32, time: Duration);
    /// Wakes the threads that sleep.
    fn wake(&self);
    /// Rings the bell of the reader's reactor.
    fn ring(&self);
}

/// Memory that two processes share, and the bell of the one that reads it.
pub struct SharedRingMemory {
    pub(super) memory: Mapping,
    pub(super) bell: OwnedFd,
    /// Its file, where this process made it.
    pub(super) file: Option<OwnedFd>,
}

impl RingMemory for SharedRingMemory {
    type Word = std::sync::atomic::AtomicU32;
    type Counter = std::sync::atomic::AtomicU64;
    const CAPACITY: usize = CAPACITY;

    #[inline]
    fn bytes_written(&self) -> &Self::Counter {
        self.memory.atomic_u64_at(WRITTEN)
    }

    #[inline]
    fn bytes_read(&self) -> &Self::Counter {
        self.memory.atomic_u64_at(READ)
    }

    #[inline]
    fn reader_sleep_word(&self) -> &Self::Word {
        self.memory.atomic_u32_at(SLEEP)
    }

    #[inline]
    fn writer_waiting_word(&self) -> &Self::Word {
        self.memory.atomic_u32_at(WAITING)
    }

    #[inline]
    fn memory_revoked_word(&self) -> &Self::Word {
        self.memory.atomic_u32_at(REVOKED)
    }

    #[inline]
    fn copy_out(&self, at: usize, into: &mut [u8]) {
        self.memory.copy_out(FRAMES + at, into);
    }

    #[inline]
    fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.memory.copy_in(FRAMES + at, bytes);
    }

    fn wait(&self, how: u32, time: Duration) {
        if let Ok(time) = Timespec::try_from(time) {
            let _whatever_woke_it =
                futex::wait(self.reader_sleep_word(), futex::Flags::empty(), how, Some(&time));
        }
    }

    fn wake(&self) {
        let _woken = futex::wake(self.reader_sleep_word(), futex::Flags::empty(), u32::MAX);
    }

    fn ring(&self) {
        let _a_full_counter_rings_as_well = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

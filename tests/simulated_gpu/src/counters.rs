//! Counters: what tests read of the simulated driver.

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

/// Defines the counters: variant, key.
macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident $key:literal;)*) => {
        /// A counter of this process.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Counter { $($(#[$doc])* $variant,)* }

        impl Counter {
            /// Every counter.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the key of the exported function.
            pub fn key(self) -> &'static str {
                match self { $(Self::$variant => $key,)* }
            }
        }
    };
}

counters! {
    /// Copies that streams have executed.
    Copies "copies";
    /// The bytes of these copies.
    CopiedBytes "copied_bytes";
    /// Copies that blocked their caller, because the host memory is not page-locked.
    PageableCopies "pageable_copies";
    /// Copies that wait for the setting `hold_copies`, now.
    HeldCopies "held_copies";
    /// Live allocations of device memory, without imported ones.
    Allocations "allocations";
    /// The bytes of device memory that are in use.
    DeviceBytes "device_bytes";
    /// Live allocations and registrations of page-locked memory.
    PinnedRanges "pinned_ranges";
    /// Live streams, without the default streams.
    Streams "streams";
    /// Live events, with imported ones.
    Events "events";
    /// Live mappings of memory of other processes, through either kind of handle.
    Imports "imports";
    /// Waits of streams for an event that no process can complete any more.
    OrphanedWaits "orphaned_waits";
    /// Live communicators.
    Communicators "communicators";
    /// Groups that have ended, well or not.
    NcclGroups "nccl_groups";
    /// Groups that wait for a revocation or an abort, now.
    NcclHangs "nccl_hangs";
    /// Communicators whose profiler plug-in is active.
    NcclProfilers "nccl_profilers";
    /// Messages that profiler plug-ins have logged.
    NcclPluginLogs "nccl_plugin_logs";
}

static VALUES: [AtomicI64; Counter::ALL.len()] = [const { AtomicI64::new(0) }; Counter::ALL.len()];

impl Counter {
    /// Returns the counter of a key.
    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|counter| counter.key() == key)
    }

    pub(crate) fn get(self) -> i64 {
        VALUES[self as usize].load(SeqCst)
    }

    pub(crate) fn add(self, amount: i64) {
        VALUES[self as usize].fetch_add(amount, SeqCst);
    }

    /// Counts something for as long as the returned guard lives.
    pub(crate) fn count_while_guard_lives(self) -> CounterGuard {
        self.add(1);
        CounterGuard(self)
    }
}

/// Counts one while it lives.
#[derive(Debug)]
pub(crate) struct CounterGuard(Counter);

impl Drop for CounterGuard {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

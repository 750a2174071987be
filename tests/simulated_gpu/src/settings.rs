//! Settings: the size of the simulated machine, and faults.
//!
//! The environment variable `SIMULATED_GPU` has `key=value` pairs with `;` between them, read at the first use. A value may
//! end in `K`, `M` or `G` (powers of 1024). `simulated_gpu_set` changes a setting at run time. An unknown key ends the
//! process, since a fault that never happens would pass every test.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

/// Defines the settings: variant, key, initial value.
macro_rules! settings {
    ($($(#[$doc:meta])* $variant:ident $key:literal = $initial:expr;)*) => {
        /// A setting. A fault that counts (`…After`, `…Fails`, `NcclHang`) happens once, at the N-th use after it was set.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Setting { $($(#[$doc])* $variant,)* }

        impl Setting {
            /// Every setting.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the key in the environment variable and of the exported functions.
            pub fn key(self) -> &'static str {
                match self { $(Self::$variant => $key,)* }
            }

            fn initial(self) -> i64 {
                match self { $(Self::$variant => $initial,)* }
            }
        }
    };
}

settings! {
    /// The number of devices.
    Devices "devices" = 1;
    /// The number of the first device on its host: it is part of UUIDs and bus ids.
    FirstDevice "first_device" = 0;
    /// The bytes of memory of each device.
    Memory "memory" = 1 << 30;
    /// The driver's version, as `cuDriverGetVersion` returns it.
    Version "version" = 12_000;
    /// NCCL's version, as `ncclGetVersion` returns it.
    NcclVersion "nccl_version" = 23_007;
    /// Whether a device can access the memory of other devices.
    PeerAccess "peer_access" = 1;
    /// The error that every call returns from now on; 0 for none.
    Sticky "sticky" = 0;
    /// How long a copy takes besides its memory accesses, in microseconds. The second half of the bytes moves at the end.
    CopyUs "copy_us" = 0;
    /// Whether copies that have begun wait, before they move a byte, until this is 0 again.
    HoldCopies "hold_copies" = 0;
    /// The N-th copy meets an uncorrectable memory error (sticky 214).
    EccAfter "ecc_after" = 0;
    /// The N-th allocation of device memory fails (2, not sticky).
    AllocFails "alloc_fails" = 0;
    /// The N-th allocation of page-locked memory fails (2, not sticky).
    HostAllocFails "host_alloc_fails" = 0;
    /// The N-th registration of host memory fails (2, not sticky).
    HostRegisterFails "host_register_fails" = 0;
    /// The sticky error that a stream meets if it waits for an event that its recorder, a process that ended, can no longer
    /// complete; 0 ends the wait without an error.
    OrphanedWait "orphaned_wait" = 0;
    /// Whether the driver stays loaded while no program uses a device, as NVML tells.
    NvmlPersistence "nvml_persistence" = 1;
    /// Whether memory has error correction, as NVML tells.
    NvmlEcc "nvml_ecc" = 1;
    /// The uncorrectable errors of the memory of the first device since the driver was loaded.
    NvmlUncorrected "nvml_uncorrected" = 0;
    /// The rows that were replaced in the memory of the first device.
    NvmlRemappedRows "nvml_remapped_rows" = 0;
    /// Whether a row of the first device is replaced at its next reset.
    NvmlRemapPending "nvml_remap_pending" = 0;
    /// Whether a row of the first device could not be replaced.
    NvmlRemapFailed "nvml_remap_failed" = 0;
    /// Why the clock of the first device is low: the bits of `nvmlClocksEventReason…`.
    NvmlClockReasons "nvml_clock_reasons" = 0;
    /// The lanes of PCIe that the first device uses, of 16.
    NvmlPcieWidth "nvml_pcie_width" = 16;
    /// The NVLinks of each device.
    NvmlLinks "nvml_links" = 4;
    /// How many of the links of the first device are down.
    NvmlLinksDown "nvml_links_down" = 0;
    /// The errors that each NVLink of the first device counts.
    NvmlLinkErrors "nvml_link_errors" = 0;
    /// Whether the first device has fallen off the bus: NVML gives no handle of it.
    NvmlLost "nvml_lost" = 0;
    /// The N-th NCCL group does not move until its communicator is revoked or aborted.
    NcclHang "nccl_hang" = 0;
    /// The N-th start of a communicator does not end until it is aborted.
    NcclInitHang "nccl_init_hang" = 0;
    /// Whether the death of a peer causes no asynchronous error, as on one host: the group waits for an abort.
    NcclSilentDeath "nccl_silent_death" = 0;
    /// Whether groups of non-blocking communicators stay in progress, before their operations are on the stream, until this
    /// is 0 again.
    NcclHoldLaunches "nccl_hold_launches" = 0;
    /// Whether operations that do not match between ranks hang, as in NCCL, instead of an asynchronous error.
    NcclLenient "nccl_lenient" = 0;
    /// The channels of an operation: so many KernelCh events a profiler plug-in gets for it. 1 to 64.
    NcclChannels "nccl_channels" = 2;
    /// The silence after which RAS says that a process is dead, in milliseconds.
    NcclRasDeadAfter "nccl_ras_dead_after" = 60_000;
    /// Whether messages that a profiler plug-in logs are printed.
    NcclPrintLogs "nccl_print_logs" = 0;
}

static VALUES: LazyLock<Vec<AtomicI64>> = LazyLock::new(|| {
    let values: Vec<_> = Setting::ALL.iter().map(|setting| AtomicI64::new(setting.initial())).collect();
    let text = std::env::var("SIMULATED_GPU").unwrap_or_default();
    for pair in text.split(';').filter(|pair| !pair.is_empty()) {
        let parsed = pair
            .split_once('=')
            .and_then(|(key, value)| Some((Setting::from_key(key)?, parse_value(value)?)));
        let Some((setting, value)) = parsed else {
            eprintln!("SIMULATED_GPU: {pair:?} is no setting of the simulated driver");
            std::process::abort();
        };
        values[setting as usize].store(value, SeqCst);
    }
    values
});

/// Parses a number with an optional unit.
fn parse_value(text: &str) -> Option<i64> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 1 << 10),
        Some(digits) if text.ends_with('M') => (digits, 1 << 20),
        Some(digits) => (digits, 1 << 30),
        None => (text, 1),
    };
    digits.parse::<i64>().ok()?.checked_mul(unit)
}

impl Setting {
    /// Returns the setting of a key.
    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|setting| setting.key() == key)
    }

    /// Returns the value.
    pub(crate) fn get(self) -> i64 {
        VALUES[self as usize].load(SeqCst)
    }

    /// Returns the value of a setting that is no code and no sign, as a number of bytes, devices or microseconds.
    pub(crate) fn amount(self) -> u64 {
        u64::try_from(self.get()).unwrap_or(0)
    }

    /// Returns whether the value is not 0.
    pub(crate) fn is_on(self) -> bool {
        self.get() != 0
    }

    /// Changes the value.
    pub(crate) fn set(self, value: i64) {
        VALUES[self as usize].store(value, SeqCst);
        crate::wait::wake_all_waits();
    }

    /// Sets the value if it is 0, and returns whether it did.
    pub(crate) fn set_once(self, value: i64) -> bool {
        let changed = VALUES[self as usize].compare_exchange(0, value, SeqCst, SeqCst).is_ok();
        crate::wait::wake_all_waits();
        changed
    }

    /// Counts one use of a fault that happens at the N-th, and returns whether this is the N-th.
    pub(crate) fn count_use_and_strikes_now(self) -> bool {
        let count = |left: i64| (left > 0).then(|| left - 1);
        VALUES[self as usize].fetch_update(SeqCst, SeqCst, count) == Ok(1)
    }
}

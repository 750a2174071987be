//! A simulated GPU for tests: the entry points of the CUDA driver, of NCCL and of NVML, over host memory. It is never shipped.
//!
//! The crate is two libraries. The shared library has the C entry points; programs load it in place of `libcuda.so`,
//! `libnccl.so` and `libnvidia-ml.so`. The Rust library has [`SimulatedGpu`], by which a test loads the shared one, sets
//! faults and reads counters. Begin at `stream.rs` (what runs when) and `device_memory.rs` (where bytes are).
//!
//! | module | what it owns |
//! | --- | --- |
//! | `error`, `device`, `device_properties` | codes, the sticky error, devices |
//! | `context`, `context_work` | primary contexts, the current context of a thread, the end of a context and of its work |
//! | `device_memory`, `host_memory`, `vmm` | allocations, page-locked memory, physical allocations and their mappings |
//! | `freeing` | the calls that free memory, which wait for all work |
//! | `stream`, `stream_values`, `event`, `ipc` | ordered work, words that streams write and await, events, handles for other processes |
//! | `copy` | copies and fills |
//! | `settings`, `counters`, `control` | faults, what tests count, and the exported functions for both |
//! | `nvml` | the health of devices |
//! | `nccl` | communicators, groups and their operations, the profiler plug-in |
//! | `loader` | what a test calls |
//!
//! The comment of an entry point states the real driver's rule. The source is the reference manual of the CUDA driver API
//! (12.x) or the NCCL user guide (2.30), unless the comment names another. *Stricter* marks an answer with which the
//! simulation refuses or exposes what a real driver may let pass; *more lenient* marks the opposite. *Unconfirmed* marks a
//! rule that no GPU has confirmed.
//!
//! General rules:
//!
//! 1. An asynchronous call returns before its work. Each stream is a thread; nothing orders two streams but events, the
//!    legacy default stream and the host.
//! 2. Device memory has no host mapping at its address. A host access is SIGSEGV. An address is never used twice, and is
//!    looked up again when work runs, so a use after free is found.
//! 3. A handle is a number in a table. An unknown handle is an error, where the real driver's behaviour is undefined.
//! 4. A wait inside the library ends when the process has a sticky error. Threads are detached: the end of the process
//!    waits for no work.
//! 5. A process has its own devices: memory limits and faults do not reach other processes.

#![allow(unsafe_code, reason = "the entry points are C functions")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the reference manual of each entry point says what the caller owes"
)]
#![allow(clippy::disallowed_methods, reason = "elapsed times of events are real ones")]

mod context;
mod context_work;
mod control;
mod copy;
mod counters;
mod device;
mod device_memory;
mod device_properties;
mod error;
mod event;
mod freeing;
mod handles;
mod host_memory;
mod ipc;
mod loader;
mod nccl;
mod nvml;
mod process;
mod settings;
mod stream;
mod stream_values;
mod vmm;
mod wait;

pub use counters::Counter;
pub use loader::SimulatedGpu;
pub use nccl::communicator_hash;
pub use settings::Setting;

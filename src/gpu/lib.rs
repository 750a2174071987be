//! GPUs through the CUDA driver, which is loaded at run time.
//!
//! A process without a driver gets a [`DriverUnavailable`] that says what is missing. No call panics. Nothing of this
//! crate reads or writes device memory from the host: an address of device memory is a number, and streams copy.
//! Begin at [`Gpu::open`], then [`Gpu::copy`].
//!
//! | file | contents |
//! | --- | --- |
//! | `driver.rs` | the functions of the driver, found once per process |
//! | `error.rs` | why there is no driver, and what a call answered |
//! | `device.rs` | a device with its context, and what it says of itself |
//! | `device_memory.rs` | memory of a device: allocated here, or the program's |
//! | `shared_memory.rs` | memory of a device that other processes map |
//! | `release_thread.rs` | the threads that free and unmap memory where the caller may not wait |
//! | `page_locked.rs` | host memory that devices copy from and to without blocking the caller |
//! | `stream.rs` | ordered work of a device |
//! | `event.rs` | points in a stream that other streams wait for |
//! | `polling.rs` | how often a thread asks the driver again |
//! | `copy_queue.rs` | ordered copies, and the thread that reports their ends |
//! | `health.rs` | what NVML says of the health of GPUs (feature `health`) |
//!
//! Rules:
//!
//! 1. Each device has one stream for each [`CopyDirection`]. The stream has the highest priority, and the default stream
//!    does not order it. Copies of one direction happen in the order of their calls.
//! 2. A copy names page-locked host memory only ([`PageLocked`]). From other memory, a copy blocks its caller.
//! 3. The end of a copy is found by a thread that queries events. A host function in a stream could make no call of
//!    the driver, and would not run after an error.
//! 4. An error of a copy is *sticky*: every later call of the process fails with it. The device is lost to the process
//!    ([`Gpu::loss`]). An error that is not sticky fails its own copy only.
//! 5. A call leaves the thread's current context as it found it: the program has its own.

mod copy_queue;
mod device;
mod device_memory;
mod driver;
mod error;
mod event;
#[cfg(feature = "health")]
mod health;
mod page_locked;
mod polling;
mod release_thread;
mod shared_memory;
mod stream;

pub use copy_queue::{
    CopyDirection, GpuCopy, GpuRows, become_reporting_thread, is_reporting_thread, report_ended_copies,
};
pub use device::{ContextGuard, DeviceFacts, Gpu, lost_gpus};
pub use device_memory::{DeviceMemory, device_memory_bytes};
pub use driver::{device_count, driver_version};
pub use error::{DriverUnavailable, GpuError};
pub use event::GpuEvent;
#[cfg(feature = "health")]
pub use health::{
    GpuHealth, InstalledGpu, NvLinkHealth, RemappedRows, Slowdown, UnreachableGpu, health_of_all_gpus,
};
pub use page_locked::PageLocked;
pub use polling::pause_before_next_query;
pub use shared_memory::ImportedMemory;
pub use stream::GpuStream;

//! Makes glibc's allocator keep freed memory for a few seconds, and returns memory to the system that stays unused.
//!
//! The kernel clears and maps fresh memory page by page. For the memory of a large value this costs more than
//! receiving the value. In every run of a job, values are deleted or overwritten, and new values need memory soon
//! after. So the allocator keeps the memory of freed values of up to 8 MiB. Memory that stays unused for about six
//! seconds is returned. If more than 256 MiB are unused, they are returned at the next check. Begin at
//! [`configure_allocator_and_start_trimming`].

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc;

use tokio::runtime::Handle;

/// Configures the allocator to keep freed memory, and starts the thread that returns unused memory.
///
/// By default glibc returns every large value to the system as soon as it is overwritten or deleted, and
/// requests new memory for the next one. The kernel clears and maps those pages one by one, which costs more
/// than receiving the value.
///
/// The threads of `runtime` allocate the values, and each of them has a heap of its own.
pub fn configure_allocator_and_start_trimming(runtime: &Handle) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::configure_allocator_and_start_trimming(runtime.clone());
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = runtime;
}

//! Memory that is freed is kept for what comes next.
#![cfg_attr(all(target_os = "linux", target_env = "gnu"), allow(unsafe_code))]

/// So much free memory at the end of a heap is kept, of which there are a few.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: libc::c_int = 64 << 20;
/// What is larger is asked of the system, and given back to it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE: libc::c_int = 8 << 20;

/// Tells the allocator to keep what is freed. By itself glibc gives every large value back to the system as soon as it is
/// overwritten or deleted, and asks for new memory for the next one: pages that are cleared and mapped one by one, which
/// costs more than receiving the value does.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: both set a number of the allocator, under its own lock.
    let set = unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT) == 1 && libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) == 1
    };
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if !set {
        tracing::warn!("the allocator does not take its settings: large values will cost more");
    }
}

//! The calls that free memory: each waits until all work of the device has ended, which is that of the current context.
//!
//! That was seen of a real driver (580.159), whose manual says that `cuMemFree` *may* wait. So a program that frees memory
//! while a kernel waits for it waits for ever. Calls about physical allocations and mappings do not wait (`vmm.rs`).

use std::ffi::{c_int, c_void};

use crate::context::{check_ready, current_device};
use crate::device_memory::{SegmentKind, remove_segment};
use crate::error::{Answer, code_of};
use crate::host_memory::{remove_allocation, remove_registration};
use crate::stream::synchronize_all;

/// Frees once all work has ended.
fn free(body: impl FnOnce() -> Answer) -> c_int {
    code_of(check_ready().and_then(|()| {
        // Without a context there is no work to wait for.
        if let Ok(device) = current_device() {
            synchronize_all(device);
        }
        body()
    }))
}

/// Frees an allocation of `cuMemAlloc`, given by its first address; address 0 is ignored, any other gives error 1.
///
/// If other processes still map the memory through an IPC handle, the behaviour is undefined; the real driver let them read it
/// on. Stricter: work of another process that comes later to the memory meets the sticky error 700.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    if at == 0 {
        return code_of(check_ready());
    }
    free(|| {
        let segment = remove_segment(at, |segment| matches!(segment.kind, SegmentKind::Allocated { .. }))?;
        segment.backing.mark_freed();
        Ok(())
    })
}

/// Frees memory of `cuMemHostAlloc`; any other address gives error 1.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(at: *mut c_void) -> c_int {
    free(|| remove_allocation(at as u64))
}

/// Ends a registration, given by its first address. Another address of page-locked memory gives error 1, and any other one 713.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(at: *mut c_void) -> c_int {
    free(|| remove_registration(at as u64))
}

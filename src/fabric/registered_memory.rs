//! Memory that peers may read, or into which reads go.
//!
//! Begin at [`Fabric::register`](crate::Fabric::register).
#![allow(unsafe_code, reason = "calls libfabric")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::endpoint::RemoteBytes;
use crate::fabric::FabricInner;
use crate::layouts::MemoryFid;

/// Registered memory. It is withdrawn when this is dropped: reads of peers fail from then on.
pub struct RegisteredMemory {
    fabric: Arc<FabricInner>,
    memory: NonNull<MemoryFid>,
    base: u64,
    len: usize,
}

// SAFETY: the fabric was opened for use by any thread.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above; shared use reads fields that never change.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Takes over what the library has registered at this address.
    pub(crate) const fn new(
        fabric: Arc<FabricInner>,
        memory: NonNull<MemoryFid>,
        base: u64,
        len: usize,
    ) -> Self {
        Self { fabric, memory, base, len }
    }

    /// Returns how a peer names the first byte.
    #[must_use]
    pub fn remote(&self) -> RemoteBytes {
        // SAFETY: it is registered while this lives, and the field never changes.
        let key = unsafe { self.memory.as_ref() }.key;
        RemoteBytes { key, address: self.base }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns what a read into the memory passes to the library.
    pub(crate) fn descriptor(&self) -> *mut c_void {
        // SAFETY: as above.
        unsafe { self.memory.as_ref() }.mem_desc
    }
}

impl std::fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegisteredMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        // SAFETY: it was registered, and is used no more.
        unsafe { self.fabric.close_fid("fi_close of memory", self.memory.as_ptr().cast()) };
    }
}

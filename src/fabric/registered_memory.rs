//! Memory that peers may read, or into which reads go.
//!
//! Begin at [`Fabric::register`](crate::Fabric::register).
#![allow(unsafe_code, reason = "calls libfabric")]

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use crate::domain::Domain;
use crate::error::FabricError;
use crate::layouts as fi;

/// Bytes of a peer's registered memory: the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteBytes {
    /// The key of the memory.
    pub key: u64,
    /// The address, as the owner of the memory names it.
    pub address: u64,
}

/// Registered memory. It is withdrawn when this is dropped: reads of peers fail from then on.
pub struct RegisteredMemory {
    domain: Arc<Domain>,
    memory: NonNull<fi::MemoryFid>,
    base: u64,
    len: usize,
}

// SAFETY: the fabric was opened for use by any thread.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above; shared use reads fields that never change.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// As [`Fabric::register`](crate::Fabric::register).
    ///
    /// # Safety
    /// As of it.
    pub(crate) unsafe fn register(
        domain: &Arc<Domain>,
        memory: NonNull<u8>,
        len: usize,
    ) -> Result<Self, FabricError> {
        let calls = domain.library.lock_calls();
        let (mut registered, access) = (null_mut(), fi::CAP_READ | fi::CAP_REMOTE_READ);
        // SAFETY: the caller guarantees the memory, and the domain is open.
        let result = unsafe {
            let handle = domain.handle.as_ptr();
            let register = (*(*handle).mr).reg;
            let address = memory.as_ptr().cast::<c_void>();
            let key = domain.new_key();
            register(handle.cast(), address, len, access, 0, key, 0, &raw mut registered, null_mut())
        };
        drop(calls);
        domain.library.check("fi_mr_reg", result as isize)?;
        let registered =
            NonNull::new(registered).ok_or_else(|| domain.library.error("fi_mr_reg", libc::EINVAL))?;
        let base = if domain.memory_mode() & fi::MR_VIRT_ADDR == 0 { 0 } else { memory.addr().get() as u64 };
        Ok(Self { domain: Arc::clone(domain), memory: registered, base, len })
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
        let _calls = self.domain.library.lock_calls();
        // SAFETY: it was registered, and is used no more.
        unsafe { self.domain.close_fid("fi_close of memory", self.memory.as_ptr().cast()) };
    }
}

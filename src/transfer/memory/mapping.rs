//! Memory that stays mapped or allocated as long as the value that owns it lives.
//!
//! The only view of the bytes that this module creates is [`Mapping::peer_view`]. Begin at [`Mapping`] and
//! [`OwnedMemory`].
#![allow(unsafe_code, reason = "maps memory, and keeps owners by address")]

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags};

use super::shared_memory_copy;
use super::view::{MemoryAddress, PeerView};
use crate::base::error::MemoryError;

/// A memory mapping, which is unmapped when it is dropped.
#[derive(Debug)]
pub struct Mapping {
    base: MemoryAddress,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `file`, to be read and, where `writable`, written.
    pub fn map_file(file: BorrowedFd<'_>, len: usize, writable: bool) -> rustix::io::Result<Self> {
        if len == 0 {
            return Ok(Self { base: MemoryAddress(NonNull::dangling()), len });
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file.as_fd(), 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base: MemoryAddress(base), len })
    }

    /// Maps `len` bytes of a file that another process sent. None if the file could shrink, which would fault
    /// its readers, or has fewer bytes.
    pub fn map_sealed_file(file: BorrowedFd<'_>, len: usize, writable: bool) -> Option<Self> {
        let seals = rustix::fs::fcntl_get_seals(file).ok()?;
        let size = usize::try_from(rustix::fs::fstat(file).ok()?.st_size).ok()?;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) || size < len {
            return None;
        }
        Self::map_file(file, len, writable).ok()
    }

    /// Asks for large pages and populates all pages now, because the first touch of a page costs more than a
    /// copy into it. Ignores errors.
    pub fn prefault(&self, writable: bool) {
        if self.len == 0 {
            return;
        }
        let populate = if writable {
            rustix::mm::Advice::LinuxPopulateWrite
        } else {
            rustix::mm::Advice::LinuxPopulateRead
        };
        for advice in [rustix::mm::Advice::LinuxHugepage, populate] {
            // SAFETY: the range is this mapping; neither advice changes its contents.
            let _best_effort = unsafe { rustix::mm::madvise(self.base.0.as_ptr().cast(), self.len, advice) };
        }
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte.
    pub const fn base(&self) -> MemoryAddress {
        self.base
    }

    /// Returns the 64-bit word at `at`, which this process and others may change. `at` must be a multiple of
    /// 8 within the mapping.
    pub fn atomic_u64_at(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a word of the mapping");
        // SAFETY: the word is aligned and within the mapping, and is only ever accessed as an atomic word.
        unsafe { AtomicU64::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// Returns the 32-bit word at `at`, as [`atomic_u64_at`](Self::atomic_u64_at) does; `at` must be a multiple of 4.
    pub fn atomic_u32_at(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "a word of the mapping");
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// Returns a view of the bytes `start..start + len` of another process's memory, or none if they exceed
    /// the mapping.
    pub fn peer_view(&self, start: usize, len: usize) -> Option<PeerView<'_>> {
        // SAFETY: the bytes are within the mapping, which the view borrows.
        (start.checked_add(len)? <= self.len)
            .then(|| unsafe { PeerView::from_address(self.base, start, len) })
    }

    /// Copies the bytes from `start` on, as many as the mapping has, although another process may change
    /// them.
    pub fn copy_out(&self, start: usize, into: &mut [u8]) {
        let start = start.min(self.len);
        let len = into.len().min(self.len - start);
        // SAFETY: the range is within the mapping, which is only accessed by atomics and such copies.
        unsafe {
            shared_memory_copy::copy_from_shared(self.base.0.as_ptr().add(start), into.as_mut_ptr(), len)
        };
    }

    /// Copies `bytes` to `start`, as many as the mapping has room for, although another process may read
    /// them. The mapping must be writable.
    pub fn copy_in(&self, start: usize, bytes: &[u8]) {
        let start = start.min(self.len);
        let len = bytes.len().min(self.len - start);
        // SAFETY: as above.
        unsafe { shared_memory_copy::copy_to_shared(bytes.as_ptr(), self.base.0.as_ptr().add(start), len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping belongs to this value, and every view of it borrowed this value.
            let _ = unsafe { rustix::mm::munmap(self.base.0.as_ptr().cast(), self.len) };
        }
    }
}

/// A program's memory together with its owner, which is kept as long as the memory is used.
pub struct OwnedMemory {
    base: MemoryAddress,
    len: usize,
    is_writable: bool,
    owner: NonNull<dyn Send>,
}

// SAFETY: the owner is `Send`, and nothing accesses it before it is dropped.
unsafe impl Send for OwnedMemory {}
// SAFETY: as above.
unsafe impl Sync for OwnedMemory {}

impl std::fmt::Debug for OwnedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

impl OwnedMemory {
    /// Takes the memory of `owner`. It calls `as_mut` once.
    pub fn from_owner<M: AsMut<[u8]> + Send + 'static>(owner: M) -> Self {
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: the pointer comes from a box, and nothing else reaches it until `drop` takes it back.
        let bytes = unsafe { (*owner).as_mut() };
        let (len, base) = (bytes.len(), NonNull::from(bytes).cast());
        Self::from_raw_parts(base, len, true, owner)
    }

    /// Takes memory that is only read, of which `owner` says nothing but when it is kept.
    ///
    /// # Errors
    /// Returns [`MemoryError::Foreign`] if the address is null, is not a multiple of `align`, or the memory would
    /// reach beyond the address space. An empty range may have any address.
    ///
    /// # Safety
    /// Until `owner` is dropped, the `len` bytes at `base` must be mapped, and nothing may write them while a
    /// transfer reads them.
    pub unsafe fn read_only(
        base: *const u8,
        len: usize,
        align: usize,
        owner: Box<dyn Send>,
    ) -> Result<Self, MemoryError> {
        let refused = |why| MemoryError::Foreign { address: base.addr(), len, why };
        if len == 0 {
            return Ok(Self::from_raw_parts(NonNull::dangling(), 0, false, Box::into_raw(owner)));
        }
        let Some(start) = NonNull::new(base.cast_mut()) else { return Err(refused("its address is null")) };
        if len > isize::MAX as usize || base.addr().checked_add(len).is_none() {
            return Err(refused("it reaches beyond the address space"));
        }
        if align == 0 || !base.addr().is_multiple_of(align) {
            return Err(refused("its address is not aligned to its elements"));
        }
        Ok(Self::from_raw_parts(start, len, false, Box::into_raw(owner)))
    }

    /// Keeps the owner that `owner`, a pointer from a box, points to.
    fn from_raw_parts(base: NonNull<u8>, len: usize, is_writable: bool, owner: *mut dyn Send) -> Self {
        // SAFETY: a pointer from a box is never null.
        let owner = unsafe { NonNull::new_unchecked(owner) };
        Self { base: MemoryAddress(base), len, is_writable, owner }
    }

    /// Returns whether transfers may write it.
    pub const fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte.
    pub const fn base(&self) -> MemoryAddress {
        self.base
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        // SAFETY: `new` took the pointer from a box, and nothing else owns it.
        drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
    }
}

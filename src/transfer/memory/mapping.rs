//! Stretches of memory that are mapped or owned, and unmapped or freed when they are not used any more.
//!
//! Views of their bytes are made elsewhere. Begin at [`Mapping`] and [`OwnedMemory`].
#![allow(unsafe_code, reason = "maps memory, and keeps owners by address")]

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags};

use super::copy;
use super::view::{MemoryAddress, PeerView};

/// Memory that is mapped as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    base: MemoryAddress,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `file`, to be read and, where `writable`, written.
    pub fn of(file: BorrowedFd<'_>, len: usize, writable: bool) -> rustix::io::Result<Self> {
        if len == 0 {
            return Ok(Self { base: MemoryAddress(NonNull::dangling()), len });
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at a place that the kernel chooses overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file.as_fd(), 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base: MemoryAddress(base), len })
    }

    /// Maps `len` bytes of what another process sent; none if it could shrink, which would fault its readers, or is
    /// shorter.
    pub fn sealed(file: BorrowedFd<'_>, len: usize, writable: bool) -> Option<Self> {
        let seals = rustix::fs::fcntl_get_seals(file).ok()?;
        let size = usize::try_from(rustix::fs::fstat(file).ok()?.st_size).ok()?;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) || size < len {
            return None;
        }
        Self::of(file, len, writable).ok()
    }

    /// Asks for large pages, and for all pages now: the first touch of a page costs more than a copy into it.
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

    /// Returns its length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns where it begins.
    pub const fn base(&self) -> MemoryAddress {
        self.base
    }

    /// Returns the word at `at`, which this process and others may change. `at` is a multiple of 8, within the mapping.
    pub fn word64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a word of the mapping");
        // SAFETY: it is aligned and within the mapping, which is only ever used as atomic words there.
        unsafe { AtomicU64::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// As [`word64`](Self::word64), of 32 bits.
    pub fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "a word of the mapping");
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// Returns a view of the bytes `start..start + len` of another process's memory, if they lie in it.
    pub fn peer_view(&self, start: usize, len: usize) -> Option<PeerView<'_>> {
        // SAFETY: they lie in the mapping, which is there as long as the view borrows it.
        (start.checked_add(len)? <= self.len).then(|| unsafe { PeerView::at(self.base, start, len) })
    }

    /// Copies what is at `start`, as far as it lies in it, although another process may change it.
    pub fn copy_out(&self, start: usize, into: &mut [u8]) {
        let start = start.min(self.len);
        let len = into.len().min(self.len - start);
        // SAFETY: within the mapping, which is not used but by atomics and such copies.
        unsafe { copy::from_shared(self.base.0.as_ptr().add(start), into.as_mut_ptr(), len) };
    }

    /// Copies to `start`, as far as it lies in it, although another process may read it. The mapping is writable.
    pub fn copy_in(&self, start: usize, bytes: &[u8]) {
        let start = start.min(self.len);
        let len = bytes.len().min(self.len - start);
        // SAFETY: as above.
        unsafe { copy::to_shared(bytes.as_ptr(), self.base.0.as_ptr().add(start), len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is this value's own, and every view of it borrowed this value.
            let _ = unsafe { rustix::mm::munmap(self.base.0.as_ptr().cast(), self.len) };
        }
    }
}

/// A program's memory as it is, with its owner, which lives here so that it outlives every use.
pub struct OwnedMemory {
    base: MemoryAddress,
    len: usize,
    owner: NonNull<dyn Send>,
}

// SAFETY: the owner may be sent, and is not looked at before it is dropped.
unsafe impl Send for OwnedMemory {}
// SAFETY: as above.
unsafe impl Sync for OwnedMemory {}

impl std::fmt::Debug for OwnedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

impl OwnedMemory {
    /// Takes the memory that `owner` has. It is asked for it once.
    pub fn new<M: AsMut<[u8]> + Send + 'static>(owner: M) -> Self {
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: made of a box a moment ago, and borrowed from here until `drop` takes it back: nothing else reaches it.
        let bytes = unsafe { (*owner).as_mut() };
        let (len, base) = (bytes.len(), NonNull::from(bytes).cast());
        let owner: *mut dyn Send = owner;
        // SAFETY: a box is never null.
        Self { base: MemoryAddress(base), len, owner: unsafe { NonNull::new_unchecked(owner) } }
    }

    /// Returns its length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns where it begins.
    pub const fn base(&self) -> MemoryAddress {
        self.base
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        // SAFETY: `new` made it of a box, and gave it away to nothing.
        drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
    }
}

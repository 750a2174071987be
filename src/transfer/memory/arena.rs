//! Arenas: shared memory, or memory of a GPU, from which buffers are allocated.
//!
//! [`free_ranges`](super::free_ranges) tracks the free ranges. The first access to a page costs more than to copy a
//! page, so [`Arena::new`] populates all pages at once. Begin at [`Arena::allocate`].

use std::os::fd::AsFd;
use std::sync::Arc;

use muster_gpu::{DeviceMemory, Gpu};
use rustix::fs::{MemfdFlags, SealFlags};

use super::buffer::{Backing, Buffer};
use super::free_ranges::{BecameUnusedCallback, FreeRanges, PAGE};
use super::mapping::Mapping;
use super::region::{MemoryRegion, RegionMemory};
use crate::base::error::MemoryError;

/// A prefaulted range of shared memory, or a range of the memory of a GPU, from which buffers are allocated. Clones are the
/// same arena; it lives as long as any of its buffers.
#[derive(Debug, Clone)]
pub struct Arena(Arc<FreeRanges>);

impl Arena {
    /// Creates an arena of `bytes`, rounded up to pages.
    ///
    /// # Errors
    /// Returns [`MemoryError::System`] if the operating system refuses the memory.
    pub fn new(bytes: usize) -> Result<Self, MemoryError> {
        Self::with_became_unused_callback(bytes, Box::new(|| ()))
    }

    /// Creates an arena of `bytes` in the memory of a GPU, rounded up to what the driver allocates. The host never touches the
    /// bytes of its buffers. GPUs of other processes on this host can copy from them.
    ///
    /// # Errors
    /// Returns [`MemoryError::Gpu`] if the GPU has not as much memory left, or was lost.
    pub fn on_gpu(gpu: &Gpu, bytes: usize) -> Result<Self, MemoryError> {
        let memory = DeviceMemory::allocate_shared(gpu, bytes)
            .map_err(|error| MemoryError::Gpu { gpu: gpu.ordinal(), error })?;
        let region = Arc::new(MemoryRegion::new(RegionMemory::Device(memory)));
        Ok(Self(Arc::new(FreeRanges::new(region, Box::new(|| ())))))
    }

    /// Creates an arena that calls `on_unused` each time its last buffer was freed, on the thread that freed it.
    pub(super) fn with_became_unused_callback(
        bytes: usize,
        on_unused: BecameUnusedCallback,
    ) -> Result<Self, MemoryError> {
        let failed = |error: rustix::io::Errno| MemoryError::System { bytes, why: error.to_string() };
        let len = bytes.checked_next_multiple_of(PAGE).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        let file = rustix::fs::memfd_create("muster-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed)?;
        rustix::fs::ftruncate(&file, len as u64).map_err(failed)?;
        let mapping = Mapping::map_file(file.as_fd(), len, true).map_err(failed)?;
        // The seals fix the size, because a file that shrinks faults the processes that read it, and refuse
        // every further writable mapping.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        mapping.prefault(true);
        let region = Arc::new(MemoryRegion::new(RegionMemory::Arena(mapping, file)));
        Ok(Self(Arc::new(FreeRanges::new(region, on_unused))))
    }

    /// Allocates a buffer of `len` bytes. Its contents are undefined: whatever the memory held before.
    ///
    /// # Errors
    /// Returns [`MemoryError::Full`] if no free range is large enough.
    pub fn allocate(&self, len: usize) -> Result<Buffer, MemoryError> {
        let start = if len == 0 { 0 } else { self.0.allocate(len)? };
        Ok(Buffer::from_backing(Backing::Arena(Arc::clone(&self.0)), start, len))
    }

    /// Returns the GPU in whose memory it is; none for host memory.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.0.region.device().map(DeviceMemory::gpu)
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.region.len()
    }

    /// Returns the free bytes.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.0.free_bytes()
    }

    /// Returns whether it has no buffers.
    pub(super) fn is_unused(&self) -> bool {
        self.0.is_unused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_one_piece_again() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut held: Vec<_> = (0..100).map(|n| arena.allocate(n * 97 + 1).unwrap()).collect();
        assert!(arena.free_bytes() < arena.size());
        fastrand::seed(7);
        while !held.is_empty() {
            held.swap_remove(fastrand::usize(..held.len()));
        }
        assert_eq!(arena.free_bytes(), arena.size());
        assert!(arena.allocate(1 << 20).is_ok());
    }

    #[test]
    fn a_full_arena_says_what_is_left() {
        let arena = Arena::new(8192).unwrap();
        let _held = arena.allocate(5000).unwrap();
        let refused = arena.allocate(1).unwrap_err();
        assert_eq!(refused, MemoryError::Full { wanted: 1, free: 0, largest: 0, size: 8192 });
        assert!(arena.allocate(usize::MAX).is_err());
        assert!(arena.allocate(0).is_ok());
    }

    #[test]
    fn buffers_do_not_overlap() {
        let arena = Arena::new(1 << 16).unwrap();
        let buffers: Vec<_> = (1..50).map(|n| arena.allocate(n * 7).unwrap()).collect();
        for (n, buffer) in buffers.iter().enumerate() {
            buffer.fill(n as u8).unwrap();
        }
        for (n, buffer) in buffers.iter().enumerate() {
            buffer.with_bytes(|bytes| assert!(bytes.iter().all(|byte| *byte == n as u8))).unwrap();
        }
    }
}

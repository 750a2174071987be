//! Arenas of device memory. Begin at [`DeviceArena::allocate`].

use std::sync::Arc;

use muster_gpu::{DeviceMemory, Gpu};

use super::buffer::{Backing, Buffer};
use super::free_ranges::FreeRanges;
use super::region::{MemoryRegion, RegionMemory};
use crate::base::error::MemoryError;

/// A range of a GPU's memory from which buffers are allocated. Clones are the same arena; it lives as long as any of its
/// buffers.
#[derive(Debug, Clone)]
pub struct DeviceArena(Arc<FreeRanges>);

impl DeviceArena {
    /// Creates an arena of `bytes` on a GPU.
    ///
    /// # Errors
    /// Returns [`MemoryError::Gpu`] if the GPU has not as much memory left, or was lost.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, MemoryError> {
        let memory = DeviceMemory::allocate(gpu, bytes)
            .map_err(|error| MemoryError::Gpu { gpu: gpu.ordinal(), error })?;
        let region = Arc::new(MemoryRegion::new(RegionMemory::Device(memory)));
        Ok(Self(Arc::new(FreeRanges::new(region, Box::new(|| ())))))
    }

    /// Allocates a buffer of `len` bytes. Its contents are undefined: whatever the memory held before.
    ///
    /// # Errors
    /// Returns [`MemoryError::Full`] if no free range is large enough.
    pub fn allocate(&self, len: usize) -> Result<Buffer, MemoryError> {
        let start = if len == 0 { 0 } else { self.0.allocate(len)? };
        Ok(Buffer::from_backing(Backing::Arena(Arc::clone(&self.0)), start, len))
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
}

//! Regions: the memory that an engine knows, and the listeners that are called when a region is dropped.
//!
//! [`free_ranges`](super::free_ranges) tracks the free ranges of an arena. Begin at [`MemoryRegion`].
#![allow(unsafe_code, reason = "registers memory that it keeps mapped")]

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use muster_fabric::{Fabric, RegisteredMemory};
use muster_gpu::{DeviceMemory, Gpu, ImportedMemory};

use super::device_mappings::DeviceMappings;
use super::fabric_registrations::FabricRegistrations;
use super::mapping::{Mapping, OwnedMemory};
use super::view::MemoryAddress;
use crate::base::weak_list::WeakList;

/// The next region's number. A number is never used twice in the life of the process.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The bytes of all live regions of host memory.
static REGISTERED: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes of all regions of host memory of this process: arenas, and memory of programs that buffers were
/// made of.
#[must_use]
pub fn registered_bytes() -> u64 {
    REGISTERED.load(Ordering::Relaxed)
}

/// A contiguous range of memory that the engine knows.
pub struct MemoryRegion {
    /// The number of the region, unique in the process.
    pub id: u32,
    /// The memory as fabrics know it. Fields are dropped in their order: this one before the memory.
    registrations: FabricRegistrations,
    memory: RegionMemory,
    /// Called when the region is gone. It may outlive many connections.
    gone: Mutex<WeakList<dyn RegionUnmapListener>>,
    /// Memory of a GPU, as the other GPUs of this task access it.
    mappings: DeviceMappings,
}

/// A connection that has announced a region to its peer, and must revoke it when the region is gone.
pub trait RegionUnmapListener: Send + Sync {
    /// Reports that the region with this number is gone.
    fn on_region_unmapped(self: Arc<Self>, id: u32);
}

impl std::fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        REGISTERED.fetch_sub(self.host_bytes(), Ordering::Relaxed);
        let listeners = std::mem::take(self.gone.get_mut().unwrap_or_else(PoisonError::into_inner));
        for listener in listeners.upgrade_all() {
            listener.on_region_unmapped(self.id);
        }
    }
}

#[derive(Debug)]
pub enum RegionMemory {
    /// Shared memory of this engine, which peers on this host may map.
    Arena(Mapping, std::os::fd::OwnedFd),
    /// A program's memory, with its owner.
    Foreign(OwnedMemory),
    /// Memory of a GPU.
    Device(DeviceMemory),
}

impl MemoryRegion {
    /// Creates a region of this memory.
    pub fn new(memory: RegionMemory) -> Self {
        let (id, gone, mappings) =
            (NEXT.fetch_add(1, Ordering::Relaxed), Mutex::default(), DeviceMappings::default());
        let region = Self { id, registrations: FabricRegistrations::default(), memory, gone, mappings };
        REGISTERED.fetch_add(region.host_bytes(), Ordering::Relaxed);
        region
    }

    /// Registers a listener, which is called when the region is gone, if it is still alive then.
    pub fn add_unmap_listener(&self, listener: Weak<dyn RegionUnmapListener>) {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).add(listener);
    }

    /// Returns the bytes of host memory.
    fn host_bytes(&self) -> u64 {
        if self.device().is_some() { 0 } else { self.len() as u64 }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            RegionMemory::Arena(mapping, _) => mapping.len(),
            RegionMemory::Foreign(foreign) => foreign.len(),
            RegionMemory::Device(memory) => memory.len(),
        }
    }

    /// Returns the memory of a GPU that the region is; none for host memory.
    pub fn device(&self) -> Option<&DeviceMemory> {
        match &self.memory {
            RegionMemory::Device(memory) => Some(memory),
            RegionMemory::Arena(..) | RegionMemory::Foreign(_) => None,
        }
    }

    /// Returns memory of a GPU as another GPU of this task accesses it; none if it cannot, or for host memory. The driver may
    /// wait, so a thread that reports copies must not call it.
    pub fn mapped_for(&self, gpu: &Gpu) -> Option<Arc<ImportedMemory>> {
        let memory = self.device()?;
        self.mappings.mapped_for(gpu, memory.descriptor()?, memory.len())
    }

    /// Returns the registration of host memory with a fabric; none if the fabric refuses it, or for other memory. It must be dropped
    /// before the region is. The first call for a fabric takes long: it locks the pages of the memory.
    pub fn registered_with(&self, fabric: &Fabric) -> Option<Arc<RegisteredMemory>> {
        if self.device().is_some() || self.len() == 0 {
            return None;
        }
        // SAFETY: the memory stays mapped while the region lives, and with it the registrations; callers drop theirs before.
        unsafe { self.registrations.registered_with(fabric, self.base().0, self.len()) }
    }

    /// Returns the address of the first byte of host memory.
    ///
    /// # Panics
    /// If the region is [memory of a GPU](Self::device): the host must not touch its bytes.
    pub fn base(&self) -> MemoryAddress {
        match &self.memory {
            RegionMemory::Arena(mapping, _) => mapping.base(),
            RegionMemory::Foreign(foreign) => foreign.base(),
            RegionMemory::Device(memory) => panic!("the host touches no {memory:?}"),
        }
    }

    /// Returns whether transfers may write it.
    pub fn is_writable(&self) -> bool {
        match &self.memory {
            RegionMemory::Arena(..) | RegionMemory::Device(_) => true,
            RegionMemory::Foreign(foreign) => foreign.is_writable(),
        }
    }

    /// Returns the file that a peer on this host maps, or whose memory its GPU maps; none for other memory than an arena's.
    pub fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            RegionMemory::Arena(_, file) => Some(std::os::fd::AsFd::as_fd(file)),
            RegionMemory::Device(memory) => memory.descriptor(),
            RegionMemory::Foreign(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct UnmapCounter(AtomicU32);

    impl RegionUnmapListener for UnmapCounter {
        fn on_region_unmapped(self: Arc<Self>, _: u32) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_region_that_lives_long_remembers_those_who_live_and_no_others() {
        let region = MemoryRegion::new(RegionMemory::Foreign(OwnedMemory::from_owner(vec![0; 10])));
        let counted = || Arc::new(UnmapCounter(AtomicU32::new(0)));
        let weak = |listener: &Arc<UnmapCounter>| -> Weak<dyn RegionUnmapListener> {
            let listener: Arc<dyn RegionUnmapListener> = listener.clone();
            Arc::downgrade(&listener)
        };
        let living: Vec<_> = (0..50).map(|_| counted()).collect();
        living.iter().for_each(|listener| region.add_unmap_listener(weak(listener)));
        for _ in 0..10_000 {
            let listener = counted();
            region.add_unmap_listener(weak(&listener));
            let remembered = region.gone.lock().unwrap().len();
            assert!(remembered <= 2 * (living.len() + 1) + 1, "{remembered}");
        }
        drop(region);
        assert!(living.iter().all(|listener| listener.0.load(Ordering::Relaxed) == 1));
    }
}

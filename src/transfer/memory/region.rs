//! Regions: the stretches of memory that an engine knows, and listeners that are told when one is gone.
//!
//! It does not know which parts of a region are free or in use. Begin at [`MemoryRegion`].

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::mapping::{Mapping, OwnedMemory};
use super::view::MemoryAddress;

/// Regions are numbered for the life of the process; a number is never used again.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Bytes of all regions that there are.
static REGISTERED: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes of memory that this process has for its engines: arenas, and memory of programs that buffers were
/// made of.
#[must_use]
pub fn registered_bytes() -> u64 {
    REGISTERED.load(Ordering::Relaxed)
}

/// One stretch of memory.
pub struct MemoryRegion {
    /// Its number.
    pub id: u32,
    memory: Memory,
    gone: Mutex<Listeners>,
}

/// A connection that has told its peer of a region, and is told when the region is gone.
pub trait RegionListener: Send + Sync {
    /// Says that the region with this number is gone.
    fn region_gone(self: Arc<Self>, id: u32);
}

/// Those to be told. A region may live as long as its process, and connections come and go: those that are gone are
/// forgotten before there are more than twice as many as live.
#[derive(Default)]
struct Listeners {
    all: Vec<Weak<dyn RegionListener>>,
    lived: usize,
}

impl Listeners {
    fn add(&mut self, listener: Weak<dyn RegionListener>) {
        const FEW: usize = 16;
        if self.all.len() >= FEW.max(2 * self.lived) {
            self.all.retain(|listener| listener.strong_count() > 0);
            self.lived = self.all.len();
        }
        self.all.push(listener);
    }
}

impl std::fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        REGISTERED.fetch_sub(self.len() as u64, Ordering::Relaxed);
        let listeners = std::mem::take(self.gone.get_mut().unwrap_or_else(PoisonError::into_inner));
        for listener in listeners.all.iter().filter_map(Weak::upgrade) {
            listener.region_gone(self.id);
        }
    }
}

#[derive(Debug)]
pub enum Memory {
    /// Shared memory of this engine's own, which peers on this host may map.
    Arena(Mapping, std::os::fd::OwnedFd),
    /// A program's memory, with its owner.
    Foreign(OwnedMemory),
}

impl MemoryRegion {
    /// Makes a region of this memory.
    pub fn new(memory: Memory) -> Self {
        let region = Self { id: NEXT.fetch_add(1, Ordering::Relaxed), memory, gone: Mutex::default() };
        REGISTERED.fetch_add(region.len() as u64, Ordering::Relaxed);
        region
    }

    /// Tells `listener` when it is gone, if there is one then.
    pub fn when_gone(&self, listener: Weak<dyn RegionListener>) {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).add(listener);
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Arena(mapping, _) => mapping.len(),
            Memory::Foreign(foreign) => foreign.len(),
        }
    }

    /// Returns where it begins.
    pub fn base(&self) -> MemoryAddress {
        match &self.memory {
            Memory::Arena(mapping, _) => mapping.base(),
            Memory::Foreign(foreign) => foreign.base(),
        }
    }

    /// Returns what a peer on this host maps it by; none for foreign memory.
    pub fn shared(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Memory::Arena(_, file) => Some(std::os::fd::AsFd::as_fd(file)),
            Memory::Foreign(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counted(AtomicU32);

    impl RegionListener for Counted {
        fn region_gone(self: Arc<Self>, _: u32) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_region_that_lives_long_remembers_those_who_live_and_no_others() {
        let region = MemoryRegion::new(Memory::Foreign(OwnedMemory::new(vec![0; 10])));
        let counted = || Arc::new(Counted(AtomicU32::new(0)));
        let weak = |listener: &Arc<Counted>| -> Weak<dyn RegionListener> {
            let listener: Arc<dyn RegionListener> = listener.clone();
            Arc::downgrade(&listener)
        };
        let living: Vec<_> = (0..50).map(|_| counted()).collect();
        living.iter().for_each(|listener| region.when_gone(weak(listener)));
        for _ in 0..10_000 {
            let listener = counted();
            region.when_gone(weak(&listener));
            let remembered = region.gone.lock().unwrap().all.len();
            assert!(remembered <= 2 * (living.len() + 1) + 1, "{remembered}");
        }
        drop(region);
        assert!(living.iter().all(|listener| listener.0.load(Ordering::Relaxed) == 1));
    }
}

//! The allocator of an arena: tracks its free ranges.
//!
//! [`arena`](super::arena) makes buffers of the allocated ranges. Begin at [`FreeRanges::allocate`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::region::MemoryRegion;
use crate::base::error::MemoryError;
use crate::base::sync::lock;

/// The alignment of buffers below a page: a cache line, so that neighbours share none.
const LINE: usize = 64;
/// The alignment of buffers of a page and more.
pub const PAGE: usize = 4096;

/// Is called when all of an arena is free again.
pub type BecameUnusedCallback = Box<dyn Fn() + Send + Sync>;

/// The free ranges of an arena, by their first byte.
pub struct FreeRanges {
    /// The memory of the arena.
    pub region: Arc<MemoryRegion>,
    free: Mutex<BTreeMap<usize, usize>>,
    on_unused: BecameUnusedCallback,
}

impl std::fmt::Debug for FreeRanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FreeRanges").field("region", &self.region).finish_non_exhaustive()
    }
}

/// Returns the bytes that a buffer of `len` bytes takes.
const fn rounded_size(len: usize) -> usize {
    len.next_multiple_of(if len >= PAGE { PAGE } else { LINE })
}

impl FreeRanges {
    /// Creates a pool in which the whole region is free.
    pub fn new(region: Arc<MemoryRegion>, on_unused: BecameUnusedCallback) -> Self {
        let len = region.len();
        let free = if len > 0 { BTreeMap::from([(0, len)]) } else { BTreeMap::new() };
        Self { region, free: Mutex::new(free), on_unused }
    }

    /// Returns the free bytes.
    pub fn free_bytes(&self) -> usize {
        lock(&self.free).values().sum()
    }

    /// Returns whether everything is free.
    pub fn is_unused(&self) -> bool {
        let free = lock(&self.free);
        free.first_key_value().map_or(0, |(_, have)| *have) == self.region.len()
    }

    /// Takes the first free range that fits, and returns its first byte.
    pub fn allocate(&self, len: usize) -> Result<usize, MemoryError> {
        let align = if len >= PAGE { PAGE } else { LINE };
        let mut free = lock(&self.free);
        let found = if len > self.region.len() {
            None
        } else {
            let wanted = rounded_size(len);
            free.iter().find_map(|(&start, &have)| {
                let at = start.next_multiple_of(align);
                (at + wanted <= start + have).then_some((start, have, at, wanted))
            })
        };
        let Some((start, have, at, wanted)) = found else {
            return Err(MemoryError::Full {
                wanted: len,
                free: free.values().sum(),
                largest: free.values().copied().max().unwrap_or(0),
                size: self.region.len(),
            });
        };
        free.remove(&start);
        if at > start {
            free.insert(start, at - start);
        }
        if at + wanted < start + have {
            free.insert(at + wanted, start + have - at - wanted);
        }
        Ok(at)
    }

    /// Frees a range, and merges it with its free neighbours.
    pub fn release(&self, start: usize, len: usize) {
        if len == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + rounded_size(len));
        let mut free = lock(&self.free);
        if let Some((&before, &have)) = free.range(..start).next_back()
            && before + have == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(have) = free.remove(&end) {
            end += have;
        }
        let is_unused = end - start == self.region.len();
        free.insert(start, end - start);
        drop(free);
        if is_unused {
            (self.on_unused)();
        }
    }
}

//! Memory that the state machine no longer needs and that its driver frees.
//!
//! Freeing a million keys takes a second. So the driver frees this memory after it has released its lock. Large
//! amounts are freed on a separate thread. Begin at [`DeferredFree`].

use std::fmt;

use bytes::Bytes;

use crate::cow::{CowMap, EntryWeight};

/// Memory that no longer belongs to the state. Freeing it may take long, so the driver does it while no
/// caller waits.
#[derive(Default)]
pub struct DeferredFree {
    parts: Vec<Box<dyn Send + Sync>>,
    /// The approximate number of allocations.
    weight: usize,
}

impl DeferredFree {
    /// The size up to which freeing bytes costs nothing worth deferring.
    const SMALL: usize = 64 << 10;

    /// Defers the freeing of a table.
    pub(super) fn of_table<K, V, const N: usize, W>(table: CowMap<K, V, N, W>) -> Self
    where
        K: Ord + Clone + Send + Sync + 'static,
        V: Clone + Send + Sync + 'static,
        W: EntryWeight<K, V> + 'static,
    {
        let weight = 2 * table.len();
        Self { parts: vec![Box::new(table)], weight }
    }

    /// Defers the freeing of a value with `weight` allocations.
    pub(super) fn of_value_with_weight(part: impl Send + Sync + 'static, weight: usize) -> Self {
        Self { parts: vec![Box::new(part)], weight }
    }

    /// Defers the freeing of a value; a small one is freed at once.
    pub(super) fn of_bytes(bytes: Bytes) -> Self {
        if bytes.len() < Self::SMALL { Self::default() } else { Self::of_value_with_weight(bytes, 1) }
    }

    /// Adds what another one frees.
    pub(super) fn add(&mut self, other: Self) {
        self.parts.extend(other.parts);
        self.weight += other.weight;
    }

    /// Returns whether there is nothing to free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the approximate number of allocations to free.
    #[must_use]
    pub fn approximate_allocations(&self) -> usize {
        self.weight
    }
}

impl fmt::Debug for DeferredFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Discarded")
    }
}

// Two values to free are always equal: they are no part of the state.
impl PartialEq for DeferredFree {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for DeferredFree {}

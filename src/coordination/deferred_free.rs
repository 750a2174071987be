//! Memory that the state machine gives up and its driver frees.
//!
//! Freeing a million keys takes a second, so the driver frees after releasing its lock, and much of it on a thread
//! of its own. Begin at [`DeferredFree`].

use std::fmt;

use bytes::Bytes;

use crate::cow::{CowMap, EntryWeight};

/// Memory that is no part of the state any more. To free it may take long: the driver does so when nobody waits for it.
#[derive(Default)]
pub struct DeferredFree {
    parts: Vec<Box<dyn Send + Sync>>,
    /// How many allocations it has, more or less.
    weight: usize,
}

impl DeferredFree {
    /// How many bytes cost nothing to free, more or less.
    const SMALL: usize = 64 << 10;

    /// A table.
    pub(super) fn of<K, V, const N: usize, W>(table: CowMap<K, V, N, W>) -> Self
    where
        K: Ord + Clone + Send + Sync + 'static,
        V: Clone + Send + Sync + 'static,
        W: EntryWeight<K, V> + 'static,
    {
        let weight = 2 * table.len();
        Self { parts: vec![Box::new(table)], weight }
    }

    /// Something of so many allocations.
    pub(super) fn of_weight(part: impl Send + Sync + 'static, weight: usize) -> Self {
        Self { parts: vec![Box::new(part)], weight }
    }

    /// A value; a small one is freed at once.
    pub(super) fn of_bytes(bytes: Bytes) -> Self {
        if bytes.len() < Self::SMALL { Self::default() } else { Self::of_weight(bytes, 1) }
    }

    /// Whether there is nothing to free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// How many allocations are to be freed, more or less.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.weight
    }
}

impl fmt::Debug for DeferredFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Discarded")
    }
}

// What is thrown away is the same as anything else that is.
impl PartialEq for DeferredFree {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for DeferredFree {}

//! The entries of the store, and the listing of a directory as a reply.
//!
//! The store itself is in `key_value_store.rs`. Begin at `DirectoryListing`.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::ids::{TaskId, Timestamp};
use crate::cow::{CowMap, EntryWeight, Weight};

/// One value of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoreEntry {
    pub value: Bytes,
    /// The time of the last write.
    pub at: Timestamp,
    /// The task that wrote it last, where the connection identifies it.
    pub by: Option<TaskId>,
}

impl StoreEntry {
    pub fn new(value: Bytes, at: Timestamp, by: Option<TaskId>) -> Self {
        Self { value, at, by }
    }
}

/// The entries by key.
pub(super) type StoreEntries = CowMap<Bytes, StoreEntry, 256, ByteWeight>;

/// The weight of an entry: the length of its key and its value.
pub(super) struct ByteWeight;

impl EntryWeight<Bytes, StoreEntry> for ByteWeight {
    fn weight(key: &Bytes, entry: &StoreEntry) -> Weight {
        Weight { keys: key.len(), values: entry.value.len() }
    }
}

/// The entries below a directory, as they were at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct DirectoryListing(pub(super) StoreEntries);

impl DirectoryListing {
    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entries, in byte order of their normalised keys.
    pub fn iter(&self) -> impl Iterator<Item = (&Bytes, &Bytes)> {
        self.0.iter().map(|(key, entry)| (key, &entry.value))
    }
}

impl FromIterator<(Bytes, Bytes)> for DirectoryListing {
    fn from_iter<I: IntoIterator<Item = (Bytes, Bytes)>>(entries: I) -> Self {
        let entry = |(key, value)| (key, StoreEntry::new(value, Timestamp::default(), None));
        Self(entries.into_iter().map(entry).collect())
    }
}

impl fmt::Debug for DirectoryListing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

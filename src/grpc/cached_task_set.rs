//! A set of tasks with the bytes that encode it, and a request message that ends in such a set.
//!
//! `task_set_cache.rs` keeps the sets. Begin at [`MessageWithCachedSet`].

use std::sync::Arc;

use bytes::Bytes;

use crate::coordination::TaskSet;

/// The encoding of a set of tasks in a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskSetEncoding {
    /// A `CoordinatedTask` for each task.
    Messages,
    /// Numbers, packed or not.
    Numbers,
}

/// A decoded set, with its bytes.
#[derive(Debug)]
pub(super) struct CachedTaskSet {
    pub(super) spelling: TaskSetEncoding,
    /// The number of the field that holds it.
    pub(super) field: u32,
    pub(super) raw: Bytes,
    pub(super) set: TaskSet,
}

/// A message that ends in a cached set.
#[derive(Debug, Clone)]
pub(super) struct MessageWithCachedSet {
    /// The bytes before the set.
    pub(super) beginning: Bytes,
    pub(super) known: Arc<CachedTaskSet>,
}

impl MessageWithCachedSet {
    /// Returns the whole message.
    pub(super) fn bytes(&self) -> Bytes {
        [&*self.beginning, &*self.known.raw].concat().into()
    }
}

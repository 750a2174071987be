//! The read buffers and the cache of header blocks of a thread. All connections that the thread serves share them.
//!
//! Begin at [`with_thread_buffers`].

use std::cell::Cell;
use std::sync::Arc;

use muster_kept::{KeptMemory, ReadRoom};

use super::request_meta::RequestMeta;
use crate::http2::HeaderBlockCache;

/// The size of the read buffer.
const READ_BUFFER: usize = 128 << 10;

/// The buffers of a thread.
pub(super) struct ThreadBuffers {
    pub(super) room: Box<[u8]>,
    /// The read buffer for kept connections.
    kept_room: Option<ReadRoom>,
    pub(super) headers: HeaderBlockCache<RequestMeta>,
}

impl Default for ThreadBuffers {
    fn default() -> Self {
        let room = vec![0; READ_BUFFER].into_boxed_slice();
        Self { room, kept_room: None, headers: HeaderBlockCache::new() }
    }
}

impl ThreadBuffers {
    /// Returns the read buffer in this memory, unless too many threads have one; the other read buffer; and the cache.
    pub(super) fn split(
        &mut self,
        memory: &Arc<KeptMemory>,
    ) -> (Option<&mut ReadRoom>, &mut [u8], &mut HeaderBlockCache<RequestMeta>) {
        if !self.kept_room.as_ref().is_some_and(|room| room.is_in(memory)) {
            self.kept_room = memory.take_read_room();
        }
        (self.kept_room.as_mut(), &mut self.room, &mut self.headers)
    }

    /// Marks the read buffer for kept connections as unowned.
    pub(super) fn release_kept_room(&mut self) {
        if let Some(room) = &mut self.kept_room {
            room.release();
        }
    }
}

thread_local! {
    /// Boxed, because the buffers are taken out and put back for every read.
    static THREAD_BUFFERS: Cell<Option<Box<ThreadBuffers>>> = const { Cell::new(None) };
}

/// Calls `work` with the thread's buffers.
pub(super) fn with_thread_buffers<R>(work: impl FnOnce(&mut ThreadBuffers) -> R) -> R {
    let mut buffers = THREAD_BUFFERS.take().unwrap_or_default();
    let result = work(&mut buffers);
    THREAD_BUFFERS.set(Some(buffers));
    result
}

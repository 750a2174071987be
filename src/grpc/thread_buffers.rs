//! The read buffer and the cache of header blocks of a thread. All connections that the thread serves share them.
//!
//! Begin at [`with_thread_buffers`].

use std::cell::Cell;

use super::request_meta::RequestMeta;
use crate::http2::HeaderBlockCache;

/// The size of the read buffer.
const READ_BUFFER: usize = 128 << 10;

struct ThreadBuffers {
    room: Box<[u8]>,
    headers: HeaderBlockCache<RequestMeta>,
}

impl Default for ThreadBuffers {
    fn default() -> Self {
        Self { room: vec![0; READ_BUFFER].into_boxed_slice(), headers: HeaderBlockCache::new() }
    }
}

thread_local! {
    /// Boxed, because the buffers are taken out and put back for every read.
    static THREAD_BUFFERS: Cell<Option<Box<ThreadBuffers>>> = const { Cell::new(None) };
}

/// Calls `work` with the thread's read buffer and its cache of header blocks.
pub(super) fn with_thread_buffers<R>(
    work: impl FnOnce(&mut [u8], &mut HeaderBlockCache<RequestMeta>) -> R,
) -> R {
    let mut buffers = THREAD_BUFFERS.take().unwrap_or_default();
    let result = work(&mut buffers.room, &mut buffers.headers);
    THREAD_BUFFERS.set(Some(buffers));
    result
}

//! Buffers for bodies that arrive in pieces.
//!
//! The system gives memory page by page, as each is touched, and clears it: for a value of a megabyte that costs more than
//! receiving it does. So large buffers are asked for in one go, and a few of those whose values were overwritten or deleted are used
//! again.

use std::collections::VecDeque;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{BufMut as _, Bytes};
use memmap2::{MmapMut, MmapOptions};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

/// Buffers of these lengths are asked for in one go. Larger ones are not: what was announced need not come.
const MAPPED: std::ops::RangeInclusive<usize> = 256 << 10..=4 << 20;

/// A buffer of a fixed length that is being filled.
#[derive(Debug)]
pub(super) enum Buffer {
    Heap(Vec<u8>),
    Mapped { map: MmapMut, filled: usize },
}

impl Buffer {
    /// `None` if there is no memory.
    fn new(length: usize) -> Option<Self> {
        if MAPPED.contains(&length) {
            let map = MmapOptions::new().len(length).populate().map_anon().ok()?;
            return Some(Self::Mapped { map, filled: 0 });
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).ok()?;
        Some(Self::Heap(bytes))
    }

    fn capacity(&self) -> usize {
        match self {
            Self::Heap(bytes) => bytes.capacity(),
            Self::Mapped { map, .. } => map.len(),
        }
    }

    /// How much of it is filled.
    pub(super) fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn clear(&mut self) {
        match self {
            Self::Heap(bytes) => bytes.clear(),
            Self::Mapped { filled, .. } => *filled = 0,
        }
    }

    /// Fills in what there is room for.
    pub(super) fn extend(&mut self, more: &[u8]) {
        match self {
            Self::Heap(bytes) => bytes.extend_from_slice(more),
            Self::Mapped { map, filled } => {
                if let Some(room) = map.get_mut(*filled..).and_then(|room| room.get_mut(..more.len())) {
                    room.copy_from_slice(more);
                    *filled += more.len();
                }
            }
        }
    }

    /// Fills in up to `most` bytes from `socket`; how many, and none if it has ended.
    pub(super) fn poll_fill<T: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut T,
        most: usize,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Heap(bytes) => pin!(socket.read_buf(&mut bytes.limit(most))).poll(cx),
            Self::Mapped { map, filled } => {
                let room = map.get_mut(*filled..).unwrap_or_default();
                let most = room.len().min(most);
                let mut room = ReadBuf::new(room.get_mut(..most).unwrap_or_default());
                ready!(Pin::new(socket).poll_read(cx, &mut room))?;
                let read = room.filled().len();
                *filled += read;
                Poll::Ready(Ok(read))
            }
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped { map, filled } => map.get(..*filled).unwrap_or_default(),
        }
    }
}

/// Shorter buffers are not worth keeping.
const LEAST: usize = 32 << 10;
/// So many bytes are kept.
const KEPT: usize = 16 << 20;

/// Buffers that are free.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// The one that was freed last stands last.
    buffers: VecDeque<Buffer>,
    bytes: usize,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty buffer with room for `length` bytes and little more; `None` if there is no memory.
    pub(super) fn take(&self, length: usize) -> Option<Buffer> {
        if length >= LEAST {
            let fits = |buffer: &Buffer| (length..=length + length / 4).contains(&buffer.capacity());
            let mut free = self.lock();
            if let Some(place) = free.buffers.iter().rposition(fits)
                && let Some(buffer) = free.buffers.remove(place)
            {
                free.bytes -= buffer.capacity();
                return Some(buffer);
            }
        }
        Buffer::new(length)
    }

    /// Bytes whose buffer comes back once nobody has them any more.
    pub(super) fn lend(self: &Arc<Self>, buffer: Buffer) -> Bytes {
        match buffer {
            Buffer::Heap(bytes) if bytes.capacity() < LEAST => bytes.into(),
            buffer => Bytes::from_owner(Lent { buffer, pool: Arc::clone(self) }),
        }
    }

    fn put(&self, mut buffer: Buffer) {
        if buffer.capacity() > KEPT / 2 {
            return;
        }
        buffer.clear();
        let mut free = self.lock();
        free.bytes += buffer.capacity();
        free.buffers.push_back(buffer);
        let mut old = Vec::new();
        while free.bytes > KEPT {
            let Some(oldest) = free.buffers.pop_front() else { break };
            free.bytes -= oldest.capacity();
            old.push(oldest);
        }
        // Given back to the system after the lock is.
        drop(free);
    }
}

struct Lent {
    buffer: Buffer,
    pool: Arc<Pool>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.put(std::mem::replace(&mut self.buffer, Buffer::Heap(Vec::new())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_nobody_has_it() {
        for length in [100_000, 1 << 20] {
            let pool = Arc::new(Pool::default());
            let mut buffer = pool.take(length).unwrap();
            buffer.extend(&vec![7; length]);
            let place = buffer.as_ref().as_ptr();
            let lent = pool.lend(buffer);
            assert_eq!(lent, vec![7; length]);
            let part = lent.slice(10..20);
            drop(lent);
            assert_eq!(pool.lock().bytes, 0, "a part of it is in use");
            assert_eq!(part, [7; 10][..]);
            drop(part);
            let other = pool.take(length / 4 * 3).unwrap();
            assert_ne!(other.as_ref().as_ptr(), place, "much too large");
            let again = pool.take(length / 10 * 9).unwrap();
            assert!(again.as_ref().as_ptr() == place && again.len() == 0);
            assert_eq!(pool.lock().bytes, 0);
        }
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let pool = Arc::new(Pool::default());
        for n in 0..100 {
            drop(pool.lend(Buffer::new((1 << 20) + n).unwrap()));
            assert!(pool.lock().bytes <= KEPT);
        }
        let kept = (KEPT >> 20) - 1;
        assert_eq!(pool.lock().buffers.len(), kept);
        for unfit in [KEPT, LEAST - 1] {
            drop(pool.lend(Buffer::new(unfit).unwrap()));
            assert_eq!(pool.lock().buffers.len(), kept);
        }
    }

    #[tokio::test]
    async fn a_buffer_takes_no_more_than_it_is_told_to() {
        for length in [1000, 300_000] {
            let mut buffer = Buffer::new(length).unwrap();
            let source = vec![5; length * 2];
            let mut source = source.as_slice();
            while buffer.len() < length {
                let most = (length - buffer.len()).min(70_000);
                let read = std::future::poll_fn(|cx| buffer.poll_fill(cx, &mut source, most)).await.unwrap();
                assert!((1..=most).contains(&read));
            }
            assert_eq!((buffer.as_ref(), source.len()), (vec![5; length].as_slice(), length));
        }
    }
}

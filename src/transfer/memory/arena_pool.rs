//! A pool of arenas that grows as needed, for programs that cannot say beforehand how much memory they use.
//!
//! Each arena has a file descriptor, so an arena for each buffer would exhaust the descriptors. A new arena has at
//! least an eighth of the pool's size, so a large pool still has few arenas. This minimum is at most 1 GiB. The pool
//! keeps arenas without buffers for reuse: as many bytes as the arenas in use have, or 256 MiB if this is more. It
//! frees further arenas without buffers. Begin at [`ArenaPool::allocate`].

use std::sync::{Arc, Mutex, Weak};

use super::arena::Arena;
use super::buffer::Buffer;
use crate::base::error::MemoryError;
use crate::base::sync::lock;

/// The least size of an arena in bytes.
const LEAST: usize = 4 << 20;
/// The most bytes by which an arena exceeds the buffer that it is made for.
const MOST: usize = 1 << 30;
/// A new arena has at least this part of the size of the pool.
const PART: usize = 8;
/// The bytes that may be kept in arenas without buffers in any case, so that buffers which come and go need no new memory.
const UNUSED_MAX: usize = if cfg!(test) { 16 << 20 } else { 256 << 20 };

/// Arenas that are made and freed as buffers need them. Clones are the same pool; buffers outlive it.
#[derive(Debug, Clone, Default)]
pub struct ArenaPool(Arc<Mutex<Vec<Arena>>>);

impl ArenaPool {
    /// Allocates a buffer of `len` bytes. Its contents are undefined, as those of [`Arena::allocate`].
    ///
    /// # Errors
    /// Returns [`MemoryError::System`] if the operating system refuses the memory.
    pub fn allocate(&self, len: usize) -> Result<Buffer, MemoryError> {
        let arenas = lock(&self.0);
        if let Some(buffer) = arenas.iter().find_map(|arena| arena.allocate(len).ok()) {
            return Ok(buffer);
        }
        let total: usize = arenas.iter().map(Arena::size).sum();
        // The memory of an arena is populated when it is made, which takes long.
        drop(arenas);
        let pool = Arc::downgrade(&self.0);
        let size = len.max((total / PART).clamp(LEAST, MOST));
        let arena = Arena::with_became_unused_callback(size, Box::new(move || free_unused_arenas(&pool)))?;
        let buffer = arena.allocate(len)?;
        lock(&self.0).push(arena);
        Ok(buffer)
    }

    /// Returns the size of its arenas in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        lock(&self.0).iter().map(Arena::size).sum()
    }
}

/// Frees arenas without buffers, except for [`UNUSED_MAX`] bytes, or as many as are in use: a program that replaces large
/// buffers again and again needs the memory at once.
fn free_unused_arenas(pool: &Weak<Mutex<Vec<Arena>>>) {
    let Some(pool) = pool.upgrade() else { return };
    let mut arenas = lock(&pool);
    let used: usize = arenas.iter().filter(|arena| !arena.is_unused()).map(Arena::size).sum();
    let kept_max = UNUSED_MAX.max(used);
    let mut kept = 0;
    let mut is_superfluous = |arena: &mut Arena| {
        let is_unused = arena.is_unused();
        let fits = kept + arena.size() <= kept_max;
        kept += if is_unused && fits { arena.size() } else { 0 };
        is_unused && !fits
    };
    let freed: Vec<Arena> = arenas.extract_if(.., |arena| is_superfluous(arena)).collect();
    drop(arenas);
    // Their memory is unmapped without the lock.
    drop(freed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_grows_in_few_arenas_and_shrinks_again() {
        let pool = ArenaPool::default();
        assert_eq!(pool.size(), 0);
        let small: Vec<Buffer> = (0..5000).map(|n| pool.allocate(n).unwrap()).collect();
        assert!(lock(&pool.0).len() <= 8, "{} arenas for 12 MiB", lock(&pool.0).len());
        let large: Vec<Buffer> = (0..3).map(|_| pool.allocate(UNUSED_MAX / 2 + 1).unwrap()).collect();
        for (n, buffer) in small.iter().chain(&large).enumerate() {
            buffer.range(0..buffer.len().min(8)).unwrap();
            assert!(
                buffer.is_empty() || buffer.with_bytes(<[u8]>::as_ptr).unwrap().addr().is_multiple_of(64),
                "{n}"
            );
        }
        let full = pool.size();
        // Any thread may free, and one that holds nothing of the pool.
        std::thread::spawn(move || drop((small, large))).join().unwrap();
        assert!(pool.size() <= UNUSED_MAX && pool.size() < full, "{} of {full}", pool.size());
        // A kept arena is used again.
        let kept = pool.size();
        drop(pool.allocate(UNUSED_MAX / 2 + 1).unwrap());
        assert_eq!(pool.size(), kept);
    }

    #[test]
    fn as_much_unused_memory_is_kept_as_is_in_use() {
        let pool = ArenaPool::default();
        let mut large: Vec<Buffer> = (0..3).map(|_| pool.allocate(2 * UNUSED_MAX).unwrap()).collect();
        let full = pool.size();
        large.pop();
        assert_eq!(pool.size(), full, "a buffer that replaces it needs no new memory");
        large.clear();
        assert!(pool.size() <= UNUSED_MAX, "{} of {full}", pool.size());
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = ArenaPool::default();
        let buffer = pool.allocate(1000).unwrap();
        drop(pool);
        buffer.fill(1).unwrap();
        assert!(ArenaPool::default().allocate(usize::MAX).is_err());
        assert!(ArenaPool::default().allocate(0).unwrap().is_empty());
    }
}

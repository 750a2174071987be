//! Searches in the chunks of a `CowMap`: of one key, and of several keys whose memory the processor waits for together. Begin at
//! [`locate`].

use std::borrow::Borrow;
use std::sync::Arc;

use super::chunk::EntryChunk;

/// The place of a key in a map, or the place at which it would be inserted. It is valid until the map changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyPosition {
    pub(super) chunk: usize,
    pub(super) place: Result<usize, usize>,
}

/// A search that [`prefetch`] makes.
struct PrefetchedSearch<'a, Q: ?Sized> {
    key: &'a Q,
    /// The chunk that may have the key.
    chunk: usize,
    /// The entries of the chunk among which the key may be.
    first: usize,
    count: usize,
}

/// Returns the place of a key.
pub(super) fn locate<K: Borrow<Q> + Ord, V, Q: Ord + ?Sized>(
    chunks: &[Arc<EntryChunk<K, V>>],
    key: &Q,
) -> KeyPosition {
    let chunk = chunks.partition_point(|chunk| chunk.begins_at_or_before(key)).saturating_sub(1);
    KeyPosition { chunk, place: chunks.get(chunk).map_or(Err(0), |chunk| chunk.search(key)) }
}

/// As [`locate`], for insertions and removals, which are mostly at the ends: it looks there first. To read a key that may be
/// anywhere, these looks would cost more than they save.
pub(super) fn locate_from_ends<K: Borrow<Q> + Ord, V, Q: Ord + ?Sized>(
    chunks: &[Arc<EntryChunk<K, V>>],
    key: &Q,
) -> KeyPosition {
    // The common cases: a key of the last chunk, because keys ascend, or of the first one, because the oldest are removed.
    let chunk = match chunks {
        [.., last] if last.begins_at_or_before(key) => chunks.len() - 1,
        [_, second, ..] if second.begins_at_or_before(key) => return locate(chunks, key),
        _ => 0,
    };
    let place = chunks.get(chunk).map_or(Err(0), |entries| {
        // The common case: a key after all others of the chunk.
        match entries.last() {
            Some((last, _)) if last.borrow() < key => Err(entries.len()),
            _ => entries.search(key),
        }
    });
    KeyPosition { chunk, place }
}

/// Reads what searches of these keys will read, so that the caches of the processor have it. The searches go on in step: the
/// processor then waits for the memory of several of them at once, but a single search waits for one read after the other.
pub(super) fn prefetch<K: Borrow<Q> + Ord, V, Q: Ord + ?Sized, R: Borrow<Q>>(
    chunks: &[Arc<EntryChunk<K, V>>],
    keys: &[R],
) {
    let Some(last) = chunks.last() else { return };
    let mut searches: Vec<PrefetchedSearch<'_, Q>> = keys
        .iter()
        .map(|key| PrefetchedSearch { key: key.borrow(), chunk: 0, first: 0, count: 0 })
        // An insertion looks at the last chunk first.
        .filter(|search| !last.begins_at_or_before(search.key))
        .collect();
    let mut left = chunks.len();
    while left > 1 {
        let half = left / 2;
        for search in &mut searches {
            let middle = search.chunk + half;
            if chunks[middle].begins_at_or_before(search.key) {
                search.chunk = middle;
            }
        }
        left -= half;
    }
    for search in &mut searches {
        search.count = chunks[search.chunk].len();
    }
    while searches.iter().any(|search| search.count > 1) {
        for search in searches.iter_mut().filter(|search| search.count > 1) {
            let half = search.count / 2;
            let middle = search.first + half;
            if chunks[search.chunk][middle].0.borrow() <= search.key {
                search.first = middle;
            }
            search.count -= half;
        }
    }
    // The compiler must not leave out searches whose results are not used.
    for search in searches {
        std::hint::black_box(search.first);
    }
}

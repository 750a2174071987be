//! Searches of a [`CowMap`]: of one key, and of several keys whose memory is waited for together. Begin at `CowMap::position`.

use std::borrow::Borrow;

use super::{CowMap, EntryWeight};

/// The place of a key in a map, or the place at which it would be inserted. It is valid until the map changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyPosition {
    pub(super) chunk: usize,
    pub(super) place: Result<usize, usize>,
}

/// A search that `CowMap::prefetch` makes.
struct PrefetchedSearch<'a, Q: ?Sized> {
    key: &'a Q,
    /// The chunk that may have the key.
    chunk: usize,
    /// The entries of the chunk among which the key may be.
    first: usize,
    count: usize,
}

impl<K: Ord + Clone, V: Clone, const N: usize, W: EntryWeight<K, V>> CowMap<K, V, N, W> {
    /// Returns the index of the chunk that holds a key or would hold it, and the key's index in the chunk.
    pub(super) fn locate<Q: Ord + ?Sized>(&self, key: &Q) -> (usize, Result<usize, usize>)
    where
        K: Borrow<Q>,
    {
        let chunk = self.chunks.partition_point(|chunk| chunk.begins_at_or_before(key)).saturating_sub(1);
        (chunk, self.chunks.get(chunk).map_or(Err(0), |chunk| chunk.search(key)))
    }

    /// As [`locate`](Self::locate), for insertions and removals, which are mostly at the ends: it looks there first. To
    /// read a key that may be anywhere, these looks would cost more than they save.
    pub(super) fn locate_from_ends<Q: Ord + ?Sized>(&self, key: &Q) -> (usize, Result<usize, usize>)
    where
        K: Borrow<Q>,
    {
        // The common cases: a key of the last chunk, because keys ascend, or of the first one, because the oldest are removed.
        let chunk = match &*self.chunks {
            [.., last] if last.begins_at_or_before(key) => self.chunks.len() - 1,
            [_, second, ..] if second.begins_at_or_before(key) => return self.locate(key),
            _ => 0,
        };
        let place = self.chunks.get(chunk).map_or(Err(0), |entries| {
            // The common case: a key after all others of the chunk.
            match entries.last() {
                Some((last, _)) if last.borrow() < key => Err(entries.len()),
                _ => entries.search(key),
            }
        });
        (chunk, place)
    }

    /// Searches a key, to insert it or to replace its value with [`insert_at`](Self::insert_at). In a map that no cache holds, a
    /// search takes longer than all else that an insertion does.
    pub fn position<Q: Ord + ?Sized>(&self, key: &Q) -> KeyPosition
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.locate_from_ends(key);
        KeyPosition { chunk, place }
    }

    /// Returns the entry of the key whose position this is; `None` if the map does not have the key.
    pub fn entry_at(&self, position: KeyPosition) -> Option<(&K, &V)> {
        self.chunks.get(position.chunk)?.get(position.place.ok()?).map(|(key, value)| (key, value))
    }

    /// Reads what searches of these keys will read, so that the caches of the processor have it. The searches go on in step: the
    /// processor then waits for the memory of several of them at once, but a single search waits for one read after the other.
    pub fn prefetch<Q: Ord + ?Sized, R: Borrow<Q>>(&self, keys: &[R])
    where
        K: Borrow<Q>,
    {
        let Some(last) = self.chunks.last() else { return };
        let mut searches: Vec<PrefetchedSearch<'_, Q>> = keys
            .iter()
            .map(|key| PrefetchedSearch { key: key.borrow(), chunk: 0, first: 0, count: 0 })
            // An insertion looks at the last chunk first.
            .filter(|search| !last.begins_at_or_before(search.key))
            .collect();
        let mut chunks = self.chunks.len();
        while chunks > 1 {
            let half = chunks / 2;
            for search in &mut searches {
                let middle = search.chunk + half;
                if self.chunks[middle].begins_at_or_before(search.key) {
                    search.chunk = middle;
                }
            }
            chunks -= half;
        }
        for search in &mut searches {
            search.count = self.chunks[search.chunk].len();
        }
        while searches.iter().any(|search| search.count > 1) {
            for search in searches.iter_mut().filter(|search| search.count > 1) {
                let half = search.count / 2;
                let middle = search.first + half;
                if self.chunks[search.chunk][middle].0.borrow() <= search.key {
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
}

#[cfg(test)]
mod tests {
    use super::super::NoWeight;
    use super::*;

    #[test]
    fn a_position_is_found_once_to_read_and_to_write_and_a_prefetch_changes_nothing() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut table: CowMap<u32, u32, 8, NoWeight> = CowMap::default();
        table.prefetch(&[1, 2]);
        for step in 0..2_000 {
            let keys: Vec<u32> = (0..rng.usize(0..9)).map(|_| rng.u32(0..800)).collect();
            let before = table.clone();
            table.prefetch(&keys);
            assert_eq!(table, before, "step {step}");
            let key = rng.u32(0..800);
            let position = table.position(&key);
            let there = table.entry_at(position).map(|(key, value)| (*key, *value));
            assert_eq!(there, before.get(&key).map(|value| (key, *value)));
            assert_eq!(table.insert_at(position, key, step), there.map(|(_, value)| value));
            assert!(table.get(&key) == Some(&step) && table.is_consistent(), "step {step}");
        }
    }
}

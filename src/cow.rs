//! Copy-on-write tables. [`CowMap`] is an ordered map, and [`CowVec`] is a vector of fixed length. A copy of a table
//! shares its chunks with the original. A shared chunk is copied when the original or the copy changes it.
//!
//! A reader takes a copy of a table and reads it while the original changes. Taking the copy costs one pointer for
//! each chunk. While a copy is held, a writer copies each chunk that it changes, but only the first time. Begin at
//! [`CowMap::insert`].
//!
//! Invariants of a [`CowMap`]:
//! - Each chunk has at least one entry and at most `N`.
//! - Two neighbouring chunks together have more than `N / 2` entries, so `len` entries are in at most
//!   `4 * len / N + 1` chunks.
//! - Keys ascend within a chunk and from chunk to chunk.
//! - `len` is the number of all entries.

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Bound;
use std::sync::Arc;

mod chunk;
mod search;
mod serde_impls;
mod vec;

pub(crate) use chunk::{EntryWeight, NoWeight, Weight};
pub(crate) use search::KeyPosition;
pub(crate) use vec::CowVec;

use chunk::{EntryChunk, append_chunk};

/// An ordered map whose copies are cheap. A chunk has at most `N` entries, and caches the total weight of its
/// entries by the measure `W`.
pub(crate) struct CowMap<K, V, const N: usize = 64, W = NoWeight> {
    chunks: Vec<Arc<EntryChunk<K, V>>>,
    len: usize,
    measure: PhantomData<fn() -> W>,
}

impl<K, V, const N: usize, W> Default for CowMap<K, V, N, W> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0, measure: PhantomData }
    }
}

impl<K, V, const N: usize, W> Clone for CowMap<K, V, N, W> {
    fn clone(&self) -> Self {
        Self { chunks: self.chunks.clone(), len: self.len, measure: PhantomData }
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize> CowMap<K, V, N> {
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let KeyPosition { chunk, place } = self.locate(key);
        let chunk = Arc::make_mut(self.chunks.get_mut(chunk)?);
        chunk.entries.get_mut(place.ok()?).map(|(_, value)| value)
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize, W: EntryWeight<K, V>> CowMap<K, V, N, W> {
    pub fn len(&self) -> usize {
        self.len
    }

    fn locate<Q: Ord + ?Sized>(&self, key: &Q) -> KeyPosition
    where
        K: Borrow<Q>,
    {
        search::locate(&self.chunks, key)
    }

    /// Searches a key, to insert it or to replace its value with [`insert_at`](Self::insert_at). In a map that no cache holds, a
    /// search takes longer than all else that an insertion does.
    pub fn position<Q: Ord + ?Sized>(&self, key: &Q) -> KeyPosition
    where
        K: Borrow<Q>,
    {
        search::locate_from_ends(&self.chunks, key)
    }

    /// Returns the entry of the key whose position this is; `None` if the map does not have the key.
    pub fn entry_at(&self, position: KeyPosition) -> Option<(&K, &V)> {
        self.chunks.get(position.chunk)?.get(position.place.ok()?).map(|(key, value)| (key, value))
    }

    /// Reads what searches of these keys will read, so that the caches of the processor have it.
    pub fn prefetch<Q: Ord + ?Sized, R: Borrow<Q>>(&self, keys: &[R])
    where
        K: Borrow<Q>,
    {
        search::prefetch(&self.chunks, keys);
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.get_key_value(key).map(|(_, value)| value)
    }

    pub fn get_key_value<Q: Ord + ?Sized>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        self.entry_at(self.locate(key))
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.locate(key).place.is_ok()
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.insert_at(self.position(&key), key, value)
    }

    /// Does what [`insert`](Self::insert) does. `position` must be that of `key`.
    pub fn insert_at(&mut self, position: KeyPosition, key: K, value: V) -> Option<V> {
        debug_assert_eq!(position, self.position(&key), "the position is that of the key in the present map");
        let KeyPosition { chunk: at, place } = position;
        let place = match place {
            Ok(place) => {
                let chunk = Arc::make_mut(&mut self.chunks[at]);
                let (key, there) = &mut chunk.entries[place];
                chunk.weight += W::weight(key, &value);
                chunk.weight -= W::weight(key, there);
                return Some(std::mem::replace(there, value));
            }
            Err(place) => place,
        };
        self.len += 1;
        let Some(chunk) = self.chunks.get_mut(at) else {
            self.chunks.push(Arc::new(EntryChunk::from_entries::<W>(vec![(key, value)])));
            return None;
        };
        if chunk.len() < N {
            Arc::make_mut(chunk).insert::<W>(place, key, value);
        } else if place == N {
            // A full chunk is not split for a key at its end: ascending keys leave full chunks behind.
            match self.chunks.get_mut(at + 1).filter(|next| next.len() < N) {
                Some(next) => Arc::make_mut(next).insert::<W>(0, key, value),
                None => {
                    self.chunks.insert(at + 1, Arc::new(EntryChunk::from_entries::<W>(vec![(key, value)])))
                }
            }
        } else {
            let chunk = Arc::make_mut(chunk);
            let mut upper = EntryChunk::from_entries::<W>(chunk.entries.split_off(N / 2));
            chunk.weight -= upper.weight;
            match place.checked_sub(N / 2) {
                Some(place) => upper.insert::<W>(place, key, value),
                None => chunk.insert::<W>(place, key, value),
            }
            self.chunks.insert(at + 1, Arc::new(upper));
        }
        None
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let KeyPosition { chunk, place } = self.position(key);
        self.remove_entry_at(chunk, place.ok()?).map(|(_, value)| value)
    }

    fn remove_entry_at(&mut self, at: usize, place: usize) -> Option<(K, V)> {
        let chunk = Arc::make_mut(self.chunks.get_mut(at)?);
        let removed = chunk.entries.remove(place);
        chunk.weight -= W::weight(&removed.0, &removed.1);
        self.len -= 1;
        let left = chunk.len();
        if left == 0 {
            self.chunks.remove(at);
        }
        if left < N / 2 {
            self.merge_small_neighbours(at);
        }
        Some(removed)
    }

    /// Restores the bound on neighbouring chunks after the chunks at `at` and `at + 1` have become smaller or are gone.
    fn merge_small_neighbours(&mut self, at: usize) {
        for at in (at.saturating_sub(1)..=at + 1).rev() {
            if let Some([chunk, next]) = self.chunks.get_mut(at..).and_then(<[_]>::first_chunk_mut)
                && chunk.len() + next.len() <= N / 2
            {
                let next = self.chunks.remove(at + 1);
                append_chunk(&mut self.chunks[at], next);
            }
        }
    }

    pub fn first_key_value(&self) -> Option<(&K, &V)> {
        self.chunks.first()?.first().map(|(key, value)| (key, value))
    }

    pub fn pop_first(&mut self) -> Option<(K, V)> {
        self.remove_entry_at(0, 0)
    }

    /// Returns the entries from a key on, ascending.
    pub fn range_from<Q: Ord + ?Sized>(
        &self,
        from: Bound<&Q>,
    ) -> impl Iterator<Item = (&K, &V)> + use<'_, K, V, Q, N, W>
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.start_position(from);
        let (first, rest) = match self.chunks.get(chunk..) {
            Some([first, rest @ ..]) => (first.get(place..).unwrap_or_default(), rest),
            _ => (&[][..], &[][..]),
        };
        first.iter().chain(rest.iter().flat_map(|entries| entries.iter())).map(|(key, value)| (key, value))
    }

    fn start_position<Q: Ord + ?Sized>(&self, from: Bound<&Q>) -> (usize, usize)
    where
        K: Borrow<Q>,
    {
        match from {
            Bound::Unbounded => (0, 0),
            Bound::Included(key) => {
                let KeyPosition { chunk, place } = self.locate(key);
                (chunk, place.unwrap_or_else(|place| place))
            }
            Bound::Excluded(key) => {
                let KeyPosition { chunk, place } = self.locate(key);
                (chunk, place.map_or_else(|place| place, |found| found + 1))
            }
        }
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.chunks.iter().flat_map(|entries| entries.iter()).map(|(key, value)| (key, value))
    }

    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// Returns the total weight of all entries.
    pub fn weight(&self) -> Weight {
        self.chunks.iter().map(|chunk| chunk.weight).sum()
    }

    /// Removes and returns the entries `from..to`. It visits each chunk between them, not their entries.
    pub fn remove_range<Q: Ord + ?Sized>(&mut self, from: &Q, to: &Q) -> Self
    where
        K: Borrow<Q>,
    {
        let (first, place) = self.start_position(Bound::Included(from));
        let (last, end) = self.start_position(Bound::Included(to));
        let mut cut = |at: usize, range: (Bound<usize>, Bound<usize>)| {
            let chunk = Arc::make_mut(&mut self.chunks[at]);
            let part = EntryChunk::from_entries::<W>(chunk.entries.drain(range).collect());
            chunk.weight -= part.weight;
            Arc::new(part)
        };
        let mut removed = Vec::new();
        if first == last {
            if place < end {
                removed.push(cut(first, (Bound::Included(place), Bound::Excluded(end))));
            }
        } else if first < last {
            removed.push(cut(first, (Bound::Included(place), Bound::Unbounded)));
            let tail = cut(last, (Bound::Unbounded, Bound::Excluded(end)));
            removed.extend(self.chunks.drain(first + 1..last));
            removed.push(tail);
        }
        // Only the chunks at the ends of the range can have become empty.
        for at in [first + 1, first] {
            if self.chunks.get(at).is_some_and(|chunk| chunk.is_empty()) {
                self.chunks.remove(at);
            }
        }
        self.merge_small_neighbours(first);
        let removed = Self::from_chunks(removed);
        self.len -= removed.len;
        removed
    }

    /// Returns the entries `from..to` as a map of its own. It shares its chunks with this one, except those
    /// at the ends.
    pub fn copy_range<Q: Ord + ?Sized>(&self, from: &Q, to: &Q) -> Self
    where
        K: Borrow<Q>,
    {
        let (first, place) = self.start_position(Bound::Included(from));
        let (last, end) = self.start_position(Bound::Included(to));
        let part = |at: usize, from: usize, to: Option<usize>| {
            let chunk = self.chunks.get(at)?;
            let part = chunk.get(from..to.unwrap_or(chunk.len()))?;
            Some(Arc::new(EntryChunk::from_entries::<W>(part.to_vec())))
        };
        let mut chunks = Vec::with_capacity((last + 1).saturating_sub(first));
        if first == last {
            chunks.extend(part(first, place, Some(end)));
        } else if first < last {
            chunks.extend(part(first, place, None));
            chunks.extend(self.chunks[first + 1..last].iter().cloned());
            chunks.extend(part(last, 0, Some(end)));
        }
        Self::from_chunks(chunks)
    }

    /// Creates a map of these chunks, and joins small ones with their neighbours.
    fn from_chunks(all: Vec<Arc<EntryChunk<K, V>>>) -> Self {
        let len = all.iter().map(|chunk| chunk.len()).sum();
        let mut chunks: Vec<Arc<EntryChunk<K, V>>> = Vec::with_capacity(all.len());
        for chunk in all {
            match chunks.last_mut() {
                _ if chunk.is_empty() => {}
                Some(last) if last.len() + chunk.len() <= N / 2 => append_chunk(last, chunk),
                _ => chunks.push(chunk),
            }
        }
        Self { chunks, len, measure: PhantomData }
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        for chunk in &mut self.chunks {
            if chunk.iter().any(|(key, value)| !keep(key, value)) {
                let chunk = Arc::make_mut(chunk);
                chunk.entries.retain(|(key, value)| keep(key, value));
                chunk.weight = chunk.entries.iter().map(|(key, value)| W::weight(key, value)).sum();
            }
        }
        *self = Self::from_chunks(std::mem::take(&mut self.chunks));
    }

    /// Returns whether the invariants hold.
    pub fn is_consistent(&self) -> bool {
        let sizes = self.chunks.iter().all(|entries| (1..=N).contains(&entries.len()));
        let joined =
            self.chunks.windows(2).all(|pair| pair.iter().map(|chunk| chunk.len()).sum::<usize>() > N / 2);
        let counted: usize = self.chunks.iter().map(|entries| entries.len()).sum();
        let weighed = self.chunks.iter().all(|chunk| {
            chunk.weight == chunk.iter().map(|(key, value)| W::weight(key, value)).sum::<Weight>()
        });
        sizes && joined && weighed && counted == self.len && self.keys().is_sorted_by(|a, b| a < b)
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize, W: EntryWeight<K, V>> FromIterator<(K, V)>
    for CowMap<K, V, N, W>
{
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        for (key, value) in entries {
            map.insert(key, value);
        }
        map
    }
}

impl<K, V, const N: usize, W> fmt::Debug for CowMap<K, V, N, W>
where
    K: Ord + Clone + fmt::Debug,
    V: Clone + fmt::Debug,
    W: EntryWeight<K, V>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Ord + Clone, V: Clone + PartialEq, const N: usize, W: EntryWeight<K, V>> PartialEq
    for CowMap<K, V, N, W>
{
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: Ord + Clone, V: Clone + Eq, const N: usize, W: EntryWeight<K, V>> Eq for CowMap<K, V, N, W> {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    struct WeightOfValue;

    impl EntryWeight<u32, u32> for WeightOfValue {
        fn weight(_: &u32, value: &u32) -> Weight {
            Weight { keys: 1, values: *value as usize }
        }
    }

    #[test]
    fn a_position_is_found_once_to_read_and_to_write_and_a_prefetch_changes_nothing() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut table: CowMap<u32, u32, 8> = CowMap::default();
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

    #[test]
    fn a_map_tracks_the_weight_of_its_entries() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut table: CowMap<u32, u32, 8, WeightOfValue> = CowMap::default();
        for _ in 0..2_000 {
            let (key, value) = (rng.u32(0..300), rng.u32(0..1_000));
            match rng.u8(0..8) {
                0..5 => drop(table.insert(key, value)),
                5 => drop(table.remove(&key)),
                6 => drop(table.remove_range(&key, &(key + value % 30))),
                _ => table.retain(|key, _| key % 50 != value % 50),
            }
            assert!(table.is_consistent());
            let part = table.copy_range(&key, &(key + 40));
            let all = table.iter().filter(|(k, _)| (key..key + 40).contains(*k));
            assert_eq!(part.weight().values, all.map(|(_, value)| *value as usize).sum::<usize>());
        }
        assert_eq!(table.weight().keys, table.len());
        assert_eq!(table.weight().values, table.values().map(|value| *value as usize).sum::<usize>());
    }

    /// Compares random operations on a map of small chunks with the standard library's map; copies must stay
    /// as they were when they were made.
    #[test]
    fn a_map_behaves_as_a_btree_map_and_copies_do_not_change() {
        for seed in 0..60 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut table: CowMap<u32, u32, 8> = CowMap::default();
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            let mut copies: Vec<(CowMap<u32, u32, 8>, BTreeMap<u32, u32>)> = Vec::new();
            let span = [20, 200, 2_000][rng.usize(0..3)];
            for step in 0..600 {
                let (key, value) = (rng.u32(0..span), rng.u32(..));
                match rng.u8(0..20) {
                    0..10 => assert_eq!(table.insert(key, value), model.insert(key, value)),
                    10..14 => assert_eq!(table.remove(&key), model.remove(&key)),
                    14 => assert_eq!(table.pop_first(), model.pop_first()),
                    15 => {
                        let to = key.saturating_add(rng.u32(0..span / 2));
                        let copy = table.copy_range(&key, &to);
                        let removed = table.remove_range(&key, &to);
                        let expected: BTreeMap<u32, u32> =
                            model.range(key..to).map(|(key, value)| (*key, *value)).collect();
                        model.retain(|k, _| !(key..to).contains(k));
                        assert!(removed.is_consistent() && removed.iter().eq(expected.iter()));
                        assert_eq!(copy, removed);
                    }
                    16 => {
                        if let Some(there) = table.get_mut(&key) {
                            *there = value;
                        }
                        if let Some(there) = model.get_mut(&key) {
                            *there = value;
                        }
                    }
                    17 => {
                        table.retain(|key, _| key % 7 != value % 7);
                        model.retain(|key, _| key % 7 != value % 7);
                    }
                    18 => copies.push((table.clone(), model.clone())),
                    _ => drop(copies.pop()),
                }
                assert!(table.is_consistent(), "seed {seed}, step {step}");
                assert!(table.chunks.len() <= 4 * table.len() / 8 + 1, "seed {seed}, step {step}");
                assert!(table.iter().eq(model.iter()), "seed {seed}, step {step}");
                assert_eq!(
                    (table.get(&key), table.first_key_value()),
                    (model.get(&key), model.first_key_value())
                );
                for from in [Bound::Included(&key), Bound::Excluded(&key)] {
                    assert!(table.range_from(from).eq(model.range((from, Bound::Unbounded))));
                }
                for (copy, model) in &copies {
                    assert!(copy.iter().eq(model.iter()), "a copy stays as it was");
                }
            }
            let bytes = postcard::to_stdvec(&table).expect("it can be serialised");
            assert_eq!(bytes, postcard::to_stdvec(&model).expect("it can be serialised"), "as a map");
            assert_eq!(postcard::from_bytes::<CowMap<u32, u32, 8>>(&bytes).expect("and restored"), table);
        }
    }

    #[test]
    fn keys_that_come_in_their_order_fill_their_chunks_and_those_that_come_backwards_make_no_chunk_each() {
        let ascending: CowMap<u32, (), 64> = (0..6_400).map(|key| (key, ())).collect();
        assert_eq!(ascending.chunks.len(), 100);
        let descending: CowMap<u32, (), 64> = (0..6_400).rev().map(|key| (key, ())).collect();
        assert!(descending.chunks.len() <= 200, "{} chunks", descending.chunks.len());
        let mut between: CowMap<u32, (), 64> = (0..64).chain(10_000..10_064).map(|key| (key, ())).collect();
        for key in (1_000..2_000).rev() {
            between.insert(key, ());
        }
        assert!(between.is_consistent() && between.chunks.len() <= 40, "{} chunks", between.chunks.len());
    }

    #[test]
    fn removed_ranges_leave_no_chunks_that_are_almost_empty() {
        let mut table: CowMap<u32, u32, 64, WeightOfValue> = (0..64_000).map(|key| (key, key)).collect();
        // Each range ends within a chunk and begins within another one.
        for from in (1..64_000).step_by(64) {
            assert_eq!(table.remove_range(&from, &(from + 63)).len(), 63);
        }
        assert!(table.is_consistent() && table.len() == 1_000);
        assert!(table.chunks.len() <= 4 * 1_000 / 64 + 1, "{} chunks", table.chunks.len());
        let keys: Vec<u32> = (0..64_000).step_by(64).collect();
        assert!(table.keys().eq(&keys));
    }
}

//! Copy-on-write tables: a copy shares its chunks with the original until either of them changes.
//!
//! A reader takes a copy of the state and reads it while the state goes on: the copy costs one pointer a chunk, and a
//! writer copies the chunk that it changes, once for each copy that is still held. [`CowMap`] is an ordered map, [`CowVec`]
//! a vector of fixed length.
//!
//! Invariants of a [`CowMap`]: no chunk is empty or has more than `N` entries; keys ascend within a chunk and from chunk to
//! chunk; `len` is the number of all entries.

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Index, IndexMut};
use std::sync::Arc;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An ordered map whose copies are cheap. `N` entries make a chunk at most.
#[derive(Clone)]
pub(crate) struct CowMap<K, V, const N: usize = 64> {
    chunks: Vec<Arc<Chunk<K, V>>>,
    len: usize,
}

type Chunk<K, V> = Vec<(K, V)>;

impl<K, V, const N: usize> Default for CowMap<K, V, N> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize> CowMap<K, V, N> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The chunk that holds a key or would hold it, and the place in it.
    fn locate<Q: Ord + ?Sized>(&self, key: &Q) -> (usize, Result<usize, usize>)
    where
        K: Borrow<Q>,
    {
        let behind =
            self.chunks.partition_point(|chunk| chunk.first().is_some_and(|(k, _)| k.borrow() <= key));
        let chunk = behind.saturating_sub(1);
        let place = self.chunks.get(chunk).map_or(Err(0), |entries| {
            // The usual key of a table that grows at its end.
            match entries.last() {
                Some((last, _)) if last.borrow() < key => Err(entries.len()),
                _ => entries.binary_search_by(|(k, _)| k.borrow().cmp(key)),
            }
        });
        (chunk, place)
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
        let (chunk, place) = self.locate(key);
        self.chunks.get(chunk)?.get(place.ok()?).map(|(key, value)| (key, value))
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.locate(key).1.is_ok()
    }

    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.locate(key);
        let entries = Arc::make_mut(self.chunks.get_mut(chunk)?);
        entries.get_mut(place.ok()?).map(|(_, value)| value)
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let (chunk, place) = self.locate(&key);
        let place = match place {
            Ok(place) => {
                let entries = Arc::make_mut(&mut self.chunks[chunk]);
                return Some(std::mem::replace(&mut entries[place].1, value));
            }
            Err(place) => place,
        };
        self.len += 1;
        let Some(entries) = self.chunks.get_mut(chunk) else {
            self.chunks.push(Arc::new(vec![(key, value)]));
            return None;
        };
        if entries.len() < N {
            Arc::make_mut(entries).insert(place, (key, value));
        } else if place == N {
            // Keys that come in their order fill their chunks: none is halved for them.
            match self.chunks.get_mut(chunk + 1).filter(|next| next.len() < N) {
                Some(next) => Arc::make_mut(next).insert(0, (key, value)),
                None => self.chunks.insert(chunk + 1, Arc::new(vec![(key, value)])),
            }
        } else {
            let entries = Arc::make_mut(entries);
            let mut upper = entries.split_off(N / 2);
            match place.checked_sub(N / 2) {
                Some(place) => upper.insert(place, (key, value)),
                None => entries.insert(place, (key, value)),
            }
            self.chunks.insert(chunk + 1, Arc::new(upper));
        }
        None
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.locate(key);
        self.remove_at(chunk, place.ok()?).map(|(_, value)| value)
    }

    fn remove_at(&mut self, chunk: usize, place: usize) -> Option<(K, V)> {
        let entries = Arc::make_mut(self.chunks.get_mut(chunk)?);
        let removed = entries.remove(place);
        self.len -= 1;
        if entries.is_empty() {
            self.chunks.remove(chunk);
        } else if entries.len() < N / 4 {
            self.join(chunk);
        }
        Some(removed)
    }

    /// Puts a chunk that has become small together with the one behind it, if both are small.
    fn join(&mut self, chunk: usize) {
        let small = |chunk: Option<&Arc<Chunk<K, V>>>| chunk.map_or(N, |entries| entries.len());
        if small(self.chunks.get(chunk)) + small(self.chunks.get(chunk + 1)) <= N / 2 {
            let next = Arc::unwrap_or_clone(self.chunks.remove(chunk + 1));
            Arc::make_mut(&mut self.chunks[chunk]).extend(next);
        }
    }

    pub fn first_key_value(&self) -> Option<(&K, &V)> {
        self.chunks.first()?.first().map(|(key, value)| (key, value))
    }

    pub fn pop_first(&mut self) -> Option<(K, V)> {
        self.remove_at(0, 0)
    }

    /// Takes out the first chunk, as a table of its own.
    pub fn pop_chunk(&mut self) -> Option<Self> {
        if self.chunks.is_empty() {
            return None;
        }
        let chunk = self.chunks.remove(0);
        self.len -= chunk.len();
        Some(Self { len: chunk.len(), chunks: vec![chunk] })
    }

    /// The entries from a key on, ascending.
    pub fn range_from<Q: Ord + ?Sized>(
        &self,
        from: Bound<&Q>,
    ) -> impl Iterator<Item = (&K, &V)> + use<'_, K, V, Q, N>
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.start(from);
        let (first, rest) = match self.chunks.get(chunk..) {
            Some([first, rest @ ..]) => (first.get(place..).unwrap_or_default(), rest),
            _ => (&[][..], &[][..]),
        };
        first.iter().chain(rest.iter().flat_map(|entries| entries.iter())).map(|(key, value)| (key, value))
    }

    fn start<Q: Ord + ?Sized>(&self, from: Bound<&Q>) -> (usize, usize)
    where
        K: Borrow<Q>,
    {
        match from {
            Bound::Unbounded => (0, 0),
            Bound::Included(key) => {
                let (chunk, place) = self.locate(key);
                (chunk, place.unwrap_or_else(|place| place))
            }
            Bound::Excluded(key) => {
                let (chunk, place) = self.locate(key);
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

    /// Takes out the entries from one key to before another. Costs a look at each chunk between them, and not at their
    /// entries.
    pub fn remove_range<Q: Ord + ?Sized>(&mut self, from: &Q, to: &Q) -> Self
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.start(Bound::Included(from));
        let (last, end) = self.start(Bound::Included(to));
        let mut removed = Self::default();
        if chunk == last {
            if place < end {
                removed
                    .chunks
                    .push(Arc::new(Arc::make_mut(&mut self.chunks[chunk]).drain(place..end).collect()));
            }
        } else if chunk < last {
            let head = Arc::make_mut(&mut self.chunks[chunk]).split_off(place);
            let tail: Chunk<K, V> = Arc::make_mut(&mut self.chunks[last]).drain(..end).collect();
            removed.chunks.push(Arc::new(head));
            removed.chunks.extend(self.chunks.drain(chunk + 1..last));
            removed.chunks.push(Arc::new(tail));
        }
        removed.chunks.retain(|entries| !entries.is_empty());
        removed.len = removed.chunks.iter().map(|entries| entries.len()).sum();
        self.len -= removed.len;
        // Only what stood at the ends of the range can have become empty.
        for at in [chunk + 1, chunk] {
            if self.chunks.get(at).is_some_and(|entries| entries.is_empty()) {
                self.chunks.remove(at);
            }
        }
        removed
    }

    /// The entries from one key to before another, as a table of its own that shares its chunks with this one, except
    /// those at the ends.
    pub fn copy_range<Q: Ord + ?Sized>(&self, from: &Q, to: &Q) -> Self
    where
        K: Borrow<Q>,
    {
        let (chunk, place) = self.start(Bound::Included(from));
        let (last, end) = self.start(Bound::Included(to));
        let part = |at: usize, from: usize, to: Option<usize>| {
            let entries = self.chunks.get(at)?;
            let part = entries.get(from..to.unwrap_or(entries.len()))?;
            (!part.is_empty()).then(|| Arc::new(part.to_vec()))
        };
        let mut chunks = Vec::with_capacity((last + 1).saturating_sub(chunk));
        if chunk == last {
            chunks.extend(part(chunk, place, Some(end)));
        } else if chunk < last {
            chunks.extend(part(chunk, place, None));
            chunks.extend(self.chunks[chunk + 1..last].iter().cloned());
            chunks.extend(part(last, 0, Some(end)));
        }
        let len = chunks.iter().map(|entries| entries.len()).sum();
        Self { chunks, len }
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        for entries in &mut self.chunks {
            if entries.iter().any(|(key, value)| !keep(key, value)) {
                Arc::make_mut(entries).retain(|(key, value)| keep(key, value));
            }
        }
        self.chunks.retain(|entries| !entries.is_empty());
        self.len = self.chunks.iter().map(|entries| entries.len()).sum();
    }

    /// Whether the invariants of the table hold.
    pub fn is_sound(&self) -> bool {
        let sizes = self.chunks.iter().all(|entries| (1..=N).contains(&entries.len()));
        let counted: usize = self.chunks.iter().map(|entries| entries.len()).sum();
        sizes && counted == self.len && self.keys().is_sorted_by(|a, b| a < b)
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize> FromIterator<(K, V)> for CowMap<K, V, N> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        for (key, value) in entries {
            map.insert(key, value);
        }
        map
    }
}

impl<K: Ord + Clone + fmt::Debug, V: Clone + fmt::Debug, const N: usize> fmt::Debug for CowMap<K, V, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Ord + Clone, V: Clone + PartialEq, const N: usize> PartialEq for CowMap<K, V, N> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: Ord + Clone, V: Clone + Eq, const N: usize> Eq for CowMap<K, V, N> {}

// As a map: the same entries are the same bytes, however they lie in chunks.
impl<K: Ord + Clone + Serialize, V: Clone + Serialize, const N: usize> Serialize for CowMap<K, V, N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len))?;
        for (key, value) in self.iter() {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de, K, V, const N: usize> Deserialize<'de> for CowMap<K, V, N>
where
    K: Ord + Clone + Deserialize<'de>,
    V: Clone + Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<K, V, const N: usize>(PhantomData<(K, V)>);
        impl<'de, K, V, const N: usize> Visitor<'de> for Entries<K, V, N>
        where
            K: Ord + Clone + Deserialize<'de>,
            V: Clone + Deserialize<'de>,
        {
            type Value = CowMap<K, V, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut map = CowMap::default();
                while let Some((key, value)) = entries.next_entry()? {
                    map.insert(key, value);
                }
                Ok(map)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// How many elements of a [`CowVec`] make a chunk.
const TOGETHER: usize = 16;

/// A vector of fixed length whose copies are cheap.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct CowVec<T> {
    chunks: Vec<Arc<Vec<T>>>,
    len: usize,
}

impl<T: Clone> CowVec<T> {
    /// So many equal elements.
    pub fn of(element: &T, len: usize) -> Self {
        std::iter::repeat_n(element, len).cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn get(&self, place: usize) -> Option<&T> {
        self.chunks.get(place / TOGETHER)?.get(place % TOGETHER)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }
}

impl<T> Index<usize> for CowVec<T> {
    type Output = T;

    fn index(&self, place: usize) -> &T {
        &self.chunks[place / TOGETHER][place % TOGETHER]
    }
}

impl<T: Clone> IndexMut<usize> for CowVec<T> {
    fn index_mut(&mut self, place: usize) -> &mut T {
        &mut Arc::make_mut(&mut self.chunks[place / TOGETHER])[place % TOGETHER]
    }
}

impl<T: Clone> FromIterator<T> for CowVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut elements = elements.into_iter();
        let mut chunks = Vec::new();
        let mut len = 0;
        loop {
            let chunk: Vec<T> = elements.by_ref().take(TOGETHER).collect();
            if chunk.is_empty() {
                return Self { chunks, len };
            }
            len += chunk.len();
            chunks.push(Arc::new(chunk));
        }
    }
}

impl<T: Clone + fmt::Debug> fmt::Debug for CowVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T: Clone + Serialize> Serialize for CowVec<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.len))?;
        for element in self.iter() {
            seq.serialize_element(element)?;
        }
        seq.end()
    }
}

impl<'de, T: Clone + Deserialize<'de>> Deserialize<'de> for CowVec<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T>(PhantomData<T>);
        impl<'de, T: Clone + Deserialize<'de>> Visitor<'de> for Elements<T> {
            type Value = CowVec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(element) = elements.next_element()? {
                    all.push(element);
                }
                Ok(all.into_iter().collect())
            }
        }
        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Random operations on a table of small chunks and on the standard library's map, and copies that must stay as they
    /// were when they were made.
    #[test]
    fn a_table_is_what_an_ordered_map_is_and_its_copies_stay() {
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
                        assert!(removed.is_sound() && removed.iter().eq(expected.iter()));
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
                assert!(table.is_sound(), "seed {seed}, step {step}");
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
        assert!(between.is_sound() && between.chunks.len() <= 40, "{} chunks", between.chunks.len());
    }

    #[test]
    fn a_vector_keeps_its_elements_and_its_copies_stay() {
        let mut numbers: CowVec<u32> = (0..100).collect();
        let copy = numbers.clone();
        numbers[50] = 7;
        assert_eq!((numbers[50], copy[50], numbers.len()), (7, 50, 100));
        assert!(numbers.get(100).is_none());
        assert!(copy.iter().copied().eq(0..100));
        let bytes = postcard::to_stdvec(&numbers).expect("it can be serialised");
        assert_eq!(postcard::from_bytes::<CowVec<u32>>(&bytes).expect("and restored"), numbers);
    }
}

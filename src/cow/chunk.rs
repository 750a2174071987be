//! The chunks of a `CowMap`, with the weight of their entries. Begin at [`EntryChunk`].

use std::borrow::Borrow;
use std::iter::Sum;
use std::ops::{AddAssign, Deref, SubAssign};
use std::sync::Arc;

/// The weight of entries: of their keys and of their values.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Weight {
    pub keys: usize,
    pub values: usize,
}

impl AddAssign for Weight {
    fn add_assign(&mut self, more: Self) {
        self.keys += more.keys;
        self.values += more.values;
    }
}

impl SubAssign for Weight {
    fn sub_assign(&mut self, less: Self) {
        self.keys -= less.keys;
        self.values -= less.values;
    }
}

impl Sum for Weight {
    fn sum<I: Iterator<Item = Self>>(weights: I) -> Self {
        weights.fold(Self::default(), |mut sum, weight| {
            sum += weight;
            sum
        })
    }
}

/// A measure of the weight of entries.
pub(crate) trait EntryWeight<K, V> {
    fn weight(key: &K, value: &V) -> Weight;
}

/// The measure by which every entry weighs nothing.
pub(crate) struct NoWeight;

impl<K, V> EntryWeight<K, V> for NoWeight {
    fn weight(_: &K, _: &V) -> Weight {
        Weight::default()
    }
}

/// Entries in the order of their keys, and their weight.
#[derive(Clone)]
pub(super) struct EntryChunk<K, V> {
    pub entries: Vec<(K, V)>,
    pub weight: Weight,
}

impl<K, V> EntryChunk<K, V> {
    pub fn from_entries<W: EntryWeight<K, V>>(entries: Vec<(K, V)>) -> Self {
        let weight = entries.iter().map(|(key, value)| W::weight(key, value)).sum();
        Self { entries, weight }
    }

    pub fn insert<W: EntryWeight<K, V>>(&mut self, place: usize, key: K, value: V) {
        self.weight += W::weight(&key, &value);
        self.entries.insert(place, (key, value));
    }
}

/// Appends the entries of `next` to `chunk`, which precedes it.
pub(super) fn append_chunk<K: Clone, V: Clone>(
    chunk: &mut Arc<EntryChunk<K, V>>,
    next: Arc<EntryChunk<K, V>>,
) {
    let next = Arc::unwrap_or_clone(next);
    let chunk = Arc::make_mut(chunk);
    chunk.weight += next.weight;
    chunk.entries.extend(next.entries);
}

impl<K: Ord, V> EntryChunk<K, V> {
    /// Returns whether its first key is this one or before it.
    pub fn begins_at_or_before<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.first().is_some_and(|(first, _)| first.borrow() <= key)
    }

    /// Returns the index of a key, or the index at which it would be inserted.
    pub fn search<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.binary_search_by(|(found, _)| found.borrow().cmp(key))
    }
}

impl<K, V> Deref for EntryChunk<K, V> {
    type Target = [(K, V)];

    fn deref(&self) -> &[(K, V)] {
        &self.entries
    }
}

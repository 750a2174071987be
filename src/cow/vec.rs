//! [`CowVec`], a vector of fixed length. A copy shares its chunks of 16 elements with the original. A chunk is copied
//! when the original or the copy changes an element of it.
//!
//! Begin at [`CowVec::filled_with`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The number of elements of a chunk of a [`CowVec`].
const CHUNK_LEN: usize = 16;

/// A vector of fixed length whose copies are cheap.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct CowVec<T> {
    chunks: Vec<Arc<Vec<T>>>,
    len: usize,
}

impl<T: Clone> CowVec<T> {
    /// Creates a vector of `len` equal elements. Its chunks share memory until they change.
    pub fn filled_with(element: &T, len: usize) -> Self {
        let whole = Arc::new(vec![element.clone(); CHUNK_LEN.min(len)]);
        let mut chunks = vec![whole; len / CHUNK_LEN];
        if !len.is_multiple_of(CHUNK_LEN) {
            chunks.push(Arc::new(vec![element.clone(); len % CHUNK_LEN]));
        }
        Self { chunks, len }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn get(&self, place: usize) -> Option<&T> {
        self.chunks.get(place / CHUNK_LEN)?.get(place % CHUNK_LEN)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }
}

impl<T> Index<usize> for CowVec<T> {
    type Output = T;

    fn index(&self, place: usize) -> &T {
        &self.chunks[place / CHUNK_LEN][place % CHUNK_LEN]
    }
}

impl<T: Clone> IndexMut<usize> for CowVec<T> {
    fn index_mut(&mut self, place: usize) -> &mut T {
        &mut Arc::make_mut(&mut self.chunks[place / CHUNK_LEN])[place % CHUNK_LEN]
    }
}

impl<T: Clone> FromIterator<T> for CowVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut elements = elements.into_iter();
        let mut chunks = Vec::new();
        let mut len = 0;
        loop {
            let chunk: Vec<T> = elements.by_ref().take(CHUNK_LEN).collect();
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
        struct CowVecVisitor<T>(PhantomData<T>);
        impl<'de, T: Clone + Deserialize<'de>> Visitor<'de> for CowVecVisitor<T> {
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
        deserializer.deserialize_seq(CowVecVisitor(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_keeps_its_elements_and_its_copies_stay() {
        let mut numbers: CowVec<u32> = (0..100).collect();
        let copy = numbers.clone();
        numbers[50] = 7;
        assert_eq!((numbers[50], copy[50], numbers.len()), (7, 50, 100));
        assert!(numbers.get(100).is_none());
        for len in [0, 1, 15, 16, 17, 48, 50] {
            let mut equal = CowVec::filled_with(&3, len);
            assert!(equal.len() == len && equal.iter().copied().eq(std::iter::repeat_n(3, len)));
            if len > 20 {
                equal[20] = 4;
                assert_eq!(equal.iter().filter(|number| **number == 4).count(), 1);
            }
        }
        assert!(copy.iter().copied().eq(0..100));
        let bytes = postcard::to_stdvec(&numbers).expect("it can be serialised");
        assert_eq!(postcard::from_bytes::<CowVec<u32>>(&bytes).expect("and restored"), numbers);
    }
}

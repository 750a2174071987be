//! Serialises a [`CowMap`] as a plain map, and restores it. The serialised form does not depend on how the entries
//! are divided into chunks.
//!
//! `vec.rs` serialises its own type. Begin at the `Serialize` impl of [`CowMap`].

use std::fmt;
use std::marker::PhantomData;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{CowMap, EntryWeight};

impl<K, V, const N: usize, W> Serialize for CowMap<K, V, N, W>
where
    K: Ord + Clone + Serialize,
    V: Clone + Serialize,
    W: EntryWeight<K, V>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len))?;
        for (key, value) in self.iter() {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de, K, V, const N: usize, W> Deserialize<'de> for CowMap<K, V, N, W>
where
    K: Ord + Clone + Deserialize<'de>,
    V: Clone + Deserialize<'de>,
    W: EntryWeight<K, V>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CowMapVisitor<K, V, const N: usize, W>(PhantomData<(K, V, W)>);
        impl<'de, K, V, const N: usize, W> Visitor<'de> for CowMapVisitor<K, V, N, W>
        where
            K: Ord + Clone + Deserialize<'de>,
            V: Clone + Deserialize<'de>,
            W: EntryWeight<K, V>,
        {
            type Value = CowMap<K, V, N, W>;

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
        deserializer.deserialize_map(CowMapVisitor::<K, V, N, W>(PhantomData))
    }
}

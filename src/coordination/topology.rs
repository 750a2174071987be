//! The keys under which JAX workers publish their topology, and the values stored under them.
//!
//! It decodes no value: `devices.rs` does. Begin at [`TopologyKey::parse`].

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::cow::CowMap;

/// The topology values by their keys.
pub(super) type Topology = CowMap<Bytes, (TopologyKey, Bytes)>;

/// What a key of the store has to do with the topology.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TopologyKey {
    /// One process's devices.
    Local {
        /// The platform.
        platform: String,
    },
    /// Every process's devices.
    Global {
        /// The platform.
        platform: String,
    },
}

impl TopologyKey {
    /// Reads a normalised key.
    #[must_use]
    pub fn parse(key: &[u8]) -> Option<Self> {
        let key = std::str::from_utf8(key).ok()?;
        let mut parts = key.split('/');
        let (_, topic) = parts.next()?.split_once(':')?;
        let platform = parts.next()?.to_owned();
        match (topic, parts.next(), parts.next()) {
            ("local_topology", Some(process), None) if process.parse::<u32>().is_ok() => {
                Some(Self::Local { platform })
            }
            ("global_topology", None, None) => Some(Self::Global { platform }),
            _ => None,
        }
    }
}

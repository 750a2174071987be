//! The keys under which JAX workers publish their topology, and the values stored under them.
//!
//! It decodes no value: `devices.rs` does. Begin at [`TopologyKey::parse`].

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::cow::CowMap;

/// The topology values, by key.
pub(super) type Topology = CowMap<Bytes, (TopologyKey, Bytes)>;

/// A key under which JAX workers publish topology.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TopologyKey {
    /// The devices of one process.
    Local {
        /// The platform.
        platform: String,
    },
    /// The devices of all processes.
    Global {
        /// The platform.
        platform: String,
    },
}

impl TopologyKey {
    /// Parses a normalised key; returns `None` if it is no topology key.
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

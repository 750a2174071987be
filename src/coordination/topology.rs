//! The keys under which JAX workers publish their topology, the values of these keys, and the devices that the
//! values describe. Process identities are kept here too, because they tell on which host a device is.
//!
//! `views/devices.rs` decodes the values. Begin at [`TopologyKey::parse`].

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::derived_value::DerivedValue;
use super::ids::{TaskId, Timestamp};
use super::process_identity::ProcessIdentity;
use crate::cow::CowMap;

/// A value that a task published under a topology key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TopologyValue {
    pub key: TopologyKey,
    pub value: Bytes,
    pub written_at: Timestamp,
}

/// The topology values, by the key in the store.
pub(super) type TopologyValues = CowMap<Bytes, TopologyValue>;

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
    /// The identity of a task's process over runs.
    Identity {
        /// The task.
        task: i32,
    },
}

impl TopologyKey {
    /// Parses a normalised key; returns `None` if it is no topology key.
    #[must_use]
    pub fn parse(key: &[u8]) -> Option<Self> {
        let key = std::str::from_utf8(key).ok()?;
        if let Some(task) = ProcessIdentity::task_of_store_key(key) {
            return Some(Self::Identity { task });
        }
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

/// The contents of topology values, decoded when first needed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct DecodedTopology {
    pub devices: DerivedValue<Arc<Vec<Device>>>,
    pub hosts: DerivedValue<Arc<Vec<PublishedHost>>>,
}

/// A property of a task's host that the task published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublishedHost {
    pub task: TaskId,
    pub property: PublishedHostProperty,
    pub written_at: Timestamp,
}

/// A property by which a host is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PublishedHostProperty {
    /// The host in the identity of the task's process.
    Identity(ProcessIdentity),
    /// The boot id of its kernel.
    BootId(String),
}

/// One accelerator (or CPU device) of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// The platform: `cpu`, `cuda`, `tpu`, …
    pub platform: String,
    /// The kind of device, in its vendor's words.
    pub kind: String,
    /// Its id in the whole job.
    pub global_id: i32,
    /// Its place on its task.
    pub local_id: i32,
    /// The task that it belongs to.
    pub task: TaskId,
    /// The partition (formerly slice) that it belongs to: devices of one partition share a fast fabric.
    pub partition: Option<i32>,
    /// Identifies one boot of the host's kernel; tasks that share it share a host.
    pub boot_id: String,
    /// The identity of its task's process over runs, if the process published one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<ProcessIdentity>,
}

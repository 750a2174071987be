//! The devices of a job, decoded from the topology values that JAX workers publish.
//!
//! Every process writes `<platform>:local_topology/<platform>/<process>`; process 0 gathers them into
//! `<platform>:global_topology/<platform>`. The global value is preferred, since it carries the global ids and
//! partitions that the processes agreed on; until it is there, the local ones are read by the same rules that JAX
//! gathers them by. Values of a shape that is not known are kept opaque: they are the workers' own affair.

use std::collections::BTreeMap;

use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::ids::TaskId;
use crate::proto::xla;

/// One accelerator (or CPU device) of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

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

/// Decodes the topology values of a store into devices, ordered by platform and global id.
pub fn decode<'a>(values: impl IntoIterator<Item = (&'a TopologyKey, &'a [u8])>) -> Vec<Device> {
    let mut global: BTreeMap<&str, xla::GlobalTopologyProto> = BTreeMap::new();
    let mut local: BTreeMap<&str, Vec<xla::LocalTopologyProto>> = BTreeMap::new();
    for (key, value) in values {
        match key {
            TopologyKey::Global { platform } => {
                if let Ok(topology) = xla::GlobalTopologyProto::decode(value) {
                    global.insert(platform, topology);
                }
            }
            TopologyKey::Local { platform } => {
                if let Ok(topology) = xla::LocalTopologyProto::decode(value) {
                    local.entry(platform).or_default().push(topology);
                }
            }
        }
    }
    let mut devices = Vec::new();
    for (platform, topology) in &global {
        read(platform, &topology.processes, true, &mut devices);
    }
    for (platform, processes) in &mut local {
        if !global.contains_key(platform) {
            processes.sort_by_key(|p| p.process_id);
            read(platform, processes, false, &mut devices);
        }
    }
    devices.sort_by(|a, b| (&a.platform, a.global_id, a.task).cmp(&(&b.platform, b.global_id, b.task)));
    devices
}

fn read(platform: &str, processes: &[xla::LocalTopologyProto], gathered: bool, devices: &mut Vec<Device>) {
    // Where no process names its partition, JAX numbers the hosts in the order of their first process.
    let mut boots: Vec<&str> = Vec::new();
    for process in processes {
        let boot = boots.iter().position(|b| *b == process.boot_id).unwrap_or_else(|| {
            boots.push(&process.boot_id);
            boots.len() - 1
        });
        for device in &process.devices {
            let partition = if gathered {
                Some(device.partition_index)
            } else {
                process.partition_index.or_else(|| i32::try_from(boot).ok())
            };
            devices.push(Device {
                platform: platform.to_owned(),
                kind: if device.device_kind.is_empty() {
                    device.name.clone()
                } else {
                    device.device_kind.clone()
                },
                global_id: device.global_device_id,
                local_id: device.local_device_ordinal,
                task: TaskId(process.process_id),
                partition,
                boot_id: process.boot_id.clone(),
            });
        }
    }
}

//! From a communicator to the devices of its clique: XLA writes the unique id of each clique to the key-value store, under a
//! key that names the devices.
//!
//! The key has the same text in jaxlib 0.10.2 to 0.12.0: `cuda:root_process: P; clique: devices=[0,1]; communication_id=C;
//! incarnations=[..]`. The value is the unique id. Keys of other texts, such as the shortened ones of older releases, are not
//! read. Begin at [`CliqueIndex::refresh`].

use std::collections::BTreeMap;

use muster_collectives::{UNIQUE_ID_BYTES, communicator_hash};

use crate::coordination::{JobReader, RunNumber, TaskId};

/// The platforms whose devices form cliques.
const PLATFORMS: [&str; 2] = ["cuda", "rocm"];
/// The maximum number of cliques of a job that are read.
const CLIQUES_MAX: usize = 4096;
/// The number of keys that are read at once.
const PAGE: usize = 256;

/// A clique as XLA names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CliqueDevices {
    /// The devices by rank.
    pub devices: Vec<i32>,
    /// The tasks by rank, where the topology of the job has the device.
    pub tasks: Vec<Option<TaskId>>,
}

impl CliqueDevices {
    /// Returns the devices that a key of the store names; `None` if it is no key of a clique.
    fn devices_of_key(key: &[u8]) -> Option<Vec<i32>> {
        let key = std::str::from_utf8(key).ok()?;
        let (_, rest) = key.split_once("clique: devices=[")?;
        let (devices, rest) = rest.split_once(']')?;
        if !rest.contains("incarnations=[") {
            return None;
        }
        devices.split(',').map(|device| device.trim().parse().ok()).collect()
    }
}

/// The cliques of a job in one run, by NCCL's hash of their unique ids.
#[derive(Debug, Clone, Default)]
pub(super) struct CliqueIndex {
    run: Option<RunNumber>,
    by_hash: BTreeMap<u64, CliqueDevices>,
}

impl CliqueIndex {
    /// Returns the clique with this hash.
    pub fn get(&self, hash: u64) -> Option<&CliqueDevices> {
        self.by_hash.get(&hash)
    }

    /// Reads the cliques of the present run.
    pub fn refresh(&mut self, job: &JobReader<'_>, run: RunNumber) {
        let all_devices = job.devices();
        self.run = Some(run);
        self.by_hash.clear();
        for platform in PLATFORMS {
            // A task has devices of several platforms, each of which numbers its own.
            let of_platform = all_devices.iter().filter(|device| device.platform == platform);
            let tasks: BTreeMap<i32, TaskId> =
                of_platform.map(|device| (device.global_id, device.task)).collect();
            let prefix = format!("{platform}:root_process: ").into_bytes();
            let mut after = prefix.clone();
            'pages: loop {
                let page = job.list_keys(b"", &after, true, PAGE);
                let is_last = page.len() < PAGE;
                for entry in page {
                    if !entry.key.starts_with(&prefix) || self.by_hash.len() >= CLIQUES_MAX {
                        break 'pages;
                    }
                    after = entry.key.to_vec();
                    let Some(devices) = CliqueDevices::devices_of_key(&entry.key) else { continue };
                    let value = job.stored_value(&entry.key).map(|stored| stored.value);
                    let Some(id) = value.as_deref().and_then(|value| value.first_chunk::<UNIQUE_ID_BYTES>())
                    else {
                        continue;
                    };
                    let tasks = devices.iter().map(|device| tasks.get(device).copied()).collect();
                    self.by_hash.insert(communicator_hash(id), CliqueDevices { devices, tasks });
                }
                if is_last {
                    break;
                }
            }
        }
    }

    /// Returns whether it has the cliques of this run.
    pub fn is_of_run(&self, run: RunNumber) -> bool {
        self.run == Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_xla_names_its_devices() {
        let key =
            b"cuda:root_process: 0; clique: devices=[0,1,2,3]; communication_id=0; incarnations=[7,8,9,10]";
        assert_eq!(CliqueDevices::devices_of_key(key), Some(vec![0, 1, 2, 3]));
        for other in [
            &b"cuda:root_process: 0; clique: devices=[0,x]; communication_id=0; incarnations=[7]"[..],
            b"cuda:root_process: 0; clique: devices=[]; communication_id=0; incarnations=[7]",
            b"cuda:root_process: 0; clique: 8 devices",
            b"cuda:local_topology/0",
            b"\xff",
        ] {
            assert_eq!(CliqueDevices::devices_of_key(other), None, "{}", String::from_utf8_lossy(other));
        }
    }
}

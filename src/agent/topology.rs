//! Encodes the devices of tasks as JAX processes encode theirs. `join.rs` publishes those of this task, and simulated
//! tasks publish theirs. Begin at `encode`.
//!
//! The key is `cpu:local_topology/cpu/<task>`, because this worker moves host memory. JAX's process 0 waits for the
//! devices of every process before it gathers them.

use prost::Message as _;

use super::config::{AgentConfig, device_id_of_task};
use crate::proto::xla;
use crate::transfer::TaskId;

/// Returns the key of the devices of `task`.
pub fn store_key(task: u32) -> String {
    format!("cpu:local_topology/cpu/{task}")
}

/// The key of the devices of all tasks.
pub const GLOBAL_TOPOLOGY_KEY: &str = "cpu:global_topology/cpu";

/// Encodes the devices of this task.
pub fn encode(config: &AgentConfig, boot_id: &str) -> Vec<u8> {
    encode_local_topology(config.task, config.devices, boot_id)
}

/// Encodes the devices of a task.
pub fn encode_local_topology(task: u32, devices: u32, boot_id: &str) -> Vec<u8> {
    local_topology(task, devices, boot_id.to_owned(), 0).encode_to_vec()
}

/// Encodes the devices of all tasks: for each task its number, its number of devices, the identity of its host's boot,
/// and its partition.
pub fn encode_global_topology(tasks: impl IntoIterator<Item = (u32, u32, String, u32)>) -> Vec<u8> {
    let processes = tasks
        .into_iter()
        .map(|(task, devices, boot_id, partition)| local_topology(task, devices, boot_id, partition as i32));
    xla::GlobalTopologyProto { processes: processes.collect() }.encode_to_vec()
}

fn local_topology(task: u32, devices: u32, boot_id: String, partition: i32) -> xla::LocalTopologyProto {
    let devices = (0..devices).map(|ordinal| {
        let device = device_id_of_task(TaskId(task), ordinal);
        xla::DeviceProto {
            local_device_ordinal: ordinal as i32,
            global_device_id: device.0 as i32,
            partition_index: partition,
            device_kind: "cpu".to_owned(),
            to_string: format!("CpuDevice(id={device})"),
            debug_string: format!("cpu:{device}"),
            ..Default::default()
        }
    });
    xla::LocalTopologyProto {
        process_id: task as i32,
        boot_id,
        devices: devices.collect(),
        partition_index: None,
        network_nodes: Vec::new(),
    }
}

/// Returns whether two topologies have the same devices, on whichever hosts.
pub fn have_same_devices(a: &[u8], b: &[u8]) -> bool {
    let devices = |bytes: &[u8]| xla::LocalTopologyProto::decode(bytes).ok().map(|topology| topology.devices);
    devices(a).is_some() && devices(a) == devices(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{TopologyKey, decode_devices};

    #[test]
    fn the_service_reads_the_devices_as_those_of_jax() {
        let config = AgentConfig { devices: 2, ..AgentConfig::new("m:1", 1) };
        let value = encode(&config, "boot");
        let key = TopologyKey::parse(store_key(1).as_bytes()).unwrap();
        let devices = decode_devices([(&key, value.as_slice())]);
        let told: Vec<_> =
            devices.iter().map(|d| (d.platform.as_str(), d.task.0, d.local_id, d.global_id)).collect();
        assert_eq!(told, [("cpu", 1, 0, 2048), ("cpu", 1, 1, 2049)]);
        assert!(have_same_devices(&value, &encode(&config, "another boot")));
        assert!(!have_same_devices(&value, &encode(&AgentConfig { devices: 1, ..config }, "boot")));
        assert!(!have_same_devices(b"\xff", b"\xff"));
        let global = encode_global_topology([(0, 1, "a".to_owned(), 0), (3, 1, "b".to_owned(), 2)]);
        let key = TopologyKey::parse(GLOBAL_TOPOLOGY_KEY.as_bytes()).unwrap();
        let devices = decode_devices([(&key, global.as_slice())]);
        let told: Vec<_> = devices.iter().map(|d| (d.task.0, d.global_id, d.partition)).collect();
        assert_eq!(told, [(0, 0, Some(0)), (3, 6144, Some(2))]);
    }
}

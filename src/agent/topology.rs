//! Encodes the devices of this task as JAX processes encode theirs. `join.rs` publishes them. Begin at `encode`.
//!
//! The key is `cpu:local_topology/cpu/<task>`, because this worker moves host memory. JAX's process 0 waits for the
//! devices of every process before it gathers them.

use prost::Message as _;

use super::config::AgentConfig;
use crate::proto::xla;

/// Returns the key of the devices of `task`.
pub fn store_key(task: u32) -> String {
    format!("cpu:local_topology/cpu/{task}")
}

/// Encodes the devices of this task.
pub fn encode(config: &AgentConfig, boot_id: &str) -> Vec<u8> {
    let devices = config.device_ids().into_iter().enumerate().map(|(ordinal, device)| xla::DeviceProto {
        local_device_ordinal: ordinal as i32,
        global_device_id: device.0 as i32,
        device_kind: "cpu".to_owned(),
        to_string: format!("CpuDevice(id={device})"),
        debug_string: format!("cpu:{device}"),
        ..Default::default()
    });
    xla::LocalTopologyProto {
        process_id: config.task as i32,
        boot_id: boot_id.to_owned(),
        devices: devices.collect(),
        partition_index: None,
        network_nodes: Vec::new(),
    }
    .encode_to_vec()
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
    }
}

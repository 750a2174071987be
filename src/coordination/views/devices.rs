//! The devices of a run, decoded from the topology values that JAX workers publish.
//!
//! Every process writes `<platform>:local_topology/<platform>/<process>`; process 0 combines these values in
//! `<platform>:global_topology/<platform>`. The global value is preferred, because it carries the global ids and
//! partitions that the processes agreed on. Until it exists, the local values are combined by the rules that JAX
//! applies. Values of an unknown shape are ignored. Begin at `decode_topology`.

use std::collections::BTreeMap;

use prost::encoding::{WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message as _};

use crate::coordination::ids::TaskId;
use crate::coordination::process_identity::ProcessIdentity;
use crate::coordination::topology::{Device, TopologyKey, TopologyValues};
use crate::proto::xla;

/// The most devices that are read of the topology of a job, processes counted as well. Values with more are left alone.
const DEVICES_MAX: usize = 1 << 17;
/// The longest identity of a boot or name of a platform: each device has a copy.
const NAME_MAX: usize = 256;

/// Decodes the topology values of a store into devices, ordered by platform and global id.
pub(super) fn decode_topology(values: &TopologyValues) -> Vec<Device> {
    decode_topology_values(values.values().map(|it| (&it.key, it.value.as_ref())))
}

/// Decodes topology values into devices, ordered by platform and global id.
pub fn decode_topology_values<'a>(
    values: impl IntoIterator<Item = (&'a TopologyKey, &'a [u8])>,
) -> Vec<Device> {
    let mut global: BTreeMap<&str, xla::GlobalTopologyProto> = BTreeMap::new();
    let mut local: BTreeMap<&str, Vec<xla::LocalTopologyProto>> = BTreeMap::new();
    let mut left = DEVICES_MAX;
    let mut identities: BTreeMap<TaskId, ProcessIdentity> = BTreeMap::new();
    for (key, value) in values {
        // A device of two bytes becomes hundreds: they are counted before they are decoded.
        let (platform, counted) = match key {
            TopologyKey::Global { platform } => (platform, count_entries_of_global_topology(value)),
            TopologyKey::Local { platform } => (platform, count_entries_of_local_topology(value)),
            TopologyKey::Identity { task } => {
                if let Some(identity) = ProcessIdentity::from_store_value(value) {
                    identities.insert(TaskId(*task), identity);
                }
                continue;
            }
        };
        let Ok(Some(rest)) = counted.map(|count| left.checked_sub(count?)) else { continue };
        if platform.len() > NAME_MAX {
            continue;
        }
        left = rest;
        match key {
            TopologyKey::Global { .. } => {
                if let Ok(topology) = xla::GlobalTopologyProto::decode(value) {
                    global.insert(platform, topology);
                }
            }
            TopologyKey::Local { .. } => {
                if let Ok(topology) = xla::LocalTopologyProto::decode(value) {
                    local.entry(platform).or_default().push(topology);
                }
            }
            TopologyKey::Identity { .. } => {}
        }
    }
    let mut devices = Vec::new();
    for (platform, topology) in &global {
        push_devices_of_processes(platform, &topology.processes, true, &mut devices);
    }
    for (platform, processes) in &mut local {
        if !global.contains_key(platform) {
            processes.sort_by_key(|p| p.process_id);
            push_devices_of_processes(platform, processes, false, &mut devices);
        }
    }
    for device in &mut devices {
        device.identity = identities.get(&device.task).cloned();
    }
    devices.sort_by(|a, b| (&a.platform, a.global_id, a.task).cmp(&(&b.platform, b.global_id, b.task)));
    devices
}

/// Counts the processes and devices of a `GlobalTopologyProto`; none if a text of it is too long.
fn count_entries_of_global_topology(value: &[u8]) -> Result<Option<usize>, DecodeError> {
    let mut total = Some(0_usize);
    for_each_length_delimited_field(value, |tag, process| {
        if tag == 1 {
            let count = count_entries_of_local_topology(process)?;
            total = total.and_then(|total| total.checked_add(count?));
        }
        Ok(())
    })?;
    Ok(total)
}

/// Counts the process and the devices of a `LocalTopologyProto`; none if a text of it is too long.
fn count_entries_of_local_topology(value: &[u8]) -> Result<Option<usize>, DecodeError> {
    let (mut devices, mut is_short) = (1, true);
    for_each_length_delimited_field(value, |tag, bytes| {
        match tag {
            2 => is_short &= bytes.len() <= NAME_MAX,
            3 => devices += 1,
            _ => {}
        }
        Ok(())
    })?;
    Ok(is_short.then_some(devices))
}

/// Calls `take` with the number and the bytes of each field of a message that has a length of its own.
fn for_each_length_delimited_field(
    mut message: &[u8],
    mut take: impl FnMut(u32, &[u8]) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    while !message.is_empty() {
        let (tag, wire_type) = decode_key(&mut message)?;
        let field = message;
        if wire_type == WireType::LengthDelimited {
            let mut bytes = message;
            let length = usize::try_from(decode_varint(&mut bytes)?).unwrap_or(usize::MAX);
            if let Some(bytes) = bytes.get(..length) {
                take(tag, bytes)?;
            }
        }
        message = field;
        skip_field(wire_type, tag, &mut message, prost::encoding::DecodeContext::default())?;
    }
    Ok(())
}

fn push_devices_of_processes(
    platform: &str,
    processes: &[xla::LocalTopologyProto],
    gathered: bool,
    devices: &mut Vec<Device>,
) {
    // If no process names its partition, JAX numbers the hosts in the order of their first process.
    let mut boots: BTreeMap<&str, usize> = BTreeMap::new();
    for process in processes {
        let next = boots.len();
        let boot = *boots.entry(&process.boot_id).or_insert(next);
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
                identity: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local_topology_of_process(
        id: i32,
        boot: &str,
        partition: Option<i32>,
        ids: &[i32],
    ) -> xla::LocalTopologyProto {
        let devices = ids.iter().enumerate().map(|(local, id)| xla::DeviceProto {
            local_device_ordinal: i32::try_from(local).expect("few devices"),
            global_device_id: *id,
            device_kind: "cpu".into(),
            ..Default::default()
        });
        xla::LocalTopologyProto {
            process_id: id,
            boot_id: boot.into(),
            devices: devices.collect(),
            partition_index: partition,
            network_nodes: Vec::new(),
        }
    }

    fn topology_key(text: &str) -> TopologyKey {
        TopologyKey::parse(text.as_bytes()).expect("a topology key")
    }

    #[test]
    fn only_the_keys_that_workers_write_are_topology() {
        assert_eq!(topology_key("cpu:local_topology/cpu/3"), TopologyKey::Local { platform: "cpu".into() });
        assert_eq!(
            topology_key("cuda:global_topology/cuda"),
            TopologyKey::Global { platform: "cuda".into() }
        );
        for other in [
            "local_topology/cpu/3",
            "cpu:local_topology/cpu",
            "cpu:local_topology/cpu/x",
            "cpu:gloo/0,1/0",
            "",
        ] {
            assert_eq!(TopologyKey::parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn without_a_global_topology_hosts_are_numbered_as_in_jax() {
        let values: Vec<(TopologyKey, Vec<u8>)> = [
            local_topology_of_process(2, "host-b", None, &[4096]),
            local_topology_of_process(0, "host-a", None, &[0, 1]),
            local_topology_of_process(1, "host-a", None, &[2048]),
        ]
        .into_iter()
        .map(|p| (topology_key(&format!("cpu:local_topology/cpu/{}", p.process_id)), p.encode_to_vec()))
        .collect();
        let devices = decode_topology_values(values.iter().map(|(key, value)| (key, value.as_slice())));
        let told: Vec<_> = devices.iter().map(|d| (d.task.0, d.local_id, d.global_id, d.partition)).collect();
        let expected = [(0, 0, 0, Some(0)), (0, 1, 1, Some(0)), (1, 0, 2048, Some(0)), (2, 0, 4096, Some(1))];
        assert_eq!(told, expected);
        assert_eq!(devices[3].boot_id, "host-b");
    }

    #[test]
    fn the_global_topology_takes_precedence_over_local_ones() {
        let mut gathered =
            xla::GlobalTopologyProto { processes: vec![local_topology_of_process(0, "h", None, &[7])] };
        gathered.processes[0].devices[0].partition_index = 3;
        let local = local_topology_of_process(0, "h", None, &[0]).encode_to_vec();
        let global = gathered.encode_to_vec();
        let keys = [topology_key("cuda:local_topology/cuda/0"), topology_key("cuda:global_topology/cuda")];
        let devices = decode_topology_values([(&keys[0], local.as_slice()), (&keys[1], global.as_slice())]);
        assert_eq!(devices.len(), 1);
        assert_eq!((devices[0].global_id, devices[0].partition), (7, Some(3)));
    }

    #[test]
    fn a_value_makes_no_more_of_itself_in_memory_than_a_bound() {
        let (one, two) = (topology_key("cpu:local_topology/cpu/0"), topology_key("cpu:local_topology/cpu/1"));
        let devices = |count: usize| {
            let mut value =
                xla::LocalTopologyProto { boot_id: "h".into(), ..Default::default() }.encode_to_vec();
            // Field 3, empty: a device of two bytes.
            value.extend([0x1a, 0].repeat(count));
            value
        };
        let read =
            |first: &[u8], second: &[u8]| decode_topology_values([(&one, first), (&two, second)]).len();
        let most = devices(DEVICES_MAX - 1);
        assert_eq!(read(&most, &[]), DEVICES_MAX - 1);
        assert_eq!(read(&devices(DEVICES_MAX), &devices(3)), 3, "one value with too many is left alone");
        assert_eq!(read(&devices(10), &most), 10, "and one that is too many beside another");
        let mut named = local_topology_of_process(0, &"h".repeat(NAME_MAX), None, &[0]);
        assert_eq!(read(&named.encode_to_vec(), &[]), 1);
        named.boot_id.push('h');
        assert_eq!(read(&named.encode_to_vec(), &devices(1)), 1, "each device would have a copy");
        let all = xla::GlobalTopologyProto {
            processes: vec![local_topology_of_process(0, "h", None, &[1]); DEVICES_MAX / 2],
        };
        let global = topology_key("cpu:global_topology/cpu");
        assert_eq!(
            decode_topology_values([(&global, all.encode_to_vec().as_slice())]).len(),
            DEVICES_MAX / 2
        );
        let empty = xla::GlobalTopologyProto {
            processes: vec![local_topology_of_process(0, "h", None, &[]); DEVICES_MAX + 1],
        };
        assert!(
            count_entries_of_global_topology(&empty.encode_to_vec())
                .is_ok_and(|count| count > Some(DEVICES_MAX))
        );
    }

    #[test]
    fn an_explicit_partition_is_taken_and_the_unknown_is_left_alone() {
        // A later release may add fields; this one is number 60, a string.
        let mut bytes = local_topology_of_process(0, "h", Some(5), &[0]).encode_to_vec();
        bytes.extend_from_slice(&[0xe2, 0x03, 2, b'h', b'i']);
        let (good, bad) =
            (topology_key("tpu:local_topology/tpu/0"), topology_key("tpu:local_topology/tpu/1"));
        let devices =
            decode_topology_values([(&good, bytes.as_slice()), (&bad, b"\xff\xffno message".as_slice())]);
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].partition, Some(5));
    }
}

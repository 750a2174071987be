//! Matches the devices of one run with the devices of an earlier run, and shows which of them have another task or id
//! now. Begin at [`match_devices`].
//!
//! A task id does not tell where the process runs. After a restart, the tasks may be distributed over the hosts in
//! another order, and then the global device ids change too. So devices are matched by their *place*: the host, the
//! number of the process on the host, the platform, and the local id of the device.
//!
//! A process states its host and its number there in the process identity that it publishes. A process that publishes
//! no identity counts as process 0 of its host, and its host is found by the boot id of the kernel. If all publishing
//! processes with the same boot id name one host, that is the host. Otherwise the boot id stands for the host, but it
//! changes when the host reboots. If several tasks of a host publish no identity, devices with the same local id are
//! matched in the order of the tasks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::host_assignment::unambiguous_values;
use crate::coordination::ids::{RunNumber, TaskId};
use crate::coordination::process_identity::ProcessIdentity;
use crate::coordination::topology::Device;

/// A device's identity within a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceIdentity {
    /// The task that it belongs to.
    pub task: TaskId,
    /// Its id in the whole job.
    pub global_id: i32,
    /// The partition that it belongs to.
    pub partition: Option<i32>,
}

/// The change of a place between two runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = DeviceFate)]
pub enum DeviceChange {
    /// The place has the same task and ids as before.
    Same,
    /// The place has another task, or other ids, than before.
    Moved,
    /// The place has a device now and had none before.
    Came,
    /// The place had a device before and has none now.
    Gone,
}

/// One place, in the run before and in this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = DeviceMove)]
pub struct DevicePlaceComparison {
    /// The latest known boot of the host.
    pub boot_id: String,
    /// The identity of the process over runs, if one is known: its host, and its number there.
    pub identity: Option<ProcessIdentity>,
    /// The platform.
    pub platform: String,
    /// The device's place on its task.
    pub local_id: i32,
    /// The device at this place in the run before.
    pub before: Option<DeviceIdentity>,
    /// The device at this place in this run.
    pub now: Option<DeviceIdentity>,
    /// The change of the place.
    pub fate: DeviceChange,
    /// The change in words.
    pub explanation: String,
}

/// The comparison of the devices of two runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = DeviceMap)]
pub struct DeviceComparison {
    /// The run.
    pub run: RunNumber,
    /// The earlier run with which it is compared; `None` if none is known.
    pub previous: Option<RunNumber>,
    /// The runs whose devices are known, newest first: each may be compared with an earlier one.
    #[serde(default)]
    pub runs: Vec<RunNumber>,
    /// Every place, ordered by platform, host and local id.
    pub places: Vec<DevicePlaceComparison>,
}

/// Matches the devices of two runs by their places.
#[must_use]
pub fn match_devices(before: &[Device], now: &[Device]) -> Vec<DevicePlaceComparison> {
    let hosts = host_of_each_boot_id(before.iter().chain(now));
    let mut places: BTreeMap<DevicePlaceKey<'_>, (Option<&Device>, Option<&Device>)> = BTreeMap::new();
    for (place, device) in devices_by_place(before, &hosts) {
        places.entry(place).or_default().0 = Some(device);
    }
    for (place, device) in devices_by_place(now, &hosts) {
        places.entry(place).or_default().1 = Some(device);
    }
    let moves = places.into_iter().filter_map(|(place, (before, now))| {
        let (fate, explanation) = describe_change(before, now)?;
        Some(DevicePlaceComparison {
            boot_id: now.or(before)?.boot_id.clone(),
            identity: now.and_then(|now| now.identity.clone()).or_else(|| before?.identity.clone()),
            platform: place.0.to_owned(),
            local_id: place.3,
            before: before.map(device_identity),
            now: now.map(device_identity),
            fate,
            explanation,
        })
    });
    moves.collect()
}

/// Platform, host, number of the process on it, local id, and the number of the device among those with the same four.
type DevicePlaceKey<'a> = (&'a str, &'a str, u32, i32, usize);

/// Returns the host of each boot id for which all processes that published an identity published the same one.
fn host_of_each_boot_id<'a>(devices: impl Iterator<Item = &'a Device>) -> BTreeMap<&'a str, Option<&'a str>> {
    let host = |device: &'a Device| Some((device.boot_id.as_str(), device.identity.as_ref()?.host()));
    unambiguous_values(devices.filter_map(host))
}

fn devices_by_place<'a>(
    devices: &'a [Device],
    hosts: &BTreeMap<&'a str, Option<&'a str>>,
) -> Vec<(DevicePlaceKey<'a>, &'a Device)> {
    let mut ordered: Vec<&Device> = devices.iter().collect();
    ordered.sort_by_key(|device| (device.task, device.global_id));
    let mut seen: BTreeMap<(&str, &str, u32, i32), usize> = BTreeMap::new();
    ordered
        .into_iter()
        .map(|device| {
            let (host, local) = match &device.identity {
                Some(identity) => (identity.host(), identity.local()),
                None => (hosts.get(&*device.boot_id).copied().flatten().unwrap_or(&device.boot_id), 0),
            };
            let key = (device.platform.as_str(), host, local, device.local_id);
            let nth = seen.entry(key).or_default();
            *nth += 1;
            ((key.0, key.1, key.2, key.3, *nth), device)
        })
        .collect()
}

fn device_identity(device: &Device) -> DeviceIdentity {
    DeviceIdentity { task: device.task, global_id: device.global_id, partition: device.partition }
}

fn describe_change(before: Option<&Device>, now: Option<&Device>) -> Option<(DeviceChange, String)> {
    Some(match (before, now) {
        (None, None) => return None,
        (Some(old), None) => (
            DeviceChange::Gone,
            format!("was device {} of task {}; not in this run", old.global_id, old.task),
        ),
        (None, Some(new)) => (
            DeviceChange::Came,
            format!("is device {} of task {}; not in the run before", new.global_id, new.task),
        ),
        (Some(old), Some(new)) => {
            let mut changes = Vec::new();
            if old.task != new.task {
                changes.push(format!("task {} is now task {}", old.task, new.task));
            }
            if old.global_id != new.global_id {
                changes.push(format!("device {} is now device {}", old.global_id, new.global_id));
            }
            if old.partition != new.partition {
                let shown = |p: Option<i32>| p.map_or_else(|| "none".to_owned(), |p| p.to_string());
                changes.push(format!("partition {} is now {}", shown(old.partition), shown(new.partition)));
            }
            if changes.is_empty() {
                (DeviceChange::Same, "as before".to_owned())
            } else {
                (DeviceChange::Moved, changes.join(", "))
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_without_identity(boot: &str, local_id: i32, task: i32, global_id: i32) -> Device {
        Device {
            platform: "cpu".into(),
            kind: "cpu".into(),
            global_id,
            local_id,
            task: TaskId(task),
            partition: None,
            boot_id: boot.into(),
            identity: None,
        }
    }

    fn device_on_host(host: &str, local: u32, device: Device) -> Device {
        Device { identity: ProcessIdentity::new(host, local).ok(), ..device }
    }

    #[test]
    fn a_host_is_the_same_after_a_reboot_if_it_has_an_identity() {
        let before = [
            device_on_host("a", 0, device_without_identity("boot-1", 0, 0, 0)),
            device_on_host("b", 0, device_without_identity("boot-2", 0, 1, 1)),
        ];
        // Host a has rebooted, and the tasks have changed hosts.
        let now = [
            device_on_host("b", 0, device_without_identity("boot-2", 0, 0, 0)),
            device_on_host("a", 0, device_without_identity("boot-3", 0, 1, 1)),
        ];
        let map = match_devices(&before, &now);
        let told: Vec<_> = map
            .iter()
            .map(|m| (m.identity.as_ref().map(ToString::to_string), m.boot_id.as_str(), m.fate))
            .collect();
        let expected = [
            (Some("a".into()), "boot-3", DeviceChange::Moved),
            (Some("b".into()), "boot-2", DeviceChange::Moved),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn a_run_without_identities_is_matched_with_one_that_has_them_by_the_boot() {
        let before = [device_without_identity("boot-1", 0, 0, 0)];
        let now = [device_on_host("a", 0, device_without_identity("boot-1", 0, 0, 0))];
        assert_eq!(match_devices(&before, &now)[0].fate, DeviceChange::Same);
        // Two identities on one boot: nothing says which of them it was.
        let two = [
            device_on_host("a", 0, device_without_identity("boot-1", 0, 0, 0)),
            device_on_host("b", 0, device_without_identity("boot-1", 0, 1, 1)),
        ];
        let fates: Vec<_> = match_devices(&before, &two).iter().map(|m| m.fate).collect();
        assert_eq!(fates, [DeviceChange::Came, DeviceChange::Came, DeviceChange::Gone]);
    }

    #[test]
    fn processes_of_a_host_are_told_apart_by_their_numbers() {
        let before = [
            device_on_host("a", 0, device_without_identity("x", 0, 0, 0)),
            device_on_host("a", 1, device_without_identity("x", 0, 1, 1)),
        ];
        let now = [
            device_on_host("a", 1, device_without_identity("x", 0, 0, 0)),
            device_on_host("a", 0, device_without_identity("x", 0, 1, 1)),
        ];
        let fates: Vec<_> = match_devices(&before, &now).iter().map(|m| m.fate).collect();
        assert_eq!(fates, [DeviceChange::Moved, DeviceChange::Moved]);
    }

    #[test]
    fn devices_are_matched_by_host_and_local_id_not_by_task() {
        let before = [
            device_without_identity("a", 0, 0, 0),
            device_without_identity("b", 0, 1, 1),
            device_without_identity("c", 0, 2, 2),
        ];
        let now = [
            device_without_identity("b", 0, 0, 0),
            device_without_identity("a", 0, 1, 1),
            device_without_identity("d", 0, 2, 2),
        ];
        let map = match_devices(&before, &now);
        let told: Vec<_> = map.iter().map(|m| (m.boot_id.as_str(), m.fate, m.explanation.as_str())).collect();
        assert_eq!(
            told,
            [
                ("a", DeviceChange::Moved, "task 0 is now task 1, device 0 is now device 1"),
                ("b", DeviceChange::Moved, "task 1 is now task 0, device 1 is now device 0"),
                ("c", DeviceChange::Gone, "was device 2 of task 2; not in this run"),
                ("d", DeviceChange::Came, "is device 2 of task 2; not in the run before"),
            ]
        );
    }

    #[test]
    fn tasks_that_share_a_host_are_matched_in_their_order() {
        let before = [device_without_identity("a", 0, 3, 3), device_without_identity("a", 0, 1, 1)];
        let now = [device_without_identity("a", 0, 1, 1), device_without_identity("a", 0, 3, 4)];
        let fates: Vec<_> = match_devices(&before, &now).iter().map(|m| m.fate).collect();
        assert_eq!(fates, [DeviceChange::Same, DeviceChange::Moved]);
    }
}

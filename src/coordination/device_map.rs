//! Matches the devices of one run with those of the next: which moved, and where.
//!
//! A task number says who a process claims to be, not where it runs: after a restart, the tasks, and with
//! them the global ids, may be distributed over the hosts in another order. A *place* does not change: the
//! boot id of a host, the platform, and the local id of the device. If several tasks share a host, devices with the same
//! local id are matched in the order of the tasks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::devices::Device;
use super::ids::{RunNumber, TaskId};

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
pub struct DeviceMapEntry {
    /// One boot of a host.
    pub boot_id: String,
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
pub struct DeviceMap {
    /// The present run.
    pub run: RunNumber,
    /// The latest run before it that had devices; `None` if none is kept.
    pub previous: Option<RunNumber>,
    /// Every place, ordered by platform, host and local id.
    pub places: Vec<DeviceMapEntry>,
}

/// Matches the devices of two runs by their places.
#[must_use]
pub fn match_devices(before: &[Device], now: &[Device]) -> Vec<DeviceMapEntry> {
    let mut places: BTreeMap<DevicePlaceKey<'_>, (Option<&Device>, Option<&Device>)> = BTreeMap::new();
    for (place, device) in by_place(before) {
        places.entry(place).or_default().0 = Some(device);
    }
    for (place, device) in by_place(now) {
        places.entry(place).or_default().1 = Some(device);
    }
    let moves = places.into_iter().filter_map(|((platform, boot_id, local_id, _), (before, now))| {
        let (fate, explanation) = describe_change(before, now)?;
        Some(DeviceMapEntry {
            boot_id: boot_id.to_owned(),
            platform: platform.to_owned(),
            local_id,
            before: before.map(identity),
            now: now.map(identity),
            fate,
            explanation,
        })
    });
    moves.collect()
}

/// Platform, boot, local id, and the number of the device among those with the same three.
type DevicePlaceKey<'a> = (&'a str, &'a str, i32, usize);

fn by_place(devices: &[Device]) -> Vec<(DevicePlaceKey<'_>, &Device)> {
    let mut ordered: Vec<&Device> = devices.iter().collect();
    ordered.sort_by_key(|device| (device.task, device.global_id));
    let mut seen: BTreeMap<(&str, &str, i32), usize> = BTreeMap::new();
    ordered
        .into_iter()
        .map(|device| {
            let key = (device.platform.as_str(), device.boot_id.as_str(), device.local_id);
            let nth = seen.entry(key).or_default();
            *nth += 1;
            ((key.0, key.1, key.2, *nth), device)
        })
        .collect()
}

fn identity(device: &Device) -> DeviceIdentity {
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

    fn device(boot: &str, local_id: i32, task: i32, global_id: i32) -> Device {
        Device {
            platform: "cpu".into(),
            kind: "cpu".into(),
            global_id,
            local_id,
            task: TaskId(task),
            partition: None,
            boot_id: boot.into(),
        }
    }

    #[test]
    fn devices_are_matched_by_host_and_local_id_not_by_task() {
        let before = [device("a", 0, 0, 0), device("b", 0, 1, 1), device("c", 0, 2, 2)];
        let now = [device("b", 0, 0, 0), device("a", 0, 1, 1), device("d", 0, 2, 2)];
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
        let before = [device("a", 0, 3, 3), device("a", 0, 1, 1)];
        let now = [device("a", 0, 1, 1), device("a", 0, 3, 4)];
        let fates: Vec<_> = match_devices(&before, &now).iter().map(|m| m.fate).collect();
        assert_eq!(fates, [DeviceChange::Same, DeviceChange::Moved]);
    }
}

//! The task that owns each device, and the host on which this task runs.
//!
//! The caller discovers the devices. Begin at [`Placement`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounded::{check_name, deserialize_at_most};
use super::error::check_limit;
use super::{DeviceId, MAX_DESCRIPTION_TEXT, MAX_PLACED, PlanError, TaskId};

/// The identity of a host: a name, or the id of one boot of its kernel. A plan only compares two of them for
/// equality.
pub type HostName = String;

/// A device, with its task and host. It also deserialises from the entries of the device list in a job's REST
/// API, which have other field names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlacedDevice {
    /// The device.
    #[serde(alias = "global_id")]
    pub device: DeviceId,
    /// The task that owns it.
    pub task: TaskId,
    /// The host on which this task runs.
    #[serde(alias = "boot_id")]
    pub host: HostName,
}

/// The task and the host of each device. The order of the entries and entries of devices that a plan does not
/// use have no effect.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The devices.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_PLACED>")]
    pub devices: Vec<PlacedDevice>,
}

impl Placement {
    /// Places devices in blocks: each task owns `per_task` consecutive devices, each host runs
    /// `tasks_per_host` consecutive tasks. Zero counts as one.
    #[must_use]
    pub fn blocks(devices: impl IntoIterator<Item = DeviceId>, per_task: u32, tasks_per_host: u32) -> Self {
        let (per_task, tasks_per_host) = (i64::from(per_task.max(1)), i64::from(tasks_per_host.max(1)));
        let place = |device: DeviceId| {
            let task = i64::from(device.0).div_euclid(per_task);
            let host = task.div_euclid(tasks_per_host);
            // The quotient by a positive number is at most the id itself.
            PlacedDevice {
                device,
                task: TaskId(u32::try_from(task).unwrap_or(device.0)),
                host: format!("host-{host}"),
            }
        };
        Self { devices: devices.into_iter().map(place).collect() }
    }

    /// Reads a placement from JSON.
    ///
    /// # Errors
    /// Returns [`PlanError::Json`] if the text is no placement, and the errors of [`Placement::check`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        check_limit("bytes of a placement", text.len(), MAX_DESCRIPTION_TEXT)?;
        let found: Self =
            serde_json::from_str(text).map_err(|error| PlanError::json("the placement", &error))?;
        found.check()?;
        Ok(found)
    }

    /// Checks that every device is placed once, and every task is on one host.
    ///
    /// # Errors
    /// Returns the first error found.
    pub fn check(&self) -> Result<(), PlanError> {
        self.entries_by_device().map(|_| ())
    }

    /// Returns the entries by device.
    pub(super) fn entries_by_device(&self) -> Result<BTreeMap<DeviceId, &PlacedDevice>, PlanError> {
        check_limit("placed devices", self.devices.len(), MAX_PLACED)?;
        let mut tasks: BTreeMap<TaskId, &str> = BTreeMap::new();
        let mut devices = BTreeMap::new();
        for (number, placed) in self.devices.iter().enumerate() {
            check_name("host of placed device", number, &placed.host)?;
            if *tasks.entry(placed.task).or_insert(&placed.host) != placed.host {
                return Err(PlanError::TaskOnTwoHosts(placed.task));
            }
            if devices.insert(placed.device, placed).is_some() {
                return Err(PlanError::PlacedTwice(placed.device));
            }
        }
        Ok(devices)
    }
}

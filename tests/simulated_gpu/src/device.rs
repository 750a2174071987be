//! Devices.

use std::ffi::c_int;

use crate::error::{Answer, INVALID_DEVICE};
use crate::settings::Setting;

/// The most devices that a process can have.
pub const DEVICES_MAX: usize = 16;

/// A device that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device(usize);

impl Device {
    /// Returns the device of a number.
    pub fn find(ordinal: c_int) -> Answer<Self> {
        let index = usize::try_from(ordinal).ok().filter(|index| *index < count());
        index.map(Self).ok_or(INVALID_DEVICE)
    }

    /// Returns the device's place in tables of devices.
    pub fn index(self) -> usize {
        self.0
    }

    /// Returns the device's number in this process.
    pub fn ordinal(self) -> c_int {
        self.0 as c_int
    }

    /// Returns the device's number on its host.
    pub fn host_number(self) -> u64 {
        Setting::FirstDevice.amount() + self.0 as u64
    }
}

/// Returns the number of devices.
pub fn count() -> usize {
    usize::try_from(Setting::Devices.amount()).unwrap_or(DEVICES_MAX).min(DEVICES_MAX)
}

//! The health of GPUs, as NVML, the management library of the driver, reports it.
//!
//! NVML counts all GPUs that this container has, whichever of them `CUDA_VISIBLE_DEVICES` names. Facts that the driver does not
//! report are `None`. Begin at [`health_of_all_gpus`].
#![allow(unsafe_code, reason = "asks the library for the rows that its binding leaves out")]

use std::ffi::{OsStr, c_uint};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// The names of the library: that of the driver's installation, and that of a development kit.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// More than any GPU has.
const NVLINKS_MAX: u32 = 32;

/// A GPU of this host, and its health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledGpu {
    /// The number in which NVML counts the GPUs of the host, in the order of the PCI bus.
    pub number: u32,
    /// Its health, or why NVML does not tell it.
    pub health: Result<GpuHealth, UnreachableGpu>,
}

/// A GPU of which NVML tells nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreachableGpu {
    /// The GPU has fallen off the bus, or does not answer for another reason: a reset may bring it back.
    pub is_lost: bool,
    /// NVML's reason.
    pub reason: String,
}

/// The health of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuHealth {
    /// The name of the product.
    pub name: String,
    /// The address on the PCI bus, such as `00000000:3B:00.0`.
    pub pci: String,
    /// Whether the driver keeps the GPU ready while no program uses it.
    pub is_persistent: Option<bool>,
    /// Whether its memory corrects errors.
    pub has_ecc: Option<bool>,
    /// The errors of its memory that could not be corrected, since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// The replaced rows of its memory.
    pub rows: Option<RemappedRows>,
    /// Why its clock is lower than it could be.
    pub slowdowns: Option<Vec<Slowdown>>,
    /// The lanes of PCIe in use, and the most that the GPU and its slot could use.
    pub pcie_lanes: Option<(u32, u32)>,
    /// Its NVLinks.
    pub nvlinks: Vec<NvLinkHealth>,
}

/// Rows of memory that the GPU has replaced by spare ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemappedRows {
    /// Rows replaced after errors that were corrected.
    pub corrected: u32,
    /// Rows replaced after errors that could not be corrected.
    pub uncorrected: u32,
    /// A row is replaced at the next reset of the GPU.
    pub is_pending: bool,
    /// A row could not be replaced: no spare one was left.
    pub has_failed: bool,
}

/// A reason why a GPU runs slower than it could, other than that it has nothing to do or was set so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slowdown {
    /// It is too hot; the driver lowers the clock.
    Heat,
    /// It is much too hot; the hardware halves the clock or worse.
    SevereHeat,
    /// The power supply asks for less power.
    PowerBrake,
    /// It has reached its limit of power.
    PowerLimit,
    /// The hardware lowers the clock, and says no more.
    Hardware,
}

/// A link to another GPU, or to a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvLinkHealth {
    /// Its number at this GPU.
    pub number: u32,
    /// Whether it is up.
    pub is_up: bool,
    /// Transmissions that were repeated, and recoveries of the link, since it came up.
    pub errors: Option<u64>,
}

/// Returns the health of every GPU of this host.
///
/// # Errors
/// Returns why NVML tells nothing: it is not installed, or does not reach the driver.
pub fn health_of_all_gpus() -> Result<Vec<InstalledGpu>, String> {
    let nvml = load().map_err(|error| format!("NVML: {error}"))?;
    let count = nvml.device_count().map_err(|error| format!("NVML: {error}"))?;
    let gpu = |number| {
        let health = nvml.device_by_index(number).and_then(|device| read(&nvml, &device));
        let unreachable = |error: NvmlError| UnreachableGpu {
            is_lost: matches!(error, NvmlError::GpuLost),
            reason: error.to_string(),
        };
        InstalledGpu { number, health: health.map_err(unreachable) }
    };
    Ok((0..count).map(gpu).collect())
}

fn load() -> Result<Nvml, NvmlError> {
    let [usual, other] = LIBRARIES.map(OsStr::new);
    // The error of the usual name says more.
    let load = |name| Nvml::builder().lib_path(name).init();
    load(usual).or_else(|error| load(other).map_err(|_| error))
}

/// Reads the health of a GPU. The library keeps names, also those of a GPU that has fallen off the bus: the lanes are asked first.
fn read(nvml: &Nvml, device: &Device) -> Result<GpuHealth, NvmlError> {
    let is_lost = |error: &NvmlError| matches!(error, NvmlError::GpuLost);
    let lanes = device.current_pcie_link_width().and_then(|now| Ok((now, device.max_pcie_link_width()?)));
    if let Err(error) = &lanes
        && is_lost(error)
    {
        return Err(NvmlError::GpuLost);
    }
    Ok(GpuHealth {
        name: device.name()?,
        pci: device.pci_info()?.bus_id,
        is_persistent: device.is_in_persistent_mode().ok(),
        has_ecc: device.is_ecc_enabled().ok().map(|state| state.currently_enabled),
        uncorrected_errors: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        rows: remapped_rows(nvml, device),
        slowdowns: device.current_throttle_reasons().ok().map(slowdowns),
        pcie_lanes: lanes.ok(),
        nvlinks: (0..NVLINKS_MAX).filter_map(|number| nvlink(device, number)).collect(),
    })
}

fn remapped_rows(nvml: &Nvml, device: &Device) -> Option<RemappedRows> {
    let [mut corrected, mut uncorrected, mut is_pending, mut has_failed]: [c_uint; 4] = [0; 4];
    // SAFETY: the device is one of this library, and the call writes four numbers.
    let status = unsafe {
        nvml.lib().nvmlDeviceGetRemappedRows.as_ref().ok()?(
            device.handle(),
            &raw mut corrected,
            &raw mut uncorrected,
            &raw mut is_pending,
            &raw mut has_failed,
        )
    };
    (status == 0).then_some(RemappedRows {
        corrected,
        uncorrected,
        is_pending: is_pending != 0,
        has_failed: has_failed != 0,
    })
}

fn slowdowns(reasons: ThrottleReasons) -> Vec<Slowdown> {
    let named = [
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, Slowdown::SevereHeat),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, Slowdown::Heat),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, Slowdown::PowerBrake),
        (ThrottleReasons::SW_POWER_CAP, Slowdown::PowerLimit),
    ];
    let mut found: Vec<Slowdown> =
        named.into_iter().filter(|(bit, _)| reasons.contains(*bit)).map(|(_, reason)| reason).collect();
    // It comes with one of the two of the hardware, where the driver tells which.
    let is_explained = |reason: &Slowdown| matches!(reason, Slowdown::SevereHeat | Slowdown::PowerBrake);
    if reasons.contains(ThrottleReasons::HW_SLOWDOWN) && !found.iter().any(is_explained) {
        found.push(Slowdown::Hardware);
    }
    found
}

/// Returns the health of a link; none if the GPU has no link of this number.
fn nvlink(device: &Device, number: u32) -> Option<NvLinkHealth> {
    let link = device.link_wrapper_for(number);
    let is_up = link.is_active().ok()?;
    let counters = [ErrorCounter::DlReplay, ErrorCounter::DlRecovery];
    let errors = counters.iter().map(|counter| link.error_counter(*counter).ok()).sum();
    Some(NvLinkHealth { number, is_up, errors })
}

//! The driver under the tests of GPUs: the simulated one, or with `MUSTER_GPU=real` that of this machine.
#![allow(dead_code, reason = "every target uses its own part of it")]

use muster_gpu::Gpu;
use simulated_gpu::SimulatedGpu;

use crate::isolated_test::run_isolated;
use crate::skip::{Lacking, skip};

/// Returns whether the tests use a GPU of this machine.
pub fn is_real() -> bool {
    !SimulatedGpu::is_wanted()
}

/// Runs a test in a process of its own, over the simulated driver with these settings: it makes faults, or counts calls.
pub fn run_on_simulated_gpu<F: FnOnce()>(settings: &str, body: F) {
    if is_real() {
        return skip(Lacking::Hardware("GPU whose faults can be set and whose calls are counted"));
    }
    run_isolated(&[("SIMULATED_GPU", settings)], body);
}

/// Runs a test in a process of its own, over either driver. The settings are those of the simulated one.
pub fn run_on_any_gpu<F: FnOnce()>(settings: &str, body: F) {
    run_isolated(&[("SIMULATED_GPU", settings)], body);
}

/// Opens a GPU. Numbers beyond those of the machine begin anew: with one GPU, each of them is that one.
pub fn open_gpu(number: u32) -> Gpu {
    SimulatedGpu::load_if_wanted();
    Gpu::open(number % muster_gpu::device_count().unwrap()).unwrap()
}

//! Detects a GPU that is lost to its process, as jaxlib tells it in the key-value store.
//!
//! `coordination/fatal_gpu_error.rs` reads the key. Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::RunState;

pub(super) static DETECTOR: Detector = Detector {
    id: "fatal-gpu-error",
    title: "A GPU has a fatal error",
    severity: Severity::Critical,
    means: "A process has told that the driver has lost one of its GPUs: an ECC error, an illegal address, a lost link. Nothing runs \
            on it until the process starts again, and the collectives of all others wait for it.",
    advice: "Exclude the task: then the others learn that it is gone, and JAX aborts their collectives \
             (`XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE=1`). The setting auto-exclude can do that. Then look at the kernel's log \
             of the host (Xid) and at `nvidia-smi -q`; a GPU with ECC errors needs a reset.",
    detect,
};

fn detect(DetectorInput { job, .. }: DetectorInput<'_>) -> Option<Detection> {
    let error = job.fatal_gpu_error.as_ref().filter(|_| job.state == RunState::Running)?;
    // A process that has started since has the GPU again.
    let task = job.task(error.task)?;
    if task.registered_at > error.at {
        return None;
    }
    Some(Detection::new(error.describe(), error.at, vec![error.task]))
}

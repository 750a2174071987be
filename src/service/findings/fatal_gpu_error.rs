//! Detects a GPU that is lost to its process: as jaxlib tells it in the key-value store, or as a native worker reports it.
//!
//! `coordination/fatal_gpu_error.rs` reads the key. Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::{FatalGpuError, RunState};
use crate::text::format_count_with_noun;

pub(super) static DETECTOR: Detector = Detector {
    id: "fatal-gpu-error",
    title: "A GPU has a fatal error",
    severity: Severity::Critical,
    means: "A process has told that the driver has lost one of its GPUs: an ECC error, an illegal address, a lost link. Nothing runs \
            on it until the process starts again, and the collectives and transfers of all others wait for it.",
    advice: "Exclude the task: then the others learn that it is gone, and JAX aborts their collectives \
             (`XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE=1`). The setting auto-exclude can do that. Then look at the kernel's log \
             of the host (Xid) and at `nvidia-smi -q`; a GPU with ECC errors needs a reset.",
    detect,
};

fn detect(DetectorInput { job, lost_gpus, .. }: DetectorInput<'_>) -> Option<Detection> {
    // A process that has started since has the GPU again.
    let is_of_present_process =
        |error: &&FatalGpuError| job.task(error.task).is_some_and(|task| task.registered_at <= error.at);
    let of_jax = job.fatal_gpu_error.iter().filter(is_of_present_process).cloned();
    let reported = lost_gpus.iter().map(|(task, lost)| FatalGpuError {
        task: *task,
        device: lost.gpu,
        status: lost.error.clone(),
        at: lost.reported_at,
    });
    let mut errors: Vec<FatalGpuError> = of_jax.chain(reported).collect();
    errors.sort_by_key(|error| (error.at, error.task));
    let first = errors.first().filter(|_| job.state == RunState::Running)?;
    let mut tasks: Vec<_> = errors.iter().map(|error| error.task).collect();
    tasks.sort_unstable();
    tasks.dedup();
    let summary = match tasks.len() {
        1 => first.describe(),
        several => format!(
            "GPUs of {} have fatal errors; first, {}",
            format_count_with_noun(several, "task", "tasks"),
            first.describe()
        ),
    };
    Some(Detection::new(summary, first.at, tasks))
}

//! Copies as the tests ask for them.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use muster_gpu::{CopyDirection, DeviceMemory, Gpu, GpuCopy, GpuError, PageLocked};

pub type Outcome = Result<(), GpuError>;

/// Asks for copies of memory that lives until the end of the test.
pub fn copy(gpu: &Gpu, direction: CopyDirection, copies: &[GpuCopy]) -> Receiver<Outcome> {
    let (tell, told) = channel();
    // SAFETY: each test keeps its memory until it has the outcome.
    unsafe { gpu.copy(direction, copies, move |outcome| tell.send(outcome).unwrap()) }.unwrap();
    told
}

pub fn wait(told: &Receiver<Outcome>) -> Outcome {
    told.recv_timeout(Duration::from_secs(30)).expect("the end of a copy is reported")
}

pub fn whole(direction: CopyDirection, host: &PageLocked, device: &DeviceMemory) -> GpuCopy {
    GpuCopy::with_host(direction, host.base(), device.address(), host.len().min(device.len()))
}

/// Copies the whole of one memory to or from the other.
pub fn copy_whole(gpu: &Gpu, direction: CopyDirection, host: &PageLocked, device: &DeviceMemory) -> Outcome {
    wait(&copy(gpu, direction, &[whole(direction, host, device)]))
}

pub fn bytes_of(memory: &mut PageLocked) -> &mut [u8] {
    // SAFETY: the memory is as long, and tests use it when no copy is under way.
    unsafe { std::slice::from_raw_parts_mut(memory.base().as_ptr(), memory.len()) }
}

/// Waits until a condition becomes true.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..5000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("in vain: {what}");
}

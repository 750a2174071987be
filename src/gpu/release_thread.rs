//! The threads that free memory which this crate took for itself, and release what is dropped on the thread that reports copies.
//!
//! To free memory is to wait for all work of the device, which may wait for another process that waits for this one: seen of
//! driver 580.159, `cuMemFree`, `cuMemFreeHost` and `cuMemHostUnregister` wait, and no call that allocates, maps or unmaps does.
//! Therefore the reporting thread frees and unmaps nothing, and page-locked memory, which this crate takes for itself, is freed
//! on a thread of its own. Memory of a device that the program drops is freed at once: a program knows that this waits. Calls
//! that wait and calls that do not wait have different threads, so a kernel that hangs does not keep peers from giving memory back.
//! Begin at [`release_off_reporting_thread`] and [`free_later`].

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use super::copy_queue::is_reporting_thread;

type Release = Box<dyn FnOnce() + Send>;

/// A thread that starts with the first release.
struct ReleaseThread {
    name: &'static str,
    sender: OnceLock<Option<Sender<Release>>>,
}

/// For what does not wait, and for memory of devices.
static RELEASING: ReleaseThread = ReleaseThread { name: "muster-gpu-drop", sender: OnceLock::new() };
/// For page-locked memory.
static FREEING: ReleaseThread = ReleaseThread { name: "muster-gpu-free", sender: OnceLock::new() };

impl ReleaseThread {
    /// Calls `release` on the thread. If it cannot be started, nothing is released: a caller that must not wait cannot do it.
    fn call(&self, release: impl FnOnce() + Send + 'static) {
        let sender = self.sender.get_or_init(|| {
            let (sender, receiver) = channel::<Release>();
            let run = move || receiver.iter().for_each(|release| release());
            std::thread::Builder::new().name(self.name.to_owned()).spawn(run).ok().map(|_| sender)
        });
        if let Some(sender) = sender {
            let _is_there = sender.send(Box::new(release));
        }
    }
}

/// Calls `release`: on this thread, or on another one if this one reports copies.
pub fn release_off_reporting_thread(release: impl FnOnce() + Send + 'static) {
    if is_reporting_thread() { RELEASING.call(release) } else { release() }
}

/// Calls `release`, which waits for the work of a device, on another thread.
pub fn free_later(release: impl FnOnce() + Send + 'static) {
    FREEING.call(release);
}

//! The thread that frees memory which this crate took for itself, and what is dropped on the thread that reports copies.
//!
//! To free memory is to wait for all work of the device, which may wait for another process that waits for this one: seen of
//! driver 580.159, `cuMemFree`, `cuMemFreeHost` and `cuMemHostUnregister` wait, and no call that allocates, maps or unmaps does.
//! So neither the reporting thread nor one of the program's that moves bytes may free. Begin at
//! [`release_off_reporting_thread`] and [`release_later`].

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use super::copy_queue::is_reporting_thread;

type Release = Box<dyn FnOnce() + Send>;

/// Calls `release`: on this thread, or on another one if this one reports copies.
pub fn release_off_reporting_thread(release: impl FnOnce() + Send + 'static) {
    if is_reporting_thread() { release_later(release) } else { release() }
}

/// Calls `release` on another thread.
pub fn release_later(release: impl FnOnce() + Send + 'static) {
    static THREAD: OnceLock<Option<Sender<Release>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (sender, receiver) = channel::<Release>();
        let run = move || receiver.iter().for_each(|release| release());
        std::thread::Builder::new().name("muster-gpu-free".to_owned()).spawn(run).ok().map(|_| sender)
    });
    match thread {
        Some(thread) => drop(thread.send(Box::new(release))),
        None => release(),
    }
}

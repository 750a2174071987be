//! The thread that frees and unmaps memory of devices, if the last reference to it is dropped on the thread that reports
//! copies.
//!
//! To free memory is to wait for the work of the device, which may wait for another process that waits for a report. So the
//! reporting thread must not do it. Begin at [`release_off_reporting_thread`].

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use super::copy_queue::is_reporting_thread;

type Release = Box<dyn FnOnce() + Send>;

/// Calls `release`: on this thread, or on another one if this one reports copies.
pub fn release_off_reporting_thread(release: impl FnOnce() + Send + 'static) {
    if !is_reporting_thread() {
        return release();
    }
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

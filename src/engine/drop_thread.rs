//! A thread that frees large amounts of memory, so that neither connections nor inputs wait for it.
//!
//! Begin at [`DropThread::run_in_background`].

use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

type DropWork = Box<dyn FnOnce() + Send>;

/// The thread, which is started at its first use.
#[derive(Debug, Default)]
pub(super) struct DropThread(OnceLock<Option<Sender<DropWork>>>);

impl DropThread {
    /// Runs `work` on the thread, in the order of the calls. Without a thread it runs here.
    pub fn run_in_background(&self, work: impl FnOnce() + Send + 'static) {
        let work: DropWork = Box::new(work);
        let left = match self.0.get_or_init(start_drop_thread) {
            Some(queue) => queue.send(work).err().map(|refused| refused.0),
            None => Some(work),
        };
        if let Some(work) = left {
            work();
        }
    }
}

fn start_drop_thread() -> Option<Sender<DropWork>> {
    let (queue, given) = mpsc::channel::<DropWork>();
    let reap = move || given.iter().for_each(|work| work());
    thread::Builder::new().name("muster-reaper".into()).spawn(reap).ok().map(|_| queue)
}

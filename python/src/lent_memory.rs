//! Returns borrowed memory to the library that lent it.
//!
//! The return may need the GIL. If a Python object is the last owner of the memory, its thread has the GIL and
//! returns the memory at once ([`drop_with_gil`]). If a transfer is the last owner, a thread of the engine drops the
//! memory. That thread must neither wait nor take the GIL. So it hands the return over to the thread of this module.
//! Once the interpreter begins to end, no memory is returned; the memory then stays allocated until the process ends.
//! Begin at [`LentMemory`].

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::prelude::*;

use super::wait::forked_error;

/// The return of memory to its library. It is called once, with the GIL.
type ReleaseFunction = Box<dyn FnOnce(Python<'_>) + Send>;

/// The process that started the thread, and the channel to the thread.
static THREAD: OnceLock<(u32, Sender<ReleaseFunction>)> = OnceLock::new();

/// Whether the interpreter ends. The thread holds the lock while it uses the interpreter.
static IS_OVER: Mutex<bool> = Mutex::new(false);

/// The same for threads that have the GIL. They must not wait for the lock, because its holder may wait for the GIL.
static IS_OVER_WITH_GIL: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread drops a value by [`drop_with_gil`].
    static HAS_GIL: Cell<bool> = const { Cell::new(false) };
}

/// The owner of memory that a library lent. When it is dropped, the memory is returned: at once by [`drop_with_gil`],
/// otherwise by the thread of this module, a moment later.
pub struct LentMemory(Option<ReleaseFunction>);

impl LentMemory {
    /// Creates an owner whose memory `release` returns.
    pub fn new(py: Python<'_>, release: impl FnOnce(Python<'_>) + Send + 'static) -> PyResult<Self> {
        start_release_thread(py)?;
        Ok(Self(Some(Box::new(release))))
    }
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        let Some(release) = self.0.take() else { return };
        match THREAD.get() {
            Some((process, _)) if *process == std::process::id() && HAS_GIL.get() => {
                if IS_OVER_WITH_GIL.load(Ordering::Relaxed) {
                    std::mem::forget(release);
                } else {
                    Python::attach(|py| release_now(py, release));
                }
            }
            Some((process, hand_over)) if *process == std::process::id() => {
                if let Err(kept) = hand_over.send(release) {
                    std::mem::forget(kept);
                }
            }
            // A forked process has a copy of the memory, and no such thread.
            _ => std::mem::forget(release),
        }
    }
}

/// Drops a value on a thread that has the GIL. If it is the last owner of memory that was lent, the memory is returned at
/// once: a hand-over would make two threads wait for each other's GIL.
pub fn drop_with_gil<T>(_py: Python<'_>, value: T) {
    let before = HAS_GIL.replace(true);
    drop(value);
    HAS_GIL.set(before);
}

/// Returns memory. An exception that is on its way stays as it is, although the library may run Python.
fn release_now(py: Python<'_>, release: ReleaseFunction) {
    let raised = PyErr::take(py);
    release(py);
    if let Some(raised) = raised {
        raised.restore(py);
    }
}

/// Starts the thread, unless it runs.
fn start_release_thread(py: Python<'_>) -> PyResult<()> {
    if THREAD.get().is_none() {
        let (hand_over, handed) = channel();
        if THREAD.set((std::process::id(), hand_over)).is_ok() {
            std::thread::Builder::new()
                .name("muster-release".to_owned())
                .spawn(move || run_releases(&handed))?;
            let stop = wrap_pyfunction!(stop_releases, py)?;
            let atexit = py.import("atexit")?;
            atexit.call_method1("register", (stop,))?;
            let finish = py.import("muster._memory")?.getattr("finish_computations")?;
            atexit.call_method1("register", (finish,))?;
        }
    }
    match THREAD.get() {
        Some((process, _)) if *process == std::process::id() => Ok(()),
        _ => Err(forked_error(py)),
    }
}

fn lock_interpreter_end_flag() -> MutexGuard<'static, bool> {
    IS_OVER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run_releases(handed: &Receiver<ReleaseFunction>) {
    while let Ok(first) = handed.recv() {
        let over = lock_interpreter_end_flag();
        if *over {
            std::mem::forget(first);
            continue;
        }
        let mut waiting = Some(first);
        Python::try_attach(|py| {
            while let Some(release) = waiting.take() {
                release(py);
                waiting = handed.try_recv().ok();
            }
        });
        // Not given back if the interpreter has ended.
        std::mem::forget(waiting);
        drop(over);
    }
}

/// Stops the thread from using the interpreter, which ends.
#[pyfunction]
fn stop_releases(py: Python<'_>) {
    // A forked process has no such thread, but its copy of the lock may be held.
    if THREAD.get().is_some_and(|(process, _)| *process == std::process::id()) {
        IS_OVER_WITH_GIL.store(true, Ordering::Relaxed);
        py.detach(|| *lock_interpreter_end_flag() = true);
    }
}

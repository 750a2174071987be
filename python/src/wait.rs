//! The tokio runtime of the extension module, and the functions by which Python threads wait for its work.
//!
//! A wait releases the GIL. The waiting thread checks for signals every 50 ms, so Ctrl-C ends the wait. If [`wait()`]
//! ends early, the work is cancelled. The futures that callers pass have deadlines of their own. No code on the
//! runtime's threads takes the GIL. Begin at [`wait()`].

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use muster::clock;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use super::errors::new_exception;

/// The longest time after which a waiting thread sees a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// The threads of the runtime. They wait for sockets and timers most of the time.
const THREADS: usize = 2;

/// The runtime, and the process that started it. It is never stopped: the process ends with its threads running.
static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// Returns the runtime.
pub fn runtime(py: Python<'_>) -> PyResult<&'static Runtime> {
    let own = std::process::id();
    if RUNTIME.get().is_none() {
        let made = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("muster")
            .enable_all()
            .build()
            .map_err(|error| {
                new_exception(
                    py,
                    "MusterError",
                    &format!("the threads of muster cannot be started: {error}"),
                    &[],
                )
            })?;
        // If another thread was first, its runtime is used.
        let _ = RUNTIME.set((own, made));
    }
    match RUNTIME.get() {
        Some((process, runtime)) if *process == own => Ok(runtime),
        // A forked process has none of the threads.
        _ => Err(forked_error(py)),
    }
}

/// Returns the exception for a process that was forked from the one that has begun something.
pub fn forked_error(py: Python<'_>) -> PyErr {
    new_exception(
        py,
        "MusterError",
        "muster was used before this process was forked, and its threads exist only in the parent: start processes \
         with the method `spawn` (multiprocessing.set_start_method), or use muster only in the child",
        &[],
    )
}

/// Runs `work` to its end without the GIL.
///
/// # Errors
/// `KeyboardInterrupt`, or what another signal handler raised; the work is cancelled then.
pub fn wait<T: Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = T> + Send + 'static,
) -> PyResult<T> {
    let (send, receive) = sync_channel(1);
    // A receiver cannot be shared between threads, and the compiler takes the thread without the GIL for another one.
    let receive = Mutex::new(receive);
    let task = runtime(py)?.spawn(async move {
        // Nobody receives it after a signal.
        let _ = send.send(work.await);
    });
    loop {
        let next = || receive.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_INTERVAL);
        match py.detach(next) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = py.check_signals() {
                    task.abort();
                    return Err(error);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                let text = "muster failed inside (standard error has the message): please report it";
                return Err(new_exception(py, "MusterError", text, &[]));
            }
        }
    }
}

/// Repeats `step` without the GIL until it returns a value, or `limit` has passed. A step blocks for at most the time that
/// it is given; the calling thread itself waits, which is quicker than [`wait`] for what is nearly over.
///
/// # Errors
/// `KeyboardInterrupt`, or what another signal handler raised.
pub fn wait_in_steps<T: Send>(
    py: Python<'_>,
    limit: Duration,
    mut step: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // A forked process would wait for threads that it does not have.
    runtime(py)?;
    let until = clock::monotonic() + limit;
    loop {
        let left = until.saturating_duration_since(clock::monotonic());
        let found = py.detach(|| step(left.min(SIGNAL_INTERVAL)));
        if found.is_some() || left.is_zero() {
            return Ok(found);
        }
        py.check_signals()?;
    }
}

/// Returns a timeout given in seconds.
///
/// # Errors
/// `SettingsError`, if it is no number of seconds from 0 to a year.
pub fn parse_timeout_seconds(py: Python<'_>, name: &str, given: f64) -> PyResult<Duration> {
    const YEAR: f64 = 366.0 * 86_400.0;
    match Duration::try_from_secs_f64(given) {
        Ok(time) if given <= YEAR => Ok(time),
        _ => {
            let text = format!("{name} is {given}: give a number of seconds from 0 to {YEAR:.0} (a year)");
            Err(new_exception(py, "SettingsError", &text, &[]))
        }
    }
}

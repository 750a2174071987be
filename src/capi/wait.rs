//! Three things: the tokio runtime of the library, the function [`wait`], by which most calls wait, and cancellation.
//!
//! Work runs on threads of the runtime, which block all signals except those of their own faults. So a broken
//! connection raises no SIGPIPE in a thread of the program, and the program's signal handlers run on its own threads.
//! The calling thread only waits for the outcome. Begin at [`wait`].

use std::cell::Cell;
use std::future::Future;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use super::boundary::{OutputPointer, panic_error, run_interface_function};
use super::handles::{self, OpaqueHandle};
use super::process::check_not_forked;
use super::status::{CallError, MusterStatus};

/// The threads of the runtime. They wait for sockets and timers most of the time.
const THREADS: usize = 2;
/// The time that the service has for an answer after a timeout that it applies itself.
pub const ANSWER_TIME: Duration = Duration::from_secs(1);
/// The longest timeout: a year of 366 days.
pub const MUSTER_TIMEOUT_MAX_MS: i64 = 31_622_400_000;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Returns the runtime. It is never stopped: the process ends with its threads running.
fn runtime() -> Result<&'static Runtime, CallError> {
    if RUNTIME.get().is_none() {
        let made = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("muster")
            .on_thread_start(block_signals)
            .enable_all()
            .build()
            .map_err(|error| {
                CallError::new(
                    MusterStatus::System,
                    format!("the threads of muster cannot be started: {error}"),
                )
            })?;
        // If another thread was first, its runtime is used.
        if let Err(unused) = RUNTIME.set(made) {
            unused.shutdown_background();
        }
    }
    RUNTIME.get().ok_or_else(panic_error)
}

/// Blocks the signals of this thread and of those that it starts.
fn block_signals() {
    let _for_ever = set_signal_mask(libc::SIG_BLOCK, &blockable_signals());
}

/// Returns all signals except those that a thread raises by a fault of its own.
fn blockable_signals() -> libc::sigset_t {
    const OF_FAULTS: [libc::c_int; 7] =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];
    // SAFETY: the set is initialised by `sigfillset`, and the calls change nothing else.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        for signal in OF_FAULTS {
            libc::sigdelset(&raw mut set, signal);
        }
        set
    }
}

/// Changes the mask of this thread, and returns the former one.
fn set_signal_mask(how: libc::c_int, set: &libc::sigset_t) -> libc::sigset_t {
    // SAFETY: both sets are initialised, and only the mask of this thread changes.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(how, set, &raw mut before);
        before
    }
}

/// Runs work of the library that may start threads on a thread of the program: they inherit a mask that blocks signals.
pub fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    struct RestoreSignalMask(libc::sigset_t);
    impl Drop for RestoreSignalMask {
        fn drop(&mut self) {
            set_signal_mask(libc::SIG_SETMASK, &self.0);
        }
    }
    let _restore = RestoreSignalMask(set_signal_mask(libc::SIG_BLOCK, &blockable_signals()));
    work()
}

thread_local! {
    /// Whether this thread runs a callback of the program.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a callback of the program.
pub fn run_callback(callback: impl FnOnce()) {
    // A thread that is ending has no such mark any more.
    let before = IN_CALLBACK.try_with(|inside| inside.replace(true)).unwrap_or(false);
    callback();
    let _restored = IN_CALLBACK.try_with(|inside| inside.set(before));
}

/// Refuses to wait in a callback, where the wait could be for this very thread.
pub fn check_not_in_callback() -> Result<(), CallError> {
    let inside = IN_CALLBACK.try_with(Cell::get).unwrap_or(false);
    if inside || tokio::runtime::Handle::try_current().is_ok() {
        let text = "a release callback must not wait: leave it to another thread of the program";
        return Err(CallError::new(MusterStatus::InCallback, text));
    }
    Ok(())
}

/// Returns a timeout given in milliseconds.
pub fn parse_timeout_ms(name: &str, given: i64) -> Result<Duration, CallError> {
    match u64::try_from(given) {
        Ok(milliseconds) if given <= MUSTER_TIMEOUT_MAX_MS => Ok(Duration::from_millis(milliseconds)),
        _ => Err(CallError::invalid_argument(format!(
            "{name} is {given}: give milliseconds from 0 to {MUSTER_TIMEOUT_MAX_MS} (a year)"
        ))),
    }
}

/// The limits of a wait: its timeout, and its cancellation if it has one.
pub struct WaitLimits {
    pub timeout: Duration,
    pub cancellation: Option<Arc<Cancellation>>,
}

impl WaitLimits {
    /// Returns the limits that a caller has given.
    pub fn new(timeout_ms: i64, cancellation: *const MusterCancellation) -> Result<Self, CallError> {
        check_not_in_callback()?;
        let cancellation = handles::get_optional(cancellation)?;
        Ok(Self { timeout: parse_timeout_ms("timeout_ms", timeout_ms)?, cancellation })
    }
}

/// Runs `work` until it ends, the timeout passes, or the wait is cancelled; in the latter cases it is dropped.
///
/// The service applies most timeouts and says what is missing, so `work` has a moment longer for its answer.
pub fn wait<T: Send + 'static>(
    limits: WaitLimits,
    work: impl Future<Output = Result<T, CallError>> + Send + 'static,
) -> Result<T, CallError> {
    let (send, receive) = sync_channel(1);
    runtime()?.spawn(async move {
        let WaitLimits { timeout, cancellation } = limits;
        let done = tokio::select! {
            biased;
            () = wait_until_cancelled(cancellation) => {
                Err(CallError::new(MusterStatus::Interrupted, "the wait was cancelled by its cancellation"))
            }
            done = work => done,
            () = tokio::time::sleep(timeout + ANSWER_TIME) => Err(timeout_error(timeout)),
        };
        // The caller receives it as long as this task runs.
        let _received = send.send(done);
    });
    // The sender is lost only if the work panics.
    receive.recv().unwrap_or_else(|_| Err(panic_error()))
}

/// Runs work that ends soon to its end.
pub fn spawn_and_wait(work: impl Future<Output = ()> + Send + 'static) -> Result<(), CallError> {
    let (send, receive) = sync_channel(1);
    spawn(async move {
        work.await;
        // The caller receives it.
        let _received = send.send(());
    })?;
    receive.recv().map_err(|_| panic_error())
}

/// Starts work that no caller waits for.
pub fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Result<(), CallError> {
    runtime()?.spawn(work);
    Ok(())
}

/// Returns the error of a timeout.
pub fn timeout_error(timeout: Duration) -> CallError {
    let text = format!(
        "no answer within {} ms; `muster status` shows which tasks are missing or waiting",
        timeout.as_millis()
    );
    CallError::new(MusterStatus::TimedOut, text)
}

async fn wait_until_cancelled(cancellation: Option<Arc<Cancellation>>) {
    match cancellation {
        // It cannot be dropped meanwhile, so the wait does not fail.
        Some(cancellation) => _ = cancellation.0.subscribe().wait_for(|cancelled| *cancelled).await,
        None => std::future::pending().await,
    }
}

/// Ends waits of other threads. `muster_cancellation_new` makes one.
pub struct MusterCancellation {
    _private: [u8; 0],
}

/// The object of a [`MusterCancellation`].
pub struct Cancellation(watch::Sender<bool>);

impl OpaqueHandle for MusterCancellation {
    type Object = Cancellation;
    const NAME: &'static str = "muster_cancellation";
}

/// Makes a cancellation, to be passed to waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_cancellation_new(cancellation: *mut *mut MusterCancellation) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("cancellation", cancellation)?;
        place.set(handles::add(Arc::new(Cancellation(watch::Sender::new(false)))));
        Ok(())
    })
}

/// Ends all waits with this cancellation, also those that begin later, with MUSTER_STATUS_INTERRUPTED. Do not call it in
/// a signal handler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_cancellation_cancel(cancellation: *mut MusterCancellation) -> MusterStatus {
    run_interface_function(|| {
        handles::get(cancellation)?.0.send_replace(true);
        Ok(())
    })
}

/// Frees a cancellation. Waits with it go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_cancellation_free(cancellation: *mut MusterCancellation) -> MusterStatus {
    run_interface_function(|| handles::remove(cancellation).map(drop))
}

/// Returns the number of handles that are not freed, to find leaks.
#[unsafe(no_mangle)]
pub extern "C" fn muster_handle_count() -> usize {
    if check_not_forked().is_ok() { handles::count() } else { 0 }
}

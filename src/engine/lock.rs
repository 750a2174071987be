//! The lock of the driver, and measurements of the times for which threads wait for it and hold it.
//!
//! Every access to the locked state takes the lock through this module. There is one method for each kind of use (a
//! single input, bulk work, a read), so each kind is measured separately. The module does not know the state. Begin
//! at `StateLock`.
//!
//! *A panic in a transition ends the process.* The transition may have changed half of the state, and no answer may
//! be given from such a state. The lock is still held when the process ends, so no other thread sees that state. A
//! panic of a reader ends only the reader, because it has changed nothing.

use std::io::Write as _;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::clock::{Clock, Timestamp};
use crate::meter;

/// The times for which the engine's lock is waited for and held.
#[derive(Debug, Default)]
pub struct EngineLockTimes {
    /// For inputs about one task or one key; one in many is timed.
    pub inputs: meter::LockTimes,
    /// For all other inputs; each hold is timed, and the wait of one in many.
    pub bulk: meter::LockTimes,
    /// For readers (pages, scrapes, detectors), which take a copy; each is timed.
    pub reads: meter::LockTimes,
}

/// The locked state, to read.
pub(super) struct ReadLockedState<'a, T> {
    // Declared before the lock, so that it is dropped before it: only the holder of the lock adds times.
    held: meter::LockHold<'a>,
    state: MutexGuard<'a, T>,
}

impl<T> Deref for ReadLockedState<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

/// The locked state, to change.
pub(super) struct WriteLockedState<'a, T> {
    locked: ReadLockedState<'a, T>,
    /// Whether the thread was already panicking when it took the lock, as a connection does that reports its own end.
    was_panicking: bool,
}

impl<T> WriteLockedState<'_, T> {
    /// Returns the time at which the lock was taken, if it was read then.
    pub(super) fn locked_at(&self) -> Option<Timestamp> {
        self.locked.held.began_at()
    }
}

impl<T> Deref for WriteLockedState<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.locked
    }
}

impl<T> DerefMut for WriteLockedState<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.locked.state
    }
}

impl<T> Drop for WriteLockedState<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            end_process();
        }
    }
}

/// Ends the process by SIGABRT, after a panic that has been reported on standard error.
#[cold]
fn end_process() -> ! {
    // Written directly: the thread that writes the log needs time that this process no longer has.
    let _ = std::io::stderr().write_all(
        b"muster: the panic above interrupted a change of the jobs' state. What is left of that state is not reliable, so \
          the process ends now and serves nobody from it. Start the service again, and report the panic.\n",
    );
    std::process::abort()
}

/// The state, its lock, and the times of the lock.
pub(super) struct StateLock<T> {
    state: Mutex<T>,
    times: EngineLockTimes,
}

impl<T> StateLock<T> {
    pub(super) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), times: EngineLockTimes::default() }
    }

    /// Returns the times for which the lock is waited for and held.
    pub(super) fn times(&self) -> &EngineLockTimes {
        &self.times
    }

    /// Locks the state for an input about one task or one key.
    pub(super) fn lock_for_input<'a>(&'a self, clock: &'a Clock) -> WriteLockedState<'a, T> {
        self.lock_for_change(self.times.inputs.begin_sampled_wait(clock))
    }

    /// Locks the state for any other input.
    pub(super) fn lock_for_bulk_work<'a>(&'a self, clock: &'a Clock) -> WriteLockedState<'a, T> {
        self.lock_for_change(self.times.bulk.begin_wait_for_timed_hold(clock))
    }

    /// Locks the state for a reader.
    pub(super) fn lock_for_read<'a>(&'a self, clock: &'a Clock) -> ReadLockedState<'a, T> {
        self.lock_with_timing(self.times.reads.begin_timed_wait(clock))
    }

    fn lock_for_change<'a>(&'a self, waiting: meter::LockWait<'a>) -> WriteLockedState<'a, T> {
        WriteLockedState { locked: self.lock_with_timing(waiting), was_panicking: std::thread::panicking() }
    }

    fn lock_with_timing<'a>(&'a self, waiting: meter::LockWait<'a>) -> ReadLockedState<'a, T> {
        // Only a reader can have panicked under the lock in a process that still runs.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        ReadLockedState { held: waiting.begin_hold(), state }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::process::Command;
    use std::sync::Arc;

    use crate::clock::Clock;
    use crate::coordination::{BarrierRecordWithArrivals, JobEvent, JobName, JobSettings};
    use crate::engine::{Engine, Observer};

    /// Set in the process in which a transition panics.
    const PANICS_HERE: &str = "MUSTER_TEST_TRANSITION_PANICS";

    struct PanickingObserver;

    impl Observer for PanickingObserver {
        fn on_event(&self, _: &JobEvent) {
            panic!("a defect of an observer");
        }

        fn on_barrier_ended(&self, _: &Arc<BarrierRecordWithArrivals>) {}
    }

    fn declare_job(engine: &Engine) {
        let name: JobName = "train".parse().expect("a name");
        engine.declare_job(name, JobSettings::new(1)).expect("a new job");
    }

    #[test]
    fn a_panic_in_a_transition_ends_the_process() {
        if std::env::var_os(PANICS_HERE).is_some() {
            let engine = Engine::new(Clock::start());
            engine.set_observers(vec![Arc::new(PanickingObserver)]);
            let panicked = catch_unwind(AssertUnwindSafe(|| declare_job(&engine))).is_err();
            println!("the process went on, and the panic was caught: {panicked}");
            return;
        }
        let test = "engine::lock::tests::a_panic_in_a_transition_ends_the_process";
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args([test, "--exact", "--nocapture"])
            .env(PANICS_HERE, "1")
            .output()
            .expect("another process of this test");
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        let signal = std::os::unix::process::ExitStatusExt::signal(&child.status);
        assert_eq!(signal, Some(6), "it ended with {:?}\n{out}\n{err}", child.status);
        assert!(!out.contains("the process went on"), "{out}");
        let (panic, reason) =
            (err.find("a defect of an observer"), err.find("interrupted a change of the jobs' state"));
        assert!(panic.is_some() && panic < reason, "{err}");
    }

    #[test]
    fn a_panic_of_a_reader_ends_only_the_reader() {
        let engine = Engine::new(Clock::start());
        declare_job(&engine);
        let reader = AssertUnwindSafe(|| engine.read_under_lock(|_| panic!("a defect of a reader")));
        assert!(catch_unwind(reader).is_err());
        assert!(engine.read_under_lock(|state| state.job_named("train").is_some()));
        let inputs = engine.counters().inputs;
        engine.stop();
        assert_eq!(engine.counters().inputs, inputs + 1);
    }

    #[test]
    fn a_thread_that_already_panics_may_report_its_end() {
        struct ConnectionThatReportsItsEnd<'a>(&'a Engine);
        impl Drop for ConnectionThatReportsItsEnd<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let engine = Engine::new(Clock::start());
        let broken = AssertUnwindSafe(|| {
            let _connection = ConnectionThatReportsItsEnd(&engine);
            panic!("a defect of a connection");
        });
        assert!(catch_unwind(broken).is_err());
        assert_eq!(engine.counters().inputs, 1);
    }
}

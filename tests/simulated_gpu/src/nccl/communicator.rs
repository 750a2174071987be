//! Communicators: their start, asynchronous error, revocation and end.
//!
//! A blocking communicator's calls return when they are done. A non-blocking one's return error 7 (in progress), and the
//! asynchronous error is 7 until they are done; meanwhile the communicator can only be asked for it, or aborted.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::unix::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use super::collective::Function;
use super::profiler::{ProfilerSlot, communicator_hash};
use super::rendezvous::{RankLinks, UniqueId, connect_to_all_ranks};
use super::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, NcclAnswer, NcclError, SYSTEM_ERROR, code_of, write_out,
};
use crate::counters::{Counter, CounterGuard};
use crate::device::Device;
use crate::error::is_lost;
use crate::handles::new_handle;
use crate::settings::Setting;
use crate::wait::{lock, wait_until, wake_all_waits};

/// One rank's side of a communicator.
#[derive(Debug)]
pub struct Communicator {
    pub rank: usize,
    pub ranks: usize,
    pub device: Device,
    pub is_blocking: bool,
    id: UniqueId,
    /// The asynchronous error: 0, or a code.
    state: AtomicI32,
    is_revoked: AtomicBool,
    is_aborted: AtomicBool,
    is_finalized: AtomicBool,
    links: Mutex<Option<Arc<RankLinks>>>,
    /// The groups that were launched, and those of them that have ended.
    launched: AtomicU64,
    ended: AtomicU64,
    /// The groups that their streams execute now.
    running: AtomicU64,
    /// The collectives that were launched, for each function.
    sequence_numbers: [AtomicU64; Function::COUNT],
    pub profiler: ProfilerSlot,
    _guard: CounterGuard,
}

static COMMUNICATORS: Mutex<BTreeMap<usize, Arc<Communicator>>> = Mutex::new(BTreeMap::new());

impl Communicator {
    /// Returns a communicator that has not started, with its handle.
    pub fn create(
        rank: usize,
        ranks: usize,
        device: Device,
        is_blocking: bool,
        id: UniqueId,
    ) -> (usize, Arc<Self>) {
        let communicator = Arc::new(Self {
            rank,
            ranks,
            device,
            is_blocking,
            id,
            state: AtomicI32::new(IN_PROGRESS.0),
            is_revoked: AtomicBool::new(false),
            is_aborted: AtomicBool::new(false),
            is_finalized: AtomicBool::new(false),
            links: Mutex::new(None),
            launched: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            running: AtomicU64::new(0),
            sequence_numbers: Default::default(),
            profiler: ProfilerSlot::default(),
            _guard: Counter::Communicators.count_while_guard_lives(),
        });
        let handle = new_handle();
        lock(&COMMUNICATORS).insert(handle, communicator.clone());
        (handle, communicator)
    }

    /// Returns the communicator of a handle.
    pub fn find(handle: usize) -> NcclAnswer<Arc<Self>> {
        lock(&COMMUNICATORS).get(&handle).cloned().ok_or(INVALID_ARGUMENT)
    }

    /// Returns the communicator of a handle, if operations may be launched on it.
    pub fn find_ready(handle: usize) -> NcclAnswer<Arc<Self>> {
        let communicator = Self::find(handle)?;
        communicator.check_ready()?;
        Ok(communicator)
    }

    /// Returns an error while a call is in progress, or after the communicator's end has begun.
    pub fn check_ready(&self) -> NcclAnswer {
        match self.state.load(SeqCst) {
            0 if self.is_stopped() || self.is_finalized.load(SeqCst) => Err(INVALID_USAGE),
            0 => Ok(()),
            code if code == IN_PROGRESS.0 => Err(INVALID_ARGUMENT),
            code => Err(NcclError(code)),
        }
    }

    /// Returns whether running groups must stop.
    pub fn is_stopped(&self) -> bool {
        self.is_revoked.load(SeqCst) || self.is_aborted.load(SeqCst) || is_lost()
    }

    /// Returns whether a group has met an error.
    pub fn has_failed(&self) -> bool {
        !matches!(self.state.load(SeqCst), 0) && self.state.load(SeqCst) != IN_PROGRESS.0
    }

    /// Sets the asynchronous error, unless there is one.
    pub fn fail(&self, error: NcclError) {
        let change = |code| (code == 0 || code == IN_PROGRESS.0).then_some(error.0);
        // A former error stays.
        let _ = self.state.fetch_update(SeqCst, SeqCst, change);
        wake_all_waits();
    }

    /// Returns the links, as long as the communicator is not at its end.
    pub fn links(&self) -> Option<Arc<RankLinks>> {
        lock(&self.links).clone()
    }

    /// Returns the number of the next group.
    pub fn next_group(&self) -> u64 {
        self.launched.fetch_add(1, SeqCst)
    }

    /// Returns the number of the next collective of a function.
    pub fn next_sequence_number(&self, function: Function) -> u64 {
        self.sequence_numbers[function as usize].fetch_add(1, SeqCst)
    }

    /// Waits until all groups before this one have ended, or groups must stop.
    pub fn begin_group(&self, number: u64) {
        wait_until(|| self.ended.load(SeqCst) >= number || self.is_stopped());
        self.running.fetch_add(1, SeqCst);
    }

    /// Returns how many collectives of a function were launched.
    pub fn sequence_number(&self, function: Function) -> u64 {
        self.sequence_numbers[function as usize].load(SeqCst)
    }

    /// Returns the asynchronous error: 0, or a code.
    pub fn asynchronous_error(&self) -> i32 {
        self.state.load(SeqCst)
    }

    /// Returns the unique id.
    pub fn unique_id_bytes(&self) -> &[u8; 128] {
        self.id.bytes()
    }

    /// Returns the address at which RAS of a rank answers its peers.
    pub fn ras_address(&self, rank: usize) -> std::io::Result<SocketAddr> {
        self.id.address("ras", rank)
    }

    /// Counts the end of a group.
    pub fn end_group(&self) {
        self.ended.fetch_add(1, SeqCst);
        self.running.fetch_sub(1, SeqCst);
        Counter::NcclGroups.add(1);
        wake_all_waits();
    }

    /// Waits until groups must stop.
    pub fn wait_for_stop(&self) {
        let _guard = Counter::NcclHangs.count_while_guard_lives();
        wake_all_waits();
        wait_until(|| self.is_stopped());
    }

    /// Runs the slow part of a call: at once on a blocking communicator, else on a thread, in progress until it ends.
    pub fn run_slow_call(
        self: &Arc<Self>,
        body: impl FnOnce(&Arc<Self>) -> NcclAnswer + Send + 'static,
    ) -> NcclAnswer {
        if self.is_blocking {
            return body(self);
        }
        // An error that a group has met stays.
        let _ = self.state.compare_exchange(0, IN_PROGRESS.0, SeqCst, SeqCst);
        self.continue_on_thread(body)
    }

    fn continue_on_thread(
        self: &Arc<Self>,
        body: impl FnOnce(&Arc<Self>) -> NcclAnswer + Send + 'static,
    ) -> NcclAnswer {
        let own = self.clone();
        let thread = std::thread::Builder::new().name("simulated-nccl".into());
        let spawned = thread.spawn(move || {
            match body(&own) {
                Ok(()) => drop(own.state.compare_exchange(IN_PROGRESS.0, 0, SeqCst, SeqCst)),
                Err(error) => own.fail(error),
            }
            wake_all_waits();
        });
        spawned.map_err(|_| SYSTEM_ERROR)?;
        Err(IN_PROGRESS)
    }

    /// Meets the other ranks.
    fn connect(&self) -> NcclAnswer {
        let is_stopped = || self.is_aborted.load(SeqCst) || is_lost();
        if Setting::NcclInitHang.count_use_and_strikes_now() {
            wait_until(is_stopped);
            return Err(INVALID_USAGE);
        }
        let links =
            connect_to_all_ranks(&self.id, self.rank, self.ranks, &is_stopped)?.ok_or(INVALID_USAGE)?;
        let links = Arc::new(links);
        *lock(&self.links) = Some(links.clone());
        if is_stopped() {
            links.shut_down();
        }
        self.profiler.init(communicator_hash(self.id.bytes()), self.rank, self.ranks);
        Ok(())
    }

    /// Starts the communicator: the second half of the call, which a group defers to its end.
    pub fn start(self: &Arc<Self>) -> NcclAnswer {
        if self.is_blocking {
            self.connect().inspect_err(|_| {
                lock(&COMMUNICATORS).retain(|_, other| !Arc::ptr_eq(other, self));
            })?;
            self.state.store(0, SeqCst);
            return Ok(());
        }
        self.continue_on_thread(|own| own.connect())
    }

    /// Waits until all launched groups have ended.
    fn drain(&self) {
        wait_until(|| self.ended.load(SeqCst) == self.launched.load(SeqCst) || self.is_stopped());
    }
}

/// Returns the asynchronous error: 0, 7 while a call is in progress, or what a group has met. It does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, to: *mut c_int) -> c_int {
    code_of(Communicator::find(handle).and_then(|communicator| {
        // SAFETY: the caller passes a place for a code.
        unsafe { write_out(to, communicator.state.load(SeqCst)) }
    }))
}

/// Writes a number of a communicator that has started.
unsafe fn write_number(handle: usize, to: *mut c_int, number: impl FnOnce(&Communicator) -> usize) -> c_int {
    code_of(Communicator::find(handle).and_then(|communicator| {
        if communicator.state.load(SeqCst) == IN_PROGRESS.0 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller passes a place for a number.
        unsafe { write_out(to, number(&communicator) as c_int) }
    }))
}

/// Returns the number of ranks; error 4 while a call is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(handle: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    unsafe { write_number(handle, to, |communicator| communicator.ranks) }
}

/// Returns the own rank; error 4 while a call is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(handle: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    unsafe { write_number(handle, to, |communicator| communicator.rank) }
}

/// Returns the device; error 4 while a call is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(handle: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    unsafe { write_number(handle, to, |communicator| communicator.device.index()) }
}

/// Stops the groups of a communicator and frees its streams (since 2.28.7). Other ranks are not told. Afterwards the
/// communicator can only be destroyed or aborted; operations give error 5. Flags must be 0.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(handle: usize, flags: c_int) -> c_int {
    code_of(Communicator::find(handle).and_then(|communicator| {
        if flags != 0 || communicator.state.load(SeqCst) == IN_PROGRESS.0 {
            return Err(INVALID_ARGUMENT);
        }
        communicator.is_revoked.store(true, SeqCst);
        wake_all_waits();
        communicator.run_slow_call(|own| {
            wait_until(|| own.running.load(SeqCst) == 0);
            Ok(())
        })
    }))
}

/// Ends a communicator in any state, also while it starts or another call is in progress. Its groups stop, and the handle
/// ends. Other ranks notice as they notice a death.
///
/// Stricter: the call does not wait for the stream. A group may move bytes until the stream has come past it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: usize) -> c_int {
    let removed = lock(&COMMUNICATORS).remove(&handle);
    code_of(removed.ok_or(INVALID_ARGUMENT).map(|communicator| {
        communicator.is_aborted.store(true, SeqCst);
        let links = lock(&communicator.links).take();
        if let Some(links) = links {
            links.shut_down();
        }
        wake_all_waits();
        communicator.profiler.finalize();
    }))
}

/// Flushes the operations of a communicator. Afterwards it can only be destroyed or aborted.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: usize) -> c_int {
    code_of(Communicator::find_ready(handle).and_then(|communicator| {
        communicator.is_finalized.store(true, SeqCst);
        communicator.run_slow_call(|own| {
            own.drain();
            Ok(())
        })
    }))
}

/// Destroys a communicator after its operations have ended. If a group has met an error or hangs, it waits until another
/// thread aborts the communicator. Error 4 while a call is in progress.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: usize) -> c_int {
    code_of(Communicator::find(handle).and_then(|communicator| {
        if communicator.state.load(SeqCst) == IN_PROGRESS.0 {
            return Err(INVALID_ARGUMENT);
        }
        communicator.drain();
        lock(&COMMUNICATORS).remove(&handle);
        // The groups that a revocation stopped may still hold the links.
        lock(&communicator.links).take();
        communicator.profiler.finalize();
        Ok(())
    }))
}

/// Registers memory for operations without intermediate copies. Here it only checks the range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(handle: usize, at: u64, len: usize, to: *mut *mut c_void) -> c_int {
    code_of(Communicator::find_ready(handle).and_then(|_| {
        crate::device_memory::find_usable_pieces(at, len).ok_or(INVALID_ARGUMENT)?;
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, new_handle() as *mut c_void) }
    }))
}

/// Ends a registration. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(handle: usize, _registration: *mut c_void) -> c_int {
    code_of(Communicator::find(handle).map(drop))
}

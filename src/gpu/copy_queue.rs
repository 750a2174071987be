//! Ordered copies between page-locked memory and a device, or between devices, and the thread that reports the ends of copies and the events
//! that have happened. Threads that wait may report as well ([`report_ended_copies`]).
//!
//! The streams of a device and the thread start with its first copy. Begin at [`Gpu::copy`].
#![allow(unsafe_code, reason = "calls the driver")]

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype, CUstream};

use super::device::{DEVICES_MAX, Gpu};
use super::driver::call;
use super::error::GpuError;
use super::event::GpuEvent;
use super::polling::{ROUNDS_AWAKE, pause_before_next_query};
use super::stream::GpuStream;

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;
/// The greatest distance between rows that every driver accepts (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_MAX: usize = i32::MAX as usize;
/// The events that are kept for reuse.
const FREE_EVENTS_MAX: usize = 64;

/// Where copies go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the device to the host.
    ToHost,
    /// From the host to the device.
    ToDevice,
    /// From memory of a device, which may be another one or another process's, to the device.
    BetweenDevices,
}

/// The number of directions.
const DIRECTIONS: usize = 3;

/// One copy of contiguous bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuCopy {
    /// The first address that is read: in page-locked host memory, or in device memory.
    pub from: u64,
    /// The first address that is written: in device memory, or in page-locked host memory.
    pub to: u64,
    /// The number of bytes.
    pub len: usize,
}

impl GpuCopy {
    /// Returns a copy between page-locked host memory and device memory, in one of the two directions between them.
    ///
    /// # Panics
    /// If the direction is between devices.
    #[must_use]
    pub fn with_host(direction: CopyDirection, host: NonNull<u8>, device: u64, len: usize) -> Self {
        let host = host.as_ptr().expose_provenance() as u64;
        match direction {
            CopyDirection::ToHost => Self { from: device, to: host, len },
            CopyDirection::ToDevice => Self { from: host, to: device, len },
            CopyDirection::BetweenDevices => panic!("a copy between devices has no address of the host"),
        }
    }
}

/// Copies of equal lengths at equal distances, from device memory to device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuRows {
    /// The first row.
    pub first: GpuCopy,
    /// The number of rows.
    pub count: usize,
    /// The distances from one row to the next in bytes: where they are read, and where they are written. Rows that are written do not
    /// overlap. Distances below the length of a row make one copy of each row.
    pub pitches: [usize; 2],
}

impl GpuRows {
    /// Returns one row alone.
    fn row(&self, number: usize) -> GpuCopy {
        let GpuCopy { from, to, len } = self.first;
        let offset = |pitch: usize| pitch as u64 * number as u64;
        GpuCopy { from: from + offset(self.pitches[0]), to: to + offset(self.pitches[1]), len }
    }
}

type EndListener = Box<dyn FnOnce(Result<(), GpuError>) + Send>;

/// A request whose copies are in a stream.
struct PendingCopies {
    /// Recorded behind the copies. None if the driver refused that: then they end with all work of the stream.
    event: Option<GpuEvent>,
    /// The error of a later copy of the same request.
    outcome: Result<(), GpuError>,
    then: EndListener,
}

#[derive(Default)]
struct QueueState {
    /// By direction, in the order of the stream.
    pending: [VecDeque<PendingCopies>; DIRECTIONS],
    /// Events of streams of the program, in no order.
    awaited: Vec<(GpuEvent, EndListener)>,
    free_events: Vec<GpuEvent>,
    /// Whether the reporting thread sleeps. A request wakes it only then: to wake a thread is a system call.
    is_reporter_asleep: bool,
}

/// The streams of a device, and the copies in them.
struct CopyQueues {
    gpu: Gpu,
    /// By direction.
    streams: [GpuStream; DIRECTIONS],
    state: Mutex<QueueState>,
    submitted: Condvar,
    /// Held by the thread that reports for the device: one at a time, so that ends are reported in their order.
    reporting: Mutex<()>,
}

/// The requests and events of all devices that are in a list: no thread has taken them to report them.
static UNREPORTED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_REPORTING: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread one that reports the ends of operations of GPUs, for as long as it runs: work that waits for operations,
/// as the release of memory does, is done on other threads.
pub fn become_reporting_thread() {
    IS_REPORTING.set(true);
}

/// Returns whether this thread reports the ends of copies. It must not wait for one.
#[must_use]
pub fn is_reporting_thread() -> bool {
    IS_REPORTING.get()
}

/// Whether a thread has called [`report_ended_copies`] since the thread of a device looked last.
static IS_HELPED: AtomicBool = AtomicBool::new(false);
/// The pause between two looks of the thread of a device while other threads look again and again, and for how many such looks it
/// expects them to go on.
const PAUSE_WHILE_HELPED: Duration = Duration::from_micros(100);
const ROUNDS_HELPED: u32 = 4;

/// Reports the copies and events that have ended, on this thread, unless another thread does so now. A thread that waits for a short copy
/// calls it again and again: so the end of the copy needs no change of threads. The thread of the device looks as well, but
/// less often meanwhile, so this thread's other work is no matter.
pub fn report_ended_copies() {
    if UNREPORTED.load(Ordering::Relaxed) == 0 || is_reporting_thread() {
        return;
    }
    IS_HELPED.store(true, Ordering::Relaxed);
    IS_REPORTING.set(true);
    for queues in QUEUES.iter().filter_map(OnceLock::get) {
        if let Ok(turn) = queues.reporting.try_lock()
            && let Ok(state) = queues.state.try_lock()
        {
            drop(queues.report_round(turn, state));
        }
    }
    IS_REPORTING.set(false);
}

/// The queues of each device, by its number.
static QUEUES: [OnceLock<Arc<CopyQueues>>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

impl Gpu {
    /// Copies, and calls `then` when all bytes are in place, or with the error: on the thread of the device, or on one that
    /// calls [`report_ended_copies`]. The call itself waits for nothing. `then` must not wait: meanwhile no other copy of the device is
    /// reported.
    ///
    /// # Errors
    /// Returns the error of the driver if no copy was asked of the device: then `then` is dropped uncalled.
    ///
    /// # Safety
    /// Until `then` is called, the memory of both sides must stay allocated, nothing else may write the bytes that are
    /// read, and nothing else may use the bytes that are written. Host addresses are page-locked memory. The device can
    /// access the device addresses, and those that are written belong to it.
    pub unsafe fn copy(
        &self,
        direction: CopyDirection,
        copies: &[GpuCopy],
        then: impl FnOnce(Result<(), GpuError>) + Send + 'static,
    ) -> Result<(), GpuError> {
        let queues = CopyQueues::of(self)?;
        queues.submit(direction, Box::new(then), copies.len(), |number, stream, begun| {
            // SAFETY: the stream is never destroyed, and the caller guarantees the memory.
            unsafe { queues.enqueue(direction, stream, &copies[number], begun) }
        })
    }

    /// As [`Gpu::copy`] between devices, of rows.
    ///
    /// # Errors
    /// As of [`Gpu::copy`].
    ///
    /// # Safety
    /// As of [`Gpu::copy`].
    pub unsafe fn copy_rows(
        &self,
        rows: &[GpuRows],
        then: impl FnOnce(Result<(), GpuError>) + Send + 'static,
    ) -> Result<(), GpuError> {
        let queues = CopyQueues::of(self)?;
        queues.submit(CopyDirection::BetweenDevices, Box::new(then), rows.len(), |number, stream, begun| {
            // SAFETY: as above.
            unsafe { queues.enqueue_rows(stream, &rows[number], begun) }
        })
    }

    /// Calls `then`, as [`Gpu::copy`] does, once the work before the latest record of an event of this device is done, or with the
    /// error of the work.
    ///
    /// # Errors
    /// Returns the error of the driver if the event cannot be watched: then `then` is dropped uncalled.
    pub fn call_when_happened(
        &self,
        event: GpuEvent,
        then: impl FnOnce(Result<(), GpuError>) + Send + 'static,
    ) -> Result<(), GpuError> {
        let queues = CopyQueues::of(self)?;
        let mut state = queues.lock_state();
        state.awaited.push((event, Box::new(then)));
        UNREPORTED.fetch_add(1, Ordering::Relaxed);
        queues.wake_reporter(state);
        Ok(())
    }
}

impl CopyQueues {
    /// Returns the queues of a device. The first call starts them.
    fn of(gpu: &Gpu) -> Result<&'static Self, GpuError> {
        static STARTING: Mutex<()> = Mutex::new(());
        let place = &QUEUES[gpu.ordinal() as usize];
        if let Some(queues) = place.get() {
            return Ok(queues);
        }
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queues) = place.get() {
            return Ok(queues);
        }
        let started = Self::start(gpu).inspect_err(|error| gpu.note_error(error))?;
        Ok(place.get_or_init(|| started))
    }

    /// Creates the streams, and starts the thread. It runs as long as the process.
    fn start(gpu: &Gpu) -> Result<Arc<Self>, GpuError> {
        let streams = [GpuStream::new(gpu)?, GpuStream::new(gpu)?, GpuStream::new(gpu)?];
        let (state, submitted, reporting) = (Mutex::default(), Condvar::new(), Mutex::default());
        let queues = Arc::new(Self { gpu: gpu.clone(), streams, state, submitted, reporting });
        let reporting = Arc::clone(&queues);
        std::thread::Builder::new()
            .name(format!("muster-gpu-{}", gpu.ordinal()))
            .spawn(move || reporting.report_ends())
            .map_err(|error| GpuError { call: "pthread_create", code: 0, name: error.to_string() })?;
        Ok(queues)
    }

    /// Asks for `count` copies, each with `enqueue`, and reports the end of all of them to `then`. `enqueue` tells whether the stream
    /// has work of it, also if it fails.
    fn submit(
        &self,
        direction: CopyDirection,
        then: EndListener,
        count: usize,
        enqueue: impl Fn(usize, CUstream, &mut bool) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let noted = |error: GpuError| {
            self.gpu.note_error(&error);
            error
        };
        let stream = self.streams[direction as usize].handle();
        let _context = self.gpu.enter().map_err(noted)?;
        // The lock keeps the order of the list that of the stream.
        let mut state = self.lock_state();
        let event = match state.free_events.pop() {
            Some(event) => event,
            None => GpuEvent::new(&self.gpu).map_err(noted)?,
        };
        let mut begun = false;
        let outcome = (0..count).try_for_each(|number| enqueue(number, stream, &mut begun));
        if !begun && let Err(error) = outcome {
            return Err(noted(error));
        }
        // Behind the copies that are in the stream, also if a later one failed.
        // SAFETY: the stream is never destroyed.
        let recorded = unsafe { event.record(stream) };
        let outcome = outcome.and(recorded.clone()).map_err(noted);
        let event = recorded.is_ok().then_some(event);
        state.pending[direction as usize].push_back(PendingCopies { event, outcome, then });
        UNREPORTED.fetch_add(1, Ordering::Relaxed);
        self.wake_reporter(state);
        Ok(())
    }

    fn wake_reporter(&self, mut state: MutexGuard<'_, QueueState>) {
        if std::mem::take(&mut state.is_reporter_asleep) {
            drop(state);
            self.submitted.notify_one();
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the device for a copy.
    ///
    /// # Safety
    /// As of [`Gpu::copy`].
    unsafe fn enqueue(
        &self,
        direction: CopyDirection,
        stream: CUstream,
        copy: &GpuCopy,
        begun: &mut bool,
    ) -> Result<(), GpuError> {
        let (&GpuCopy { from, to, len }, driver) = (copy, self.gpu.driver());
        let host = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the caller guarantees the memory.
        let asked = unsafe {
            match direction {
                CopyDirection::ToHost => call!(driver, cuMemcpyDtoHAsync_v2(host(to), from, len, stream)),
                CopyDirection::ToDevice => {
                    call!(driver, cuMemcpyHtoDAsync_v2(to, host(from).cast_const(), len, stream))
                }
                CopyDirection::BetweenDevices => {
                    call!(driver, cuMemcpyDtoDAsync_v2(to, from, len, stream))
                }
            }
        };
        asked.inspect(|()| *begun = true)
    }

    /// Asks the device for rows.
    ///
    /// # Safety
    /// As of [`Gpu::copy_rows`].
    unsafe fn enqueue_rows(
        &self,
        stream: CUstream,
        rows: &GpuRows,
        begun: &mut bool,
    ) -> Result<(), GpuError> {
        let &GpuRows { first: GpuCopy { from, to, len }, count, pitches } = rows;
        if count > 1 && pitches.iter().all(|pitch| *pitch <= PITCH_MAX) {
            let copy = CUDA_MEMCPY2D {
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcDevice: from,
                srcPitch: pitches[0],
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstDevice: to,
                dstPitch: pitches[1],
                WidthInBytes: len,
                Height: count,
                srcXInBytes: 0,
                srcY: 0,
                srcHost: std::ptr::null(),
                srcArray: std::ptr::null_mut(),
                dstXInBytes: 0,
                dstY: 0,
                dstHost: std::ptr::null_mut(),
                dstArray: std::ptr::null_mut(),
            };
            // SAFETY: the caller guarantees the memory, and the driver reads the description during the call.
            match unsafe { call!(self.gpu.driver(), cuMemcpy2DAsync_v2(&raw const copy, stream)) } {
                // A driver may refuse distances that it would not have chosen itself.
                Err(error) if error.code == INVALID_VALUE => {}
                outcome => return outcome.inspect(|()| *begun = true),
            }
        }
        // SAFETY: as above.
        (0..count).try_for_each(|number| unsafe {
            self.enqueue(CopyDirection::BetweenDevices, stream, &rows.row(number), begun)
        })
    }

    /// Reports the ends of copies, for ever.
    fn report_ends(&self) {
        become_reporting_thread();
        let (mut idle_rounds, mut empty_rounds, mut helped_rounds) = (0, 0, 0);
        loop {
            let mut state = self.lock_state();
            while state.awaited.is_empty() && state.pending.iter().all(VecDeque::is_empty) {
                idle_rounds = 0;
                empty_rounds += 1;
                if empty_rounds <= ROUNDS_AWAKE {
                    self.pause_awake(state, &mut helped_rounds);
                    state = self.lock_state();
                } else {
                    state.is_reporter_asleep = true;
                    state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            drop(state);
            empty_rounds = 0;
            let turn = self.reporting.lock().unwrap_or_else(PoisonError::into_inner);
            idle_rounds = match self.report_round(turn, self.lock_state()) {
                Some(state) => self.wait_for_next_round(state, idle_rounds + 1, &mut helped_rounds),
                None => 0,
            };
        }
    }

    /// Pauses for a moment in which a request wakes no thread: the shortest one, or a longer one while other threads look, too.
    fn pause_awake(&self, state: MutexGuard<'_, QueueState>, helped_rounds: &mut u32) {
        *helped_rounds = match IS_HELPED.swap(false, Ordering::Relaxed) {
            true => ROUNDS_HELPED,
            false => helped_rounds.saturating_sub(1),
        };
        if *helped_rounds == 0 {
            drop(state);
            std::thread::yield_now();
        } else {
            let paused = self.submitted.wait_timeout(state, PAUSE_WHILE_HELPED);
            drop(paused.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Reports what has ended by now. Returns the state if nothing has.
    fn report_round<'a>(
        &self,
        _turn: MutexGuard<'_, ()>,
        mut state: MutexGuard<'a, QueueState>,
    ) -> Option<MutexGuard<'a, QueueState>> {
        let mut ended = Vec::new();
        for direction in 0..state.pending.len() {
            self.take_ended(&mut state, direction, &mut ended);
        }
        self.take_happened(&mut state, &mut ended);
        if ended.is_empty() {
            return Some(state);
        }
        drop(state);
        UNREPORTED.fetch_sub(ended.len(), Ordering::Relaxed);
        for (then, outcome) in ended {
            // A listener that panics must not end the reports of all others.
            let told = std::panic::catch_unwind(AssertUnwindSafe(|| then(outcome)));
            if told.is_err() {
                tracing::error!(gpu = self.gpu.ordinal(), "a listener of a copy panicked");
            }
        }
        None
    }

    /// Waits a moment before the next look: the longer nothing has ended, the longer. Returns the number of such rounds, which
    /// begins anew with a new request.
    fn wait_for_next_round(
        &self,
        mut state: MutexGuard<'_, QueueState>,
        idle_rounds: u32,
        helped_rounds: &mut u32,
    ) -> u32 {
        let Some(pause) = pause_before_next_query(idle_rounds) else {
            self.pause_awake(state, helped_rounds);
            return idle_rounds;
        };
        state.is_reporter_asleep = true;
        let (mut state, timeout) =
            self.submitted.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
        state.is_reporter_asleep = false;
        drop(state);
        if timeout.timed_out() { idle_rounds } else { 0 }
    }

    /// Takes the requests of a direction that have ended. They end in order.
    fn take_ended(
        &self,
        state: &mut QueueState,
        direction: usize,
        ended: &mut Vec<(EndListener, Result<(), GpuError>)>,
    ) {
        while let Some(first) = state.pending[direction].front() {
            let happened = match &first.event {
                Some(event) => event.has_happened(),
                None => self.streams[direction].is_idle(),
            };
            if is_under_way(&happened) {
                return;
            }
            let Some(PendingCopies { event, outcome, then }) = state.pending[direction].pop_front() else {
                return;
            };
            if happened.is_ok() && state.free_events.len() < FREE_EVENTS_MAX {
                state.free_events.extend(event);
            }
            ended.push((then, happened.and(outcome)));
        }
    }

    /// Takes the events that have happened.
    fn take_happened(&self, state: &mut QueueState, ended: &mut Vec<(EndListener, Result<(), GpuError>)>) {
        let mut at = 0;
        while at < state.awaited.len() {
            let happened = state.awaited[at].0.has_happened();
            if is_under_way(&happened) {
                at += 1;
                continue;
            }
            let (_, then) = state.awaited.swap_remove(at);
            ended.push((then, happened.map(drop)));
        }
    }
}

/// Returns whether a query tells that work is not known to have ended. If the query itself failed, and the device is not
/// lost, the work may go on.
fn is_under_way(happened: &Result<bool, GpuError>) -> bool {
    match happened {
        Ok(happened) => !happened,
        Err(error) => !error.is_sticky(),
    }
}

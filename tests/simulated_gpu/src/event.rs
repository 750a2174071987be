//! Events. A record is numbered. A wait or a query is about one record, the latest at the time of the call.
//!
//! The state of an event is a page. The page of an interprocess event is a file in memory, which other processes map. It
//! names the recording process, so that a wait can tell that the record will never complete.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::context::{check_ready, current_device};
use crate::counters::{Counter, CounterGuard};
use crate::device::Device;
use crate::device_memory::{Mapping, PAGE, create_file};
use crate::error::{
    Answer, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OUT_OF_MEMORY, check_sticky, code_of, error_of,
    is_lost, write_out,
};
use crate::handles::new_handle;
use crate::process::ProcessIdentity;
use crate::settings::Setting;
use crate::stream::{ExecuteOrDiscard, Stream, on_stream};
use crate::wait::{lock, wait_until, wake_all_waits};

/// Flags of events, as `CUevent_flags` numbers them.
pub const BLOCKING_SYNC: c_uint = 1;
pub const DISABLE_TIMING: c_uint = 2;
pub const INTERPROCESS: c_uint = 4;

/// How many records of one event are told apart.
const SLOTS: usize = 128;

/// One record.
#[repr(C)]
struct EventRecordSlot {
    /// The number of the record that has completed here last.
    completed: AtomicU64,
    /// The number of the record here that was discarded last.
    discarded: AtomicU64,
    /// The process that records.
    pid: AtomicU64,
}

/// The state of an event.
#[repr(C)]
struct EventState {
    /// The number of the last record that was begun.
    begun: AtomicU64,
    /// The number of the last record that every process may see.
    latest: AtomicU64,
    slots: [EventRecordSlot; SLOTS],
}

/// The start times of the recording processes are in the next page.
const STATE_LEN: usize = 2 * PAGE;
const _: () = assert!(size_of::<EventState>() <= PAGE);

/// An event of this process, or one of another process that this one has opened.
pub struct Event {
    pub device: Device,
    flags: c_uint,
    state: Mapping,
    file: OwnedFd,
    /// When the last records completed, for events with timing.
    times: Mutex<BTreeMap<u64, Instant>>,
    /// Whether another process created it.
    is_imported: bool,
    _guard: CounterGuard,
}

/// One record of an event.
#[derive(Clone)]
pub struct EventRecord {
    event: Arc<Event>,
    number: u64,
}

static EVENTS: Mutex<BTreeMap<usize, Arc<Event>>> = Mutex::new(BTreeMap::new());

impl Event {
    fn new(device: Device, flags: c_uint, file: OwnedFd, is_imported: bool) -> Answer<Self> {
        let state = Mapping::new(file.as_fd(), 0, STATE_LEN).ok_or(OUT_OF_MEMORY)?;
        let times = Mutex::default();
        Ok(Self {
            device,
            flags,
            state,
            file,
            times,
            is_imported,
            _guard: Counter::Events.count_while_guard_lives(),
        })
    }

    /// Opens an event of another process, and returns its handle.
    pub fn import(device: Device, flags: c_uint, file: OwnedFd) -> Answer<usize> {
        Ok(register_event(Self::new(device, flags, file, true)?))
    }

    /// Returns the event of a handle.
    pub fn find(handle: usize) -> Answer<Arc<Self>> {
        lock(&EVENTS).get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    /// Returns the file and the flags, if this process may give them to another.
    pub fn export(&self) -> Option<(BorrowedFd<'_>, c_uint)> {
        (self.flags & INTERPROCESS != 0 && !self.is_imported).then(|| (self.file.as_fd(), self.flags))
    }

    fn state(&self) -> &EventState {
        // SAFETY: the pages are mapped as long as `self` lives; atomics may have any value.
        unsafe { &*(self.state.address() as *const EventState) }
    }

    fn slot(&self, number: u64) -> &EventRecordSlot {
        &self.state().slots[(number % SLOTS as u64) as usize]
    }

    /// Returns where the start time of a recording process is.
    fn start_time(&self, number: u64) -> &AtomicU64 {
        let at = self.state.address() + PAGE as u64 + 8 * (number % SLOTS as u64);
        // SAFETY: the second page has a number for each slot.
        unsafe { &*(at as *const AtomicU64) }
    }

    /// Begins a record by this process.
    fn begin(self: &Arc<Self>) -> EventRecord {
        let (number, own) = (self.state().begun.fetch_add(1, SeqCst) + 1, ProcessIdentity::own());
        self.slot(number).pid.store(own.pid, SeqCst);
        self.start_time(number).store(own.started, SeqCst);
        self.state().latest.fetch_max(number, SeqCst);
        EventRecord { event: self.clone(), number }
    }

    /// Returns the latest record; `None` if there was none.
    pub fn latest(self: &Arc<Self>) -> Option<EventRecord> {
        let number = self.state().latest.load(SeqCst);
        (number > 0).then(|| EventRecord { event: self.clone(), number })
    }
}

impl EventRecord {
    fn is_complete(&self) -> bool {
        self.event.slot(self.number).completed.load(SeqCst) >= self.number
    }

    /// Returns whether no process can complete the record any more.
    fn is_orphaned(&self) -> bool {
        let slot = self.event.slot(self.number);
        let started = self.event.start_time(self.number).load(SeqCst);
        let recorder = ProcessIdentity { pid: slot.pid.load(SeqCst), started };
        let is_lost = slot.discarded.load(SeqCst) >= self.number || !recorder.is_alive();
        // A process may have completed the record just before it ended.
        is_lost && !self.is_complete()
    }

    fn complete_or_discard(&self, turn: ExecuteOrDiscard) {
        let slot = self.event.slot(self.number);
        if turn == ExecuteOrDiscard::Discard {
            slot.discarded.fetch_max(self.number, SeqCst);
            return;
        }
        if self.event.flags & DISABLE_TIMING == 0 {
            let mut times = lock(&self.event.times);
            times.insert(self.number, Instant::now());
            times.retain(|number, _| number + SLOTS as u64 > self.number);
        }
        slot.completed.fetch_max(self.number, SeqCst);
    }

    /// Waits until the record is complete, orphaned or given up after a sticky error; returns whether it is orphaned.
    fn wait(&self) -> bool {
        let mut is_orphaned = false;
        wait_until(|| {
            is_orphaned = !self.is_complete() && self.is_orphaned();
            is_orphaned || self.is_complete() || is_lost()
        });
        is_orphaned
    }
}

/// Waits for a record in the order of a stream.
fn wait_on_stream(record: &EventRecord) -> Answer {
    if record.wait() {
        Counter::OrphanedWaits.add(1);
        error_of(Setting::OrphanedWait.get())?;
    }
    Ok(())
}

fn register_event(event: Event) -> usize {
    let handle = new_handle();
    lock(&EVENTS).insert(handle, Arc::new(event));
    handle
}

/// Creates an event. Flags: blocking synchronization 1, no timing 2, for other processes 4, which needs 2 (else error 1).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut usize, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|device| {
        let known = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;
        let lacks_timing_flag = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
        if flags & !known != 0 || lacks_timing_flag || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let event = Event::new(device, flags, create_file(STATE_LEN)?, false)?;
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, register_event(event)) }
    }))
}

/// Destroys an event. Work that waits for one of its records goes on waiting.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(handle: usize) -> c_int {
    code_of(check_ready().and_then(|()| lock(&EVENTS).remove(&handle).map(drop).ok_or(INVALID_HANDLE)))
}

/// Records an event: it completes when all work that is on the stream now has ended. The new record replaces the former
/// one for later queries and waits; earlier waits keep theirs. Event and stream must have one device, else error 400.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(handle: usize, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        let (event, stream) = (Event::find(handle)?, Stream::find(stream, device)?);
        if event.device != stream.device {
            return Err(INVALID_HANDLE);
        }
        let record = event.begin();
        stream.enqueue(move |turn| {
            record.complete_or_discard(turn);
            wake_all_waits();
            Ok(())
        });
        Ok(())
    }))
}

/// Lets the later work of a stream wait for the latest record of an event, as of this call. An event that was never
/// recorded is no wait. The stream may belong to another device than the event.
///
/// A record by a process that has ended, or has lost its device, may never complete. The manual leaves that undefined;
/// *unconfirmed*: a real stream is taken to wait for ever. Here the wait ends, and is counted (`orphaned_waits`). The setting
/// `orphaned_wait` makes it a sticky error.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(handle: usize, event: usize, flags: c_uint) -> c_int {
    on_stream(handle, |stream| {
        let event = Event::find(event)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        if let Some(record) = event.latest() {
            stream.enqueue_work(move || wait_on_stream(&record));
        }
        Ok(())
    })
}

/// Returns whether the latest record is complete: success or error 600. An event that was never recorded is complete.
///
/// A record of a process that ended stays at 600 (*unconfirmed*).
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(handle: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        let is_complete = Event::find(handle)?.latest().is_none_or(|record| record.is_complete());
        check_sticky()?;
        if is_complete { Ok(()) } else { Err(NOT_READY) }
    }))
}

/// Waits until the latest record is complete. An event that was never recorded is complete.
///
/// A record of a process that ended ends the wait with error 999 (*unconfirmed*: a real one is taken to wait for ever).
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(handle: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        let is_orphaned = Event::find(handle)?.latest().is_some_and(|record| record.wait());
        check_sticky()?;
        if is_orphaned { Err(crate::error::UNKNOWN) } else { Ok(()) }
    }))
}

/// Returns the milliseconds between two records: error 400 if an event has no timing or was never recorded, 600 if a
/// record is not complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(to: *mut f32, start: usize, end: usize) -> c_int {
    let time = |handle| {
        let event = Event::find(handle)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let record = event.latest().ok_or(INVALID_HANDLE)?;
        let time = lock(&event.times).get(&record.number).copied();
        time.ok_or(NOT_READY)
    };
    code_of(check_ready().and_then(|()| {
        let (start, end): (Instant, Instant) = (time(start)?, time(end)?);
        let sign = if end < start { -1.0 } else { 1.0 };
        let elapsed = end.max(start).duration_since(end.min(start));
        // SAFETY: the caller passes a place for a number.
        unsafe { write_out(to, sign * elapsed.as_secs_f32() * 1e3) }
    }))
}

/// The same as `cuEventElapsedTime` for drivers since CUDA 12.8.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(to: *mut f32, start: usize, end: usize) -> c_int {
    // SAFETY: the caller passes a place for a number.
    unsafe { cuEventElapsedTime(to, start, end) }
}

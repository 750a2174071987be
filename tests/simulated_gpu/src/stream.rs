//! Streams: a thread each, which executes operations in the order in which they were enqueued.
//!
//! After a sticky error a stream discards what is left. The legacy default stream (handles 0 and 1) and the blocking
//! streams of its device wait for one another: an operation of one side begins after all operations that were enqueued on
//! the other side before it. The default stream of a thread (handle 2) is a blocking stream.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::context::{check_ready, current_device, run_host_function};
use crate::counters::{Counter, CounterGuard};
use crate::device::Device;
use crate::error::{
    Answer, INVALID_HANDLE, INVALID_VALUE, NOT_READY, check_sticky, code_of, is_lost, make_sticky, write_out,
};
use crate::handles::new_handle;
use crate::wait::{lock, wait_until, wake_all_waits};

pub const LEAST_PRIORITY: c_int = 0;
pub const GREATEST_PRIORITY: c_int = -5;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// The handles of the legacy default stream are 0 and 1; that of the thread's default stream is 2.
const PER_THREAD: usize = 2;

/// The treatment of an operation by its stream: execute it, or discard it after a sticky error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecuteOrDiscard {
    Execute,
    Discard,
}

type StreamOperation = Box<dyn FnOnce(ExecuteOrDiscard) -> Answer + Send>;

/// A place in the order of a stream: all operations up to this number.
struct StreamPosition {
    stream: Arc<Stream>,
    number: u64,
}

impl StreamPosition {
    fn is_reached(&self) -> bool {
        lock(&self.stream.queue).done >= self.number
    }
}

#[derive(Default)]
struct StreamQueue {
    waiting: VecDeque<(Vec<StreamPosition>, StreamOperation)>,
    enqueued: u64,
    done: u64,
    is_closed: bool,
}

/// An ordered queue of work.
pub struct Stream {
    pub device: Device,
    priority: c_int,
    is_blocking: bool,
    queue: Mutex<StreamQueue>,
    arrived: Condvar,
}

/// The streams that programs made, by their handles.
static STREAMS: Mutex<BTreeMap<usize, (Arc<Stream>, CounterGuard)>> = Mutex::new(BTreeMap::new());
/// The legacy default streams.
static LEGACY: Mutex<BTreeMap<Device, Arc<Stream>>> = Mutex::new(BTreeMap::new());
/// The default streams of threads.
static THREADS: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<BTreeMap<Device, Arc<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

impl Stream {
    fn start(device: Device, priority: c_int, is_blocking: bool) -> Answer<Arc<Self>> {
        let (queue, arrived) = (Mutex::default(), Condvar::new());
        let stream = Arc::new(Self { device, priority, is_blocking, queue, arrived });
        let runner = stream.clone();
        let thread = std::thread::Builder::new().name("simulated-stream".into());
        thread.spawn(move || runner.run()).map_err(|_| crate::error::OUT_OF_MEMORY)?;
        Ok(stream)
    }

    /// Returns the stream of a handle, as a thread with this current device sees it.
    pub fn find(handle: usize, device: Device) -> Answer<Arc<Self>> {
        match handle {
            0 | 1 => legacy_default_stream(device),
            PER_THREAD => OWN.with_borrow_mut(|own| match own.get(&device) {
                Some(stream) => Ok(stream.clone()),
                None => {
                    let stream = Self::start(device, 0, true)?;
                    lock(&THREADS).push(stream.clone());
                    own.insert(device, stream.clone());
                    Ok(stream)
                }
            }),
            _ => lock(&STREAMS).get(&handle).map(|(stream, _)| stream.clone()).ok_or(INVALID_HANDLE),
        }
    }

    /// Executes operations until the stream is destroyed and empty.
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((positions, operation)) = queue.waiting.pop_front() {
                drop(queue);
                wait_until(|| is_lost() || positions.iter().all(StreamPosition::is_reached));
                let turn = if is_lost() { ExecuteOrDiscard::Discard } else { ExecuteOrDiscard::Execute };
                if let Err(error) = operation(turn) {
                    make_sticky(error);
                }
                queue = lock(&self.queue);
                queue.done += 1;
                wake_all_waits();
            } else if queue.is_closed {
                return;
            } else {
                queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Enqueues an operation. An error that it returns becomes sticky.
    pub fn enqueue(&self, operation: impl FnOnce(ExecuteOrDiscard) -> Answer + Send + 'static) {
        // Taken before this operation is enqueued, so that no two operations wait for each other.
        let positions = self.earlier_of_others();
        let mut queue = lock(&self.queue);
        queue.waiting.push_back((positions, Box::new(operation)));
        queue.enqueued += 1;
        self.arrived.notify_one();
    }

    /// Enqueues an operation that is not executed after a sticky error.
    pub fn enqueue_work(&self, operation: impl FnOnce() -> Answer + Send + 'static) {
        self.enqueue(|turn| if turn == ExecuteOrDiscard::Execute { operation() } else { Ok(()) });
    }

    /// Returns the positions on other streams that the next operation waits for.
    fn earlier_of_others(&self) -> Vec<StreamPosition> {
        if !self.is_blocking {
            return Vec::new();
        }
        let legacy = lock(&LEGACY).get(&self.device).cloned();
        let Some(legacy) = legacy else { return Vec::new() };
        if !std::ptr::eq(self, Arc::as_ptr(&legacy)) {
            return vec![last_enqueued_position(legacy)];
        }
        streams_of_device(self.device)
            .filter(|stream| stream.is_blocking && !Arc::ptr_eq(stream, &legacy))
            .map(last_enqueued_position)
            .collect()
    }

    fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.done == queue.enqueued
    }

    /// Waits until what is enqueued now has ended, or until the process has a sticky error.
    pub fn synchronize(self: &Arc<Self>) {
        let end = last_enqueued_position(self.clone());
        wait_until(|| end.is_reached() || is_lost());
    }

    fn close(&self) {
        lock(&self.queue).is_closed = true;
        self.arrived.notify_one();
    }
}

/// Returns the legacy default stream of a device. It exists from its first use on.
fn legacy_default_stream(device: Device) -> Answer<Arc<Stream>> {
    let mut streams = lock(&LEGACY);
    if let Some(stream) = streams.get(&device) {
        return Ok(stream.clone());
    }
    let stream = Stream::start(device, 0, true)?;
    streams.insert(device, stream.clone());
    Ok(stream)
}

fn last_enqueued_position(stream: Arc<Stream>) -> StreamPosition {
    let number = lock(&stream.queue).enqueued;
    StreamPosition { stream, number }
}

/// Returns all streams of a device.
fn streams_of_device(device: Device) -> impl Iterator<Item = Arc<Stream>> {
    let mut all: Vec<_> = lock(&STREAMS).values().map(|(stream, _)| stream.clone()).collect();
    all.extend(lock(&LEGACY).values().cloned());
    all.extend(lock(&THREADS).iter().cloned());
    all.into_iter().filter(move |stream| stream.device == device)
}

/// Waits for all work of a device.
pub fn synchronize_all(device: Device) {
    streams_of_device(device).for_each(|stream| stream.synchronize());
}

/// Destroys the streams of a device whose context ends.
pub fn destroy_all(device: Device) {
    lock(&STREAMS).retain(|_, (stream, _)| {
        if stream.device == device {
            stream.close();
        }
        stream.device != device
    });
}

/// Runs a call about a stream.
pub fn on_stream(handle: usize, body: impl FnOnce(Arc<Stream>) -> Answer) -> c_int {
    code_of(current_device().and_then(|device| body(Stream::find(handle, device)?)))
}

/// Creates a stream of priority 0. Flags: non-blocking 1, which exempts it from waiting for the legacy default stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(to: *mut usize, flags: c_uint) -> c_int {
    // SAFETY: the caller passes a place for a handle.
    unsafe { cuStreamCreateWithPriority(to, flags, 0) }
}

/// Creates a stream. A priority outside of the range is moved to its nearer end. Priorities order work that is ready; they
/// promise nothing, and here they have no effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut usize, flags: c_uint, priority: c_int) -> c_int {
    code_of(current_device().and_then(|device| {
        if flags & !NON_BLOCKING != 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
        let stream = Stream::start(device, priority, flags & NON_BLOCKING == 0)?;
        let handle = new_handle();
        lock(&STREAMS).insert(handle, (stream, Counter::Streams.count_while_guard_lives()));
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, handle) }
    }))
}

/// Returns the priority of a stream, as it was moved into the range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(handle: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    on_stream(handle, |stream| unsafe { write_out(to, stream.priority) })
}

/// Destroys a stream. The call returns at once; the stream's work goes on to its end. Default streams give error 400.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(handle: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        let (stream, _) = lock(&STREAMS).remove(&handle).ok_or(INVALID_HANDLE)?;
        stream.close();
        Ok(())
    }))
}

/// Returns whether all work of a stream has ended: success or error 600 (not ready).
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(handle: usize) -> c_int {
    on_stream(handle, |stream| {
        let is_idle = stream.is_idle();
        // An operation that failed has made its error sticky before it counts as ended.
        check_sticky()?;
        if is_idle { Ok(()) } else { Err(NOT_READY) }
    })
}

/// Waits until all work of a stream has ended, and returns an error of that work.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(handle: usize) -> c_int {
    on_stream(handle, |stream| {
        stream.synchronize();
        check_sticky()
    })
}

/// Returns whether a stream records a graph. Graphs do not exist here, so the answer is 0 (none).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    on_stream(handle, |_| unsafe { write_out(to, 0) })
}

/// Calls a function of the host after all earlier work of a stream; the stream's later work waits for its return. The
/// function may make no CUDA call (error 800 here), and is not called after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    handle: usize,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> c_int {
    let data = data as usize;
    on_stream(handle, |stream| {
        let function = function.ok_or(INVALID_VALUE)?;
        stream.enqueue_work(move || {
            // SAFETY: the caller promises that the function may be called with this argument, once.
            run_host_function(|| unsafe { function(data as *mut c_void) });
            Ok(())
        });
        Ok(())
    })
}

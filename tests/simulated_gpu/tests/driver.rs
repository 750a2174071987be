//! Calls of the driver, as the tests use them.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use cudarc::driver::result::{self, ctx, primary_ctx, stream};
use cudarc::driver::sys::{self, CUresult};
use simulated_gpu::SimulatedGpu;

pub use cudarc::driver::sys::{CUevent, CUstream};

pub const OK: CUresult = CUresult::CUDA_SUCCESS;
pub const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
pub const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
pub const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
pub const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
pub const ILLEGAL_ADDRESS: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;

/// Flags of an event that only orders, and of one for other processes.
pub const ORDER_ONLY: u32 = 2;
pub const SHARED: u32 = 6;

/// Loads the simulated driver, and makes the context of device 0 current.
pub fn start() -> &'static SimulatedGpu {
    let gpu = SimulatedGpu::load();
    result::init().unwrap();
    use_device(0);
    gpu
}

/// Makes the context of a device current on this thread.
pub fn use_device(ordinal: i32) {
    // SAFETY: the context is never released.
    unsafe { ctx::set_current(primary_ctx::retain(ordinal).unwrap()).unwrap() };
}

/// Creates a stream that the default stream does not order.
pub fn new_stream() -> CUstream {
    stream::create(stream::StreamKind::NonBlocking).unwrap()
}

pub fn query(stream: CUstream) -> CUresult {
    // SAFETY: a handle is checked by the library.
    unsafe { sys::cuStreamQuery(stream) }
}

pub fn synchronize(stream: CUstream) -> CUresult {
    // SAFETY: a handle is checked by the library.
    unsafe { sys::cuStreamSynchronize(stream) }
}

pub fn allocate(len: usize) -> u64 {
    // SAFETY: the memory is only used by copies.
    unsafe { result::malloc_sync(len).unwrap() }
}

pub fn free(at: u64) -> CUresult {
    // SAFETY: an address is checked by the library.
    unsafe { sys::cuMemFree_v2(at) }
}

/// Returns the answer of an allocation.
pub fn try_allocate(len: usize) -> CUresult {
    let mut at = 0;
    // SAFETY: the library writes an address.
    unsafe { sys::cuMemAlloc_v2(&raw mut at, len) }
}

pub fn fill(at: u64, byte: u8, len: usize, stream: CUstream) -> CUresult {
    // SAFETY: an address is checked by the library.
    unsafe { sys::cuMemsetD8Async(at, byte, len, stream) }
}

pub fn copy(to: u64, from: u64, len: usize, stream: CUstream) -> CUresult {
    // SAFETY: an address is checked by the library, and host memory lives as long as the test.
    unsafe { sys::cuMemcpyAsync(to, from, len, stream) }
}

/// Allocates page-locked memory for the rest of the process.
pub fn allocate_pinned(len: usize) -> &'static mut [u8] {
    // SAFETY: the memory is new, has this length, and is never freed by this function.
    unsafe { std::slice::from_raw_parts_mut(result::malloc_host(len, 0).unwrap().cast(), len) }
}

pub fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr() as u64
}

/// Returns the bytes of device memory, read by a stream of their own.
pub fn contents(at: u64, len: usize) -> Vec<u8> {
    let (stream, to) = (new_stream(), allocate_pinned(len));
    assert_eq!(copy(address(to), at, len, stream), OK);
    assert_eq!(synchronize(stream), OK);
    let read = to.to_vec();
    // The memory is not freed: that waits for all work of the device, which may wait for this thread.
    // SAFETY: the stream is not used any more.
    unsafe { stream::destroy(stream).unwrap() };
    read
}

/// Writes bytes to device memory by a stream of their own.
pub fn write_device_bytes(at: u64, bytes: &[u8]) {
    let (stream, from) = (new_stream(), allocate_pinned(bytes.len()));
    from.copy_from_slice(bytes);
    assert_eq!(copy(at, address(from), bytes.len(), stream), OK);
    assert_eq!(synchronize(stream), OK);
}

pub fn new_event(flags: u32) -> CUevent {
    let mut event = std::ptr::null_mut();
    // SAFETY: the library writes a handle.
    unsafe { sys::cuEventCreate(&raw mut event, flags).result().unwrap() };
    event
}

pub fn record(event: CUevent, stream: CUstream) -> CUresult {
    // SAFETY: handles are checked by the library.
    unsafe { sys::cuEventRecord(event, stream) }
}

pub fn query_event(event: CUevent) -> CUresult {
    // SAFETY: a handle is checked by the library.
    unsafe { sys::cuEventQuery(event) }
}

pub fn wait_event(stream: CUstream, event: CUevent) -> CUresult {
    // SAFETY: handles are checked by the library.
    unsafe { sys::cuStreamWaitEvent(stream, event, 0) }
}

/// Holds a stream until it is opened.
pub struct Gate(&'static AtomicU32);

impl Gate {
    /// Lets the later work of a stream wait.
    pub fn close(stream: CUstream) -> Self {
        let bytes = allocate_pinned(4);
        // SAFETY: the memory is aligned to a page, and lives as long as the process.
        let word = unsafe { &*bytes.as_ptr().cast::<AtomicU32>() };
        // SAFETY: addresses are checked by the library.
        unsafe { sys::cuStreamWaitValue32_v2(stream, address(bytes), 1, 0).result().unwrap() };
        Self(word)
    }

    pub fn open(&self) {
        self.0.store(1, SeqCst);
    }
}

/// Calls a function on a stream, and lets it return something through its argument.
pub fn launch_host_function<T>(
    stream: CUstream,
    function: unsafe extern "C" fn(*mut c_void),
    argument: &'static T,
) {
    let argument = std::ptr::from_ref(argument).cast_mut().cast();
    // SAFETY: the function takes this argument, which lives as long as the process.
    unsafe { stream::launch_host_function(stream, function, argument).unwrap() };
}

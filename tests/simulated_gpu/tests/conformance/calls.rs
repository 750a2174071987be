//! Calls of one process: devices, contexts, streams, events, memory, copies.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use cudarc::driver::sys::{
    self, CUdevice_attribute as DeviceAttribute, CUpointer_attribute as PointerAttribute, CUresult,
};

use super::Answers;
use crate::driver::{
    CUevent, CUstream, address, allocate, allocate_pinned, contents, copy, fill, free, launch_host_function,
    new_event, new_stream, query, query_event, record, synchronize, try_allocate, use_device, wait_event,
    write_device_bytes,
};

/// Set when the function on the held stream may return.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn wait_until_open(_: *mut c_void) {
    while !IS_OPEN.load(SeqCst) {
        std::thread::yield_now();
    }
}

/// Holds a stream until `IS_OPEN` is set.
fn hold_stream_until_open(stream: CUstream) {
    IS_OPEN.store(false, SeqCst);
    launch_host_function(stream, wait_until_open, &IS_OPEN);
}

fn create_stream(flags: u32) -> CUresult {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the library writes a handle.
    unsafe { sys::cuStreamCreate(&raw mut stream, flags) }
}

fn create_event(flags: u32) -> CUresult {
    let mut event = std::ptr::null_mut();
    // SAFETY: the library writes a handle.
    unsafe { sys::cuEventCreate(&raw mut event, flags) }
}

pub fn before_initialization(answers: &mut Answers, is_initialized: bool) {
    answers.section("before initialization");
    let mut number = 0;
    // SAFETY: the library writes a number.
    unsafe {
        let count = sys::cuDeviceGetCount(&raw mut number);
        // The presence of a real driver is found out by its initialization.
        let count = if is_initialized { CUresult::CUDA_ERROR_NOT_INITIALIZED } else { count };
        answers.note("cuDeviceGetCount", count);
        answers.note("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut number));
        answers.note("cuInit with flags", sys::cuInit(1));
        answers.note("cuInit", sys::cuInit(0));
    }
}

pub fn devices_and_contexts(answers: &mut Answers) {
    answers.section("devices and contexts");
    let mut number = -1;
    // SAFETY: the library writes numbers and handles; the context is retained once more than it is released.
    unsafe {
        answers.note("cuDeviceGet of device -1", sys::cuDeviceGet(&raw mut number, -1));
        answers.note("cuDeviceGet of device 1000", sys::cuDeviceGet(&raw mut number, 1000));
        answers.note("cuDeviceGet", (sys::cuDeviceGet(&raw mut number, 0), number));
        let mut attribute = |attribute| (sys::cuDeviceGetAttribute(&raw mut number, attribute, 0), number);
        use DeviceAttribute as A;
        answers.note("unified addresses", attribute(A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING));
        let vmm = A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        answers.note("virtual memory management", attribute(vmm));
        let descriptors = A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        answers.note("handles as descriptors", attribute(descriptors));
        answers.note("events for other processes", attribute(A::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED));
        answers.note("cuCtxGetDevice without a context", sys::cuCtxGetDevice(&raw mut number));
        answers.note("cuStreamCreate without a context", create_stream(1));
        answers.note("cuEventCreate without a context", create_event(2));
        answers.note("cuMemAlloc without a context", try_allocate(4));
        answers.note("cuDevicePrimaryCtxRelease without a retain", sys::cuDevicePrimaryCtxRelease_v2(0));
        let (mut flags, mut is_active) = (0, -1);
        let mut state =
            || (sys::cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut is_active), is_active);
        answers.note("the primary context before a retain", state());
        use_device(0);
        answers.note("cuCtxGetDevice", (sys::cuCtxGetDevice(&raw mut number), number));
        answers.note("cuCtxSetCurrent of none", sys::cuCtxSetCurrent(std::ptr::null_mut()));
        answers.note("cuCtxSynchronize without a context", sys::cuCtxSynchronize());
        use_device(0);
        answers.note("cuDevicePrimaryCtxRelease", sys::cuDevicePrimaryCtxRelease_v2(0));
        answers.note("the primary context after it", {
            let (mut flags, mut is_active) = (0, -1);
            (sys::cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut is_active), is_active)
        });
        answers.note("cuCtxSynchronize", sys::cuCtxSynchronize());
    }
}

pub fn streams(answers: &mut Answers) {
    answers.section("streams");
    let (mut stream, mut priority, null): (CUstream, i32, CUstream) =
        (std::ptr::null_mut(), 99, std::ptr::null_mut());
    // SAFETY: the library writes handles and numbers.
    unsafe {
        answers.note("cuStreamCreate with flags 4", create_stream(4));
        let (mut least, mut greatest) = (99, 99);
        answers.note("priorities", sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest));
        answers.note("the greatest is not greater", greatest <= least);
        answers.note(
            "cuStreamCreateWithPriority",
            sys::cuStreamCreateWithPriority(&raw mut stream, 1, greatest - 100),
        );
        answers.note("cuStreamGetPriority", sys::cuStreamGetPriority(stream, &raw mut priority));
        answers.note("it is moved into the range", priority == greatest);
        answers.note("cuStreamQuery of a new stream", query(stream));
        answers.note("cuStreamSynchronize", synchronize(stream));
        let mut capture = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        answers.note("cuStreamIsCapturing", (sys::cuStreamIsCapturing(stream, &raw mut capture), capture));
        hold_stream_until_open(stream);
        answers.note("cuStreamQuery while work is left", query(stream));
        answers.note("cuStreamDestroy while work is left", sys::cuStreamDestroy_v2(stream));
        IS_OPEN.store(true, SeqCst);
        answers.note("cuStreamQuery of the default stream", query(null));
        answers.note("cuStreamDestroy of the default stream", sys::cuStreamDestroy_v2(null));
        answers.note(
            "cuLaunchHostFunc without a function",
            sys::cuLaunchHostFunc(null, None, std::ptr::null_mut()),
        );
    }
}

pub fn events(answers: &mut Answers) {
    answers.section("events");
    let (stream, other) = (new_stream(), new_stream());
    let [timed, event]: [CUevent; 2] = [new_event(0), new_event(2)];
    let mut ms = 0.0;
    let mut elapsed = |from, to| {
        // SAFETY: the library writes a number.
        unsafe { sys::cuEventElapsedTime(&raw mut ms, from, to) }
    };
    answers.note("cuEventCreate with flags 8", create_event(8));
    answers.note("cuEventCreate for processes with timing", create_event(4));
    answers.note("cuEventCreate for processes", create_event(6));
    answers.note("cuEventQuery of an event without a record", query_event(event));
    // SAFETY: the handle exists.
    answers
        .note("cuEventSynchronize of an event without a record", unsafe { sys::cuEventSynchronize(event) });
    answers.note("cuEventElapsedTime without records", elapsed(timed, timed));
    answers.note("cuStreamWaitEvent of an event without a record", wait_event(stream, event));
    answers.note("the stream does not wait", synchronize(stream));
    answers.note("cuEventRecord", record(timed, stream));
    answers.note("cuEventRecord without timing", record(event, stream));
    synchronize(stream);
    answers.note("cuEventQuery", query_event(event));
    answers.note("cuEventElapsedTime", elapsed(timed, timed));
    answers.note("cuEventElapsedTime without timing", elapsed(timed, event));
    hold_stream_until_open(stream);
    answers.note("cuEventRecord behind work", record(event, stream));
    answers.note("cuEventRecord with timing behind work", record(timed, stream));
    answers.note("cuEventQuery of it", query_event(event));
    answers.note("cuEventElapsedTime of it", elapsed(timed, timed));
    answers.note("cuStreamWaitEvent of it", wait_event(other, event));
    answers.note("the other stream waits", query(other));
    answers.note("cuEventRecord on a third stream", record(event, new_stream()));
    // SAFETY: the handle exists.
    answers.note("cuEventSynchronize is about the latest record", unsafe { sys::cuEventSynchronize(event) });
    answers.note("the other stream waits for the former record", query(other));
    // SAFETY: the handle exists, and is not used any more.
    answers.note("cuEventDestroy while a stream waits", unsafe { sys::cuEventDestroy_v2(event) });
    answers.note("the other stream still waits", query(other));
    IS_OPEN.store(true, SeqCst);
    answers.note("the other stream after the first one", synchronize(other));
    answers.note("cuStreamWaitEvent with flags 8", {
        // SAFETY: handles exist.
        unsafe { sys::cuStreamWaitEvent(other, timed, 8) }
    });
}

pub fn memory(answers: &mut Answers) {
    answers.section("device memory");
    let at = allocate(4096);
    let (mut free_bytes, mut all) = (0, 0);
    // SAFETY: the library writes numbers.
    answers.note("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free_bytes, &raw mut all) });
    answers.note("cuMemAlloc of nothing", try_allocate(0));
    answers.note("cuMemAlloc of more than there is", try_allocate(all + 1));
    answers.note("cuMemAlloc after it", try_allocate(4096));
    answers.note("cuMemFree of null", free(0));
    answers.note("cuMemFree of an inner address", free(at + 256));
    answers.note("cuMemFree", free(at));
    let attribute = |attribute, at| {
        let mut value = 0u64;
        // SAFETY: the library writes at most eight bytes.
        let answer = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, at) };
        (answer, value)
    };
    use PointerAttribute as A;
    let (at, host, heap) = (allocate(4096), allocate_pinned(4096), vec![0u8; 4096]);
    answers.note("memory type of device memory", attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 100));
    answers.note(
        "memory type of page-locked memory",
        attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(host)),
    );
    answers.note("memory type of the heap", attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(&heap)).0);
    answers.note("device of device memory", attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at));
    let capable = A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    answers.note("device memory has handles", attribute(capable, at));
    let (first, size) = (A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, A::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
    answers.note("the range begins at its first address", attribute(first, at + 100).1 == at);
    answers.note("the range has its size", attribute(size, at + 100));
}

pub fn host_memory(answers: &mut Answers) {
    answers.section("host memory");
    let bytes = vec![0u8; 64 << 10];
    let start = address(&bytes).next_multiple_of(4096);
    // SAFETY: ranges are checked by the library, and lie in the vector.
    unsafe {
        let pointer = |offset: u64| (start + offset) as *mut c_void;
        let register = |offset, len, flags| sys::cuMemHostRegister_v2(pointer(offset), len, flags);
        answers.note("cuMemHostRegister of nothing", register(0, 0, 0));
        answers.note("cuMemHostRegister with flags 64", register(0, 4096, 64));
        answers.note("cuMemHostRegister", register(4096, 8192, 0));
        answers.note("cuMemHostRegister of the same", register(4096, 8192, 0));
        answers.note("cuMemHostRegister of an overlap", register(8192, 8192, 0));
        answers.note("cuMemHostRegister beside it", register(12288, 4096, 0));
        let mut device_address = 0;
        let mut get = |offset, flags| {
            sys::cuMemHostGetDevicePointer_v2(&raw mut device_address, pointer(offset), flags)
        };
        answers.note("cuMemHostGetDevicePointer", get(4096, 0));
        answers.note("cuMemHostGetDevicePointer with flags", get(4096, 1));
        answers.note("cuMemHostGetDevicePointer of the heap", get(32768, 0));
        answers.note_open("the addresses are the same", device_address == start + 4096);
        answers.note("cuMemHostUnregister of the heap", sys::cuMemHostUnregister(pointer(32768)));
        answers.note("cuMemHostUnregister", sys::cuMemHostUnregister(pointer(4096)));
        answers.note("cuMemHostUnregister again", sys::cuMemHostUnregister(pointer(4096)));
        answers.note("cuMemHostUnregister of the other", sys::cuMemHostUnregister(pointer(12288)));
        answers.note("cuMemFreeHost of the heap", sys::cuMemFreeHost(pointer(0)));
        let mut at = std::ptr::null_mut();
        answers.note("cuMemHostAlloc of nothing", sys::cuMemHostAlloc(&raw mut at, 0, 0));
        answers.note("cuMemHostAlloc with flags 64", sys::cuMemHostAlloc(&raw mut at, 4096, 64));
        answers.note("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut at, 4096, 3));
        answers.note("cuMemFreeHost", sys::cuMemFreeHost(at));
        answers.note("cuMemHostRegister again", register(4096, 8192, 0));
        answers.note("cuMemHostUnregister of an inner address", sys::cuMemHostUnregister(pointer(8192)));
        // Not noted: it depends on the answer before.
        let _ = sys::cuMemHostUnregister(pointer(4096));
        let allocated = allocate_pinned(4096).as_mut_ptr().cast();
        answers.note("cuMemHostUnregister of an allocation", sys::cuMemHostUnregister(allocated));
    }
}

pub fn copies(answers: &mut Answers) {
    answers.section("copies");
    let (stream, at, other, host) = (new_stream(), allocate(8192), allocate(8192), allocate_pinned(8192));
    let mut heap = vec![3u8; 8192];
    write_device_bytes(at, &[5; 8192]);
    answers.note("cuMemcpyAsync between allocations", copy(other, at, 8192, stream));
    answers.note("cuMemcpyAsync to the host", copy(address(host), other, 8192, stream));
    answers.note("cuStreamSynchronize", synchronize(stream));
    answers.note("the contents arrived", host.iter().all(|byte| *byte == 5));
    answers.note("cuMemcpyAsync from the heap", copy(at, address(&heap), 8192, stream));
    answers.note("cuMemcpyAsync to the heap", copy(heap.as_mut_ptr() as u64, other, 8192, stream));
    answers.note("the contents are there after the call", heap.iter().all(|byte| *byte == 5));
    answers.note("cuMemsetD8Async", fill(at, 9, 8192, stream));
    answers.note("cuStreamSynchronize after it", synchronize(stream));
    answers.note("the bytes are set", contents(at, 8192).iter().all(|byte| *byte == 9));
    answers.note("cuMemcpyAsync of nothing", copy(other, at, 0, stream));
    answers.note("cuMemsetD8Async of nothing", fill(other, 1, 0, stream));
    answers.note("cuMemcpyAsync beyond the end", copy(other, at, 8193, stream));
    answers.note("cuMemsetD8Async beyond the end", fill(at + 8000, 1, 500, stream));
    // SAFETY: addresses are checked by the library.
    unsafe {
        let (host, heap) = (host.as_mut_ptr().cast::<c_void>(), heap.as_ptr().cast::<c_void>());
        answers.note("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(at, heap, 8192, stream));
        answers.note("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(host, at, 8192, stream));
        answers.note("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(other, at, 8192, stream));
        answers
            .note("cuMemcpyHtoDAsync to the host", sys::cuMemcpyHtoDAsync_v2(heap as u64, host, 4, stream));
    }
    answers.note("cuStreamSynchronize at the end", synchronize(stream));
    let rows = |pitches: [usize; 2], width, height| sys::CUDA_MEMCPY2D {
        srcXInBytes: 1,
        srcY: 1,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: at,
        srcArray: std::ptr::null_mut(),
        srcPitch: pitches[0],
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: other,
        dstArray: std::ptr::null_mut(),
        dstPitch: pitches[1],
        WidthInBytes: width,
        Height: height,
    };
    let numbers: Vec<u8> = (0..8192_u32).map(|number| (number % 251) as u8).collect();
    write_device_bytes(at, &numbers);
    write_device_bytes(other, &[7; 8192]);
    let mut copy_rows = |name: &str, pitches, width, height| {
        let copy = rows(pitches, width, height);
        // SAFETY: addresses are checked by the library.
        answers.note_open(name, unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) });
    };
    copy_rows("cuMemcpy2DAsync of odd pitches", [101, 3], 3, 80);
    copy_rows("cuMemcpy2DAsync of no rows", [101, 3], 3, 0);
    copy_rows("cuMemcpy2DAsync of rows without bytes", [101, 3], 0, 80);
    copy_rows("cuMemcpy2DAsync of rows that overlap", [2, 3], 3, 80);
    copy_rows("cuMemcpy2DAsync beyond the end", [101, 3], 3, 82);
    copy_rows("cuMemcpy2DAsync of one row with a great pitch", [1 << 31, 3], 3, 1);
    answers.note_open("cuStreamSynchronize after rows", synchronize(stream));
    let copied = contents(other, 8192);
    let row_is_there = |row: usize| copied[row * 3..][..3] == numbers[101 * (row + 1) + 1..][..3];
    answers.note_open("the rows are there", (0..80).all(row_is_there));
    answers.note_open("nothing else is", copied[240..].iter().all(|byte| *byte == 7));
}

pub fn values(answers: &mut Answers) {
    answers.section("values of streams");
    let (stream, words, heap) = (new_stream(), allocate_pinned(8), [0u32; 2]);
    // SAFETY: addresses are checked by the library.
    unsafe {
        let write = |at, flags| sys::cuStreamWriteValue32_v2(stream, at, 7, flags);
        let wait = |at, flags| sys::cuStreamWaitValue32_v2(stream, at, 7, flags);
        answers.note("cuStreamWriteValue32", write(address(words), 0));
        answers.note("cuStreamWaitValue32", wait(address(words), 1));
        answers.note("cuStreamSynchronize", synchronize(stream));
        answers.note("the word", words[0]);
        answers.note("cuStreamWriteValue32 of an odd address", write(address(words) + 2, 0));
        answers.note("cuStreamWriteValue32 of the heap", write(heap.as_ptr() as u64, 0));
        answers.note("cuStreamWaitValue32 with flags 64", wait(address(words), 64));
    }
}

//! Device memory and page-locked memory: who may touch what, and what happens after a free.

use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use cudarc::driver::sys::{self, CUpointer_attribute as Attribute, CUresult};
use simulated_gpu::{Counter, Setting};

use crate::driver::{
    Gate, ILLEGAL_ADDRESS, INVALID_VALUE, OK, OUT_OF_MEMORY, address, allocate, allocate_pinned, contents,
    copy, fill, free, new_stream, query, start, synchronize, try_allocate, use_device, write_device_bytes,
};
use crate::isolation::{PeerProcess, run_isolated, wait_until};
use crate::sharing::{GRANULE, create_physical, map_anywhere, memory_handle};

#[test]
fn a_host_access_to_device_memory_is_a_fault() {
    run_isolated("", || {
        start();
        let at = allocate(4096);
        for role in ["read_allocation_on_host", "read_mapping_on_host", "read_import_on_host"] {
            let mut peer = PeerProcess::start(role, "");
            if role == "read_import_on_host" {
                peer.send(&memory_handle(at));
            }
            assert_eq!(peer.wait().signal(), Some(libc::SIGSEGV), "{role}");
        }
    });
}

fn register(bytes: &[u8]) -> CUresult {
    // SAFETY: the range is checked by the library.
    unsafe { sys::cuMemHostRegister_v2(bytes.as_ptr().cast_mut().cast(), bytes.len(), 0) }
}

fn unregister(bytes: &[u8]) -> CUresult {
    // SAFETY: the address is checked by the library.
    unsafe { sys::cuMemHostUnregister(bytes.as_ptr().cast_mut().cast()) }
}

#[test]
fn a_copy_blocks_only_for_memory_that_is_not_page_locked() {
    run_isolated("", || {
        let gpu = start();
        let (stream, at, heap) = (new_stream(), allocate(8192), vec![5u8; 8192]);
        for is_from_host in [true, false] {
            for (host, expected) in [(address(allocate_pinned(8192)), 0), (heap.as_ptr() as u64, 1)] {
                let before = gpu.count(Counter::PageableCopies);
                let (to, from) = if is_from_host { (at, host) } else { (host, at) };
                assert_eq!(copy(to, from, 8192, stream), OK);
                assert_eq!(gpu.count(Counter::PageableCopies) - before, expected);
                // A caller that was blocked comes back when the copy has ended.
                assert!(expected == 0 || query(stream) == OK);
                assert_eq!(synchronize(stream), OK);
            }
        }
        assert_eq!(
            [register(&heap), copy(at, heap.as_ptr() as u64, 8192, stream), synchronize(stream)],
            [OK; 3]
        );
        assert_eq!((gpu.count(Counter::PageableCopies), gpu.count(Counter::Copies)), (2, 5));
        assert_eq!((contents(at, 8192), unregister(&heap)), (vec![5; 8192], OK));
    });
}

#[test]
fn registrations_do_not_overlap() {
    run_isolated("", || {
        let gpu = start();
        let bytes = vec![0u8; 4 * 4096];
        let overlap = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        assert_eq!(register(&bytes[4096..8192]), OK);
        for range in [4096..8192, 0..4097, 8191..9000, 0..16384, 5000..5001] {
            assert_eq!(register(&bytes[range.clone()]), overlap, "{range:?}");
        }
        assert_eq!([register(&bytes[8192..12288]), register(&bytes[..4096])], [OK, OK]);
        assert_eq!((gpu.count(Counter::PinnedRanges), register(allocate_pinned(4096))), (3, overlap));
        let unknown = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        assert_eq!([unregister(&bytes[4097..]), unregister(&bytes[12288..])], [INVALID_VALUE, unknown]);
        // A copy across two registrations, or with a part that is not registered, is refused.
        let (at, stream) = (allocate(16384), new_stream());
        for range in [4000..4200, 12000..12400] {
            let bytes = &bytes[range];
            assert_eq!(copy(at, address(bytes), bytes.len(), stream), INVALID_VALUE);
        }
        assert_eq!(
            [unregister(&bytes[4096..]), unregister(&bytes[4096..]), register(&[])],
            [OK, unknown, INVALID_VALUE]
        );
    });
}

#[test]
fn work_on_memory_that_is_gone_is_a_sticky_error_of_the_process() {
    run_isolated("", || {
        start();
        let (stream, other, to) = (new_stream(), new_stream(), allocate(4096));
        let at = map_anywhere(create_physical(GRANULE), GRANULE);
        let gate = Gate::close(stream);
        // SAFETY: arguments are checked by the library.
        let unmapped = || unsafe { sys::cuMemUnmap(at, GRANULE) };
        assert_eq!([copy(to, at, 4096, stream), unmapped()], [OK, OK]);
        assert_eq!(copy(to, at, 4096, stream), INVALID_VALUE, "the call looks the address up as well");
        gate.open();
        assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
        assert_eq!([query(other), synchronize(other), try_allocate(4), free(to)], [ILLEGAL_ADDRESS; 4]);
        assert_eq!(crate::driver::query_event(std::ptr::null_mut()), ILLEGAL_ADDRESS);
        let mut version = 0;
        // SAFETY: the library writes a number.
        assert_eq!(unsafe { sys::cuDriverGetVersion(&raw mut version) }, OK, "it concerns no device");
        // Another process has its own context.
        let mut peer = PeerProcess::start("leave_stuck_work", "");
        assert_eq!(peer.receive(), *b"stuck");
        assert!(peer.wait().success());
    });
}

/// Runs work on memory that goes before a gate opens, in a process of its own for each kind.
fn check_use_after_release(enqueue: impl FnOnce(sys::CUstream), release: impl FnOnce() -> CUresult) {
    let stream = new_stream();
    let gate = Gate::close(stream);
    enqueue(stream);
    assert_eq!(release(), OK);
    gate.open();
    assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
}

/// Asserts that a call which frees memory waits for the work of the device.
fn assert_waits_for_work(release: impl FnOnce() -> CUresult + Send) {
    let gate = Gate::close(new_stream());
    std::thread::scope(|scope| {
        let releasing = scope.spawn(|| {
            use_device(0);
            release()
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!releasing.is_finished(), "it waits");
        gate.open();
        assert_eq!(releasing.join().unwrap(), OK);
    });
}

#[test]
fn to_free_memory_is_to_wait_for_the_work_of_the_device() {
    run_isolated("", || {
        start();
        let (at, pinned, heap) = (allocate(4096), address(allocate_pinned(4096)), vec![0; 4096]);
        assert_eq!(register(&heap), OK);
        assert_waits_for_work(|| free(at));
        // SAFETY: nothing uses the memory.
        assert_waits_for_work(|| unsafe { sys::cuMemFreeHost(pinned as *mut _) });
        assert_waits_for_work(|| unregister(&heap));
        // A mapping can be removed meanwhile.
        let mapped = map_anywhere(create_physical(GRANULE), GRANULE);
        let gate = Gate::close(new_stream());
        // SAFETY: nothing uses the memory.
        assert_eq!(unsafe { sys::cuMemUnmap(mapped, GRANULE) }, OK);
        gate.open();
    });
}

#[test]
fn late_work_on_unmapped_memory_is_a_sticky_error() {
    run_isolated("", || {
        start();
        let at = map_anywhere(create_physical(GRANULE), GRANULE);
        // SAFETY: arguments are checked by the library.
        check_use_after_release(
            |stream| assert_eq!(fill(at, 1, GRANULE, stream), OK),
            || unsafe { sys::cuMemUnmap(at, GRANULE) },
        );
    });
}

#[test]
fn out_of_memory_is_not_sticky() {
    run_isolated("memory=1M", || {
        let gpu = start();
        let (half, info) = (allocate(512 << 10), || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the library writes two numbers.
            unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total).result().unwrap() };
            (free, total)
        });
        assert_eq!(info(), (512 << 10, 1 << 20));
        assert_eq!(
            [try_allocate((512 << 10) + 1), try_allocate(usize::MAX), try_allocate(0)],
            [OUT_OF_MEMORY, OUT_OF_MEMORY, INVALID_VALUE]
        );
        let whole = allocate(512 << 10);
        assert_eq!(
            [try_allocate(1), free(half), free(half), free(whole + 1)],
            [OUT_OF_MEMORY, OK, INVALID_VALUE, INVALID_VALUE]
        );
        assert_eq!((gpu.count(Counter::DeviceBytes), gpu.count(Counter::Allocations)), (512 << 10, 1));
        let small = allocate(1);
        assert_eq!(info().0, (512 << 10) - 512);
        assert_eq!([free(small), free(0)], [OK, OK]);
    });
}

#[test]
fn an_address_is_never_used_again_and_has_exact_bounds() {
    run_isolated("", || {
        start();
        let stream = new_stream();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let at = allocate(5000);
            assert!(seen.insert(at), "{at:x} again");
            assert_eq!(
                [fill(at, 1, 5000, stream), fill(at, 1, 5001, stream), fill(at + 4999, 1, 1, stream)],
                [OK, INVALID_VALUE, OK]
            );
            assert_eq!([synchronize(stream), free(at)], [OK, OK]);
        }
    });
}

/// Returns an attribute of an address, as a number of so many bytes.
fn attribute(wanted: Attribute, at: u64) -> Result<u64, CUresult> {
    let mut value = 0u64;
    // SAFETY: the library writes at most eight bytes.
    match unsafe { sys::cuPointerGetAttribute((&raw mut value).cast::<c_void>(), wanted, at) } {
        OK => Ok(value),
        error => Err(error),
    }
}

#[test]
fn attributes_tell_what_an_address_is() {
    run_isolated("", || {
        start();
        use Attribute as A;
        let (at, host, heap) = (allocate(5000), allocate_pinned(100), [0u8; 8]);
        let mapped = map_anywhere(create_physical(GRANULE), GRANULE);
        assert_eq!(
            [at, address(host), mapped].map(|at| attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 50)),
            [Ok(2), Ok(1), Ok(2)]
        );
        assert_eq!(attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, heap.as_ptr() as u64), Err(INVALID_VALUE));
        let capable = |at| attribute(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at);
        assert_eq!([capable(at), capable(mapped)], [Ok(1), Ok(0)]);
        let range = |at| {
            [A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, A::CU_POINTER_ATTRIBUTE_RANGE_SIZE]
                .map(|a| attribute(a, at))
        };
        assert_eq!(range(at + 4999), [Ok(at), Ok(5000)]);
        assert_eq!(range(address(host) + 7), [Ok(address(host)), Ok(100)]);
        assert_eq!(attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at), Ok(0));
        let id = |at| attribute(A::CU_POINTER_ATTRIBUTE_BUFFER_ID, at).unwrap();
        assert_ne!(id(at), id(mapped));
        assert_eq!(attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 5000), Err(INVALID_VALUE));
        let mut device_address = 0;
        // SAFETY: the library writes an address.
        unsafe {
            let host = host.as_mut_ptr().cast();
            assert_eq!(sys::cuMemHostGetDevicePointer_v2(&raw mut device_address, host, 0), OK);
            assert_eq!(device_address, host as u64);
            let heap = heap.as_ptr().cast_mut().cast();
            assert_eq!(sys::cuMemHostGetDevicePointer_v2(&raw mut device_address, heap, 0), INVALID_VALUE);
        }
    });
}

#[test]
fn no_byte_moves_before_the_copy_runs() {
    run_isolated("", || {
        let gpu = start();
        let (stream, from, to) = (new_stream(), allocate(1000), allocate(1000));
        write_device_bytes(from, &[1; 1000]);
        gpu.set(Setting::HoldCopies, 1);
        assert_eq!(copy(to, from, 1000, stream), OK);
        wait_until("the copy is held", || gpu.count(Counter::HeldCopies) == 1);
        // The bytes that count are those at the time of the copy, not of the call.
        let other = new_stream();
        assert_eq!([fill(from, 2, 1000, other), fill(to, 3, 1000, other), synchronize(other)], [OK; 3]);
        gpu.set(Setting::HoldCopies, 0);
        assert_eq!((synchronize(stream), contents(to, 1000)), (OK, vec![2; 1000]));
    });
}

//! The order of work in streams and between them.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use cudarc::driver::result::stream;
use cudarc::driver::sys::{self, CUresult};

use crate::driver::{
    Gate, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, ORDER_ONLY, address, allocate, allocate_pinned,
    contents, copy, fill, launch_host_function, new_event, new_stream, query, record, start, synchronize,
    wait_event,
};
use crate::isolation::{PeerProcess, run_isolated};

const LEN: usize = 300_000;

#[test]
fn work_of_a_stream_runs_in_its_order_and_after_the_call() {
    run_isolated("copy_us=200", || {
        start();
        let (stream, [a, b, c]) = (new_stream(), [allocate(LEN), allocate(LEN), allocate(LEN)]);
        let gate = Gate::close(stream);
        for (to, byte) in [(b, 1), (c, 2)] {
            assert_eq!(fill(a, byte, LEN, stream), OK);
            assert_eq!(copy(to, a, LEN, stream), OK);
        }
        assert_eq!(fill(a, 3, LEN, stream), OK);
        assert_eq!(query(stream), NOT_READY);
        assert_eq!(contents(b, 4), [0; 4], "the gate is closed");
        gate.open();
        assert_eq!(synchronize(stream), OK);
        assert_eq!(query(stream), OK);
        for (at, byte) in [(a, 3), (b, 1), (c, 2)] {
            assert!(contents(at, LEN).iter().all(|found| *found == byte), "{byte}");
        }
    });
}

#[test]
fn only_events_order_two_streams() {
    run_isolated("", || {
        start();
        let (held, free, at) = (new_stream(), new_stream(), allocate(LEN));
        let gate = Gate::close(held);
        assert_eq!(fill(at, 7, LEN, held), OK);
        let filled = new_event(ORDER_ONLY);
        assert_eq!(record(filled, held), OK);
        assert_eq!(fill(at, 8, LEN, free), OK);
        assert_eq!(synchronize(free), OK);
        assert_eq!((query(held), contents(at, 1)), (NOT_READY, vec![8]));
        assert_eq!(wait_event(free, filled), OK);
        assert_eq!(fill(at, 9, LEN, free), OK);
        assert_eq!(query(free), NOT_READY);
        gate.open();
        assert_eq!(synchronize(free), OK);
        assert_eq!(contents(at, LEN), vec![9; LEN]);
    });
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    run_isolated("", || {
        start();
        let (legacy, at) = (std::ptr::null_mut(), allocate(4));
        let (blocking, free) = (stream::create(stream::StreamKind::Default).unwrap(), new_stream());
        let gate = Gate::close(blocking);
        assert_eq!(fill(at, 1, 4, legacy), OK);
        assert_eq!(fill(at, 2, 4, blocking), OK);
        assert_eq!(fill(at, 3, 4, free), OK);
        assert_eq!(synchronize(free), OK);
        assert_eq!([query(legacy), query(blocking)], [NOT_READY; 2]);
        assert_eq!(contents(at, 4), [3; 4]);
        gate.open();
        assert_eq!(synchronize(blocking), OK);
        assert_eq!(contents(at, 4), [2; 4]);
        let gate = Gate::close(legacy);
        // The default stream of this thread is a blocking one, too.
        let of_thread = 2 as sys::CUstream;
        assert_eq!(fill(at, 4, 4, of_thread), OK);
        assert_eq!(query(of_thread), NOT_READY);
        gate.open();
        assert_eq!(synchronize(of_thread), OK);
        assert_eq!((query(legacy), contents(at, 4)), (OK, vec![4; 4]));
    });
}

unsafe extern "C" fn call_the_driver(answer: *mut c_void) {
    // SAFETY: the test passes an atomic number that lives as long as the process.
    let answer = unsafe { &*answer.cast::<AtomicI32>() };
    let mut at = 0;
    // SAFETY: the library writes an address.
    answer.store(unsafe { sys::cuMemAlloc_v2(&raw mut at, 1) } as i32, SeqCst);
}

#[test]
fn a_host_function_runs_in_order_and_may_not_call_the_driver() {
    run_isolated("", || {
        static ANSWER: AtomicI32 = AtomicI32::new(-1);
        start();
        let stream = new_stream();
        let gate = Gate::close(stream);
        launch_host_function(stream, call_the_driver, &ANSWER);
        assert_eq!(query(stream), NOT_READY);
        assert_eq!(ANSWER.load(SeqCst), -1);
        gate.open();
        assert_eq!(synchronize(stream), OK);
        assert_eq!(ANSWER.load(SeqCst), CUresult::CUDA_ERROR_NOT_PERMITTED as i32);
    });
}

#[test]
fn a_stream_waits_for_a_word_by_each_comparison() {
    run_isolated("", || {
        start();
        // A comparison, the value, a word for which it does not hold, and one for which it does.
        let cases =
            [(0, 5, 4, 5), (0, 1, u32::MAX, 2), (1, 5, 6, 5), (2, 6, 8, 12), (3, 0xff, !0xff, !0x1ff)];
        for (comparison, value, before, after) in cases {
            let (stream, words) = (new_stream(), allocate_pinned(8));
            let [word, answer] = [address(words), address(words) + 4];
            words[..4].copy_from_slice(&u32::to_ne_bytes(before));
            // SAFETY: addresses are checked by the library, and the words live as long as the process.
            unsafe {
                sys::cuStreamWaitValue32_v2(stream, word, value, comparison).result().unwrap();
                sys::cuStreamWriteValue32_v2(stream, answer, 9, 0).result().unwrap();
                assert_eq!(query(stream), NOT_READY, "comparison {comparison}");
                (word as *mut u32).write_volatile(after);
            }
            assert_eq!(synchronize(stream), OK);
            assert_eq!(words[4..], u32::to_ne_bytes(9), "comparison {comparison}");
        }
        let (stream, heap) = (new_stream(), [0u32; 2]);
        for (at, comparison) in [
            (heap.as_ptr() as u64, 0),
            (address(allocate_pinned(8)) + 2, 0),
            (address(allocate_pinned(8)), 4),
        ] {
            // SAFETY: addresses are checked by the library.
            assert_eq!(unsafe { sys::cuStreamWaitValue32_v2(stream, at, 1, comparison) }, INVALID_VALUE);
        }
    });
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    run_isolated("", || {
        let gpu = start();
        let (held, at) = (new_stream(), allocate(4));
        let gate = Gate::close(held);
        assert_eq!(fill(at, 6, 4, held), OK);
        let filled = new_event(ORDER_ONLY);
        assert_eq!(record(filled, held), OK);
        // SAFETY: the handle is checked by the library.
        assert_eq!(
            unsafe { [sys::cuStreamDestroy_v2(held), sys::cuStreamDestroy_v2(held)] },
            [OK, INVALID_HANDLE]
        );
        assert_eq!((query(held), gpu.count(simulated_gpu::Counter::Streams)), (INVALID_HANDLE, 0));
        let free = new_stream();
        assert_eq!(wait_event(free, filled), OK);
        assert_eq!(query(free), NOT_READY);
        gate.open();
        assert_eq!(synchronize(free), OK);
        assert_eq!(contents(at, 4), [6; 4]);
    });
}

#[test]
fn a_context_waits_for_its_streams_and_ends_with_them() {
    run_isolated("", || {
        let gpu = start();
        let (stream, at) = (new_stream(), allocate(4));
        let gate = Gate::close(stream);
        assert_eq!(fill(at, 6, 4, stream), OK);
        let opener = std::thread::spawn(move || gate.open());
        // SAFETY: calls without pointers.
        unsafe {
            assert_eq!(sys::cuCtxSynchronize(), OK);
            assert_eq!(query(stream), OK);
            opener.join().unwrap();
            assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(0), OK);
            assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
            assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        assert_eq!(gpu.count(simulated_gpu::Counter::Allocations), 0);
        crate::driver::use_device(0);
        assert_eq!(query(stream), INVALID_HANDLE);
        assert_eq!(fill(at, 1, 4, new_stream()), INVALID_VALUE);
    });
}

#[test]
fn a_process_ends_with_work_that_never_will() {
    run_isolated("", || {
        for role in ["leave_stuck_work", "leave_stuck_group"] {
            let mut peer = PeerProcess::start(role, "");
            assert_eq!(peer.receive(), *b"stuck");
            assert!(peer.wait().success(), "{role}");
        }
    });
}

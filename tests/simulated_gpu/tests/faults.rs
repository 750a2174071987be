//! Faults by setting.

use std::sync::{Arc, Barrier};

use cudarc::driver::sys::{self, CUresult};
use simulated_gpu::{Counter, Setting};

use crate::driver::{
    Gate, NOT_READY, OK, OUT_OF_MEMORY, address, allocate, allocate_pinned, contents, copy, fill, new_stream,
    query, start, synchronize, try_allocate,
};
use crate::isolation::{PeerProcess, run_isolated, wait_until};

const ECC: CUresult = CUresult::CUDA_ERROR_ECC_UNCORRECTABLE;

#[test]
fn the_nth_copy_meets_an_uncorrectable_error() {
    run_isolated("ecc_after=3", || {
        let gpu = start();
        let (stream, other, host) = (new_stream(), new_stream(), allocate_pinned(4));
        let [a, b] = [allocate(4), allocate(4)];
        assert_eq!([fill(a, 1, 4, stream), copy(b, a, 4, stream), synchronize(stream)], [OK; 3]);
        assert_eq!([copy(address(host), b, 4, stream), synchronize(stream)], [OK, OK]);
        assert_eq!((gpu.setting(Setting::EccAfter), &host[..]), (1, &[1; 4][..]));
        let gate = Gate::close(stream);
        // The call that enqueues it succeeds, and so do calls before it runs.
        assert_eq!([fill(b, 2, 4, stream), copy(address(host), b, 4, stream), query(other)], [OK; 3]);
        assert_eq!(fill(a, 9, 4, stream), OK);
        gate.open();
        assert_eq!([synchronize(stream), query(other), try_allocate(4)], [ECC; 3]);
        assert_eq!((&host[..], gpu.count(Counter::Copies)), (&[1; 4][..], 3));
    });
}

#[test]
fn a_sticky_error_ends_every_wait_and_discards_work() {
    run_isolated("", || {
        let gpu = start();
        let (stuck, waiting) = (new_stream(), new_stream());
        let (event, _gate) = (crate::driver::new_event(crate::driver::ORDER_ONLY), Gate::close(stuck));
        assert_eq!(crate::driver::record(event, stuck), OK);
        assert_eq!(crate::driver::wait_event(waiting, event), OK);
        let at = allocate(4);
        let (to_host, from_host) = (stuck as usize, waiting as usize);
        let started = Arc::new(Barrier::new(3));
        let wait = |call: Box<dyn FnOnce() -> CUresult + Send>| {
            let started = started.clone();
            std::thread::spawn(move || {
                crate::driver::use_device(0);
                started.wait();
                call()
            })
        };
        let waits = [
            wait(Box::new(move || synchronize(to_host as sys::CUstream))),
            wait(Box::new(move || copy([0u8; 4].as_ptr() as u64, at, 4, from_host as sys::CUstream))),
        ];
        started.wait();
        wait_until("the second copy is enqueued", || gpu.count(Counter::PageableCopies) == 1);
        assert_eq!([query(stuck), query(waiting)], [NOT_READY; 2]);
        gpu.set(Setting::Sticky, 214);
        let answers = waits.map(|wait| wait.join().unwrap());
        assert_eq!((answers, gpu.count(Counter::Copies)), ([ECC; 2], 0));
    });
}

#[test]
fn the_nth_allocation_fails_and_the_next_succeeds() {
    run_isolated("alloc_fails=2;host_alloc_fails=1;host_register_fails=1", || {
        start();
        assert_eq!([try_allocate(4), try_allocate(4), try_allocate(4)], [OK, OUT_OF_MEMORY, OK]);
        let mut at = std::ptr::null_mut();
        let bytes = [0u8; 64];
        // SAFETY: the library writes an address, and checks the range.
        unsafe {
            assert_eq!(sys::cuMemHostAlloc(&raw mut at, 4, 0), OUT_OF_MEMORY);
            assert_eq!((sys::cuMemHostAlloc(&raw mut at, 4, 0), sys::cuMemFreeHost(at)), (OK, OK));
            let register = || sys::cuMemHostRegister_v2(bytes.as_ptr().cast_mut().cast(), 64, 0);
            assert_eq!([register(), register()], [OUT_OF_MEMORY, OK]);
        }
        assert_eq!(contents(allocate(1), 1), [0]);
    });
}

#[test]
fn the_machine_is_as_it_is_set() {
    run_isolated("devices=3;memory=3K;version=12040;first_device=5", || {
        start();
        let (mut version, mut count, mut total) = (0, 0, 0);
        // SAFETY: the library writes numbers.
        unsafe {
            assert_eq!(sys::cuDriverGetVersion(&raw mut version), OK);
            assert_eq!(sys::cuDeviceGetCount(&raw mut count), OK);
            assert_eq!(sys::cuDeviceTotalMem_v2(&raw mut total, 2), OK);
            assert_eq!(sys::cuDeviceTotalMem_v2(&raw mut total, 3), CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        assert_eq!((version, count, total), (12040, 3, 3 << 10));
        let uuid = |ordinal| cudarc::driver::result::device::get_uuid(ordinal).unwrap().bytes;
        assert_ne!(uuid(0), uuid(1));
        assert_eq!(uuid(2)[15], 7);
        // Each device has its own memory.
        assert_eq!([try_allocate(2 << 10), try_allocate(2 << 10)], [OK, OUT_OF_MEMORY]);
        crate::driver::use_device(1);
        assert_eq!(try_allocate(2 << 10), OK);
    });
}

#[test]
fn without_a_device_initialization_fails() {
    run_isolated("devices=0", || {
        simulated_gpu::SimulatedGpu::load();
        assert_eq!(cudarc::driver::result::init().unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE);
    });
}

#[test]
fn an_unknown_setting_ends_the_process() {
    run_isolated("", || {
        use std::os::unix::process::ExitStatusExt;
        for settings in ["ecc_afer=3", "ecc_after=x", "ecc_after"] {
            let peer = PeerProcess::start_with("unknown_setting", |command| {
                command.env("SIMULATED_GPU", settings).stderr(std::process::Stdio::null())
            });
            assert_eq!(peer.wait().signal(), Some(libc::SIGABRT), "{settings}");
        }
    });
}

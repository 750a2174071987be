//! Copies: contents, order, and what an error ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::sys;
use muster_gpu::{
    CopyDirection, DeviceMemory, Gpu, GpuCopy, GpuEvent, GpuRows, PageLocked, device_memory_bytes,
    is_reporting_thread, report_ended_copies,
};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::copying::{Outcome, bytes_of, copy, copy_whole, wait, wait_until, whole};
use crate::gpu_driver::{open_gpu, run_on_any_gpu, run_on_simulated_gpu};

#[test]
fn threads_that_wait_report_copies_in_their_order_and_each_once() {
    run_on_any_gpu("", || {
        const COPIES: usize = 2000;
        let gpu = open_gpu(0);
        let host = PageLocked::allocate(&gpu, 64).unwrap();
        let memory = DeviceMemory::allocate(&gpu, 64).unwrap();
        let ends = Arc::new(Mutex::new(Vec::new()));
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Acquire) {
                        report_ended_copies();
                        assert!(!is_reporting_thread(), "only while it reports");
                    }
                });
            }
            for number in 0..COPIES {
                let copy = GpuCopy::with_host(CopyDirection::ToDevice, host.base(), memory.address(), 64);
                let ends = Arc::clone(&ends);
                let then = move |outcome: Result<(), _>| {
                    // A report from within a report does nothing.
                    report_ended_copies();
                    assert!(is_reporting_thread());
                    ends.lock().unwrap().push((number, outcome));
                };
                // SAFETY: both memories live until all copies have ended.
                unsafe { gpu.copy(CopyDirection::ToDevice, &[copy], then) }.unwrap();
            }
            wait_until("all are reported", || ends.lock().unwrap().len() == COPIES);
            is_done.store(true, Ordering::Release);
        });
        let all: Vec<_> = (0..COPIES).map(|number| (number, Ok(()))).collect();
        assert_eq!(*ends.lock().unwrap(), all);
    });
}

#[test]
fn random_pieces_arrive_where_they_belong_and_no_copy_blocks() {
    run_on_any_gpu("", || {
        let gpu = open_gpu(0);
        fastrand::seed(7);
        let len = 1 << 16;
        let [mut from, mut to] = [(); 2].map(|()| PageLocked::allocate(&gpu, len).unwrap());
        let memory = DeviceMemory::allocate(&gpu, len).unwrap();
        assert_eq!(device_memory_bytes(), len as u64);
        bytes_of(&mut from).fill_with(|| fastrand::u8(..));
        for _ in 0..50 {
            // The host's bytes, in pieces that are shuffled on the device, and back.
            let mut cuts: Vec<usize> = (0..fastrand::usize(0..20)).map(|_| fastrand::usize(..len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            let mut pieces: Vec<(usize, usize)> =
                cuts.windows(2).map(|cut| (cut[0], cut[1] - cut[0])).collect();
            fastrand::shuffle(&mut pieces);
            let mut at = 0;
            let mut plan = Vec::new();
            for (start, len) in pieces {
                plan.push((start, memory.address() + at as u64, len));
                at += len;
            }
            let copies = |direction: CopyDirection, host: &PageLocked| -> Vec<GpuCopy> {
                let piece = |(start, device, len): &(usize, u64, usize)| {
                    // SAFETY: the piece is within the memory.
                    let host = unsafe { host.base().add(*start) };
                    GpuCopy::with_host(direction, host, *device, *len)
                };
                plan.iter().map(piece).collect()
            };
            bytes_of(&mut to).fill(0);
            assert_eq!(
                wait(&copy(&gpu, CopyDirection::ToDevice, &copies(CopyDirection::ToDevice, &from))),
                Ok(())
            );
            assert_eq!(wait(&copy(&gpu, CopyDirection::ToHost, &copies(CopyDirection::ToHost, &to))), Ok(()));
            assert!(bytes_of(&mut from) == bytes_of(&mut to));
        }
        if let Some(simulated) = SimulatedGpu::load_if_wanted() {
            assert_eq!(simulated.count(Counter::PageableCopies), 0);
            assert!(simulated.count(Counter::Events) <= 4, "events are used again");
        }
        drop((from, to, memory));
        assert_eq!(device_memory_bytes(), 0);
        if let Some(simulated) = SimulatedGpu::load_if_wanted() {
            assert_eq!(simulated.count(Counter::Allocations), 0);
            wait_until("page-locked memory is freed", || simulated.count(Counter::PinnedRanges) == 0);
        }
    });
}

#[test]
fn rows_are_copied_at_any_distances() {
    run_on_any_gpu("", || {
        let gpu = open_gpu(0);
        fastrand::seed(11);
        let len = 1 << 16;
        let [mut from, mut to] = [(); 2].map(|()| PageLocked::allocate(&gpu, len).unwrap());
        let [source, target] = [(); 2].map(|()| DeviceMemory::allocate(&gpu, len).unwrap());
        for _ in 0..30 {
            bytes_of(&mut from).fill_with(|| fastrand::u8(..));
            copy_whole(&gpu, CopyDirection::ToDevice, &from, &source).unwrap();
            copy_whole(&gpu, CopyDirection::ToDevice, &from, &target).unwrap();
            let mut wanted = bytes_of(&mut from).to_vec();
            // Some requests have rows of several shapes, which write disjoint parts of the target.
            let mut end = 0;
            let mut request = Vec::new();
            for _ in 0..fastrand::usize(1..4) {
                let (row, count) = (fastrand::usize(1..700), fastrand::usize(1..20));
                let pitches = [(); 2].map(|()| row + fastrand::usize(0..300));
                let (start, extent) = (end, row + (count - 1) * pitches[1]);
                end += extent;
                let read = fastrand::usize(0..=len - row - (count - 1) * pitches[0]);
                let first = GpuCopy {
                    from: source.address() + read as u64,
                    to: target.address() + start as u64,
                    len: row,
                };
                request.push(GpuRows { first, count, pitches });
                for number in 0..count {
                    let (at, source) = (start + number * pitches[1], read + number * pitches[0]);
                    wanted[at..at + row].copy_from_slice(&bytes_of(&mut from)[source..source + row]);
                }
            }
            let (tell, told) = channel();
            let before = SimulatedGpu::load_if_wanted().map(|driver| driver.count(Counter::Copies));
            // SAFETY: the memory lives until the end of the test.
            unsafe { gpu.copy_rows(&request, move |outcome| tell.send(outcome).unwrap()) }.unwrap();
            assert_eq!(wait(&told), Ok(()));
            if let (Some(driver), Some(before)) = (SimulatedGpu::load_if_wanted(), before) {
                assert_eq!(
                    driver.count(Counter::Copies) - before,
                    request.len() as i64,
                    "one call for all rows"
                );
            }
            copy_whole(&gpu, CopyDirection::ToHost, &to, &target).unwrap();
            assert!(bytes_of(&mut to) == wanted);
        }
        // A distance that the driver does not accept: the rows are copied one by one.
        let first = GpuCopy { from: source.address(), to: target.address(), len: 100 };
        let (tell, told) = channel();
        // SAFETY: as above.
        unsafe {
            let rows = GpuRows { first, count: 3, pitches: [50, 100] };
            gpu.copy_rows(&[rows], move |outcome| tell.send(outcome).unwrap()).unwrap();
        }
        assert_eq!(wait(&told), Ok(()));
        copy_whole(&gpu, CopyDirection::ToHost, &to, &target).unwrap();
        let (from, to) = (bytes_of(&mut from), bytes_of(&mut to));
        assert!((0..3).all(|row| to[row * 100..][..100] == from[row * 50..][..100]));
    });
}

#[test]
fn an_event_of_the_program_is_awaited() {
    run_on_any_gpu("", || {
        let gpu = open_gpu(0);
        let [mut gate, mut to] = [(); 2].map(|()| PageLocked::allocate(&gpu, 4096).unwrap());
        let memory = DeviceMemory::allocate(&gpu, 4096).unwrap();
        bytes_of(&mut gate).fill(0);
        let mut context = std::ptr::null_mut();
        // A program's own stream, which fills the memory once a word is set.
        // SAFETY: the memory lives until the end of the test.
        let event = unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, 0).result().unwrap();
            sys::cuCtxSetCurrent(context).result().unwrap();
            let mut stream = std::ptr::null_mut();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
            sys::cuStreamWaitValue32_v2(stream, gate.base().as_ptr() as u64, 1, 0).result().unwrap();
            sys::cuMemsetD8Async(memory.address(), 7, 4096, stream).result().unwrap();
            GpuEvent::recorded_on(&gpu, stream.cast()).unwrap()
        };
        assert_eq!(event.has_happened(), Ok(false));
        let (tell, happened) = channel();
        gpu.call_when_happened(event, move |outcome| tell.send(outcome).unwrap()).unwrap();
        assert!(happened.recv_timeout(Duration::from_millis(20)).is_err(), "it waits");
        // Copies of others go on meanwhile.
        let other = DeviceMemory::allocate(&gpu, 4096).unwrap();
        assert_eq!(copy_whole(&gpu, CopyDirection::ToDevice, &to, &other), Ok(()));
        bytes_of(&mut gate)[0] = 1;
        assert_eq!(wait(&happened), Ok(()));
        assert_eq!(copy_whole(&gpu, CopyDirection::ToHost, &to, &memory), Ok(()));
        assert!(bytes_of(&mut to).iter().all(|byte| *byte == 7));
    });
}

#[test]
fn the_context_of_the_program_stays_current() {
    run_on_simulated_gpu("devices=2", || {
        SimulatedGpu::load();
        let [first, second] = [0, 1].map(|ordinal| Gpu::open(ordinal).unwrap());
        let current = || {
            let mut context = std::ptr::null_mut();
            // SAFETY: the call writes a handle.
            unsafe { sys::cuCtxGetCurrent(&raw mut context).result().unwrap() };
            context
        };
        assert!(current().is_null(), "no call leaves a context behind");
        let mut own = std::ptr::null_mut();
        // SAFETY: the context is never released.
        unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut own, 0).result().unwrap();
            sys::cuCtxSetCurrent(own).result().unwrap();
        }
        for gpu in [&first, &second] {
            let host = PageLocked::allocate(gpu, 100).unwrap();
            let memory = DeviceMemory::allocate(gpu, 100).unwrap();
            assert_eq!(copy_whole(gpu, CopyDirection::ToDevice, &host, &memory), Ok(()));
            assert_eq!(current(), own);
        }
        let memory = DeviceMemory::allocate(&second, 100).unwrap();
        // SAFETY: the memory outlives the value.
        let other = unsafe { DeviceMemory::of_program(&first, memory.address(), 100, Box::new(())) };
        let text = other.unwrap_err().to_string();
        assert!(text.contains("memory of GPU 1, not of GPU 0"), "{text}");
        assert_eq!(current(), own);
    });
}

#[test]
fn missing_memory_fails_its_own_call_only() {
    run_on_simulated_gpu("memory=1M;host_alloc_fails=1", || {
        SimulatedGpu::load();
        let gpu = Gpu::open(0).unwrap();
        assert!(PageLocked::allocate(&gpu, 100).unwrap_err().is_out_of_memory());
        assert!(DeviceMemory::allocate(&gpu, 2 << 20).unwrap_err().is_out_of_memory());
        let (host, memory) =
            (PageLocked::allocate(&gpu, 100).unwrap(), DeviceMemory::allocate(&gpu, 100).unwrap());
        assert_eq!(copy_whole(&gpu, CopyDirection::ToDevice, &host, &memory), Ok(()));
        assert_eq!(gpu.loss(), None);
    });
}

#[test]
fn a_memory_error_fails_every_copy_and_is_the_loss_of_the_device() {
    run_on_simulated_gpu("", || {
        let simulated = SimulatedGpu::load();
        let gpu = Gpu::open(0).unwrap();
        let (host, memory) =
            (PageLocked::allocate(&gpu, 100).unwrap(), DeviceMemory::allocate(&gpu, 100).unwrap());
        simulated.set(Setting::HoldCopies, 1);
        simulated.set(Setting::EccAfter, 2);
        let copies = [(); 3].map(|()| {
            [CopyDirection::ToDevice, CopyDirection::ToHost]
                .map(|to| copy(&gpu, to, &[whole(to, &host, &memory)]))
        });
        assert_eq!(gpu.loss(), None);
        simulated.set(Setting::HoldCopies, 0);
        let outcomes: Vec<Outcome> = copies.iter().flatten().map(wait).collect();
        let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        assert!(failed >= 5, "{outcomes:?}");
        let loss = gpu.loss().expect("the loss is recorded before a copy is reported");
        assert_eq!((loss.code, loss.is_sticky(), loss.is_out_of_memory()), (214, true, false), "{loss}");
        let later = whole(CopyDirection::ToHost, &host, &memory);
        // SAFETY: nothing is copied.
        let later = unsafe { gpu.copy(CopyDirection::ToHost, &[later], |_| ()) };
        assert_eq!(later.unwrap_err().code, 214);
    });
}

//! Events: what a wait is bound to, also across processes.

use cudarc::driver::sys::{self, CUresult};
use simulated_gpu::{Counter, Setting};

use crate::driver::{
    Gate, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, ORDER_ONLY, SHARED, allocate, contents, fill,
    new_event, new_stream, query, query_event, record, start, synchronize, use_device, wait_event,
};
use crate::isolation::{PeerProcess, run_isolated, wait_until};
use crate::sharing::{event_handle, memory_handle, open_event, try_open_event};

#[test]
fn a_wait_is_bound_to_the_latest_record_at_its_call() {
    run_isolated("", || {
        start();
        let (held, free, waiting) = (new_stream(), new_stream(), new_stream());
        let event = new_event(ORDER_ONLY);
        let gate = Gate::close(held);
        assert_eq!(record(event, held), OK);
        assert_eq!(wait_event(waiting, event), OK);
        // The second record replaces the first one for the query, and not for the wait.
        assert_eq!(record(event, free), OK);
        assert_eq!(synchronize(free), OK);
        assert_eq!((query_event(event), query(waiting)), (OK, NOT_READY));
        // A wait from now on is bound to the second.
        let later = new_stream();
        assert_eq!(wait_event(later, event), OK);
        assert_eq!((synchronize(later), query(waiting)), (OK, NOT_READY));
        gate.open();
        assert_eq!(synchronize(waiting), OK);
    });
}

#[test]
fn an_event_that_was_never_recorded_is_no_wait() {
    run_isolated("", || {
        start();
        let (held, free, event) = (new_stream(), new_stream(), new_event(ORDER_ONLY));
        assert_eq!(wait_event(free, event), OK);
        let _gate = Gate::close(held);
        assert_eq!((query_event(event), synchronize(free)), (OK, OK));
        // SAFETY: the handle is checked by the library.
        assert_eq!(unsafe { sys::cuEventSynchronize(event) }, OK);
        assert_eq!(record(event, held), OK);
        assert_eq!((query_event(event), query(free)), (NOT_READY, OK));
    });
}

#[test]
fn a_destroyed_event_keeps_its_waits() {
    run_isolated("", || {
        let gpu = start();
        let (held, waiting, event) = (new_stream(), new_stream(), new_event(ORDER_ONLY));
        let gate = Gate::close(held);
        assert_eq!(record(event, held), OK);
        assert_eq!(wait_event(waiting, event), OK);
        // SAFETY: the handle is checked by the library.
        assert_eq!(
            unsafe { [sys::cuEventDestroy_v2(event), sys::cuEventDestroy_v2(event)] },
            [OK, INVALID_HANDLE]
        );
        assert_eq!(query(waiting), NOT_READY);
        gate.open();
        assert_eq!(synchronize(waiting), OK);
        wait_until("the end of the event", || gpu.count(Counter::Events) == 0);
    });
}

#[test]
fn an_event_is_recorded_on_its_own_device_and_awaited_on_any() {
    run_isolated("devices=2", || {
        start();
        let (event, stream) = (new_event(ORDER_ONLY), new_stream());
        use_device(1);
        let other = new_stream();
        assert_eq!(record(event, other), INVALID_HANDLE);
        let gate = Gate::close(stream);
        assert_eq!((record(event, stream), wait_event(other, event), query(other)), (OK, OK, NOT_READY));
        gate.open();
        assert_eq!(synchronize(other), OK);
    });
}

#[test]
fn times_are_those_of_complete_records() {
    run_isolated("", || {
        start();
        let (stream, [start, end, order_only]) =
            (new_stream(), [new_event(0), new_event(0), new_event(ORDER_ONLY)]);
        let elapsed = |from, to| {
            let mut ms = -1.0;
            // SAFETY: the library writes a number.
            (unsafe { sys::cuEventElapsedTime(&raw mut ms, from, to) }, ms)
        };
        assert_eq!(elapsed(start, end).0, INVALID_HANDLE, "never recorded");
        assert_eq!(record(start, stream), OK);
        let gate = Gate::close(stream);
        assert_eq!([record(end, stream), record(order_only, stream)], [OK, OK]);
        assert_eq!(elapsed(start, end).0, NOT_READY);
        gate.open();
        assert_eq!(synchronize(stream), OK);
        assert_eq!(elapsed(start, order_only).0, INVALID_HANDLE, "without timing");
        let (answer, ms) = elapsed(start, end);
        assert!(answer == OK && ms >= 0.0, "{answer:?} {ms}");
        assert_eq!(elapsed(end, start), (OK, -ms));
    });
}

#[test]
fn an_event_for_other_processes_has_no_timing() {
    run_isolated("", || {
        start();
        let mut event = std::ptr::null_mut();
        // SAFETY: the library writes a handle.
        assert_eq!(unsafe { sys::cuEventCreate(&raw mut event, 4) }, INVALID_VALUE);
        // SAFETY: the same.
        let answer = unsafe {
            let mut handle = std::mem::zeroed();
            sys::cuIpcGetEventHandle(&raw mut handle, new_event(ORDER_ONLY))
        };
        assert_eq!(answer, INVALID_HANDLE);
    });
}

#[test]
fn another_process_waits_for_a_record() {
    run_isolated("", || {
        start();
        let (stream, at, event) = (new_stream(), allocate(4096), new_event(SHARED));
        let gate = Gate::close(stream);
        assert_eq!([fill(at, 0x5a, 4096, stream), record(event, stream)], [OK, OK]);
        let mut peer = PeerProcess::start("read_after_event", "");
        peer.send(&memory_handle(at));
        peer.send(&event_handle(event));
        assert_eq!(peer.receive(), *b"waits");
        gate.open();
        assert_eq!(peer.receive(), [0x5a]);
        assert!(peer.wait().success());
    });
}

#[test]
fn another_process_records_an_event() {
    run_isolated("", || {
        start();
        let event = new_event(SHARED);
        let mut peer = PeerProcess::start("record_behind_gate", "");
        peer.send(&event_handle(event));
        assert_eq!(peer.receive(), *b"gate");
        let stream = new_stream();
        assert_eq!(
            (wait_event(stream, event), query(stream), query_event(event)),
            (OK, NOT_READY, NOT_READY)
        );
        peer.send(b"open");
        assert_eq!((synchronize(stream), query_event(event)), (OK, OK));
        assert!(peer.wait().success());
    });
}

/// Starts a peer that has recorded an event of its own behind a gate, and returns the event here.
fn event_of_peer() -> (PeerProcess, sys::CUevent) {
    let mut peer = PeerProcess::start("own_event_behind_gate", "");
    let event = open_event(peer.receive());
    assert_eq!(peer.receive(), *b"gate");
    (peer, event)
}

#[test]
fn the_death_of_the_recorder_ends_a_wait_and_is_counted() {
    run_isolated("", || {
        let gpu = start();
        let (mut peer, event) = event_of_peer();
        let stream = new_stream();
        assert_eq!((wait_event(stream, event), query(stream)), (OK, NOT_READY));
        // The dead process is not reaped yet: it still has its number.
        peer.kill_unseen();
        assert_eq!(synchronize(stream), OK);
        assert_eq!(gpu.count(Counter::OrphanedWaits), 1);
        assert_eq!(query_event(event), NOT_READY);
        // SAFETY: the handle is checked by the library.
        assert_eq!(unsafe { sys::cuEventSynchronize(event) }, CUresult::CUDA_ERROR_UNKNOWN);
        peer.kill();
        assert_eq!((wait_event(stream, event), synchronize(stream)), (OK, OK));
        assert_eq!(gpu.count(Counter::OrphanedWaits), 2);
    });
}

#[test]
fn the_death_of_the_recorder_is_a_sticky_error_by_setting() {
    run_isolated("", || {
        let gpu = start();
        let (peer, event) = event_of_peer();
        gpu.set(Setting::OrphanedWait, 719);
        let stream = new_stream();
        assert_eq!(wait_event(stream, event), OK);
        peer.kill();
        assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(query(std::ptr::null_mut()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    });
}

#[test]
fn a_recorder_that_loses_its_device_ends_the_waits_of_others() {
    run_isolated("", || {
        let gpu = start();
        let (mut peer, event) = event_of_peer();
        let stream = new_stream();
        assert_eq!((wait_event(stream, event), query(stream)), (OK, NOT_READY));
        peer.send(b"lose");
        assert_eq!((synchronize(stream), gpu.count(Counter::OrphanedWaits)), (OK, 1));
        assert_eq!(peer.receive(), *b"lost");
    });
}

#[test]
fn an_event_outlives_its_owner_and_its_handle_does_not() {
    run_isolated("", || {
        start();
        let mut peer = PeerProcess::start("own_event_behind_gate", "");
        let handle = peer.receive();
        let event = open_event(handle);
        assert_eq!(peer.receive(), *b"gate");
        peer.kill();
        assert_eq!(try_open_event(handle).unwrap_err(), INVALID_HANDLE);
        let stream = new_stream();
        assert_eq!([record(event, stream), synchronize(stream), query_event(event)], [OK; 3]);
        // One's own handle is refused, as the driver refuses one's own memory.
        let own = event_handle(new_event(SHARED));
        assert_eq!(try_open_event(own).unwrap_err(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(contents(allocate(4), 4), [0; 4]);
    });
}

//! The profiler host: what a plug-in can tell of collectives that do not begin or do not end.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use simulated_gpu::{Counter, Setting};

use crate::driver::{OK, allocate, launch_host_function, new_stream, synchronize};
use crate::isolation::{run_isolated, wait_until};
use crate::nccl::{FLOAT, INVALID_USAGE, nccl};
use crate::plugin_recorder::{COLL, Call, KERNEL_CHANNEL, calls, context_of, started, stopped, take_calls};
use crate::profiler::{all_reduce, on_blocking_threads, only, start_with_plugin, wait_for_flag};
use crate::ranks::{abort, async_error, on_threads};

#[test]
fn a_kernel_begins_only_when_its_stream_reaches_it() {
    run_isolated("", || {
        start_with_plugin();
        let (barrier, gate) = (Barrier::new(2), &*Box::leak(Box::new(AtomicBool::new(false))));
        on_blocking_threads(2, |rank| {
            if rank.rank == 1 {
                launch_host_function(rank.stream, wait_for_flag, gate);
            }
            all_reduce(&rank, 1);
            barrier.wait();
            wait_until("the kernel of rank 0 has begun", || started(KERNEL_CHANNEL).len() == 2);
            // Both are enqueued, one has begun, none has ended.
            assert_eq!((started(COLL).len(), stopped(COLL), stopped(KERNEL_CHANNEL)), (2, 2, 0));
            assert!(started(KERNEL_CHANNEL).iter().all(|event| event.context == context_of(0)));
            assert!(rank.is_busy());
            barrier.wait();
            gate.store(true, SeqCst);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        assert_eq!((started(KERNEL_CHANNEL).len(), stopped(KERNEL_CHANNEL)), (4, 4));
    });
}

#[test]
fn a_collective_that_a_rank_does_not_call_begins_and_has_no_end() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        let barrier = Barrier::new(3);
        on_blocking_threads(3, |rank| {
            if rank.rank != 1 {
                all_reduce(&rank, 1);
                wait_until("both have begun", || started(KERNEL_CHANNEL).len() == 4);
            }
            barrier.wait();
            assert_eq!(async_error(rank.comm), 0);
            barrier.wait();
            assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
        });
        assert_eq!((started(COLL).len(), stopped(KERNEL_CHANNEL)), (2, 0));
        // Nothing comes after the end of a communicator.
        let calls = calls();
        let is_final = |call: &Call| matches!(call, Call::Finalize { .. });
        assert_eq!(calls.iter().filter(|call| is_final(call)).count(), 3);
        for rank in [0, 2] {
            let end =
                calls.iter().position(|call| *call == Call::Finalize { context: context_of(rank) }).unwrap();
            let is_later_start =
                |call: &Call| matches!(call, Call::Start(event) if event.context == context_of(rank));
            assert!(!calls[end..].iter().any(is_later_start));
        }
        assert_eq!(gpu.count(Counter::NcclProfilers), 0);
    });
}

#[test]
fn collectives_that_differ_hang_with_their_names() {
    run_isolated("nccl_lenient=1", || {
        start_with_plugin();
        let barrier = Barrier::new(2);
        on_blocking_threads(2, |rank| {
            let [from, to] = [allocate(64), allocate(64)];
            if rank.rank == 0 {
                assert_eq!(rank.all_gather(from, to, 4, FLOAT), 0);
            } else {
                assert_eq!(rank.reduce(from, to, 4, FLOAT, 1), 0);
            }
            wait_until("both have begun", || started(KERNEL_CHANNEL).len() == 4);
            assert_eq!((stopped(KERNEL_CHANNEL), async_error(rank.comm)), (0, 0));
            barrier.wait();
            assert_eq!(abort(rank.comm), 0);
        });
        let mut functions: Vec<_> = started(COLL).into_iter().map(|event| event.function).collect();
        functions.sort();
        assert_eq!((functions, stopped(KERNEL_CHANNEL)), (vec!["AllGather".into(), "Reduce".into()], 0));
    });
}

#[test]
fn a_kernel_waits_for_those_of_its_communicator_on_other_streams() {
    run_isolated("", || {
        start_with_plugin();
        let (barrier, gate) = (Barrier::new(2), &*Box::leak(Box::new(AtomicBool::new(false))));
        on_blocking_threads(2, |mut rank| {
            let (held, free) = (rank.stream, new_stream());
            launch_host_function(held, wait_for_flag, gate);
            all_reduce(&rank, 1);
            rank.stream = free;
            all_reduce(&rank, 2);
            barrier.wait();
            // No stream is held any more but by the order of the kernels.
            assert!(started(COLL).len() == 4 && started(KERNEL_CHANNEL).is_empty());
            barrier.wait();
            gate.store(true, SeqCst);
            assert_eq!([synchronize(free), synchronize(held)], [OK; 2]);
            rank.finish();
        });
        for rank in 0..2 {
            let counts: Vec<_> = started(KERNEL_CHANNEL)
                .iter()
                .filter(|event| event.context == context_of(rank))
                .map(|event| only(COLL, |coll| coll.handle == event.parent).count)
                .collect();
            assert_eq!(counts, [1, 1, 2, 2]);
        }
    });
}

#[test]
fn an_exchange_that_fails_or_is_revoked_has_no_end() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let at = allocate(64);
            assert!(matches!(rank.all_reduce(at, at, 4 + rank.rank as usize, FLOAT, 0), 0 | INVALID_USAGE));
            wait_until("the error is told", || async_error(rank.comm) == INVALID_USAGE);
            wait_until("both hang", || gpu.count(Counter::NcclHangs) == 2);
            barrier.wait();
            assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
        });
        assert_eq!((started(KERNEL_CHANNEL).len(), stopped(KERNEL_CHANNEL)), (4, 0));
        take_calls();
        gpu.set(Setting::NcclHang, 1);
        on_blocking_threads(2, |rank| {
            all_reduce(&rank, 1);
            wait_until("both have begun", || started(KERNEL_CHANNEL).len() == 4);
            barrier.wait();
            // SAFETY: the handle is checked by the library.
            unsafe {
                assert_eq!((nccl().revoke)(rank.comm, 0), 0);
                assert_eq!((synchronize(rank.stream), (nccl().destroy)(rank.comm)), (OK, 0));
            }
        });
        assert_eq!(stopped(KERNEL_CHANNEL), 0);
        let ends = calls().into_iter().filter(|call| matches!(call, Call::Finalize { .. })).count();
        assert_eq!(ends, 2);
    });
}

#[test]
fn work_that_a_stream_reaches_after_an_abort_has_no_events() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        let (barrier, gate) = (Barrier::new(2), &*Box::leak(Box::new(AtomicBool::new(false))));
        on_blocking_threads(2, |rank| {
            launch_host_function(rank.stream, wait_for_flag, gate);
            all_reduce(&rank, 1);
            barrier.wait();
            assert_eq!(abort(rank.comm), 0);
            // The stream still has the group, but the plug-in has lost its communicator.
            assert!(calls().contains(&Call::Finalize { context: context_of(rank.rank) }));
            barrier.wait();
            assert_eq!((gpu.count(Counter::Communicators), gpu.count(Counter::NcclProfilers)), (2, 0));
            barrier.wait();
            gate.store(true, SeqCst);
            assert_eq!(synchronize(rank.stream), OK);
        });
        assert!(started(COLL).len() == 2 && started(KERNEL_CHANNEL).is_empty());
    });
}

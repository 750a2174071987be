//! The profiler host: the mask, a failed `init`, and handles that are null or not written.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use simulated_gpu::{Counter, Setting};

use crate::driver::{OK, allocate, launch_host_function, synchronize};
use crate::isolation::run_isolated;
use crate::nccl::new_id;
use crate::plugin_recorder::{
    ALL, COLL, COLL_API, Call, Event, GROUP, GROUP_API, INIT_STATUS, INITIAL_MASK, KERNEL_CHANNEL,
    KERNEL_LAUNCH, NULL_HANDLES, P2P, UNWRITTEN_HANDLES, context_of, set_mask, started, stopped, take_calls,
};
use crate::profiler::{VERSIONS, all_reduce, on_blocking_threads, only, start_with_plugin, wait_for_flag};
use crate::ranks::{Rank, on_threads};

#[test]
fn a_changed_mask_holds_from_the_next_operation_on() {
    run_isolated("", || {
        start_with_plugin();
        INITIAL_MASK.store(COLL, SeqCst);
        let barrier = Barrier::new(2);
        let step = |rank: &Rank, mask: i32, count| {
            barrier.wait();
            set_mask(mask);
            barrier.wait();
            all_reduce(rank, count);
        };
        let gate = &*Box::leak(Box::new(AtomicBool::new(false)));
        on_blocking_threads(2, |rank| {
            all_reduce(&rank, 1);
            // An operation follows the mask of its call, not that of its run.
            launch_host_function(rank.stream, wait_for_flag, gate);
            step(&rank, COLL, 2);
            step(&rank, COLL | KERNEL_CHANNEL, 3);
            step(&rank, KERNEL_CHANNEL, 4);
            step(&rank, GROUP, 5);
            step(&rank, 0, 6);
            barrier.wait();
            gate.store(true, SeqCst);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        let colls = started(COLL);
        let counts = |context| {
            let own = colls.iter().filter(move |event| event.context == context);
            own.map(|event| (event.number, event.count)).collect::<Vec<_>>()
        };
        for rank in 0..2 {
            assert_eq!(counts(context_of(rank)), [(0, 1), (1, 2), (2, 3), (3, 4)]);
        }
        let with_kernels: Vec<_> =
            colls.iter().filter(|event| event.count >= 3).map(|event| event.handle).collect();
        let kernels = started(KERNEL_CHANNEL);
        assert_eq!((kernels.len(), stopped(KERNEL_CHANNEL)), (8, 8));
        assert!(kernels.iter().all(|event| with_kernels.contains(&event.parent)));
        // Parents come although they are not in the mask.
        assert_eq!((started(GROUP).len(), started(COLL_API).len(), started(GROUP_API).len()), (10, 8, 10));
        assert!(started(KERNEL_LAUNCH).is_empty());
        // The handle of the last CollApi is stopped again by calls under a mask without it.
        assert_eq!(stopped(COLL_API), 8 + 2 * 2);
    });
}

#[test]
fn the_mask_is_one_for_all_communicators() {
    run_isolated("", || {
        start_with_plugin();
        INITIAL_MASK.store(0, SeqCst);
        let barrier = Barrier::new(2);
        on_blocking_threads(2, |rank| {
            all_reduce(&rank, 1);
            barrier.wait();
            if rank.rank == 0 {
                // The init of another communicator changes the events of this one.
                INITIAL_MASK.store(COLL, SeqCst);
                Rank::join(new_id(), 0, 1).finish();
            }
            barrier.wait();
            all_reduce(&rank, 2);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        // Collectives are numbered also while no plug-in is told.
        let colls: Vec<_> = started(COLL).iter().map(|event| (event.number, event.count)).collect();
        assert_eq!(colls, [(1, 2); 2]);
    });
}

#[test]
fn a_plugin_whose_init_fails_is_not_called_again() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        INIT_STATUS.store(3, SeqCst);
        on_threads(2, |rank| {
            all_reduce(&rank, 1);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        let calls = take_calls();
        assert!(calls.len() == 2 && calls.iter().all(|(_, call)| matches!(call, Call::Init(_))), "{calls:?}");
        // The next communicator has it again.
        INIT_STATUS.store(0, SeqCst);
        on_threads(2, |rank| {
            assert!(gpu.count(Counter::NcclProfilers) > 0);
            all_reduce(&rank, 1);
            rank.finish();
        });
        assert_eq!(started(COLL).len(), 2);
    });
}

#[test]
fn a_null_handle_has_no_stop_and_is_the_parent_of_its_children() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        for (nccl, version) in VERSIONS {
            gpu.set(Setting::NcclVersion, nccl);
            NULL_HANDLES.store(ALL, SeqCst);
            run_one_of_each();
            let kernels = started(KERNEL_CHANNEL);
            assert!(kernels.len() == 12 && kernels.iter().all(|event| event.parent == 0));
            let tasks: Vec<_> = [COLL, P2P].into_iter().flat_map(started).collect();
            assert!(tasks.iter().all(|event| event.parent == 0 && event.handle == 0));
            // NCCL 2.27 starts no children of a Group without a handle.
            assert_eq!(tasks.len(), if version == 4 { 0 } else { 6 });
            let calls = take_calls();
            let is_stop = |call: &Call| matches!(call, Call::Stop { .. } | Call::State { .. });
            assert!(!calls.iter().any(|(_, call)| is_stop(call)));
            // Only Coll is of no interest.
            NULL_HANDLES.store(COLL, SeqCst);
            run_one_of_each();
            let (colls, messages) = (started(COLL), started(P2P));
            assert!(colls.len() == 2 && colls.iter().all(|event| event.handle == 0 && event.parent != 0));
            assert_eq!((messages.len(), stopped(P2P)), (4, 4));
            let orphans = started(KERNEL_CHANNEL).iter().filter(|event| event.parent == 0).count();
            assert_eq!((orphans, stopped(KERNEL_CHANNEL)), (4, 12));
            take_calls();
        }
    });
}

/// Runs a collective and an exchange on two ranks.
fn run_one_of_each() {
    on_blocking_threads(2, |rank| {
        let [from, to] = [allocate(4), allocate(4)];
        all_reduce(&rank, 1);
        assert_eq!(rank.exchange(from, 1 - rank.rank, to, 1 - rank.rank, 4), 0);
        assert_eq!(synchronize(rank.stream), OK);
        rank.finish();
    });
}

#[test]
fn a_handle_that_is_not_written_is_that_of_the_call_before() {
    run_isolated("", || {
        start_with_plugin();
        let barrier = Barrier::new(2);
        on_blocking_threads(2, |rank| {
            all_reduce(&rank, 1);
            let first = only(COLL_API, |event| event.context == context_of(rank.rank)).handle;
            barrier.wait();
            UNWRITTEN_HANDLES.store(COLL_API | COLL, SeqCst);
            all_reduce(&rank, 2);
            assert_eq!(synchronize(rank.stream), OK);
            let is_second = |event: &Event| event.context == context_of(rank.rank) && event.count == 2;
            assert_eq!(only(COLL, is_second).parent, first);
            rank.finish();
        });
        // The place of every other handle is new.
        assert_eq!(started(KERNEL_CHANNEL).iter().filter(|event| event.parent == 0).count(), 4);
    });
}

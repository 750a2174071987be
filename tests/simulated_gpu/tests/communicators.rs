//! NCCL between threads: contents, states, hangs, aborts.

use std::ffi::c_int;
use std::sync::Barrier;

use simulated_gpu::{Counter, Setting};

use crate::driver::{
    Gate, ILLEGAL_ADDRESS, NOT_READY, OK, ORDER_ONLY, allocate, contents, fill, new_event, new_stream, query,
    query_event, record, start, synchronize, use_device, write_device_bytes,
};
use crate::isolation::{run_isolated, wait_until};
use crate::nccl::{
    Comm, FLOAT, IN_PROGRESS, INT, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, config, nccl, new_id,
};
use crate::ranks::{Rank, abort, async_error, begin_communicator_start, on_threads, wait_for_async_error};

#[test]
fn contents_go_around_rings_of_two_to_eight_ranks() {
    run_isolated("", || {
        let gpu = start();
        for ranks in 2..=8 {
            on_threads(ranks, |rank| {
                rank.check_ring(&[1, 4097, 700_000]);
                rank.finish();
            });
        }
        assert_eq!(gpu.count(Counter::Communicators), 0);
        assert_eq!(gpu.count(Counter::NcclGroups), 3 * (2..=8).sum::<i64>());
    });
}

/// Reduces one element of each rank and returns the result, which must be the same on all.
fn reduce<const LEN: usize>(
    ranks: c_int,
    datatype: c_int,
    operation: c_int,
    value: impl Fn(c_int) -> [u8; LEN] + Sync,
) -> [u8; LEN] {
    const COUNT: usize = 1000;
    let results = on_threads(ranks, |rank| {
        let len = COUNT * LEN;
        let (from, to) = (allocate(len), allocate(len));
        write_device_bytes(from, &value(rank.rank).repeat(COUNT));
        assert_eq!(rank.all_reduce(from, to, COUNT, datatype, operation), 0);
        // In place, too.
        assert_eq!(rank.all_reduce(from, from, COUNT, datatype, operation), 0);
        assert_eq!(synchronize(rank.stream), OK);
        let result = contents(to, len);
        assert!(contents(from, len) == result && result.chunks(LEN).all(|element| *element == result[..LEN]));
        rank.finish();
        result[..LEN].to_vec()
    });
    assert!(results.iter().all(|result| *result == results[0]));
    results[0].clone().try_into().unwrap()
}

#[test]
fn reductions_compute_over_all_ranks() {
    run_isolated("", || {
        start();
        let value = |rank: c_int| rank as f32 * 0.5 - 1.0;
        for ranks in [2, 3, 8] {
            let values: Vec<f32> = (0..ranks).map(value).collect();
            let expected = [
                values.iter().sum(),
                values.iter().product(),
                values.iter().copied().fold(f32::MIN, f32::max),
                values.iter().copied().fold(f32::MAX, f32::min),
                values.iter().sum::<f32>() / ranks as f32,
            ];
            for (operation, expected) in expected.into_iter().enumerate() {
                let found = reduce(ranks, FLOAT, operation as c_int, |rank| value(rank).to_ne_bytes());
                assert_eq!(f32::from_ne_bytes(found), expected, "operation {operation} of {ranks}");
            }
            let sum = reduce(ranks, INT, 0, |rank| (i32::MAX - rank).to_ne_bytes());
            assert_eq!(
                i32::from_ne_bytes(sum),
                (0..ranks).fold(0, |sum: i32, rank| sum.wrapping_add(i32::MAX - rank))
            );
        }
        let maximum = reduce(2, 0, 2, |rank| [if rank == 0 { -5i8 } else { 3 } as u8]);
        assert_eq!(maximum, [3]);
        // Half precision is refused.
        on_threads(2, |rank| assert_eq!(rank.all_reduce(0, 0, 1, 6, 0), INVALID_ARGUMENT));
    });
}

#[test]
fn messages_are_matched_in_their_order_whatever_the_groups() {
    run_isolated("", || {
        start();
        on_threads(2, |rank| {
            let at = allocate(30);
            if rank.rank == 0 {
                write_device_bytes(at, &(0..30).collect::<Vec<u8>>());
                for part in 0..3 {
                    assert!(matches!(rank.send(at + 10 * part, 10, 1), 0 | IN_PROGRESS));
                    assert_eq!(wait_for_async_error(rank.comm), 0);
                }
            } else {
                let end =
                    rank.group(|| (0..3).for_each(|part| assert_eq!(rank.receive(at + 10 * part, 10, 0), 0)));
                assert_eq!((end, wait_for_async_error(rank.comm)), (IN_PROGRESS, 0));
            }
            assert_eq!((synchronize(rank.stream), contents(at, 30)), (OK, (0..30).collect()));
            rank.finish();
        });
    });
}

#[test]
fn groups_of_two_streams_run_in_the_order_of_their_launch() {
    run_isolated("", || {
        start();
        on_threads(2, |mut rank| {
            let peer = 1 - rank.rank;
            let (held, free) = (rank.stream, new_stream());
            let [from, first, second] = [allocate(4), allocate(4), allocate(4)];
            let gate = Gate::close(held);
            assert_eq!(rank.exchange(from, peer, first, peer, 4), 0);
            rank.stream = free;
            assert_eq!(rank.exchange(from, peer, second, peer, 4), 0);
            assert_eq!(query(free), NOT_READY);
            gate.open();
            assert_eq!([synchronize(free), query(held)], [OK, OK]);
            rank.finish();
        });
    });
}

#[test]
fn a_rank_sends_to_itself_only_what_it_receives() {
    run_isolated("", || {
        start();
        on_threads(1, |rank| {
            let [from, to] = [allocate(4), allocate(4)];
            write_device_bytes(from, &[1, 2, 3, 4]);
            assert_eq!(rank.exchange(from, 0, to, 0, 4), 0);
            assert_eq!((synchronize(rank.stream), contents(to, 4)), (OK, vec![1, 2, 3, 4]));
            assert_eq!(rank.send(from, 4, 0), INVALID_USAGE);
            let end = rank.group(|| {
                assert_eq!([rank.send(from, 4, 0), rank.receive(to, 3, 0)], [0, 0]);
            });
            assert_eq!(end, INVALID_USAGE);
            rank.finish();
        });
    });
}

#[test]
fn a_start_waits_for_all_ranks_and_can_be_aborted() {
    run_isolated("", || {
        let gpu = start();
        let id = new_id();
        let (comm, answer) = begin_communicator_start(id, 0, 3);
        let (other, _) = begin_communicator_start(id, 1, 3);
        assert_eq!((answer, async_error(comm)), (IN_PROGRESS, IN_PROGRESS));
        let mut number = 0;
        // SAFETY: handles are checked by the library.
        unsafe {
            assert_eq!((nccl().count)(comm, &raw mut number), INVALID_ARGUMENT);
            assert_eq!((nccl().send)(0, 0, 1, 1, comm, std::ptr::null_mut()), INVALID_ARGUMENT);
            assert_eq!((nccl().destroy)(comm), INVALID_ARGUMENT);
        }
        assert_eq!([abort(comm), abort(comm), abort(other)], [0, INVALID_ARGUMENT, 0]);
        wait_until("the communicators are gone", || gpu.count(Counter::Communicators) == 0);
        // The id can be used again: nothing is left of the first try.
        let id = new_id();
        let last = std::thread::spawn(move || {
            use_device(0);
            Rank::join(id, 1, 2).finish();
        });
        Rank::join(id, 0, 2).finish();
        last.join().unwrap();
    });
}

#[test]
fn a_start_that_hangs_can_be_aborted() {
    run_isolated("nccl_init_hang=1", || {
        let gpu = start();
        let (comm, answer) = begin_communicator_start(new_id(), 0, 1);
        assert_eq!((answer, async_error(comm)), (IN_PROGRESS, IN_PROGRESS));
        assert_eq!(abort(comm), 0);
        wait_until("the communicator is gone", || gpu.count(Counter::Communicators) == 0);
        Rank::join(new_id(), 0, 1).finish();
    });
}

#[test]
fn a_start_with_wrong_arguments_is_refused() {
    run_isolated("", || {
        start();
        for (rank, ranks) in [(-1, 2), (2, 2), (0, 0)] {
            assert_eq!(begin_communicator_start(new_id(), rank, ranks).1, INVALID_ARGUMENT);
        }
        let start = |config: &mut crate::nccl::Config| {
            let mut comm: Comm = std::ptr::null_mut();
            // SAFETY: the library writes a handle and reads the settings.
            unsafe { (nccl().start)(&raw mut comm, 1, new_id(), 0, config) }
        };
        let (mut magic, mut blocking) = (config(false), config(false));
        (magic.magic, blocking.blocking) = (0, 2);
        assert_eq!(
            [start(&mut magic), start(&mut blocking), start(&mut config(true))],
            [INVALID_ARGUMENT, INVALID_ARGUMENT, 0]
        );
        // Two processes of one rank; ranks that disagree on their number.
        let id = new_id();
        let [one, two] = [begin_communicator_start(id, 0, 2).0, begin_communicator_start(id, 0, 2).0];
        wait_until("the second is refused", || [async_error(one), async_error(two)].contains(&INVALID_USAGE));
        let id = new_id();
        let [one, two] = [begin_communicator_start(id, 0, 2).0, begin_communicator_start(id, 1, 3).0];
        wait_until("they disagree", || [async_error(one), async_error(two)].contains(&INVALID_USAGE));
    });
}

#[test]
fn blocking_communicators_start_together_in_a_group() {
    run_isolated("", || {
        start();
        let (id, mut comms) = (new_id(), [std::ptr::null_mut(); 3]);
        // SAFETY: the library writes handles and numbers.
        unsafe {
            assert_eq!((nccl().group_start)(), 0);
            for (rank, comm) in comms.iter_mut().enumerate() {
                assert_eq!((nccl().start_blocking)(comm, 3, id, rank as c_int), 0);
            }
            assert_eq!((nccl().group_end)(), 0);
            for (rank, comm) in comms.into_iter().enumerate() {
                let mut numbers = [-1; 3];
                let [count, own, device] = &mut numbers;
                assert_eq!(
                    [(nccl().count)(comm, count), (nccl().rank)(comm, own), (nccl().device)(comm, device)],
                    [0; 3]
                );
                assert_eq!((numbers, async_error(comm)), ([3, rank as c_int, 0], 0));
                assert_eq!((nccl().finalize)(comm), 0);
                assert_eq!((nccl().finalize)(comm), INVALID_USAGE);
                assert_eq!((nccl().destroy)(comm), 0);
                assert_eq!((nccl().error)(comm, &raw mut numbers[0]), INVALID_ARGUMENT);
            }
            assert_eq!((nccl().group_end)(), INVALID_USAGE);
        }
    });
}

#[test]
fn a_group_is_in_progress_until_it_is_on_its_stream() {
    run_isolated("nccl_hold_launches=1", || {
        let gpu = start();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let (peer, [from, to]) = (1 - rank.rank, [allocate(4), allocate(4)]);
            assert_eq!(fill(from, 1 + rank.rank as u8, 4, rank.stream), OK);
            assert_eq!(synchronize(rank.stream), OK);
            let end = rank.group(|| {
                assert_eq!([rank.send(from, 4, peer), rank.receive(to, 4, peer)], [0, 0]);
            });
            assert_eq!(end, IN_PROGRESS);
            // The communicator takes nothing before the launch has ended.
            assert_eq!((async_error(rank.comm), rank.send(from, 4, peer)), (IN_PROGRESS, INVALID_ARGUMENT));
            assert_eq!(query(rank.stream), OK, "nothing is on the stream yet");
            barrier.wait();
            gpu.set(Setting::NcclHoldLaunches, 0);
            assert_eq!((wait_for_async_error(rank.comm), synchronize(rank.stream)), (0, OK));
            assert_eq!(contents(to, 4), [1 + peer as u8; 4]);
            rank.finish();
        });
    });
}

#[test]
fn a_group_with_a_failed_call_launches_nothing() {
    run_isolated("", || {
        let gpu = start();
        on_threads(2, |rank| {
            let at = allocate(4);
            let end = rank.group(|| {
                assert_eq!(rank.send(at, 4, 1 - rank.rank), 0);
                assert_eq!(rank.send(at, 4, 2), INVALID_ARGUMENT);
            });
            assert_eq!((end, query(rank.stream), async_error(rank.comm)), (INVALID_ARGUMENT, OK, 0));
            // The next group has nothing of it.
            let to = allocate(4);
            assert_eq!(rank.exchange(at, 1 - rank.rank, to, 1 - rank.rank, 4), 0);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        assert_eq!(gpu.count(Counter::NcclGroups), 2);
    });
}

#[test]
fn sizes_that_differ_are_an_error_on_both_sides() {
    run_isolated("", || {
        let gpu = start();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let [from, to] = [allocate(8), allocate(8)];
            assert_eq!([fill(from, 1, 8, rank.stream), fill(to, 2, 8, rank.stream)], [OK, OK]);
            let end = rank.group(|| {
                let answer = if rank.rank == 0 { rank.send(from, 8, 1) } else { rank.receive(to, 4, 0) };
                assert_eq!(answer, 0);
            });
            assert_eq!(end, IN_PROGRESS);
            wait_until("the error is told", || async_error(rank.comm) == INVALID_USAGE);
            // A failed group keeps its stream until the communicator is aborted.
            barrier.wait();
            wait_until("both hang", || gpu.count(Counter::NcclHangs) == 2);
            assert!(rank.is_busy());
            barrier.wait();
            assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
            assert_eq!(contents(to, 8), [2; 8], "no byte moved");
        });
    });
}

#[test]
fn a_group_that_hangs_ends_by_abort_and_moves_nothing() {
    run_isolated("nccl_hang=1", || {
        let gpu = start();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let to = rank.hang(1 - rank.rank, 100_000);
            let done = new_event(ORDER_ONLY);
            assert_eq!(record(done, rank.stream), OK);
            wait_until("a group hangs", || gpu.count(Counter::NcclHangs) == 1);
            assert_eq!((query_event(done), async_error(rank.comm)), (NOT_READY, 0));
            barrier.wait();
            assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
            assert_eq!((query_event(done), contents(to, 100_000)), (OK, vec![0; 100_000]));
        });
        wait_until("the communicators are gone", || gpu.count(Counter::Communicators) == 0);
    });
}

#[test]
fn a_revoked_communicator_frees_its_stream_and_takes_nothing_more() {
    run_isolated("nccl_hang=1", || {
        let gpu = start();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let to = rank.hang(1 - rank.rank, 4096);
            wait_until("a group hangs", || gpu.count(Counter::NcclHangs) == 1);
            barrier.wait();
            // SAFETY: handles are checked by the library.
            unsafe {
                assert_eq!((nccl().revoke)(rank.comm, 1), INVALID_ARGUMENT);
                assert_eq!((nccl().revoke)(rank.comm, 0), IN_PROGRESS);
            }
            assert_eq!((wait_for_async_error(rank.comm), synchronize(rank.stream)), (0, OK));
            assert_eq!(rank.send(to, 4, 1 - rank.rank), INVALID_USAGE);
            // The stream belongs to the caller again, and nothing of the group comes later.
            assert_eq!([fill(to, 5, 4096, rank.stream), synchronize(rank.stream)], [OK, OK]);
            assert_eq!(contents(to, 4096), [5; 4096]);
            barrier.wait();
            // SAFETY: the handle is checked by the library.
            assert_eq!(unsafe { (nccl().destroy)(rank.comm) }, 0);
            assert_eq!(contents(to, 4096), [5; 4096]);
        });
        assert_eq!(gpu.count(Counter::Communicators), 0);
    });
}

#[test]
fn an_abort_of_one_rank_is_a_remote_error_for_the_other() {
    run_isolated("", || {
        start();
        on_threads(2, |rank| {
            if rank.rank == 1 {
                assert_eq!(abort(rank.comm), 0);
                return;
            }
            let at = allocate(4096);
            // The error may come before the launch has ended.
            assert_eq!(rank.group(|| assert_eq!(rank.receive(at, 4096, 1), 0)), IN_PROGRESS);
            wait_until("the error is told", || async_error(rank.comm) == REMOTE_ERROR);
            assert!(rank.is_busy());
            assert_eq!(rank.send(allocate(4), 4, 1), REMOTE_ERROR);
            assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
        });
    });
}

#[test]
fn a_sticky_error_ends_groups_and_starts() {
    run_isolated("nccl_hang=1", || {
        let gpu = start();
        let rank = Rank::join(new_id(), 0, 1);
        rank.hang(0, 4);
        wait_until("the group hangs", || gpu.count(Counter::NcclHangs) == 1);
        let (pending, _) = begin_communicator_start(new_id(), 0, 2);
        gpu.set(Setting::Sticky, 700);
        assert_eq!(synchronize(rank.stream), ILLEGAL_ADDRESS);
        wait_until("the start has ended", || async_error(pending) != IN_PROGRESS);
        wait_until("the group has ended", || gpu.count(Counter::NcclGroups) == 1);
    });
}

#[test]
fn registrations_are_of_device_memory() {
    run_isolated("", || {
        start();
        let (rank, at, mut handle) = (Rank::join(new_id(), 0, 1), allocate(4096), std::ptr::null_mut());
        // SAFETY: the library writes a handle.
        unsafe {
            assert_eq!((nccl().register)(rank.comm, at, 4096, &raw mut handle), 0);
            assert_eq!((nccl().deregister)(rank.comm, handle), 0);
            assert_eq!((nccl().register)(rank.comm, at, 4097, &raw mut handle), INVALID_ARGUMENT);
        }
        rank.finish();
    });
}

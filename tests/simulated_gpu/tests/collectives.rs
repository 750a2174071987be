//! The collectives of NCCL: contents, and ranks that do not agree.

use std::ffi::c_int;
use std::sync::Barrier;

use simulated_gpu::{Counter, Setting};

use crate::driver::{OK, allocate, contents, start, synchronize, write_device_bytes};
use crate::isolation::{run_isolated, wait_until};
use crate::nccl::{BYTE, INT, INVALID_ARGUMENT, INVALID_USAGE, nccl};
use crate::ranks::{Rank, abort, async_error, on_threads};
use crate::sharing::pattern;

/// A length that is no power of two.
const LEN: usize = 70_001;

/// Allocates device memory with these bytes.
fn upload(bytes: &[u8]) -> u64 {
    let at = allocate(bytes.len());
    write_device_bytes(at, bytes);
    at
}

/// Returns the bytes of numbers.
fn bytes_of(numbers: impl IntoIterator<Item = i32>) -> Vec<u8> {
    numbers.into_iter().flat_map(i32::to_ne_bytes).collect()
}

#[test]
fn a_gather_has_the_contents_of_all_ranks_in_their_order() {
    run_isolated("", || {
        start();
        for ranks in [1, 2, 5] {
            on_threads(ranks, |rank| {
                let expected: Vec<u8> = (0..ranks as u64).flat_map(|rank| pattern(rank, LEN)).collect();
                let (from, to) = (upload(&pattern(rank.rank as u64, LEN)), allocate(LEN * ranks as usize));
                assert_eq!(rank.all_gather(from, to, LEN, BYTE), 0);
                assert_eq!(synchronize(rank.stream), OK);
                assert!(contents(to, expected.len()) == expected);
                // In place.
                let to = allocate(expected.len());
                let own = to + (rank.rank as usize * LEN) as u64;
                write_device_bytes(own, &pattern(rank.rank as u64, LEN));
                assert_eq!((rank.all_gather(own, to, LEN, BYTE), synchronize(rank.stream)), (0, OK));
                assert!(contents(to, expected.len()) == expected);
                rank.finish();
            });
        }
    });
}

#[test]
fn a_scattered_reduction_gives_each_rank_its_part() {
    run_isolated("", || {
        start();
        for ranks in [1, 2, 5] {
            on_threads(ranks, |rank| {
                const COUNT: i32 = 1001;
                let from = upload(&bytes_of((0..COUNT * ranks).map(|index| index + rank.rank)));
                let to = allocate(4 * COUNT as usize);
                assert_eq!(rank.reduce_scatter(from, to, COUNT as usize, INT), 0);
                assert_eq!(synchronize(rank.stream), OK);
                let sum_of_ranks: i32 = (0..ranks).sum();
                let own = COUNT * rank.rank..COUNT * (rank.rank + 1);
                let expected = bytes_of(own.map(|index| index * ranks + sum_of_ranks));
                assert!(contents(to, expected.len()) == expected);
                rank.finish();
            });
        }
    });
}

#[test]
fn a_broadcast_has_the_contents_of_its_root() {
    run_isolated("", || {
        start();
        on_threads(3, |rank| {
            for root in 0..3 {
                // Only the root has a source.
                let from = if rank.rank == root { upload(&pattern(root as u64, LEN)) } else { 0 };
                let to = allocate(LEN);
                assert_eq!((rank.broadcast(from, to, LEN, BYTE, root), synchronize(rank.stream)), (0, OK));
                assert!(contents(to, LEN) == pattern(root as u64, LEN));
            }
            let at = upload(&[rank.rank as u8; 4]);
            let end = rank.group(|| {
                // SAFETY: arguments are checked by the library.
                let answer = unsafe { (nccl().broadcast_in_place)(at, 4, BYTE, 2, rank.comm, rank.stream) };
                assert_eq!(answer, 0);
            });
            assert_eq!(end, crate::nccl::IN_PROGRESS);
            assert_eq!(crate::ranks::wait_for_async_error(rank.comm), 0);
            assert_eq!((synchronize(rank.stream), contents(at, 4)), (OK, vec![2; 4]));
            assert_eq!(rank.broadcast(at, at, 4, BYTE, 3), INVALID_ARGUMENT);
            rank.finish();
        });
    });
}

#[test]
fn a_reduction_is_that_of_its_root_alone() {
    run_isolated("", || {
        start();
        on_threads(3, |rank| {
            for root in 0..3 {
                let from = upload(&bytes_of([rank.rank + 1, 10]));
                // Only the root has a destination.
                let to = if rank.rank == root { allocate(8) } else { 0 };
                assert_eq!((rank.reduce(from, to, 2, INT, root), synchronize(rank.stream)), (0, OK));
                if rank.rank == root {
                    assert_eq!(contents(to, 8), bytes_of([6, 30]));
                }
            }
            rank.finish();
        });
    });
}

type Call = fn(&Rank, u64, u64) -> c_int;

/// Pairs of calls that do not match: function, count, type, root, and a message.
const MISMATCHES: [[Call; 2]; 6] = [
    [
        |rank, from, to| rank.all_reduce(from, to, 4, INT, 0),
        |rank, from, to| rank.all_gather(from, to, 4, INT),
    ],
    [
        |rank, from, to| rank.all_reduce(from, to, 4, INT, 0),
        |rank, from, to| rank.all_reduce(from, to, 5, INT, 0),
    ],
    [
        |rank, from, to| rank.all_gather(from, to, 4, INT),
        |rank, from, to| rank.all_gather(from, to, 16, BYTE),
    ],
    [
        |rank, from, to| rank.broadcast(from, to, 4, INT, 0),
        |rank, from, to| rank.broadcast(from, to, 4, INT, 1),
    ],
    [|rank, from, to| rank.reduce(from, to, 4, INT, 0), |rank, from, to| rank.reduce(from, to, 4, INT, 1)],
    [
        |rank, from, to| rank.broadcast(from, to, 4, INT, 0),
        |rank, _, to| {
            assert!(matches!(rank.receive(to, 4, 0), 0 | crate::nccl::IN_PROGRESS));
            crate::ranks::wait_for_async_error(rank.comm)
        },
    ],
];

/// Runs the calls of a mismatch on two ranks, and then a check, before both communicators are aborted.
fn mismatch(calls: [Call; 2], check: impl Fn(&Rank) + Sync) {
    let barrier = Barrier::new(2);
    on_threads(2, |rank| {
        let (from, to) = (upload(&[1; 64]), upload(&[2; 64]));
        // A strict mismatch may be known before the launch has ended.
        assert!(matches!(calls[rank.rank as usize](&rank, from, to), 0 | INVALID_USAGE));
        check(&rank);
        assert!(rank.is_busy());
        barrier.wait();
        assert_eq!((abort(rank.comm), synchronize(rank.stream)), (0, OK));
        assert_eq!(contents(to, 64), [2; 64], "no byte moved");
    });
}

#[test]
fn collectives_that_differ_are_an_error_on_both_sides() {
    run_isolated("", || {
        start();
        for calls in MISMATCHES {
            mismatch(calls, |rank| {
                wait_until("the error is told", || async_error(rank.comm) == INVALID_USAGE);
            });
        }
    });
}

#[test]
fn collectives_that_differ_hang_by_setting() {
    run_isolated("nccl_lenient=1", || {
        let gpu = start();
        for calls in MISMATCHES {
            mismatch(calls, |rank| {
                wait_until("a rank hangs", || gpu.count(Counter::NcclHangs) > 0);
                assert_eq!(async_error(rank.comm), 0);
            });
        }
        // Messages whose sizes differ, too.
        assert_eq!(gpu.setting(Setting::NcclLenient), 1);
        let calls: [Call; 2] = [
            |rank, from, _| i32::from(!matches!(rank.send(from, 8, 1), 0 | crate::nccl::IN_PROGRESS)),
            |rank, _, to| i32::from(!matches!(rank.receive(to, 4, 0), 0 | crate::nccl::IN_PROGRESS)),
        ];
        mismatch(calls, |rank| {
            wait_until("a rank hangs", || gpu.count(Counter::NcclHangs) > 0);
            wait_until("it is launched", || async_error(rank.comm) == 0);
        });
    });
}

//! The profiler host: what a plug-in in this program is told, for each version of its table.

use std::ffi::{c_int, c_void};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use simulated_gpu::{Counter, Setting, SimulatedGpu, communicator_hash};

use crate::driver::{OK, allocate, start, synchronize};
use crate::isolation::{run_isolated, wait_until};
use crate::nccl::{BYTE, FLOAT, IN_PROGRESS, INT, UniqueId, new_id};
use crate::plugin_recorder::{
    COLL, COLL_API, Call, Event, FILL, GROUP, GROUP_API, Init, KERNEL_CHANNEL, KERNEL_LAUNCH, P2P, P2P_API,
    calls, context_of, started, stopped, take_calls, transcript,
};
use crate::ranks::{Rank, on_threads, on_threads_of};

/// Versions of NCCL, and the newest table that each knows.
pub const VERSIONS: [(i64, u32); 4] = [(22_707, 4), (22_809, 5), (23_007, 6), (23_200, 7)];

/// Loads the library in a process that is a plug-in itself.
pub fn start_with_plugin() -> &'static SimulatedGpu {
    name_plugin("STATIC_PLUGIN");
    start()
}

/// Names the plug-in of this process.
pub fn name_plugin(name: &str) {
    // SAFETY: no other thread of this process reads the environment yet.
    unsafe { std::env::set_var("NCCL_PROFILER_PLUGIN", name) };
}

/// Returns the bytes of an id.
pub fn bytes_of(id: &UniqueId) -> [u8; 128] {
    id.internal.map(|byte| byte as u8)
}

/// Runs a body for each rank of a blocking communicator on a thread.
pub fn on_blocking_threads<T: Send>(ranks: c_int, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    on_threads_of(new_id(), ranks, Rank::join_blocking, body)
}

/// Reduces some numbers of all ranks.
pub fn all_reduce(rank: &Rank, count: usize) {
    let at = allocate(4 * count.max(1));
    assert_eq!(rank.all_reduce(at, at, count, FLOAT, 0), 0);
}

/// Returns the only event that matches.
pub fn only(kind: i32, matches: impl Fn(&Event) -> bool) -> Event {
    let mut found: Vec<_> = started(kind).into_iter().filter(matches).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Waits until a flag is set.
pub unsafe extern "C" fn wait_for_flag(flag: *mut c_void) {
    // SAFETY: the test passes a flag that lives as long as the process.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    wait_until("the test goes on", || flag.load(SeqCst));
}

#[test]
fn the_number_of_a_communicator_is_that_of_nccl() {
    let id = std::array::from_fn(|index| (index * 37 + 11) as u8);
    assert_eq!(communicator_hash(&id), 0x3002_dcd1_bbe6_653d);
}

#[test]
fn all_ranks_are_told_the_same_communicator() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        for (nccl, version) in VERSIONS {
            gpu.set(Setting::NcclVersion, nccl);
            let (id, barrier) = (new_id(), Barrier::new(4));
            on_threads_of(id, 4, Rank::join, |rank| {
                barrier.wait();
                assert_eq!(gpu.count(Counter::NcclProfilers), 4);
                barrier.wait();
                rank.finish();
            });
            let mut calls: Vec<_> = take_calls().into_iter().map(|(_, call)| call).collect();
            let finals = calls.split_off(4);
            let hash = communicator_hash(&bytes_of(&id));
            for rank in 0..4 {
                let init = Init { version, hash, has_name: false, nodes: 1, ranks: 4, rank };
                assert!(calls.contains(&Call::Init(init)), "{calls:?}");
                assert!(finals.contains(&Call::Finalize { context: context_of(rank) }), "{finals:?}");
            }
            assert_eq!((finals.len(), gpu.count(Counter::NcclProfilers)), (4, 0));
        }
        assert_eq!(gpu.count(Counter::NcclPluginLogs), 16);
    });
}

/// The events of a rank's thread for two collectives and a group of messages, without the events of API calls.
const TASKS: [&str; 16] = [
    "start Group",
    "start AllReduce 0",
    "stop AllReduce 0",
    "stop Group",
    "start Group",
    "start AllReduce 1",
    "stop AllReduce 1",
    "stop Group",
    "start Group",
    "start Send 0",
    "start Recv 0",
    "start AllGather 0",
    "stop Send 0",
    "stop Recv 0",
    "stop AllGather 0",
    "stop Group",
];

/// Returns the transcript of one collective from v5 on.
fn lines_of_all_reduce(number: u64) -> Vec<String> {
    let lines = [
        "start GroupApi",
        "state 23 of GroupApi",
        "start AllReduce API",
        "stop AllReduce API",
        "state 24 of GroupApi",
        "start KernelLaunch",
        "stop KernelLaunch",
        "start Group",
        "start AllReduce N",
        "stop AllReduce N",
        "stop Group",
        "stop GroupApi",
    ];
    lines.map(|line| line.replace('N', &number.to_string())).to_vec()
}

#[test]
fn events_come_in_the_order_of_nccl_for_each_version() {
    run_isolated("", || {
        let gpu = start_with_plugin();
        for (nccl, version) in VERSIONS {
            gpu.set(Setting::NcclVersion, nccl);
            on_blocking_threads(2, |rank| {
                let [from, to] = [allocate(64), allocate(64)];
                all_reduce(&rank, 10);
                all_reduce(&rank, 20);
                let end = rank.group(|| {
                    let end = rank.group(|| assert_eq!(rank.send(from, 4, 1 - rank.rank), 0));
                    assert_eq!([end, rank.receive(to, 4, 1 - rank.rank)], [0; 2]);
                    assert_eq!(rank.all_gather(from, to, 8, INT), 0);
                });
                assert_eq!((end, synchronize(rank.stream)), (0, OK));
                rank.finish();
            });
            let depths: Vec<_> = started(GROUP_API).iter().map(|event| event.group_depth).collect();
            let calls = take_calls();
            for rank in 0..2 {
                let lines = transcript(&calls, context_of(rank));
                if version == 4 {
                    assert_eq!(lines, TASKS.map(|line| peer_line(line, rank)));
                    continue;
                }
                assert_eq!(lines[..12], lines_of_all_reduce(0));
                assert_eq!(lines[12..24], lines_of_all_reduce(1));
                let mut group: Vec<_> = [
                    "start GroupApi",
                    "state 23 of GroupApi",
                    "start Send API",
                    "stop Send API",
                    "start Recv API",
                    "stop Recv API",
                    "start AllGather API",
                    "stop AllGather API",
                    "state 24 of GroupApi",
                    "start KernelLaunch",
                    "stop KernelLaunch",
                ]
                .map(str::to_owned)
                .to_vec();
                group.extend(TASKS[8..].iter().map(|line| peer_line(line, rank)));
                group.push("stop GroupApi".to_owned());
                assert_eq!(lines[24..], group);
            }
            // The group of a single call, or two groups and that of their first call.
            assert_eq!(depths.iter().filter(|depth| **depth == 1).count(), if version == 4 { 0 } else { 4 });
            assert_eq!(depths.iter().filter(|depth| **depth == 3).count(), if version == 4 { 0 } else { 2 });
        }
    });
}

/// Returns a line of rank 1 as the given rank has it.
fn peer_line(line: &str, rank: i32) -> String {
    let peer = 1 - rank;
    line.replace("Send 0", &format!("Send {peer}")).replace("Recv 0", &format!("Recv {peer}"))
}

#[test]
fn descriptors_have_the_contents_and_the_length_of_their_version() {
    run_isolated("nccl_channels=3", || {
        let gpu = start_with_plugin();
        for (nccl, version) in VERSIONS {
            gpu.set(Setting::NcclVersion, nccl);
            let buffers = on_blocking_threads(3, |rank| {
                let [from, to] = [allocate(1200), allocate(1200)];
                assert_eq!(rank.broadcast(from, to, 100, FLOAT, 2), 0);
                assert_eq!(rank.reduce_scatter(from, to, 100, FLOAT), 0);
                let [next, previous] = [1, 2].map(|step| (rank.rank + step) % 3);
                assert_eq!(rank.exchange(from, next, to, previous, 7), 0);
                assert_eq!(synchronize(rank.stream), OK);
                let stream = rank.stream as u64;
                rank.finish();
                ([from, to], stream)
            });
            for (rank, (buffers, stream)) in (0..).zip(buffers) {
                check_contents(version, rank, buffers, stream);
            }
            take_calls();
        }
    });
}

/// Checks the events of one rank.
fn check_contents(version: u32, rank: i32, buffers: [u64; 2], stream: u64) {
    let of_rank = |function: &'static str| {
        move |event: &Event| event.context == context_of(rank) && event.function == function
    };
    // NCCL treats a broadcast as one of bytes.
    let broadcast = only(COLL, of_rank("Broadcast"));
    assert_eq!((broadcast.datatype.as_str(), broadcast.count, broadcast.root), ("ncclInt8", 400, 2));
    let coll = only(COLL, of_rank("ReduceScatter"));
    assert_eq!((coll.datatype.as_str(), coll.count, coll.root), ("ncclFloat32", 100, 0));
    assert_eq!((coll.algorithm.as_str(), coll.protocol.as_str()), ("RING", "SIMPLE"));
    assert_eq!((coll.number, coll.channels, coll.buffers, coll.rank), (0, 3, buffers, rank));
    let (send, receive) = (only(P2P, of_rank("Send")), only(P2P, of_rank("Recv")));
    assert_eq!([send.buffers[0], receive.buffers[0]], buffers);
    assert_eq!([send.root, receive.root], [(rank + 1) % 3, (rank + 2) % 3]);
    // NCCL has no name for unsigned bytes.
    assert_eq!((send.datatype.as_str(), send.count, send.channels, send.rank), ("Unknown", 7, 3, rank));
    let groups: Vec<_> =
        started(GROUP).into_iter().filter(|event| event.context == context_of(rank)).collect();
    assert_eq!(groups.len(), 3);
    assert!(groups.iter().all(|group| group.rank == 0 && group.parent == 0));
    let [_, second, third] = [0, 1, 2].map(|index: usize| groups[index].handle);
    if version == 4 {
        assert_eq!((coll.parent, send.parent, receive.parent), (second, third, third));
        assert_eq!((coll.ends, send.parent_group), ([FILL; 3], 0));
        assert!(started(GROUP_API | COLL_API | P2P_API | KERNEL_LAUNCH).is_empty());
        return;
    }
    assert_eq!(
        [coll.parent_group, send.parent_group, receive.parent_group],
        [second as u64, third as u64, third as u64]
    );
    let ends = if version == 7 { [0; 2] } else { [FILL; 2] };
    assert_eq!((coll.ends[1..].to_vec(), send.ends[1..].to_vec()), (ends.to_vec(), ends.to_vec()));
    // The events of API calls have a rank from NCCL 2.31 on.
    let own = if version == 7 { rank } else { 0 };
    let call = only(COLL_API, of_rank("Broadcast"));
    assert_eq!((call.datatype.as_str(), call.count, call.root, call.stream), ("ncclFloat32", 100, 2, stream));
    assert_eq!((call.handle, call.rank), (broadcast.parent, own));
    let group_call =
        only(GROUP_API, |event| event.handle == call.parent && event.context == context_of(rank));
    assert_eq!((group_call.parent, group_call.rank), (0, own));
    let call = only(P2P_API, of_rank("Recv"));
    assert_eq!((call.handle, call.rank, call.stream, call.count), (receive.parent, own, stream, 7));
    let launches: Vec<_> =
        started(KERNEL_LAUNCH).into_iter().filter(|event| event.context == context_of(rank)).collect();
    assert!(launches.len() == 3 && launches.iter().all(|event| event.stream == stream && event.rank == own));
    assert_eq!(launches[2].parent, call.parent);
}

#[test]
fn kernels_begin_and_end_on_another_thread() {
    run_isolated("nccl_channels=5", || {
        let gpu = start_with_plugin();
        for (nccl, _) in VERSIONS {
            gpu.set(Setting::NcclVersion, nccl);
            on_blocking_threads(2, |rank| {
                all_reduce(&rank, 10);
                assert_eq!(synchronize(rank.stream), OK);
                rank.finish();
            });
            let (tasks, kernels) = (started(COLL), started(KERNEL_CHANNEL));
            assert_eq!((tasks.len(), kernels.len()), (2, 10));
            let calls = take_calls();
            let thread_of = |wanted: &Call| calls.iter().find(|(_, call)| call == wanted).unwrap().0;
            for task in tasks {
                let own: Vec<_> = kernels.iter().filter(|event| event.parent == task.handle).collect();
                assert!(own.iter().map(|event| event.channel).eq(0..5));
                for event in own {
                    assert_eq!((event.context, event.rank), (task.context, 0));
                    let time = calls.iter().find_map(|(_, call)| match call {
                        Call::State { handle, state: 22, time } if *handle == event.handle => *time,
                        _ => None,
                    });
                    assert!(time.unwrap() >= event.gpu_time && event.gpu_time > 1 << 60);
                    let begin = thread_of(&Call::Start(event.clone()));
                    assert_eq!(begin, thread_of(&Call::Stop { handle: event.handle }));
                    assert_ne!(begin, thread_of(&Call::Start(task.clone())));
                }
            }
        }
    });
}

#[test]
fn tasks_of_a_communicator_that_does_not_block_come_on_a_thread_of_nccl() {
    run_isolated("nccl_hold_launches=1", || {
        let gpu = start_with_plugin();
        let barrier = Barrier::new(2);
        on_threads(2, |rank| {
            let at = allocate(4);
            let end = rank.group(|| {
                assert_eq!(rank.send(at, 4, 1 - rank.rank), 0);
                assert_eq!(rank.receive(at, 4, 1 - rank.rank), 0);
            });
            assert_eq!(end, IN_PROGRESS);
            // The call is over, and its group with it, before the task is enqueued.
            let is_own = |event: &Event| event.context == context_of(rank.rank);
            let group = only(GROUP_API, is_own);
            assert!(calls().contains(&Call::Stop { handle: group.handle }));
            assert!(!started(P2P).iter().any(is_own));
            barrier.wait();
            gpu.set(Setting::NcclHoldLaunches, 0);
            assert_eq!((crate::ranks::wait_for_async_error(rank.comm), synchronize(rank.stream)), (0, OK));
            rank.finish();
        });
        let calls = take_calls();
        let thread = |wanted: i32| {
            let mut of_kind =
                calls.iter().filter(|(_, call)| matches!(call, Call::Start(event) if event.kind == wanted));
            of_kind.next().unwrap().0
        };
        assert_ne!(thread(P2P), thread(P2P_API));
    });
}

#[test]
fn a_single_rank_has_no_collectives_and_an_empty_one_is_none() {
    run_isolated("", || {
        start_with_plugin();
        on_blocking_threads(1, |rank| {
            let [from, to] = [allocate(4), allocate(4)];
            all_reduce(&rank, 1);
            assert_eq!(rank.all_gather(from, to, 4, BYTE), 0);
            assert!(calls().iter().all(|call| matches!(call, Call::Init(_))));
            assert_eq!((rank.exchange(from, 0, to, 0, 4), synchronize(rank.stream)), (0, OK));
            assert_eq!((started(P2P).len(), started(KERNEL_CHANNEL).len()), (2, 4));
            rank.finish();
        });
        take_calls();
        on_blocking_threads(2, |rank| {
            all_reduce(&rank, 0);
            all_reduce(&rank, 1);
            assert_eq!(synchronize(rank.stream), OK);
            rank.finish();
        });
        assert!(started(COLL).iter().all(|event| (event.number, event.count) == (0, 1)));
    });
}

#[test]
fn a_group_of_several_communicators_is_one_call() {
    run_isolated("", || {
        start_with_plugin();
        let ranks = [(); 2].map(|()| Rank::join_blocking(new_id(), 0, 1));
        let [from, to] = [allocate(4), allocate(4)];
        let end =
            ranks[0].group(|| ranks.iter().for_each(|rank| assert_eq!(rank.exchange(from, 0, to, 0, 4), 0)));
        assert_eq!((end, ranks.each_ref().map(|rank| synchronize(rank.stream))), (0, [OK; 2]));
        let group = only(GROUP_API, |_| true);
        let calls = started(P2P_API);
        assert!(calls.len() == 4 && calls.iter().all(|call| call.parent == group.handle));
        assert_eq!((started(GROUP).len(), started(P2P).len(), stopped(GROUP_API)), (2, 4, 1));
        ranks.into_iter().for_each(Rank::finish);
    });
}

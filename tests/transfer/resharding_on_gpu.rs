//! Tests reshardings of shards in memory of GPUs, and of shards in several memories at once.

use std::time::{Duration, Instant};

use muster::transfer::plan::{ArrayDescription, BufferRole, Dtype};
use muster::transfer::{
    Arena, DeviceId, LaunchOptions, MemoryError, ReshardError, TransferEngine, TransferError, TransportChoice,
};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::cluster::{Cluster, PATIENCE, eventually, options_on_channel};
use crate::gpu_driver::{open_gpu, run_on_any_gpu, run_on_simulated_gpu};
use crate::resharding::{DEVICES_EACH, ReshardCase, array, plan};

const MIB: usize = 1 << 20;
const LINE: &[(&str, u64)] = &[("x", 8)];
const GRID: &[(&str, u64)] = &[("x", 4), ("y", 2)];

/// The arenas of a task: in host memory, and in that of two GPUs.
struct TaskArenas([Arena; 3]);

impl TaskArenas {
    fn new(task: u32) -> Self {
        let gpu = |number| Arena::on_gpu(&open_gpu(number), 32 * MIB).unwrap();
        Self([Arena::new(16 * MIB).unwrap(), gpu(2 * task % 4), gpu((2 * task + 1) % 4)])
    }

    fn assert_unused(&self) {
        for arena in &self.0 {
            // The last thread of a transfer may still hold its list.
            eventually("the staging memory is free", || arena.free_bytes() == arena.size());
        }
    }
}

/// Executes a plan with each shard in the memory that `place` chooses: 0 for the host, else a GPU of its task.
fn reshard(
    (engine, arenas): (&TransferEngine, &TaskArenas),
    case: &ReshardCase,
    options: LaunchOptions,
    place: impl Fn(DeviceId, BufferRole) -> usize,
) {
    let of_shard = |device, role| &arenas.0[place(device, role)];
    let shards = case.buffers_in(engine.here().task.0, DEVICES_EACH, of_shard);
    let staging = arenas.0.each_ref();
    engine.execute_plan(&case.plan, &shards, &staging, options).unwrap();
    case.assert_after(&shards);
}

/// Reshards arrays among four tasks, with their shards in all memories in turn and mixed.
fn reshard_in_all_memories(choice: TransportChoice) {
    let all: Vec<u32> = (0..8).collect();
    let mixed = [5, 2, 7, 0, 3, 6, 1, 4];
    let cases = [
        (&[96, 130][..], LINE, &["x"][..], LINE, &["", "x"][..]),
        (&[96, 130], GRID, &["x", "y"], GRID, &["y", "x"]),
        (&[17, 19, 3, 11], GRID, &["", "x"], GRID, &["x", "", "y"]),
        // Passed on from task to task.
        (&[1031, 5], LINE, &["x"], LINE, &[]),
        (&[40, 70], GRID, &["", "y,x"], LINE, &[]),
        (&[7], LINE, &["x"], LINE, &[]),
    ];
    let cluster = Cluster::of_devices(4, DEVICES_EACH, |config| config.transport = choice);
    let arenas: Vec<_> = (0..4).map(TaskArenas::new).collect();
    for (number, (shape, from, before, to, after)) in cases.into_iter().enumerate() {
        let case = ReshardCase::of(plan(
            array(shape, from, &all, before),
            array(shape, to, &mixed, after),
            1,
            PATIENCE,
        ));
        // All on GPUs, all from GPUs to the host and back, and each shard somewhere else.
        for turn in 0..5 {
            let place = |device: DeviceId, role| match (turn, role) {
                (0, _) => 1 + device.0 as usize % 2,
                (1, BufferRole::Source) | (2, BufferRole::Destination) => 1,
                (1 | 2, _) => 0,
                (_, BufferRole::Source) => (device.0 as usize + turn) % 3,
                (_, BufferRole::Destination) => (device.0 as usize * turn + 1) % 3,
            };
            let options = options_on_channel((number * 5 + turn) as u32);
            std::thread::scope(|scope| {
                for task in cluster.engines.iter().zip(&arenas) {
                    let case = &case;
                    scope.spawn(move || reshard(task, case, options, place));
                }
            });
        }
    }
    arenas.iter().for_each(TaskArenas::assert_unused);
    if let Some(simulated) = SimulatedGpu::load_if_wanted() {
        assert_eq!(simulated.count(Counter::PageableCopies), 0, "no copy blocks");
    }
}

#[test]
fn shards_in_any_memory_are_resharded() {
    run_on_any_gpu("devices=4", || reshard_in_all_memories(TransportChoice::Auto));
}

#[test]
fn shards_in_any_memory_are_resharded_over_tcp() {
    run_on_any_gpu("devices=4", || reshard_in_all_memories(TransportChoice::Tcp));
}

#[test]
fn shards_of_gpus_that_cannot_access_each_other_are_resharded() {
    run_on_simulated_gpu("devices=4;peer_access=0", || reshard_in_all_memories(TransportChoice::Auto));
}

/// One task with two devices, which turns rows into columns by copies alone.
fn rows_to_columns(rows: u64, time: Option<Duration>) -> (Cluster, TaskArenas, ReshardCase) {
    let cluster = Cluster::of_devices(1, DEVICES_EACH, |config| config.transport = TransportChoice::Auto);
    let line = &[("x", 2)];
    let (from, to) =
        (array(&[rows, 64], line, &[0, 1], &["x"]), array(&[rows, 64], line, &[0, 1], &["", "x"]));
    (cluster, TaskArenas::new(0), ReshardCase::of(plan(from, to, 1, time)))
}

/// An array whose copies are several requests each: short runs in two loops.
fn many_requests(time: Option<Duration>) -> ReshardCase {
    let describe = |spec: &[&str]| {
        let dtype = Dtype::Uint8;
        ArrayDescription { dtype, ..array(&[800, 1400, 8], &[("x", 2)], &[0, 1], spec) }
    };
    ReshardCase::of(plan(describe(&["", "x"]), describe(&["", "", "x"]), 1, time))
}

#[test]
fn a_copy_of_many_short_runs_is_several_requests() {
    run_on_any_gpu("devices=4", || {
        let (cluster, arenas, _) = rows_to_columns(8, None);
        let case = many_requests(None);
        let shards = case.buffers_in(0, DEVICES_EACH, |device, _| &arenas.0[1 + device.0 as usize]);
        cluster.engines[0]
            .execute_plan(&case.plan, &shards, &arenas.0.each_ref(), LaunchOptions::default())
            .unwrap();
        case.assert_after(&shards);
    });
}

#[test]
fn shards_are_free_when_the_plan_is_done() {
    run_on_any_gpu("devices=4", || {
        let (cluster, arenas, case) = rows_to_columns(64, None);
        let [host, gpu, _] = &arenas.0;
        // From host memory to a GPU: a transfer within the task, which reads the very shard.
        for _ in 0..200 {
            let place = |_, role| if role == BufferRole::Source { host } else { gpu };
            let shards = case.buffers_in(0, DEVICES_EACH, place);
            let staging = arenas.0.each_ref();
            cluster.engines[0].execute_plan(&case.plan, &shards, &staging, LaunchOptions::default()).unwrap();
            for buffer in shards.source.values().chain(shards.destination.values()) {
                buffer.write_contents(0, &[1]).unwrap();
            }
        }
    });
}

#[test]
fn a_copy_that_a_gpu_does_not_end_keeps_the_shards_until_it_ends() {
    run_on_simulated_gpu("devices=4", || {
        let simulated = SimulatedGpu::load_if_wanted().unwrap();
        let (stall, time) = (Duration::from_millis(400), Duration::from_millis(300));
        for limit in [Some(time), None] {
            let (cluster, arenas, _) = rows_to_columns(8, None);
            let (case, engine) = (many_requests(limit), &cluster.engines[0]);
            let shards = case.buffers_in(0, DEVICES_EACH, |_, _| &arenas.0[1]);
            let options = LaunchOptions { stall, ..LaunchOptions::default() };
            let before = simulated.count(Counter::CopiedBytes);
            simulated.set(Setting::HoldCopies, 1);
            let began = Instant::now();
            let outcome = engine.execute_plan(&case.plan, &shards, &arenas.0.each_ref(), options);
            assert!(began.elapsed() < 5 * stall, "{:?}", began.elapsed());
            let Err(unproven @ ReshardError::Unproven { .. }) = outcome else { panic!("{outcome:?}") };
            let said = unproven.to_string();
            assert!(
                said.contains("copies by GPU 0 may still be writing") && !said.contains("with task"),
                "{said}"
            );
            let ReshardError::Unproven { error, with, gpus } = unproven else { unreachable!() };
            assert_eq!((with.len(), &gpus[..]), (0, &[0][..]));
            match *error {
                ReshardError::Timeout { open: 0, ref gpus, .. } if limit.is_some() => {
                    assert_eq!(gpus[..], [0])
                }
                ReshardError::GpuStalled { idle, .. } if limit.is_none() => assert_eq!(idle, stall),
                error => panic!("{error}"),
            }
            let target = &shards.destination[&DeviceId(0)];
            let is_busy = |outcome: Result<(), MemoryError>| matches!(outcome, Err(MemoryError::Busy { .. }));
            assert!(is_busy(target.fill(1)), "the GPU may write it");
            let again = engine.execute_plan(&case.plan, &shards, &arenas.0.each_ref(), options);
            assert!(matches!(again, Err(ReshardError::Memory(MemoryError::Busy { .. }))), "{again:?}");
            simulated.set(Setting::HoldCopies, 0);
            eventually("the shards are free", || target.fill(1).is_ok());
            let copied = simulated.count(Counter::CopiedBytes) - before;
            let whole: usize = shards.destination.values().map(|buffer| buffer.len()).sum();
            assert!(copied < whole as i64, "what was not requested is never copied: {copied} of {whole}");
            // They are as good as new. The limit is too short for a machine with other work.
            let plan = many_requests(None).plan;
            engine.execute_plan(&plan, &shards, &arenas.0.each_ref(), LaunchOptions::default()).unwrap();
            case.assert_after(&shards);
        }
    });
}

#[test]
fn a_gpu_that_is_lost_fails_the_plan_with_the_reason() {
    run_on_simulated_gpu("devices=4", || {
        let simulated = SimulatedGpu::load_if_wanted().unwrap();
        let (cluster, arenas, case) = rows_to_columns(512, None);
        let shards = case.buffers_in(0, DEVICES_EACH, |_, _| &arenas.0[1]);
        simulated.set(Setting::EccAfter, 2);
        let staging = arenas.0.each_ref();
        let outcome =
            cluster.engines[0].execute_plan(&case.plan, &shards, &staging, LaunchOptions::default());
        let Err(ReshardError::Transfer { error: TransferError::Gpu { error, .. }, .. }) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(error.code, 214);
    });
}

#[test]
fn a_shard_without_staging_memory_is_named_before_a_byte_moves() {
    run_on_any_gpu("devices=4", || {
        let (cluster, arenas, _) = rows_to_columns(8, None);
        let describe = |spec: &[&str]| array(&[8, 8, 8], &[("x", 2)], &[0, 1], spec);
        let case = ReshardCase::of(plan(describe(&["", "x"]), describe(&["", "", "x"]), 1, PATIENCE));
        let [host, gpu, _] = &arenas.0;
        // From the host to the GPU, bytes are packed on one side and unpacked on the other.
        let place = |_, role| if role == BufferRole::Source { host } else { gpu };
        let shards = case.buffers_in(0, DEVICES_EACH, place);
        for (staging, wanted) in [([host], "in the memory of GPU 0"), ([gpu], "in host memory")] {
            let options = LaunchOptions::default();
            let refused =
                cluster.engines[0].execute_plan(&case.plan, &shards, &staging, options).unwrap_err();
            assert!(matches!(refused, ReshardError::Staging { .. }), "{refused}");
            assert!(refused.to_string().contains(wanted), "{refused}");
        }
        cluster.engines[0].execute_plan(&case.plan, &shards, &[host, gpu], LaunchOptions::default()).unwrap();
        case.assert_after(&shards);
    });
}

//! Tests that plans executed by engines give the same result as plans executed on slices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use muster::transfer::plan::{
    ArrayDescription, BufferRole, Dtype, Mesh, Partition, PartitionSpec, Placement, Plan, PlanOptions,
    ShardContents, Sharding,
};
use muster::transfer::{
    Arena, Buffer, DeviceId, FaultInjector, LaunchOptions, ReshardArray, ReshardError, ReshardStats,
    ShardBuffers, TaskId, TransferEngine, TransferError, TransportChoice,
};

use crate::cluster::{AnyMemory, Cluster, PATIENCE, contents, eventually};

pub const DEVICES_EACH: u32 = 2;

/// Starts engines with two devices each: task `n` has `2 n` and `2 n + 1`.
fn cluster(tasks: usize, choice: TransportChoice) -> Cluster {
    Cluster::of_devices(tasks, DEVICES_EACH, |config| config.transport = choice)
}

pub fn array(shape: &[u64], axes: &[(&str, u64)], devices: &[u32], spec: &[&str]) -> ArrayDescription {
    let mesh = Mesh::new(axes, devices.iter().copied());
    let spec = PartitionSpec(
        spec.iter()
            .map(|axes| {
                Partition::Axes(axes.split(',').filter(|axis| !axis.is_empty()).map(str::to_owned).collect())
            })
            .collect(),
    );
    ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Float32, sharding: Sharding { mesh, spec } }
}

/// Returns the shards of one side of a plan, with contents that depend on the device.
fn shards(plan: &Plan, role: BufferRole, devices: &[DeviceId]) -> ShardContents {
    let shard = |device: &DeviceId| contents(plan.shard_bytes(role, *device) as usize, u64::from(device.0));
    devices.iter().map(|device| (*device, shard(device))).collect()
}

/// A plan with the shards of its devices before and after.
pub struct ReshardCase {
    pub plan: Plan,
    before: ShardContents,
    after: ShardContents,
}

impl ReshardCase {
    pub fn of(plan: Plan) -> Self {
        let before = shards(&plan, BufferRole::Source, &plan.source().sharding.mesh.devices);
        let mut after = shards(&plan, BufferRole::Destination, &plan.destination().sharding.mesh.devices);
        plan.execute(&before, &mut after).unwrap();
        Self { plan, before, after }
    }

    /// Allocates the buffers of a task's shards, with `each` devices a task, as they are before the plan is
    /// executed.
    pub fn buffers(&self, task: u32, each: u32, arena: &Arena) -> ShardBuffers {
        self.buffers_in(task, each, |_, _| arena)
    }

    /// As [`buffers`](Self::buffers), each in the arena of its device and role.
    pub fn buffers_in<'a>(
        &self,
        task: u32,
        each: u32,
        arena: impl Fn(DeviceId, BufferRole) -> &'a Arena,
    ) -> ShardBuffers {
        let mine = |device: &&DeviceId| device.0 / each == task;
        let put = |from: &ShardContents, role: BufferRole| -> BTreeMap<DeviceId, Buffer> {
            let buffer = |device: &DeviceId| {
                let buffer = arena(*device, role).allocate(from[device].len()).unwrap();
                buffer.write_contents(0, &from[device]).unwrap();
                (*device, buffer)
            };
            from.keys().filter(mine).map(buffer).collect()
        };
        let destination = put(&self.after, BufferRole::Destination);
        destination.values().for_each(|buffer| buffer.fill(0xee).unwrap());
        ShardBuffers { source: put(&self.before, BufferRole::Source), destination }
    }

    pub fn assert_after(&self, shards: &ShardBuffers) {
        for (device, buffer) in &shards.destination {
            buffer.look(|bytes| assert!(bytes == self.after[device], "device {device}")).unwrap();
        }
    }

    /// Executes the plan for a task, and checks the result.
    fn execute_and_check(
        &self,
        engine: &TransferEngine,
        arena: &Arena,
        options: LaunchOptions,
    ) -> ReshardStats {
        let shards = self.buffers(engine.here().task.0, DEVICES_EACH, arena);
        let moved = engine.execute_plan(&self.plan, &shards, &[arena], options).unwrap();
        self.assert_after(&shards);
        moved
    }
}

pub fn plan(
    source: ArrayDescription,
    destination: ArrayDescription,
    hosts: u32,
    timeout: impl Into<Option<Duration>>,
) -> Plan {
    let devices = source.sharding.mesh.devices.iter().chain(&destination.sharding.mesh.devices).copied();
    let devices: BTreeSet<_> = devices.collect();
    let placement = Placement::blocks(devices, DEVICES_EACH, hosts);
    let options = PlanOptions { timeout: timeout.into(), ..PlanOptions::default() };
    Plan::new(source, destination, &placement, options).unwrap()
}

/// Executes a plan on all engines at once, and compares the result with the same plan on slices.
fn compare(cluster: &Cluster, plan: Plan, channel: u32) {
    let wanted = ReshardCase::of(plan);
    let options = LaunchOptions { channel, ..LaunchOptions::default() };
    std::thread::scope(|scope| {
        for (engine, arena) in cluster.engines.iter().zip(&cluster.arenas) {
            let wanted = &wanted;
            scope.spawn(move || {
                let moved = wanted.execute_and_check(engine, arena, options);
                assert!(moved.elapsed < Duration::from_secs(30));
            });
        }
    });
}

#[test]
fn an_array_is_resharded_in_every_way_over_every_transport() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::Loopback] {
        let cluster = cluster(4, choice);
        let all: Vec<u32> = (0..8).collect();
        let reversed: Vec<u32> = (0..8).rev().collect();
        let (low, high) = (&all[..4], &all[4..]);
        let on =
            |devices: &[u32], axes: &[(&str, u64)], spec: &[&str]| array(&[96, 130], axes, devices, spec);
        let line: &[(&str, u64)] = &[("x", 8)];
        let grid: &[(&str, u64)] = &[("x", 4), ("y", 2)];
        let half: &[(&str, u64)] = &[("x", 4)];
        let cases = [
            // Rows to columns: every task to every task, in short runs.
            (on(&all, line, &["x"]), on(&all, line, &["", "x"])),
            // All-gather, and broadcast of one half to the other.
            (on(&all, grid, &["x", "y"]), on(&all, grid, &[])),
            (on(low, half, &["x"]), on(high, half, &[])),
            // Other devices, another order, uneven shards.
            (on(&all, grid, &["y", "x"]), on(&reversed, grid, &["x", "y"])),
            (on(low, half, &["", "x"]), on(&reversed, line, &["x"])),
            // Each part that is passed on is one range: it is sent from the very memory into which it was
            // received.
            (on(&all, line, &["x"]), on(&all, line, &[])),
        ];
        for (number, (source, destination)) in cases.into_iter().enumerate() {
            compare(&cluster, plan(source, destination, 1, PATIENCE), number as u32);
        }
    }
}

#[test]
fn arrays_of_all_widths_with_uneven_shards_are_resharded_among_several_hosts() {
    let all: Vec<u32> = (0..8).collect();
    let mixed = [5, 2, 7, 0, 3, 6, 1, 4];
    let line: &[(&str, u64)] = &[("x", 8)];
    let grid: &[(&str, u64)] = &[("x", 4), ("y", 2)];
    // In most of these, the last shards are smaller, or empty.
    let cases = [
        (Dtype::Uint8, &[7][..], line, &["x"][..], line, &[][..]),
        (Dtype::Bool, &[1013, 3], grid, &["x,y"], grid, &["y", "x"]),
        (Dtype::Bfloat16, &[33, 257, 5], grid, &["y", "x"], line, &["", "", "x"]),
        (Dtype::Float64, &[129, 515], grid, &["x"], grid, &["", "y,x"]),
        (Dtype::Complex128, &[17, 19, 3, 11], line, &["", "x"], grid, &["x", "", "y"]),
        (Dtype::Float32, &[1025, 1031], line, &["x"], line, &["", "x"]),
        (Dtype::Int32, &[1031, 1025], grid, &["y", "x"], line, &[]),
    ];
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        let cluster = cluster(4, choice);
        for (number, (dtype, shape, from, before, to, after)) in cases.into_iter().enumerate() {
            let source = ArrayDescription { dtype, ..array(shape, from, &all, before) };
            let destination = ArrayDescription { dtype, ..array(shape, to, &mixed, after) };
            // Two tasks a host, or one: other steps, and the same bytes.
            for hosts in [1, 2] {
                let plan = plan(source.clone(), destination.clone(), hosts, PATIENCE);
                compare(&cluster, plan, 2 * number as u32 + hosts);
            }
        }
    }
}

/// Returns how often each pair of tasks launches together what these plans move: once for the steps that depend on no
/// other one, and once for each route by which bytes are passed on.
fn launches(plans: &[Plan]) -> BTreeMap<(u32, u32), u64> {
    fn route(plan: &Plan, step: u32) -> Vec<u32> {
        let step = plan.step(step).unwrap();
        let mut route = step.after.map_or_else(|| vec![step.source.task.0], |after| route(plan, after));
        route.push(step.destination.task.0);
        route.dedup();
        route
    }
    let mut seen = BTreeSet::new();
    for plan in plans {
        for step in plan.steps().filter(|step| step.class.leaves_task()) {
            let (from, to) = (step.source.task.0, step.destination.task.0);
            let passed_on = step.after.is_some().then(|| route(plan, step.index));
            seen.insert(((from.min(to), from.max(to)), passed_on));
        }
    }
    let mut counts = BTreeMap::new();
    seen.into_iter().for_each(|(pair, _)| *counts.entry(pair).or_default() += 1);
    counts
}

#[test]
fn many_arrays_are_resharded_in_one_launch_with_each_peer() {
    let all: Vec<u32> = (0..8).collect();
    let line: &[(&str, u64)] = &[("x", 8)];
    let grid: &[(&str, u64)] = &[("x", 4), ("y", 2)];
    let specs: [(&[_], &[&str], &[_], &[&str]); 4] = [
        (line, &["x"], grid, &["y", "x"]),
        (grid, &["x"], grid, &["x", "y"]),
        (line, &["x"], line, &["", "x"]),
        // Passed on, by several routes.
        (line, &["x"], line, &[]),
    ];
    let make = |number: usize| {
        // Every tenth array is the same as the one before it.
        let number = number - usize::from(number % 10 == 9);
        let (from, before, to, after) = specs[number % specs.len()];
        let rows = 8 * (1 + number as u64 % 5);
        let source = array(&[rows, 48], from, &all, before);
        plan(source, array(&[rows, 48], to, &all, after), 1, PATIENCE)
    };
    for (with_passed_on, choice) in
        [(false, TransportChoice::Auto), (true, TransportChoice::Auto), (true, TransportChoice::Tcp)]
    {
        let cluster = cluster(4, choice);
        let plans: Vec<Plan> =
            (0..120).filter(|number| with_passed_on || number % 4 != 3).map(make).collect();
        let expected = launches(&plans);
        assert_eq!(expected.len(), 6, "every pair of tasks has steps");
        assert_eq!(expected.values().all(|count| *count == 1), !with_passed_on, "{expected:?}");
        let bytes: u64 = plans.iter().map(|plan| plan.cost().minimum.same_host).sum::<u64>()
            + plans.iter().map(|plan| plan.cost().minimum.across_hosts).sum::<u64>();
        let cases: Vec<ReshardCase> = plans.into_iter().map(ReshardCase::of).collect();
        let moved: Vec<ReshardStats> = std::thread::scope(|scope| {
            let carry = |(engine, arena): (&TransferEngine, &Arena)| {
                let (cases, here, engine, arena) =
                    (&cases, engine.here().task.0, engine.clone(), arena.clone());
                scope.spawn(move || {
                    let shards: Vec<ShardBuffers> =
                        cases.iter().map(|case| case.buffers(here, DEVICES_EACH, &arena)).collect();
                    let arrays = cases.iter().zip(&shards);
                    let arrays: Vec<_> =
                        arrays.map(|(case, shards)| ReshardArray { plan: &case.plan, shards }).collect();
                    let moved = engine.execute_plans(&arrays, &[&arena], LaunchOptions::default()).unwrap();
                    cases.iter().zip(&shards).for_each(|(case, shards)| case.assert_after(shards));
                    moved
                })
            };
            let running: Vec<_> = cluster.engines.iter().zip(&cluster.arenas).map(carry).collect();
            running.into_iter().map(|running| running.join().unwrap()).collect()
        });
        assert_eq!(moved.iter().map(|stats| stats.sent).sum::<u64>(), bytes);
        assert_eq!(moved.iter().map(|stats| stats.received).sum::<u64>(), bytes);
        for engine in &cluster.engines {
            let here = engine.here().task.0;
            let own = expected.iter().filter(|((one, other), _)| [*one, *other].contains(&here));
            let counts: BTreeMap<_, _> =
                engine.launch_metrics().outcome_counts().filter(|(_, count)| *count > 0).collect();
            assert_eq!(counts, BTreeMap::from([("completed", own.map(|(_, count)| count).sum())]));
        }
    }
}

#[test]
fn of_arrays_that_differ_the_first_one_is_named() {
    let cluster = cluster(2, TransportChoice::Auto);
    let line: &[(&str, u64)] = &[("x", 4)];
    let describe =
        |dtype, spec: &[&str]| ArrayDescription { dtype, ..array(&[8, 8], line, &[0, 1, 2, 3], spec) };
    let case =
        |dtype| ReshardCase::of(plan(describe(dtype, &["x"]), describe(dtype, &["", "x"]), 1, PATIENCE));
    let (float, int) = (|| case(Dtype::Float32), || case(Dtype::Int32));
    // The third array has another type in one task; or one task has an array more.
    for (channel, lists) in [
        [vec![float(), int(), float()], vec![float(), int(), int()]],
        [vec![float()], vec![float(), float()]],
    ]
    .into_iter()
    .enumerate()
    {
        let options = LaunchOptions { channel: channel as u32, ..LaunchOptions::default() };
        let errors: Vec<ReshardError> = std::thread::scope(|scope| {
            let carry = |(task, cases): (usize, &Vec<ReshardCase>)| {
                let (engine, arena) = (&cluster.engines[task], &cluster.arenas[task]);
                let shards: Vec<ShardBuffers> =
                    cases.iter().map(|case| case.buffers(task as u32, DEVICES_EACH, arena)).collect();
                let arrays = cases.iter().zip(&shards);
                let arrays: Vec<_> =
                    arrays.map(|(case, shards)| ReshardArray { plan: &case.plan, shards }).collect();
                engine.execute_plans(&arrays, &[arena], options).unwrap_err()
            };
            let running: Vec<_> =
                lists.iter().enumerate().map(|side| scope.spawn(move || carry(side))).collect();
            running.into_iter().map(|running| running.join().unwrap()).collect()
        });
        for error in &errors {
            let ReshardError::Transfer { error: TransferError::LayoutMismatch { .. }, .. } = error else {
                panic!("{error}")
            };
        }
        let named = |error: &ReshardError| match error {
            ReshardError::Transfer { array, .. } => *array,
            _ => usize::MAX,
        };
        let [one, other] = [named(&errors[0]), named(&errors[1])];
        assert_eq!((one, other), if channel == 0 { (2, 2) } else { (0, 1) }, "{errors:?}");
    }
}

/// Returns the plan from one row of an array on each device to the whole array on every device: every row is
/// passed on.
pub fn gathered(devices: u32, shape: &[u64], time: Duration) -> Plan {
    let all: Vec<u32> = (0..devices).collect();
    let line: &[(&str, u64)] = &[("x", u64::from(devices))];
    plan(array(shape, line, &all, &["x"]), array(shape, line, &all, &[]), 1, time)
}

/// Returns whether a task takes part in a step or in one that it depends on.
fn needs(plan: &Plan, step: u32, task: TaskId) -> bool {
    let step = plan.step(step).unwrap();
    let own = [step.source.task, step.destination.task].contains(&task);
    own || step.after.is_some_and(|after| needs(plan, after, task))
}

#[test]
fn a_late_task_delays_only_its_dependents() {
    for choice in [TransportChoice::Loopback, TransportChoice::Auto] {
        let cluster = cluster(4, choice);
        let wanted = ReshardCase::of(gathered(8, &[64, 3000], PATIENCE));
        for (round, late) in [0, 2].into_iter().enumerate() {
            let options = LaunchOptions { channel: round as u32, ..LaunchOptions::default() };
            // The bytes that each task receives from each other one without the help of the late one.
            let mut free: BTreeMap<(u32, u32), u64> = BTreeMap::new();
            let mut passed_on = 0;
            for step in wanted.plan.steps() {
                let (from, to) = (step.source.task.0, step.destination.task.0);
                if from != to && !needs(&wanted.plan, step.index, TaskId(late)) {
                    *free.entry((from, to)).or_default() += step.bytes;
                    passed_on += u32::from(step.after.is_some());
                }
            }
            assert!(passed_on >= 2, "some is passed on by others: {passed_on}");
            let received = |from: u32, to: u32| {
                let moved = cluster.engines[to as usize].bytes_by_task();
                let of = moved.into_iter().find(|(peer, _)| peer.task.0 == from);
                of.map_or(0, |(_, traffic)| traffic.iter().map(|(_, (_, received))| received).sum::<u64>())
            };
            let before: Vec<_> = free.keys().map(|&(from, to)| received(from, to)).collect();
            std::thread::scope(|scope| {
                let carry = |task: usize| {
                    let (wanted, engine, arena) = (&wanted, &cluster.engines[task], &cluster.arenas[task]);
                    scope.spawn(move || wanted.execute_and_check(engine, arena, options))
                };
                let early: Vec<_> = (0..4).filter(|task| *task != late as usize).map(carry).collect();
                eventually("what does not need the late one is there", || {
                    let mut all = free.iter().zip(&before);
                    all.all(|((&(from, to), bytes), before)| received(from, to) - before == *bytes)
                });
                assert!(early.iter().all(|carrying| !carrying.is_finished()));
                carry(late as usize).join().unwrap();
                early.into_iter().for_each(|carrying| assert!(carrying.join().is_ok()));
            });
        }
    }
}

#[test]
fn mismatched_plans_fail_with_both_digests_before_a_byte_moves() {
    let cluster = cluster(2, TransportChoice::Auto);
    let line: &[(&str, u64)] = &[("x", 4)];
    let square =
        |dtype, spec: &[&str]| ArrayDescription { dtype, ..array(&[64, 64], line, &[0, 1, 2, 3], spec) };
    let make =
        |dtype, spec: &[&str]| ReshardCase::of(plan(square(dtype, spec), square(dtype, &[]), 1, PATIENCE));
    // As many bytes in every step: as another type, and as columns for rows.
    for (channel, other) in [(1, make(Dtype::Int32, &["x"])), (2, make(Dtype::Float32, &["", "x"]))] {
        let one = make(Dtype::Float32, &["x"]);
        let short = |wanted: &ReshardCase| wanted.plan.layout_fingerprint().to_string()[..16].to_owned();
        let names = [short(&one), short(&other)];
        assert_ne!(names[0], names[1]);
        let options = LaunchOptions { channel, ..LaunchOptions::default() };
        std::thread::scope(|scope| {
            for (task, wanted) in [&one, &other].into_iter().enumerate() {
                let (engine, arena) = (&cluster.engines[task], &cluster.arenas[task]);
                let (mine, theirs) = (&names[task], &names[1 - task]);
                scope.spawn(move || {
                    let shards = wanted.buffers(task as u32, DEVICES_EACH, arena);
                    let error = engine.execute_plan(&wanted.plan, &shards, &[arena], options).unwrap_err();
                    let ReshardError::Transfer {
                        error: TransferError::LayoutMismatch { here, there, .. },
                        ..
                    } = &error
                    else {
                        panic!("{error}")
                    };
                    assert!(here.contains(mine) && there.contains(theirs), "{error}");
                    let moved = engine.bytes_by_task();
                    let mut received =
                        moved.iter().flat_map(|(_, traffic)| traffic).map(|(_, (_, received))| received);
                    assert!(received.all(|bytes| *bytes == 0), "{moved:?}");
                });
            }
        });
    }
}

#[test]
fn buffers_that_do_not_match_the_plan_are_refused_before_a_byte_moves() {
    let cluster = cluster(2, TransportChoice::Auto);
    let line: &[(&str, u64)] = &[("x", 4)];
    let describe = |spec: &[&str]| array(&[64], line, &[0, 1, 2, 3], spec);
    let placement = Placement::blocks((0..4).map(DeviceId), DEVICES_EACH, 1);
    let plan = Plan::new(describe(&["x"]), describe(&[]), &placement, PlanOptions::default()).unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    let refused = cluster.engines[0]
        .execute_plan(&plan, &ShardBuffers::default(), &[&arena], LaunchOptions::default())
        .unwrap_err();
    assert!(matches!(refused, ReshardError::Shard { wanted: 64, found: 0, .. }), "{refused}");
}

#[test]
fn a_plan_whose_other_side_does_not_come_ends_at_its_time() {
    let cluster = cluster(2, TransportChoice::Auto);
    let line: &[(&str, u64)] = &[("x", 4)];
    let describe = |spec: &[&str]| array(&[64], line, &[0, 1, 2, 3], spec);
    let placement = Placement::blocks((0..4).map(DeviceId), DEVICES_EACH, 1);
    let time = Duration::from_millis(300);
    let options = PlanOptions { timeout: Some(time), ..PlanOptions::default() };
    let plan = Plan::new(describe(&["x"]), describe(&[]), &placement, options).unwrap();
    let arena = &cluster.arenas[0];
    let buffers = |bytes: usize| {
        [0, 1]
            .map(|device| (DeviceId(device), arena.allocate(bytes).unwrap()))
            .into_iter()
            .collect::<BTreeMap<_, _>>()
    };
    let shards = ShardBuffers { source: buffers(64), destination: buffers(256) };
    let began = Instant::now();
    let late =
        cluster.engines[0].execute_plan(&plan, &shards, &[arena], LaunchOptions::default()).unwrap_err();
    assert!(
        began.elapsed() < time + Duration::from_secs(5),
        "the other side lives and says at once that it rests"
    );
    assert!(
        matches!(&late, ReshardError::Timeout { limit, open: 4, steps: 4, with, .. } if *limit == time && *with == [TaskId(1)]),
        "{late:?}"
    );
    // The memory of a cancelled plan is free again.
    for buffer in shards.destination.values() {
        buffer.fill(0).unwrap();
    }
}

#[test]
fn a_plan_whose_peer_takes_no_bytes_any_more_ends_in_its_time_and_its_shards_are_free() {
    let (time, stall) = (Duration::from_millis(700), Duration::from_millis(600));
    let faults = FaultInjector::new(3);
    let cluster = Cluster::of_devices(4, DEVICES_EACH, |config| {
        config.transport = TransportChoice::Tcp;
        if config.here.task == TaskId(3) {
            config.faults = Some(faults.clone());
        }
    });
    compare(&cluster, gathered(8, &[64, 500], PATIENCE), 1);
    faults.hold_wires(true);
    let wanted = ReshardCase::of(gathered(8, &[64, 20_000], time));
    let options = LaunchOptions { channel: 2, stall, ..LaunchOptions::default() };
    std::thread::scope(|scope| {
        for (engine, arena) in cluster.engines.iter().zip(&cluster.arenas) {
            let wanted = &wanted;
            scope.spawn(move || {
                let shards = wanted.buffers(engine.here().task.0, DEVICES_EACH, arena);
                let began = Instant::now();
                let error = engine.execute_plan(&wanted.plan, &shards, &[arena], options).unwrap_err();
                let took = began.elapsed();
                println!("after {took:?}: {error}");
                assert!(took < time + 2 * stall, "{took:?}");
                assert!(!matches!(error, ReshardError::Unproven { .. }));
                for buffer in shards.source.values().chain(shards.destination.values()) {
                    buffer.fill(0).unwrap();
                }
            });
        }
    });
    // With new connections, plans succeed again.
    faults.clear_faults();
    compare(&cluster, gathered(8, &[64, 500], PATIENCE), 3);
}

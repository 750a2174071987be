//! Plans carried out by engines equal plans carried out on slices.

use std::collections::BTreeMap;
use std::time::Duration;

use muster::transfer::plan::{
    ArrayDescription, BufferRole, Dtype, Mesh, Options as PlanOptions, Partition, PartitionSpec, Placement,
    Plan, Sharding,
};
use muster::transfer::{Arena, Buffer, Choice, DeviceId, Options, ReshardError, ShardBuffers};

use crate::cluster::{Cluster, contents};

const DEVICES_EACH: u32 = 2;

/// Engines with two devices each: task `n` has `2 n` and `2 n + 1`.
fn cluster(tasks: usize, choice: Choice) -> Cluster {
    Cluster::of_devices(tasks, DEVICES_EACH, |config| config.transport = choice)
}

fn array(shape: &[u64], axes: &[(&str, u64)], devices: &[u32], spec: &[&str]) -> ArrayDescription {
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

/// Carries a plan out on all engines at once, and compares with the same plan on slices.
fn compare(cluster: &Cluster, source: ArrayDescription, destination: ArrayDescription, channel: u32) {
    let tasks = cluster.engines.len() as u32;
    let placement = Placement::blocks((0..tasks * DEVICES_EACH).map(DeviceId), DEVICES_EACH, 1);
    let options = PlanOptions { timeout: Some(Duration::from_secs(30)), ..PlanOptions::default() };
    let plan = Plan::new(source, destination, &placement, options).unwrap();
    let shards = |role, devices: &[DeviceId]| -> BTreeMap<DeviceId, Vec<u8>> {
        devices
            .iter()
            .map(|device| (*device, contents(plan.shard_bytes(role, *device) as usize, u64::from(device.0))))
            .collect()
    };
    let before = shards(BufferRole::Source, &plan.source().sharding.mesh.devices);
    let mut wanted = shards(BufferRole::Destination, &plan.destination().sharding.mesh.devices);
    let filled = wanted.clone();
    plan.execute(&before, &mut wanted).unwrap();

    std::thread::scope(|scope| {
        for (task, engine) in cluster.engines.iter().enumerate() {
            let (plan, before, filled, wanted) = (&plan, &before, &filled, &wanted);
            let arena = &cluster.arenas[task];
            scope.spawn(move || {
                let mine = |device: &&DeviceId| device.0 / DEVICES_EACH == task as u32;
                let put = |from: &BTreeMap<DeviceId, Vec<u8>>| -> BTreeMap<DeviceId, Buffer> {
                    from.keys()
                        .filter(mine)
                        .map(|device| {
                            let buffer = arena.allocate(from[device].len()).unwrap();
                            buffer.write(|bytes| bytes.copy_from_slice(&from[device])).unwrap();
                            (*device, buffer)
                        })
                        .collect()
                };
                let shards = ShardBuffers { source: put(before), destination: put(filled) };
                let options = Options { channel, ..Options::default() };
                let moved = engine.carry_out(plan, &shards, arena, options).unwrap();
                assert!(moved.elapsed < Duration::from_secs(30));
                for (device, buffer) in &shards.destination {
                    buffer.read(|bytes| assert!(bytes == wanted[device], "device {device}")).unwrap();
                }
            });
        }
    });
}

#[test]
fn an_array_is_resharded_in_every_way_over_every_transport() {
    for choice in [Choice::Auto, Choice::Tcp, Choice::Loopback] {
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
            // Rows to columns: everybody to everybody, in short runs.
            (on(&all, line, &["x"]), on(&all, line, &["", "x"])),
            // All-gather, and broadcast of one half to the other.
            (on(&all, grid, &["x", "y"]), on(&all, grid, &[])),
            (on(low, half, &["x"]), on(high, half, &[])),
            // Other devices, another order, uneven shards.
            (on(&all, grid, &["y", "x"]), on(&reversed, grid, &["x", "y"])),
            (on(low, half, &["", "x"]), on(&reversed, line, &["x"])),
        ];
        for (number, (source, destination)) in cases.into_iter().enumerate() {
            compare(&cluster, source, destination, number as u32);
        }
    }
}

#[test]
fn what_does_not_fit_the_plan_is_refused_before_a_byte_moves() {
    let cluster = cluster(2, Choice::Auto);
    let line: &[(&str, u64)] = &[("x", 4)];
    let describe = |spec: &[&str]| array(&[64], line, &[0, 1, 2, 3], spec);
    let placement = Placement::blocks((0..4).map(DeviceId), DEVICES_EACH, 1);
    let plan = Plan::new(describe(&["x"]), describe(&[]), &placement, PlanOptions::default()).unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    let refused = cluster.engines[0]
        .carry_out(&plan, &ShardBuffers::default(), &arena, Options::default())
        .unwrap_err();
    assert!(matches!(refused, ReshardError::Shard { wanted: 64, found: 0, .. }), "{refused}");
}

#[test]
fn a_plan_whose_other_side_does_not_come_ends_at_its_time() {
    let cluster = cluster(2, Choice::Auto);
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
    let late = cluster.engines[0].carry_out(&plan, &shards, arena, Options::default()).unwrap_err();
    assert_eq!(late, ReshardError::Timeout(time));
    // What was given up is free again.
    for buffer in shards.destination.values() {
        buffer.fill(0).unwrap();
    }
}

//! Tests that several holders of the same bytes send equally often.

use std::collections::BTreeMap;

use muster::transfer::plan::{
    ArrayDescription, DeviceId, Dtype, Mesh, PartitionSpec, Placement, Plan, PlanOptions, Sharding, StepClass,
};

type Axes<'a> = &'a [(&'a str, u64)];

/// Returns the number of regions that each host, and each task, sends to other hosts, in order of their
/// numbers.
fn sent(plan: &Plan) -> [Vec<u64>; 2] {
    let (mut hosts, mut tasks) = (BTreeMap::new(), BTreeMap::new());
    for placed in &plan.placement().devices {
        if plan.source().sharding.mesh.devices.contains(&placed.device) {
            hosts.insert(placed.host.clone(), 0);
            tasks.insert(placed.task, 0);
        }
    }
    for step in plan.steps().filter(|step| step.class == StepClass::AcrossHosts && step.after.is_none()) {
        *hosts.entry(step.source.host).or_default() += 1;
        *tasks.entry(step.source.task).or_default() += 1;
    }
    [hosts.into_values().collect(), tasks.into_values().collect()]
}

struct BalanceCase<'a> {
    axes: Axes<'a>,
    source: &'a [&'a [&'a str]],
    destination: &'a [&'a [&'a str]],
    /// The first device of the destination, which has as many devices as the source.
    first: u32,
    per_task: u32,
    tasks_per_host: u32,
}

impl BalanceCase<'_> {
    fn plan(&self) -> Plan {
        let count: u64 = self.axes.iter().map(|(_, size)| size).product();
        let count = u32::try_from(count).expect("small");
        let side = |first: u32, spec: &[&[&str]]| {
            let sharding =
                Sharding { mesh: Mesh::new(self.axes, first..first + count), spec: PartitionSpec::new(spec) };
            ArrayDescription { shape: vec![4096, 4096], dtype: Dtype::Bfloat16, sharding }
        };
        let placement =
            Placement::blocks((0..self.first + count).map(DeviceId), self.per_task, self.tasks_per_host);
        let (source, destination) = (side(0, self.source), side(self.first, self.destination));
        Plan::new(source, destination, &placement, PlanOptions::default()).expect("it makes sense")
    }
}

#[test]
fn hosts_that_hold_the_same_send_equally_much() {
    let square: Axes = &[("data", 16), ("model", 16)];
    let cube: Axes = &[("data", 8), ("fsdp", 8), ("model", 4)];
    let case = |axes, source, destination, first, per_task, tasks_per_host| BalanceCase {
        axes,
        source,
        destination,
        first,
        per_task,
        tasks_per_host,
    };
    let cases = [
        // On other devices: every region is sent.
        case(square, &[&["model"]], &[&[], &["data", "model"]], 256, 8, 1),
        case(square, &[&["data"]], &[&["model"], &["data"]], 256, 4, 2),
        case(square, &[], &[&["data"], &["model"]], 256, 8, 1),
        case(cube, &[&["fsdp"], &["model"]], &[&["model"], &["data", "fsdp"]], 256, 8, 1),
        case(cube, &[&["fsdp"]], &[&["data"]], 256, 4, 1),
        // On the same devices: regions that a host holds are taken from it, and no holder is skipped for
        // that.
        case(square, &[&["model"]], &[&[], &["data", "model"]], 0, 8, 1),
        case(square, &[&["model"]], &[&["data", "model"]], 0, 8, 1),
        case(square, &[&["data"]], &[&[], &["model"]], 0, 4, 2),
        case(cube, &[&["fsdp"], &["model"]], &[&["model"], &["data", "fsdp"]], 0, 8, 1),
        case(cube, &[&["model"]], &[&["data", "fsdp"], &["model"]], 0, 4, 2),
    ];
    for (number, case) in cases.iter().enumerate() {
        for sent in sent(&case.plan()) {
            let (least, most) = (sent.iter().min().expect("some"), sent.iter().max().expect("some"));
            assert!(most - least <= 1, "case {number}: from {least} to {most} regions: {sent:?}");
        }
    }
}

#[test]
fn within_a_round_those_who_hold_the_same_are_asked_equally_often() {
    // Every destination tile needs every source tile, each of which has eight holders.
    let case = BalanceCase {
        axes: &[("data", 8), ("model", 64)],
        source: &[&["model"]],
        destination: &[&[], &["data", "model"]],
        first: 512,
        per_task: 8,
        tasks_per_host: 1,
    };
    let steps: Vec<_> = case.plan().steps().collect();
    for round in steps.chunks(512) {
        let mut asked: BTreeMap<_, u32> = BTreeMap::new();
        for step in round {
            *asked.entry(step.source.device).or_default() += 1;
        }
        assert!(asked.values().all(|&times| times == 1), "{:?}", asked.values().max());
    }
}

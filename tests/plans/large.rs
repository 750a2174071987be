//! Tests the largest supported exchange: each of 4,096 devices has a part for every other device.

use std::collections::BTreeSet;

use muster::transfer::plan::{
    ArrayDescription, DeviceId, Dtype, Mesh, PartitionSpec, Placement, Plan, PlanOptions, Sharding,
    StepClass, TaskId,
};

fn all_to_all_plan(devices: u32) -> Plan {
    let side = |spec: &[&[&str]]| {
        let mesh = Mesh::new(&[("x", devices.into())], 0..devices);
        let sharding = Sharding { mesh, spec: PartitionSpec::new(spec) };
        ArrayDescription { shape: vec![8192, 16384], dtype: Dtype::Bfloat16, sharding }
    };
    let placement = Placement::blocks((0..devices).map(DeviceId), 8, 1);
    Plan::new(side(&[&["x"]]), side(&[&[], &["x"]]), &placement, PlanOptions::default())
        .expect("it makes sense")
}

#[test]
fn sixteen_million_steps_are_a_plan_of_which_each_task_sees_its_part() {
    let plan = all_to_all_plan(4096);
    assert_eq!(plan.len(), 4096 * 4096);
    let mut met = BTreeSet::new();
    let mut before = None;
    for step in plan.steps_of_task(TaskId(300)) {
        assert!(before < Some(step.index), "the order of the plan");
        before = Some(step.index);
        let own = |device: DeviceId| (2400..2408).contains(&device.0);
        assert!(own(step.source.device) || own(step.destination.device));
        assert!(met.insert((step.source.device, step.destination.device)));
        // Two rows, of four columns each.
        assert_eq!((step.bytes, step.source.region.extent.as_slice()), (2 * 4 * 2, &[2, 4][..]));
        assert_eq!(step.source.region.start, [0, u64::from(step.destination.device.0) * 4]);
        assert_eq!(step.destination.region.start, [u64::from(step.source.device.0) * 2, 0]);
        assert_eq!(step.after, None);
        if step.index % 1000 == 0 {
            assert_eq!(plan.step(step.index), Some(step));
        }
    }
    assert_eq!(met.len(), 2 * 8 * 4096 - 8 * 8);
    // Rows are cut into short runs, columns are not: the source regions are packed, and each arrives as one
    // range.
    assert_eq!(plan.staging_bytes(TaskId(300)), 8 * 2 * 16384 * 2);
}

#[test]
fn an_exchange_costs_the_least_possible() {
    // The whole exchange takes a second in an optimised build, and a minute in a debug build.
    let devices: u32 = if cfg!(debug_assertions) { 512 } else { 4096 };
    let cost = all_to_all_plan(devices).cost();
    let (all, own) = (u64::from(devices).pow(2), u64::from(devices) * 8);
    assert_eq!(cost.over_minimum, 0);
    assert_eq!((cost.messages, cost.rounds), (all - own, 1));
    let steps =
        |class: StepClass| cost.classes.iter().find(|cost| cost.class == class).expect("it is there").steps;
    assert_eq!([steps(StepClass::AcrossHosts), steps(StepClass::LocalCopy)], [all - own, own]);
}

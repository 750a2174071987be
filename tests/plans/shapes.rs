//! Plans of known collectives.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use muster::transfer::plan::{
    AllGather, ArrayDescription, Broadcast, DeviceId, Dtype, Mesh, MinimumTraffic, PartitionSpec,
    PlacedDevice, Placement, Plan, PlanError, PlanOptions, Reshard, Scatter, ShardRegion, Sharding, Step,
    StepClass, StridedRuns, TaskBytes, TaskId, copy_region, pack_runs, unpack_runs,
};

fn array(
    shape: &[u64],
    axes: &[(&str, u64)],
    devices: impl IntoIterator<Item = u32>,
    spec: &[&[&str]],
) -> ArrayDescription {
    let sharding = Sharding { mesh: Mesh::new(axes, devices), spec: PartitionSpec::new(spec) };
    ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Float32, sharding }
}

fn blocks(devices: std::ops::Range<u32>, per_task: u32, tasks_per_host: u32) -> Placement {
    Placement::blocks(devices.map(DeviceId), per_task, tasks_per_host)
}

fn fan_out(fan_out: u32) -> PlanOptions {
    PlanOptions { fan_out: NonZeroU32::new(fan_out).expect("not zero"), ..PlanOptions::default() }
}

fn broadcast(devices: u32, options: PlanOptions) -> Plan {
    let ask = Broadcast {
        shape: vec![256],
        dtype: Dtype::Float32,
        from: DeviceId(0),
        to: (0..devices).rev().map(DeviceId).collect(),
        placement: blocks(0..devices, 4, 2),
        options,
    };
    Plan::broadcast(ask).expect("it makes sense")
}

#[test]
fn in_each_round_of_an_exchange_everybody_sends_and_everybody_receives() {
    let rows = array(&[64, 64], &[("x", 16)], 0..16, &[&["x"]]);
    let columns = array(&[64, 64], &[("x", 16)], 0..16, &[&[], &["x"]]);
    let plan =
        Plan::new(rows, columns, &blocks(0..16, 1, 1), PlanOptions::default()).expect("it makes sense");
    let steps: Vec<Step> = plan.steps().collect();
    for round in steps.chunks(16) {
        for side in [|step: &Step| step.source.device, |step: &Step| step.destination.device] {
            let mut devices: Vec<DeviceId> = round.iter().map(side).collect();
            devices.sort_unstable();
            assert_eq!(devices, (0..16).map(DeviceId).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_broadcast_comes_to_every_host_once_and_is_copied_on_from_there() {
    // 64 hosts of two tasks of four devices.
    let plan = broadcast(512, PlanOptions::default());
    let cost = plan.cost();
    let steps =
        |class: StepClass| cost.classes.iter().find(|cost| cost.class == class).expect("it is there").steps;
    assert_eq!(StepClass::ALL.map(steps), [1, 64 * 2 * 3, 64, 63]);
    assert_eq!(cost.over_minimum, 0);
    let from_source =
        plan.steps().filter(|step| step.class == StepClass::AcrossHosts && step.after.is_none()).count();
    assert_eq!(from_source, 2, "the others are fed by those who were fed");
}

#[test]
fn fan_out_is_bounded_and_rounds_grow_logarithmically() {
    // The rounds among hosts, then to the second task of a host, then to the other devices of a task.
    for (options, rounds) in [(fan_out(1), 63 + 2), (fan_out(2), 6 + 2), (fan_out(100), 1 + 2)] {
        let plan = broadcast(512, options);
        let mut fed: BTreeMap<DeviceId, u32> = BTreeMap::new();
        for step in plan.steps().filter(|step| step.class == StepClass::AcrossHosts) {
            *fed.entry(step.source.device).or_default() += 1;
        }
        assert!(fed.values().all(|&hosts| hosts <= options.fan_out.get()), "{fed:?}");
        assert_eq!(plan.cost().rounds, rounds);
    }
}

#[test]
fn tasks_of_one_host_feed_one_another_as_a_tree_too() {
    let source = array(&[64], &[("one", 1)], [100], &[]);
    let destination = array(&[64], &[("copy", 32)], 0..32, &[]);
    let mut placement = blocks(0..32, 1, 32);
    placement.devices.push(PlacedDevice { device: DeviceId(100), task: TaskId(100), host: "far".to_owned() });
    let plan = Plan::new(source, destination, &placement, fan_out(3)).expect("it makes sense");
    let mut fed: BTreeMap<DeviceId, u32> = BTreeMap::new();
    for step in plan.steps() {
        *fed.entry(step.source.device).or_default() += 1;
    }
    assert!(fed.values().all(|&tasks| tasks <= 3), "{fed:?}");
    // One round to the host, and then three: three tasks, nine, and the rest of twenty-seven.
    assert_eq!(plan.cost().rounds, 1 + 3);
}

#[test]
fn received_bytes_are_spread_over_the_devices_of_a_task() {
    let axes = [("data", 4), ("model", 8)];
    let array = array(&[32, 1024], &axes, 0..32, &[&["data", "model"]]);
    let placement = blocks(0..32, 8, 1);
    let plan = Plan::all_gather(AllGather { array, axes: None, placement, options: PlanOptions::default() })
        .expect("it makes sense");
    let mut arrived: BTreeMap<DeviceId, u32> = BTreeMap::new();
    for step in plan.steps().filter(|step| step.class == StepClass::AcrossHosts) {
        *arrived.entry(step.destination.device).or_default() += 1;
    }
    // 24 parts arrive at each task, three at each of its eight devices.
    assert_eq!(arrived, (0..32).map(|device| (DeviceId(device), 3)).collect());
}

#[test]
fn an_all_gather_feeds_each_host_once_with_each_part() {
    // Four hosts of eight devices, with one part on each device.
    let axes = [("data", 4), ("model", 8)];
    let source = array(&[32, 1024], &axes, 0..32, &[&["data", "model"]]);
    let part = 1024 * 4;
    let gather = |axes: Option<&[&str]>| {
        let axes = axes.map(|axes| axes.iter().map(|&axis| axis.to_owned()).collect());
        Plan::all_gather(AllGather {
            array: source.clone(),
            axes,
            placement: blocks(0..32, 8, 1),
            options: fan_out(4),
        })
    };
    let all = gather(None).expect("it makes sense");
    assert_eq!(all.len(), 32 * 32);
    let cost = all.cost();
    assert_eq!(
        cost.minimum,
        MinimumTraffic { across_hosts: 4 * 24 * part, same_host: 0, local_copy: (32 * 32 - 4 * 24) * part }
    );
    // Every task sends its eight parts to three others, and none sends more.
    assert_eq!(cost.busiest_out, Some(TaskBytes { task: TaskId(0), bytes: 24 * part }));
    let along_data = gather(Some(&["data"])).expect("it makes sense");
    let left = |plan: &Plan| plan.destination().sharding.spec.0[0].axes().to_vec();
    assert_eq!((left(&all), left(&along_data)), (vec![], vec!["model".to_owned()]));
    assert_eq!(along_data.len(), 32 * 4);
    assert_eq!(gather(Some(&["rows"])).err(), Some(PlanError::UnknownAxis("rows".to_owned())));
}

#[test]
fn a_scatter_sends_each_device_its_own_part_and_nothing_else() {
    let to = array(&[10, 6], &[("x", 4), ("y", 2)], 8..16, &[&["x"], &["y"]]).sharding;
    let ask = Scatter {
        shape: vec![10, 6],
        dtype: Dtype::Int8,
        from: DeviceId(3),
        to,
        placement: blocks(0..16, 1, 1),
        options: PlanOptions::default(),
    };
    let plan = Plan::scatter(ask).expect("it makes sense");
    let sent: Vec<_> =
        plan.steps().map(|step| (step.destination.device.0, step.source.region, step.bytes)).collect();
    // Ten rows among four: three each, and one for the last.
    let part =
        |start: [u64; 2], extent: [u64; 2]| ShardRegion { start: start.to_vec(), extent: extent.to_vec() };
    let wanted = (0..8).map(|n: u64| {
        let rows = if n / 2 == 3 { 1 } else { 3 };
        (8 + n as u32, part([n / 2 * 3, n % 2 * 3], [rows, 3]), rows * 3)
    });
    assert_eq!(sent, wanted.collect::<Vec<_>>());
}

#[test]
fn shards_that_stay_are_handed_on_and_an_empty_array_needs_no_steps() {
    let same = array(&[8, 8], &[("x", 4)], 0..4, &[&["x"]]);
    let reshard = |source: &ArrayDescription, destination: &ArrayDescription| {
        let (source, destination) = (source.clone(), destination.clone());
        Plan::reshard(Reshard {
            source,
            destination,
            placement: blocks(0..8, 2, 1),
            options: PlanOptions::default(),
        })
        .expect("it makes sense")
    };
    let plan = reshard(&same, &same);
    assert!(
        plan.steps()
            .all(|step| step.class == StepClass::SameBuffer && step.source.device == step.destination.device)
    );
    assert_eq!((plan.len(), plan.cost().moved, plan.cost().busiest_out), (4, 0, None));

    let far = 1 << 61;
    let empty = array(&[far, 0, far], &[("x", 4)], 0..4, &[&["x"], &[]]);
    let plan = reshard(&empty, &array(&[far, 0, far], &[("x", 4)], 4..8, &[&[], &["x"]]));
    assert!(plan.is_empty());
    assert_eq!(plan.cost().moved, 0);

    let scalar = array(&[], &[], [5], &[]);
    let plan = reshard(&scalar, &array(&[], &[("x", 3)], 0..3, &[]));
    assert_eq!((plan.len(), plan.cost().moved), (3, 12));
}

#[test]
fn rows_beyond_the_array_leave_the_last_shards_smaller_or_empty() {
    let uneven = array(&[5], &[("x", 4)], [4, 5, 6, 7], &[&["x"]]);
    let held: Vec<_> =
        uneven.shards().expect("it makes sense").into_iter().map(|(_, region)| region.extent[0]).collect();
    assert_eq!(held, [2, 2, 1, 0]);
}

#[test]
fn meshes_that_leave_the_same_devices_without_elements_are_one_layout() {
    // Six rows and six columns in tiles of two by two: three by three tiles, on meshes of four by three and
    // of three by four.
    let grid = |rows: u64, columns: u64, idle: [usize; 3]| {
        let mut busy = 0..9;
        let devices = (0..12).map(|place| match idle.iter().position(|&at| at == place) {
            Some(number) => 9 + number as u32,
            None => busy.next().expect("nine places are left"),
        });
        array(
            &[6, 6],
            &[("rows", rows), ("columns", columns)],
            devices.collect::<Vec<_>>(),
            &[&["rows"], &["columns"]],
        )
    };
    let (tall, wide) = (grid(4, 3, [9, 10, 11]), grid(3, 4, [3, 7, 11]));
    assert_eq!(tall.shards(), wide.shards());
    let destination = array(&[6, 6], &[("copy", 2), ("x", 6)], 0..12, &[&[], &["x"]]);
    let plan = |one: &ArrayDescription, other: &ArrayDescription| {
        Plan::new(one.clone(), other.clone(), &blocks(0..12, 1, 2), PlanOptions::default())
            .expect("it makes sense")
    };
    for (one, other) in [
        (plan(&tall, &destination), plan(&wide, &destination)),
        (plan(&destination, &tall), plan(&destination, &wide)),
    ] {
        assert_eq!(one.fingerprint(), other.fingerprint());
        assert!(one.steps().eq(other.steps()));
        assert_eq!(one.cost(), other.cost());
    }
}

#[test]
fn replicas_take_turns_hosts_first_then_their_tasks_and_devices() {
    // Sixteen hosts hold a copy each; sixteen other hosts are to have a sixteenth each.
    let source = array(&[1600], &[("copy", 16)], 0..16, &[]);
    let destination = array(&[1600], &[("x", 16)], 16..32, &[&["x"]]);
    let plan =
        Plan::new(source, destination, &blocks(0..32, 1, 1), PlanOptions::default()).expect("it makes sense");
    let mut givers: Vec<_> = plan.steps().map(|step| step.source.device.0).collect();
    givers.sort_unstable();
    assert_eq!(givers, (0..16).collect::<Vec<_>>());

    // Copies on devices of one task take turns.
    let source = array(&[800], &[("copy", 4)], 0..4, &[]);
    let destination = array(&[800], &[("x", 8)], 8..16, &[&["x"]]);
    let plan =
        Plan::new(source, destination, &blocks(0..16, 4, 1), PlanOptions::default()).expect("it makes sense");
    let givers: Vec<_> = plan.steps().map(|step| step.source.device.0).collect();
    for mut four in [givers[..4].to_vec(), givers[4..].to_vec()] {
        four.sort_unstable();
        assert_eq!(four, [0, 1, 2, 3]);
    }

    // Host a holds four copies in four tasks, host b one: the hosts share the work equally, and so do the
    // tasks of host a.
    let place = |device: u32, host: &str| PlacedDevice {
        device: DeviceId(device),
        task: TaskId(device),
        host: host.to_owned(),
    };
    let mut devices: Vec<_> = (0..4).map(|device| place(device, "a")).collect();
    devices.push(place(4, "b"));
    devices.extend((5..13).map(|device| place(device, &format!("wants-{device}"))));
    let source = array(&[800], &[("copy", 5)], 0..5, &[]);
    let destination = array(&[800], &[("x", 8)], 5..13, &[&["x"]]);
    let plan = Plan::new(source, destination, &Placement { devices }, PlanOptions::default())
        .expect("it makes sense");
    let mut given = [0; 5];
    for step in plan.steps() {
        given[step.source.device.0 as usize] += 1;
    }
    assert_eq!(given, [1, 1, 1, 1, 4]);
}

#[test]
fn the_nearest_holder_is_asked() {
    // Device 1 holds it itself, device 2 has it in its task (0, 1), device 4 on its host, device 8 neither.
    let source = array(&[4], &[("copy", 3)], [0, 1, 12], &[]);
    let destination = array(&[4], &[("copy", 4)], [1, 2, 4, 8], &[]);
    let plan =
        Plan::new(source, destination, &blocks(0..16, 4, 2), PlanOptions::default()).expect("it makes sense");
    let told: Vec<_> = plan.steps().map(|s| (s.source.device.0, s.destination.device.0, s.class)).collect();
    assert_eq!(told[0], (1, 1, StepClass::SameBuffer));
    assert_eq!((told[1].1, told[1].2), (2, StepClass::LocalCopy));
    assert_eq!((told[2].1, told[2].2), (4, StepClass::SameHost));
    // Device 12 is on the host of device 8.
    assert_eq!(told[3], (12, 8, StepClass::SameHost));
}

#[test]
fn regions_become_the_fewest_and_longest_runs() {
    let source = array(&[4, 6, 8], &[("x", 2)], [0, 1], &[&["x"]]);
    let destination = array(&[4, 6, 8], &[("x", 2)], [2, 3], &[&[], &["x"]]);
    let plan =
        Plan::new(source, destination, &blocks(0..4, 1, 1), PlanOptions::default()).expect("it makes sense");
    let wanted = |step: &Step| (step.source.device, step.destination.device) == (DeviceId(0), DeviceId(3));
    let Step { source, destination, bytes, .. } = plan.steps().find(wanted).expect("it is there");
    assert_eq!(bytes, 2 * 3 * 8 * 4);
    assert_eq!(
        source.runs,
        StridedRuns { offset: 3 * 8 * 4, run_bytes: 3 * 8 * 4, counts: vec![2], strides: vec![6 * 8 * 4] }
    );
    assert_eq!(
        destination.runs,
        StridedRuns { offset: 0, run_bytes: 2 * 3 * 8 * 4, counts: vec![], strides: vec![] }
    );
    // Loops whose turns are contiguous make one loop.
    let region = ShardRegion { start: vec![1, 0, 0, 2], extent: vec![2, 3, 5, 4] };
    let runs = region.runs(&[4, 3, 5, 8], 2).expect("it fits");
    assert_eq!(
        runs,
        StridedRuns { offset: 2 * (120 + 2), run_bytes: 8, counts: vec![30], strides: vec![16] }
    );
    assert_eq!((runs.count(), runs.bytes()), (30, 240));
    // Dimensions with one element are no loops.
    let region = ShardRegion { start: vec![1, 2, 3], extent: vec![1, 1, 4] };
    let runs = region.runs(&[4, 5, 8], 2).expect("it fits");
    assert_eq!(
        runs,
        StridedRuns { offset: 2 * (40 + 16 + 3), run_bytes: 8, counts: vec![], strides: vec![] }
    );
}

#[test]
fn forwarding_reuses_the_unpack_buffer() {
    // Columns of a matrix: runs of four bytes. Two hosts of two tasks are to have the same columns.
    let source = array(&[64, 8], &[("x", 1)], [0], &[]);
    let destination = array(&[64, 8], &[("copy", 4), ("x", 2)], 2..10, &[&[], &["x"]]);
    let plan = Plan::new(source, destination, &blocks(0..12, 2, 2), fan_out(1)).expect("it makes sense");
    let steps: Vec<Step> = plan.steps().collect();
    let on = steps
        .iter()
        .find(|step| step.class.leaves_task() && step.after.is_some())
        .expect("something is sent on");
    let before = &steps[on.after.expect("it is") as usize];
    // At the destination the columns are the whole shard, so nothing is unpacked or packed again.
    assert!(
        before.source.staging.is_some()
            && before.destination.staging.is_none()
            && on.source.staging.is_none()
    );

    let source = array(&[64, 8], &[("x", 2)], [0, 1], &[&[], &["x"]]);
    let destination = array(&[64, 8], &[("copy", 5)], 2..7, &[]);
    let plan = Plan::new(source, destination, &blocks(0..12, 1, 1), fan_out(2)).expect("it makes sense");
    let steps: Vec<Step> = plan.steps().collect();
    let mut sent_on = 0;
    for on in steps.iter().filter(|step| step.after.is_some()) {
        let before = &steps[on.after.expect("it has one") as usize];
        assert!(on.source.staging.is_some());
        assert_eq!(on.source.staging, before.destination.staging);
        sent_on += 1;
    }
    assert_eq!(sent_on, 2 * 3, "of each half three are fed by those who were fed");
    // The right half follows the left one in the staging memory of a shard that has both: 64 rows of four
    // elements.
    let places: BTreeSet<_> =
        steps.iter().map(|step| step.destination.staging.expect("it is packed").offset).collect();
    assert_eq!(places, BTreeSet::from([0, 64 * 4 * 4]));
    assert_eq!(plan.staging_bytes(TaskId(3)), 64 * 8 * 4);
}

#[test]
fn copies_refuse_what_does_not_fit_and_touch_nothing() {
    let region =
        |start: &[u64], extent: &[u64]| ShardRegion { start: start.to_vec(), extent: extent.to_vec() };
    let source: Vec<u8> = (0..24).collect();
    let mut into = vec![99; 12];
    let good = (region(&[1, 2], &[2, 3]), region(&[0, 1], &[2, 3]));
    copy_region(&source, &[4, 6], &good.0, &mut into, &[3, 4], &good.1, 1).expect("it fits");
    assert_eq!(into, [99, 8, 9, 10, 99, 14, 15, 16, 99, 99, 99, 99]);
    let before = into.clone();
    let far = u64::MAX;
    let bad = [
        (vec![4, 6], region(&[1, 2], &[2, 4]), vec![3, 4], good.1.clone(), 1),
        (vec![4, 6], region(&[3, 2], &[2, 3]), vec![3, 4], good.1.clone(), 1),
        (vec![4, 6], region(&[far, 2], &[2, 3]), vec![3, 4], good.1.clone(), 1),
        (vec![4, 7], good.0.clone(), vec![3, 4], good.1.clone(), 1),
        (vec![4, 6], good.0.clone(), vec![3, 4], good.1.clone(), 2),
        (vec![4, 6], good.0.clone(), vec![3, 4], good.1.clone(), far),
        (vec![24], region(&[0], &[2]), vec![3, 4], good.1.clone(), 1),
        (vec![4, 6], good.0.clone(), vec![4, 4], good.1.clone(), 1),
        (vec![4, far], good.0.clone(), vec![3, 4], good.1.clone(), 1),
    ];
    for (shape, from, into_shape, to, item) in bad {
        let done = copy_region(&source, &shape, &from, &mut into, &into_shape, &to, item);
        assert!(matches!(done, Err(PlanError::Region { .. } | PlanError::TooLarge { .. })), "{done:?}");
    }
    let runs = |offset, run_bytes, counts: &[u64], strides: &[u64]| StridedRuns {
        offset,
        run_bytes,
        counts: counts.to_vec(),
        strides: strides.to_vec(),
    };
    for hostile in [
        runs(0, 2, &[far, far], &[0, 0]),
        runs(0, 2, &[6], &[far]),
        runs(far, 12, &[], &[]),
        runs(0, far, &[2], &[1]),
        runs(20, 2, &[6], &[2]),
        runs(0, 2, &[6], &[]),
        runs(0, 1, &[12, 0], &[1, 1]),
        runs(0, 0, &[far], &[1]),
    ] {
        assert!(
            matches!(pack_runs(&source, &hostile, &mut into), Err(PlanError::Region { .. })),
            "{hostile:?}"
        );
        assert!(
            matches!(unpack_runs(&before, &hostile, &mut source.clone()), Err(PlanError::Region { .. })),
            "{hostile:?}"
        );
    }
    assert_eq!(into, before);
}

#[test]
fn each_part_of_what_a_plan_follows_from_is_in_its_fingerprint() {
    let one = array(&[8], &[("x", 2)], 0..2, &[&["x"]]);
    let two = array(&[8], &[("x", 2)], 2..4, &[&["x"]]);
    let plan = |one: &ArrayDescription, two: &ArrayDescription, placement: &Placement, options| {
        let plan = Plan::new(one.clone(), two.clone(), placement, options).expect("it makes sense");
        (plan.layout_fingerprint(), plan.fingerprint())
    };
    let own = blocks(0..4, 1, 1);
    let first = plan(&one, &two, &own, PlanOptions::default());
    // The same bytes of another type, and the same elements of another shape.
    let with = |change: &dyn Fn(&mut ArrayDescription)| {
        let (mut one, mut two) = (one.clone(), two.clone());
        change(&mut one);
        change(&mut two);
        plan(&one, &two, &own, PlanOptions::default()).0
    };
    assert_ne!(with(&|array| array.dtype = Dtype::Int32), first.0);
    assert_ne!(with(&|array| array.shape.push(1)), first.0);
    // The same tasks on fewer hosts, and another fan-out: the layout is the same, the steps may differ.
    let together = plan(&one, &two, &blocks(0..4, 1, 2), PlanOptions::default());
    assert!(together.0 == first.0 && together.1 != first.1);
    let wider = plan(&one, &two, &own, fan_out(7));
    assert!(wider.0 == first.0 && wider.1 != first.1);
    // The timeout changes nothing.
    let options = PlanOptions { timeout: Some(std::time::Duration::from_secs(1)), ..PlanOptions::default() };
    assert_eq!(plan(&one, &two, &own, options), first);
}

#[test]
fn a_plan_is_not_carried_out_with_shards_of_another_size() {
    let source = array(&[8], &[("x", 2)], 0..2, &[&["x"]]);
    let destination = array(&[8], &[("x", 2)], 2..4, &[&["x"]]);
    let plan =
        Plan::new(source, destination, &blocks(0..4, 1, 1), PlanOptions::default()).expect("it makes sense");
    let shards = |devices: [(u32, usize); 2]| {
        devices.into_iter().map(|(d, size)| (DeviceId(d), vec![7; size])).collect()
    };
    let mut into = shards([(2, 16), (3, 16)]);
    let done = plan.execute(&shards([(0, 16), (1, 12)]), &mut into);
    assert_eq!(done, Err(PlanError::Buffer { device: DeviceId(1), role: "source", wanted: 16, found: 12 }));
    let done = plan.execute(&shards([(0, 16), (1, 16)]), &mut shards([(2, 16), (4, 16)]));
    assert_eq!(
        done,
        Err(PlanError::Buffer { device: DeviceId(3), role: "destination", wanted: 16, found: 0 })
    );
}

//! Tests of descriptions that are inconsistent or too large.

use muster::transfer::plan::{
    ArrayDescription, DeviceId, Dtype, MAX_AXES, MAX_BYTES, MAX_DEVICES, MAX_RANK, MAX_STEPS, Mesh,
    Partition, PartitionSpec, PlacedDevice, Placement, Plan, PlanError, PlanOptions, Sharding, TaskId,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn array(
    shape: &[u64],
    axes: &[(&str, u64)],
    devices: impl IntoIterator<Item = u32>,
    spec: &[&[&str]],
) -> ArrayDescription {
    let sharding = Sharding { mesh: Mesh::new(axes, devices), spec: PartitionSpec::new(spec) };
    ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Float32, sharding }
}

fn check_refused(array: &ArrayDescription) -> PlanError {
    let text = serde_json::to_string(array).expect("it can be written");
    let error = array.check().expect_err("it makes no sense");
    match &error {
        // The parser stops reading at the bound.
        PlanError::TooMany { .. } => {
            assert!(matches!(ArrayDescription::from_json(&text), Err(PlanError::Json { .. })))
        }
        error => assert_eq!(ArrayDescription::from_json(&text).as_ref(), Err(error)),
    }
    assert_eq!(array.shards().err(), Some(error.clone()));
    let good = self::array(&[4], &[("x", 1)], [0], &[]);
    let placement = Placement::blocks((0..16).map(DeviceId), 1, 1);
    let plan = |source: &ArrayDescription, destination: &ArrayDescription| {
        Plan::new(source.clone(), destination.clone(), &placement, PlanOptions::default()).err()
    };
    assert_eq!(plan(array, &good), Some(error.clone()));
    assert_eq!(plan(&good, array), Some(error.clone()));
    error
}

#[test]
fn each_mistake_in_a_description_has_its_own_error() {
    let two = [("x", 2), ("y", 2)];
    let name = || "x".to_owned();
    let far = u64::MAX;
    assert_eq!(
        check_refused(&array(&[4], &[("x", 2)], [1, 1], &[])),
        PlanError::DuplicateDevice(DeviceId(1))
    );
    assert_eq!(check_refused(&array(&[4], &two, 0..4, &[&["z"]])), PlanError::UnknownAxis("z".to_owned()));
    assert_eq!(check_refused(&array(&[4], &two, 0..4, &[&["x", "x"]])), PlanError::AxisUsedTwice(name()));
    assert_eq!(
        check_refused(&array(&[4, 4], &two, 0..4, &[&["x"], &["x"]])),
        PlanError::AxisUsedTwice(name())
    );
    assert_eq!(
        check_refused(&array(&[4], &two, 0..4, &[&["x"], &[]])),
        PlanError::Rank { entries: 2, rank: 1 }
    );
    assert_eq!(
        check_refused(&array(&[4], &[("x", 2), ("x", 2)], 0..4, &[])),
        PlanError::DuplicateAxis(name())
    );
    assert_eq!(check_refused(&array(&[4], &[("x", 0)], [], &[])), PlanError::EmptyAxis(name()));
    assert_eq!(check_refused(&array(&[4], &two, 0..3, &[])), PlanError::DeviceCount { axes: 4, devices: 3 });
    assert_eq!(
        check_refused(&array(&[4], &[("x", far), ("y", far)], 0..3, &[])),
        PlanError::DeviceCount { axes: far, devices: 3 }
    );
    assert_eq!(check_refused(&array(&[4], &[("", 1)], [0], &[])), PlanError::Name { what: "axis", index: 0 });
    assert_eq!(
        check_refused(&array(&[4], &[("a\n", 1)], [0], &[])),
        PlanError::Name { what: "axis", index: 0 }
    );
    assert_eq!(
        check_refused(&array(&[4], &[(&"x".repeat(257), 1)], [0], &[])),
        PlanError::Name { what: "axis", index: 0 }
    );
    assert_eq!(
        check_refused(&array(&[MAX_BYTES / 4 + 1], &[("x", 1)], [0], &[])),
        PlanError::TooLarge { what: "the array" }
    );
    assert_eq!(
        check_refused(&array(&[far, 0], &[("x", 1)], [0], &[])),
        PlanError::TooLarge { what: "a dimension of the array" }
    );
    assert_eq!(
        check_refused(&array(&[1 << 40, 1 << 40], &[("x", 1)], [0], &[])),
        PlanError::TooLarge { what: "the array" }
    );
    let packed = ArrayDescription { dtype: Dtype::Int4, ..array(&[4], &[("x", 1)], [0], &[]) };
    assert_eq!(check_refused(&packed), PlanError::SubByte(Dtype::Int4));
}

#[test]
fn inputs_beyond_a_limit_are_refused_with_the_limit() {
    let too_many = |what, count: usize, limit: usize| PlanError::TooMany {
        what,
        count: count as u64,
        limit: limit as u64,
    };
    let axes: Vec<String> = (0..=MAX_AXES).map(|n| format!("a{n}")).collect();
    let axes: Vec<(&str, u64)> = axes.iter().map(|name| (name.as_str(), 1)).collect();
    assert_eq!(
        check_refused(&array(&[4], &axes, [0], &[])),
        too_many("axes of a mesh", MAX_AXES + 1, MAX_AXES)
    );
    assert_eq!(
        check_refused(&array(&[1; MAX_RANK + 1], &[("x", 1)], [0], &[])),
        too_many("dimensions", MAX_RANK + 1, MAX_RANK)
    );
    let devices = MAX_DEVICES as u32 + 1;
    let wide = array(&[4], &[("x", devices as u64)], 0..devices, &[]);
    assert_eq!(check_refused(&wide), too_many("devices of a mesh", MAX_DEVICES + 1, MAX_DEVICES));
    // A long unknown name is not repeated in the error.
    let mut named = array(&[4], &[("x", 1)], [0], &[]);
    named.sharding.spec.0.push(Partition::Axis("y".repeat(1 << 20)));
    assert!(check_refused(&named).to_string().len() < 300);
    let error = ArrayDescription::from_json(&format!("{{\"{}\": 1}}", "y".repeat(1 << 20)))
        .expect_err("it has no such field");
    assert!(error.to_string().len() < 1000);
}

/// Returns the peak memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn peak_process_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the system tells");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("it is there");
    line.split_whitespace().nth(1).and_then(|kilobytes| kilobytes.parse::<u64>().ok()).expect("a number")
        * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn a_long_text_takes_no_memory_beside_its_own() {
    let one = array(&[4], &[("x", 1)], [0], &[]);
    let plan =
        Plan::new(one.clone(), one.clone(), &Placement::blocks([DeviceId(0)], 1, 1), PlanOptions::default());
    let plan = plan.expect("it makes sense").to_json().expect("it is short");
    let array = serde_json::to_string(&one).expect("it can be written");
    let step = &plan[plan.find("\"steps\":[").expect("it has steps") + 9..plan.len() - 2];
    let classes = plan.find("\"classes\"").expect("it has classes");
    let classes = &plan[classes..=classes + plan[classes..].find(']').expect("they end")];
    let instead = |text: &str, old: &str, entry: &str| {
        assert!(text.contains(old), "{old} in {text}");
        let count = (8 << 20) / (entry.len() + 1);
        text.replacen(
            old,
            &format!(
                "{}{}{entry}]",
                &old[..=old.find('[').expect("a list")],
                format!("{entry},").repeat(count)
            ),
            1,
        )
    };
    // The texts that would take the most memory if they were kept: an empty list is three bytes of text.
    let texts = [
        instead(&array, "\"spec\":[]", "[]"),
        instead(&array, "\"shape\":[4]", "4"),
        instead(&array, "\"devices\":[0]", "0"),
        instead(&array, "\"axes\":[{\"name\":\"x\",\"size\":1}]", "{\"name\":\"\",\"size\":1}"),
    ];
    let plans = [
        instead(&plan, "\"spec\":[]", "[]"),
        instead(&plan, &format!("\"steps\":[{step}]"), step),
        instead(&plan, "\"counts\":[]", "7"),
        instead(&plan, classes, "{\"class\":\"same-host\",\"steps\":0,\"bytes\":0}"),
    ];
    let before = peak_process_memory();
    for text in &texts {
        assert!(matches!(ArrayDescription::from_json(text), Err(PlanError::Json { .. })), "{}", &text[..300]);
    }
    for text in &plans {
        assert!(
            matches!(Plan::from_json(text), Err(PlanError::Json { .. } | PlanError::Contradicts { .. })),
            "{}",
            &text[..300]
        );
    }
    // Other tests run beside this one, and need a little memory.
    assert!(peak_process_memory() - before < 12 << 20, "{} MiB more", (peak_process_memory() - before) >> 20);
}

#[test]
fn a_plan_of_too_many_steps_is_refused_before_it_is_made() {
    let rows = array(&[1 << 16, 1 << 16], &[("x", 1 << 16)], 0..1 << 16, &[&["x"]]);
    let columns = array(&[1 << 16, 1 << 16], &[("x", 1 << 16)], 0..1 << 16, &[&[], &["x"]]);
    let plan = Plan::new(rows, columns, &Placement::default(), PlanOptions::default());
    // The array, once for each device, is within its bound: 2^16 * 2^32 * 4.
    assert_eq!(
        plan.err(),
        Some(PlanError::TooMany { what: "steps of the plan", count: 1 << 32, limit: MAX_STEPS })
    );
    // 8,065 * 8,321 is one more than the limit.
    let exchange = |rows: u32, columns: u32| {
        let shape = [rows.into(), columns.into()];
        let placement = Placement::blocks((0..rows + columns).map(DeviceId), 8, 1);
        let rows_of = array(&shape, &[("x", rows.into())], 0..rows, &[&["x"]]);
        let columns_of = array(&shape, &[("x", columns.into())], rows..rows + columns, &[&[], &["x"]]);
        Plan::new(rows_of, columns_of, &placement, PlanOptions::default())
    };
    let count = MAX_STEPS + 1;
    assert_eq!(
        exchange(8065, 8321).err(),
        Some(PlanError::TooMany { what: "steps of the plan", count, limit: MAX_STEPS })
    );
    let most = exchange(8192, 8192).expect("it is as many as there may be");
    assert_eq!(most.len() as u64, MAX_STEPS);
    let last = most.step(most.len() as u32 - 1).expect("it is there");
    assert_eq!((last.destination.device.0, last.source.device.0), (16383, 8190));
    assert_eq!(most.step(most.len() as u32), None);
    assert_eq!(most.to_json().err(), Some(PlanError::TooLong { steps: 1 << 26 }));
    let whole = array(&[1 << 59], &[("x", 16)], 0..16, &[]);
    let plan = Plan::new(whole.clone(), whole, &Placement::default(), PlanOptions::default());
    assert!(matches!(plan, Err(PlanError::TooLarge { .. })));
}

#[test]
fn a_short_text_that_claims_many_steps_is_refused_before_they_are_looked_at() {
    let one = array(&[4], &[("x", 1)], [0], &[]);
    let placement = Placement::blocks((0..2048).map(DeviceId), 8, 1);
    let little = Plan::new(one.clone(), one, &placement, PlanOptions::default()).expect("it makes sense");
    let mut claims: Value =
        serde_json::from_str(&little.to_json().expect("it is short")).expect("it is JSON");
    let shape = [1024, 1024];
    let plan = Plan::new(
        array(&shape, &[("x", 1024)], 0..1024, &[&["x"]]),
        array(&shape, &[("x", 1024)], 1024..2048, &[&[], &["x"]]),
        &placement,
        PlanOptions::default(),
    )
    .expect("it makes sense");
    claims["source"] = json!(plan.source());
    claims["destination"] = json!(plan.destination());
    claims["placement"] = json!(plan.placement());
    claims["layout"] = json!(plan.layout_fingerprint());
    claims["fingerprint"] = json!(plan.fingerprint());
    let error = Plan::from_json(&claims.to_string()).expect_err("it has one step");
    assert!(error.to_string().contains("it has 1 of 1048576"), "{error}");
    // The text has as many entries as it claims, but it is too short for that many steps.
    let text =
        claims.to_string().replacen("\"steps\":[", &format!("\"steps\":[{}", "0,".repeat((1 << 20) - 1)), 1);
    let error = Plan::from_json(&text).expect_err("zeros are no steps");
    assert!(error.to_string().contains("too short for them"), "{error}");
}

#[test]
fn source_and_destination_must_be_the_same_array() {
    let one = array(&[4, 2], &[("x", 1)], [0], &[]);
    let placement = Placement::blocks([DeviceId(0)], 1, 1);
    let other =
        |other: ArrayDescription| Plan::new(one.clone(), other, &placement, PlanOptions::default()).err();
    let shape = PlanError::Shape { source_shape: vec![4, 2], destination_shape: vec![2, 4] };
    assert_eq!(other(array(&[2, 4], &[("x", 1)], [0], &[])), Some(shape));
    let dtype = PlanError::DtypeChanged { source_dtype: Dtype::Float32, destination_dtype: Dtype::Int32 };
    assert_eq!(other(ArrayDescription { dtype: Dtype::Int32, ..one.clone() }), Some(dtype));
}

#[test]
fn a_placement_places_each_device_once_and_each_task_on_one_host() {
    let placed = |device, task, host: &str| PlacedDevice {
        device: DeviceId(device),
        task: TaskId(task),
        host: host.to_owned(),
    };
    let one = array(&[4], &[("x", 2)], 0..2, &[]);
    let plan = |devices: Vec<PlacedDevice>| {
        Plan::new(one.clone(), one.clone(), &Placement { devices }, PlanOptions::default()).err()
    };
    assert_eq!(plan(vec![placed(0, 0, "a")]), Some(PlanError::NotPlaced(DeviceId(1))));
    let twice = vec![placed(0, 0, "a"), placed(1, 0, "a"), placed(0, 0, "a")];
    assert_eq!(plan(twice), Some(PlanError::PlacedTwice(DeviceId(0))));
    assert_eq!(plan(vec![placed(0, 0, "a"), placed(1, 0, "b")]), Some(PlanError::TaskOnTwoHosts(TaskId(0))));
    let unnamed = PlanError::Name { what: "host of placed device", index: 1 };
    assert_eq!(plan(vec![placed(0, 0, "a"), placed(1, 0, "")]), Some(unnamed));
    assert_eq!(plan(vec![placed(0, 0, "a"), placed(1, 0, "a"), placed(2, 2, "c")]), None);
}

#[test]
fn every_data_type_of_jax_is_known_and_only_whole_bytes_move() {
    for &dtype in Dtype::ALL {
        assert_eq!(dtype.name().parse(), Ok(dtype));
        assert_eq!(dtype.bytes().is_ok(), dtype.bits() >= 8, "{dtype}");
    }
    assert_eq!("string".parse::<Dtype>(), Err(PlanError::UnknownDtype));
}

#[test]
fn ids_at_the_ends_of_their_range_are_placed_in_blocks_too() {
    let ids = [0, 1, u32::MAX - 1, u32::MAX].map(DeviceId);
    for (per_task, tasks_per_host) in [(0, 0), (1, 1), (8, 2), (u32::MAX, u32::MAX)] {
        assert_eq!(Placement::blocks(ids, per_task, tasks_per_host).check(), Ok(()));
    }
}

/// Values at which arithmetic errors are likely.
fn integers_near_limits() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..6_u64,
        Just(1 << 31),
        Just(1 << 32),
        Just(1 << 61),
        Just(MAX_BYTES),
        Just(u64::MAX - 1),
        Just(u64::MAX)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn odd_numbers_give_a_plan_or_an_error(
        shape in prop::collection::vec(integers_near_limits(), 0..4),
        sizes in prop::collection::vec(integers_near_limits(), 0..3),
        devices in prop::collection::vec(0..6_u32, 0..5),
        spec in prop::collection::vec(prop::collection::vec("[a-c]", 0..3), 0..4),
        other in prop::collection::vec(prop::collection::vec("[a-c]", 0..2), 0..3),
    ) {
        let names = ["a", "b", "c"];
        let axes: Vec<_> = names.into_iter().zip(sizes).collect();
        let describe = |spec: &[Vec<String>]| {
            let spec = PartitionSpec(spec.iter().map(|axes| Partition::Axes(axes.clone())).collect());
            let sharding = Sharding { mesh: Mesh::new(&axes, devices.iter().copied()), spec };
            ArrayDescription { shape: shape.clone(), dtype: Dtype::Float64, sharding }
        };
        let placement = Placement::blocks((0..5).map(DeviceId), 2, 1);
        if let Ok(plan) = Plan::new(describe(&spec), describe(&other), &placement, PlanOptions::default()) {
            prop_assert_eq!(plan.cost().over_minimum, 0);
            prop_assert_eq!(plan.steps().count(), plan.len());
            prop_assert!(Plan::from_json(&plan.to_json().expect("it is short")).is_ok());
        }
    }

    #[test]
    fn noise_gives_an_error_and_never_a_panic(text in ".{0,200}", cut in 0..400_usize, byte in any::<u8>()) {
        prop_assert!(Plan::from_json(&text).is_err());
        prop_assert!(Placement::from_json(&text).is_err());
        let good = r#"{"shape":[8,4],"dtype":"float32","sharding":{"mesh":{"axes":[{"name":"x","size":2}],"devices":[0,1]},"spec":["x",null]}}"#;
        let mut bytes = good.as_bytes().to_vec();
        let at = cut % bytes.len();
        bytes[at] = byte;
        if let Ok(Ok(array)) = std::str::from_utf8(&bytes).map(ArrayDescription::from_json) {
            prop_assert!(array.check().is_ok());
        }
    }
}

//! Tests of plans as JSON: reading returns the plan that was written, or an error with the reason.

use std::num::NonZeroU32;
use std::time::Duration;

use muster::transfer::plan::{
    ArrayDescription, DeviceId, Dtype, Mesh, PartitionSpec, Placement, Plan, PlanError, PlanOptions, Sharding,
};
use serde_json::{Value, json};

const SOURCE: &str = r#"{
    "shape": [6, 4], "dtype": "bfloat16",
    "sharding": {"mesh": {"axes": [{"name": "x", "size": 2}, {"name": "y", "size": 2}], "devices": [0, 1, 2, 3]}, "spec": ["x"]}
}"#;
const DESTINATION: &str = r#"{
    "shape": [6, 4], "dtype": "bfloat16",
    "sharding": {"mesh": {"axes": [{"name": "z", "size": 4}], "devices": [4, 5, 6, 7]}, "spec": [null, ["z"]]}
}"#;

fn sample_plan() -> Plan {
    let source = ArrayDescription::from_json(SOURCE).expect("it makes sense");
    let destination = ArrayDescription::from_json(DESTINATION).expect("it makes sense");
    let placement = Placement::blocks(
        source.sharding.mesh.devices.iter().chain(&destination.sharding.mesh.devices).copied(),
        2,
        1,
    );
    let options =
        PlanOptions { fan_out: NonZeroU32::MIN, timeout: Some(Duration::from_nanos(90_000_000_001)) };
    Plan::new(source, destination, &placement, options).expect("it makes sense")
}

fn sample_plan_document() -> Value {
    serde_json::from_str(&sample_plan().to_json().expect("it is short")).expect("it is JSON")
}

#[test]
fn options_and_timeout_come_back_exactly() {
    let read = Plan::from_json(&sample_plan_document().to_string()).expect("it is a plan");
    assert_eq!(read.options(), sample_plan().options());
    assert_eq!(read.timeout(), Some(Duration::from_nanos(90_000_000_001)));
}

#[test]
fn a_plan_of_other_rules_is_refused_by_its_version() {
    let mut other = sample_plan_document();
    for found in [1, 3] {
        other["version"] = json!(found);
        other["something"] = json!("new");
        assert_eq!(Plan::from_json(&other.to_string()).err(), Some(PlanError::Version { found }));
    }
}

#[test]
fn a_plan_that_was_changed_anywhere_is_refused() {
    let whole = sample_plan_document();
    let (mut changed, mut accepted) = (0, 0);
    change_each(&whole, &mut Vec::new(), &mut |path, value| {
        let mut other = whole.clone();
        *path.iter().fold(&mut other, |at, key| match key {
            Value::String(key) => &mut at[key.as_str()],
            key => &mut at[key.as_u64().expect("an index") as usize],
        }) = value;
        // Everything that is computed from the inputs must equal the result. The inputs themselves may be
        // written differently, as long as they mean the same.
        let input =
            ["source", "destination", "timeout"].iter().any(|name| path.first() == Some(&json!(name)));
        match Plan::from_json(&other.to_string()) {
            Ok(read) => {
                assert!(input, "{path:?} was changed, and nobody noticed");
                assert_eq!(read.fingerprint(), sample_plan().fingerprint());
                assert!(read.steps().eq(sample_plan().steps()), "{path:?}");
                accepted += 1;
            }
            Err(PlanError::Version { .. }) => assert_eq!(path, [json!("version")]),
            Err(_) => {}
        }
        changed += 1;
    });
    // The accepted changes are the timeout, and the name of an axis that divides nothing.
    assert!(
        changed > 500 && (1..10).contains(&accepted),
        "{changed} places were changed, {accepted} of them accepted"
    );
}

/// Calls `change` with every place of a document and another value for it.
fn change_each(value: &Value, path: &mut Vec<Value>, change: &mut dyn FnMut(&[Value], Value)) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                path.push(json!(key));
                change_each(value, path, change);
                path.pop();
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                path.push(json!(index));
                change_each(value, path, change);
                path.pop();
            }
            let mut more = items.clone();
            more.push(items.last().cloned().unwrap_or(json!(0)));
            change(path, Value::Array(more));
            if !items.is_empty() {
                change(path, Value::Array(items[..items.len() - 1].to_vec()));
            }
        }
        Value::String(text) if path.last() == Some(&json!("timeout")) => {
            change(path, json!(format!("{text} 1ms")))
        }
        Value::String(text) => change(path, json!(format!("{text}0"))),
        Value::Number(number) => change(path, json!(number.as_u64().expect("small") + 1)),
        Value::Null => change(path, json!(7)),
        Value::Bool(yes) => change(path, json!(!yes)),
    }
}

#[test]
fn steps_in_another_form_are_not_taken_for_steps() {
    for steps in [json!({}), json!({"steps": sample_plan_document()["steps"]}), json!(null), json!(3)] {
        let mut other = sample_plan_document();
        other["steps"] = steps;
        assert!(matches!(Plan::from_json(&other.to_string()), Err(PlanError::Json { .. })));
    }
    let text = sample_plan_document().to_string();
    let twice = text.replacen("\"steps\":", "\"steps\":[],\"steps\":", 1);
    assert!(matches!(Plan::from_json(&twice), Err(PlanError::Json { .. })));
    assert!(matches!(Plan::from_json(&format!("{text} {{}}")), Err(PlanError::Json { .. })));
    assert!(matches!(Plan::from_json(&text[..text.len() / 2]), Err(PlanError::Json { .. })));
}

#[test]
fn the_device_list_of_the_rest_api_is_a_placement() {
    let listed = r#"{"devices": [
        {"platform": "cpu", "kind": "cpu", "global_id": 3, "local_id": 1, "task": 1, "partition": null, "boot_id": "b7"},
        {"platform": "cpu", "kind": "cpu", "global_id": 2, "local_id": 0, "task": 1, "partition": null, "boot_id": "b7"}
    ], "next": null}"#;
    let placement = Placement::from_json(listed).expect("it is one");
    let told: Vec<_> = placement.devices.iter().map(|d| (d.device.0, d.task.0, d.host.as_str())).collect();
    assert_eq!(told, [(3, 1, "b7"), (2, 1, "b7")]);
}

#[test]
fn a_plan_that_is_too_long_to_be_read_again_is_refused_before_it_is_written() {
    let array = |devices: std::ops::Range<u32>, spec: &[&[&str]]| {
        let mesh = Mesh::new(&[("x", u64::from(devices.end - devices.start))], devices);
        let sharding = Sharding { mesh, spec: PartitionSpec::new(spec) };
        ArrayDescription { shape: vec![2048, 1024], dtype: Dtype::Uint8, sharding }
    };
    let placement = Placement::blocks((0..3072).map(DeviceId), 8, 1);
    let (source, destination) = (array(0..2048, &[&["x"]]), array(2048..3072, &[&[], &["x"]]));
    let plan = Plan::new(source, destination, &placement, PlanOptions::default()).expect("it makes sense");
    let error = plan.to_json().expect_err("it has two million steps");
    assert_eq!(error, PlanError::TooLong { steps: 2 << 20 });
    let said = error.to_string();
    assert!(said.contains("2097152 steps") && said.contains("512 MiB") && said.contains("instead"), "{said}");
}

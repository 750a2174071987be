//! `muster transfer plan`: its output as text and as JSON.

use std::path::PathBuf;

use muster::transfer::plan::Plan;
use serde_json::{Value, json};

use crate::harness::{CommandOutput, muster, run};

/// Returns an array over two rows of devices, each of which holds every row of the matrix or every column.
fn array_description_json(devices: &[i32], spec: &Value) -> String {
    json!({
        "shape": [1024, 512],
        "dtype": "bfloat16",
        "sharding": {"mesh": {"axes": [{"name": "x", "size": devices.len()}], "devices": devices}, "spec": spec},
    })
    .to_string()
}

fn plan(more: &[&str]) -> CommandOutput {
    let (source, destination) = (
        array_description_json(&[0, 1, 2, 3], &json!(["x"])),
        array_description_json(&[4, 5, 6, 7], &json!([null, "x"])),
    );
    let arguments = ["transfer", "plan", "--source", &source, "--destination", &destination];
    run(&mut muster(arguments.iter().chain(more)))
}

fn write_json_file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("transfer-{name}.json"));
    std::fs::write(&path, text).expect("the file can be written");
    path
}

#[test]
fn the_cost_of_a_plan_and_who_sends_to_whom_are_shown() {
    let shown = plan(&["--devices-per-task", "2"]);
    assert_eq!((shown.code, shown.err.as_str()), (Some(0), ""));
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = shown.out.lines().map(words).collect();
    let has =
        |wanted: &str| assert!(lines.iter().any(|line| line == wanted), "no {wanted:?} in:\n{}", shown.out);
    has("bfloat16[1024, 512] (1.0 MiB)");
    has("from P(x) over 4 devices, mesh x=4");
    has("to P(None, x) over 4 devices, mesh x=4");
    has("across hosts 16 1.0 MiB 1.0 MiB");
    has("1.0 MiB are copied or sent; no plan could move less.");
    has("Messages between tasks: 16. The longest chain of steps that wait for one another: 1.");
    has("Most goes out of task 0, 512.0 KiB.");
    has("1 3 across hosts 4 256.0 KiB");
    let few = plan(&["--devices-per-task", "2", "--rows", "1"]).out;
    assert!(few.ends_with("and 3 more pairs of tasks, with less; --rows N shows more\n"), "{few}");
}

#[test]
fn more_pairs_of_tasks_than_can_be_listed_are_not_gathered() {
    let array = |devices: std::ops::Range<i32>, spec: Value| {
        let mesh = json!({"axes": [{"name": "x", "size": 2100}], "devices": devices.collect::<Vec<_>>()});
        let sharding = json!({"mesh": mesh, "spec": spec});
        json!({"shape": [4200, 4200], "dtype": "uint8", "sharding": sharding}).to_string()
    };
    let (source, destination) = (
        write_json_file("rows", &array(0..2100, json!(["x"]))),
        write_json_file("columns", &array(2100..4200, json!([null, "x"]))),
    );
    let shown = run(muster(["transfer", "plan", "--devices-per-task", "1"])
        .arg("--source")
        .arg(source)
        .arg("--destination")
        .arg(destination));
    assert_eq!((shown.code, shown.err.as_str()), (Some(0), ""));
    assert!(shown.out.contains("Messages between tasks: 4410000."), "{}", shown.out);
    assert!(shown.out.contains("too many pairs of tasks to list them; --task N"), "{}", shown.out);
}

#[test]
fn the_steps_of_one_task_are_those_in_which_it_takes_part() {
    let shown = plan(&["--devices-per-task", "2", "--tasks-per-host", "4", "--task", "1"]).out;
    assert!(
        shown.starts_with("Task 1 takes part in 8 of 16 steps; it needs 512.0 KiB to pack short runs.\n"),
        "{shown}"
    );
    let steps: Vec<Vec<&str>> = shown.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(steps.len(), 8);
    assert!(steps.iter().all(|step| step[2] == "1" && step[6..8] == ["same", "host"]), "{shown}");
    let none = plan(&["--task", "9"]).out;
    assert_eq!(none, "Task 9 takes part in 0 of 16 steps; it needs 0 B to pack short runs.\n");
}

#[test]
fn the_plan_as_json_is_a_plan_that_can_be_read_again() {
    let devices = json!({"devices": (0..8).map(|device| json!({
        "platform": "cpu", "kind": "cpu", "global_id": device, "local_id": 0, "task": device / 4, "partition": null,
        "boot_id": format!("boot-{}", device / 4),
    })).collect::<Vec<_>>(), "next": null});
    let placement = write_json_file("devices", &devices.to_string());
    let placement = placement.to_str().expect("it is text");
    let shown = plan(&["--placement", placement, "--timeout", "90s", "--fan-out", "3", "--json"]);
    let read = Plan::from_json(shown.out.trim_end()).expect("it is a plan");
    assert_eq!(read.len(), 16);
    assert_eq!(read.timeout().map(|timeout| timeout.as_secs()), Some(90));
    assert_eq!(read.tasks().len(), 2);
    let shown: Value = serde_json::from_str(&shown.out).expect("it is JSON");
    assert_eq!(shown["steps"][5]["source"]["host"], "boot-0");
    assert_eq!(shown["fan_out"], 3);
}

#[test]
fn a_plan_that_was_printed_is_read_again_and_checked() {
    let text = plan(&["--devices-per-task", "2", "--timeout", "90s", "--fan-out", "3", "--json"]).out;
    let path = write_json_file("handed-on", &text);
    let path = path.to_str().expect("it is text");
    let from = |arguments: &[&str]| run(&mut muster([&["transfer", "plan", "--from"], arguments].concat()));
    let again = from(&[path, "--json"]);
    assert_eq!((again.code, again.out == text), (Some(0), true), "{}", again.err);
    let through = format!("'{}' transfer plan --from - --json < '{path}'", env!("CARGO_BIN_EXE_muster"));
    let piped = run(std::process::Command::new("sh").args(["-c", &through]));
    assert_eq!((piped.code, piped.out == text), (Some(0), true), "{}", piped.err);
    let shown = from(&[path]);
    let made = plan(&["--devices-per-task", "2", "--timeout", "90s", "--fan-out", "3"]);
    let but_placement =
        |text: &str| text.lines().filter(|line| !line.starts_with("  on ")).collect::<Vec<_>>().join("\n");
    assert_eq!(but_placement(&shown.out), but_placement(&made.out));
    for part in ["with fan-out 3, timeout 1m 30s", "no plan could move less", "on   4 tasks\n"] {
        assert!(shown.out.contains(part), "{part:?} is not in {}", shown.out);
    }
    assert!(from(&[path, "--task", "1"]).out.starts_with("Task 1 takes part in 8 of 16 steps"));
}

#[test]
fn a_plan_that_is_none_or_was_changed_is_refused_with_what_is_wrong() {
    let good = plan(&["--json"]).out;
    let wrong = |name: &str, text: &str| {
        let path = write_json_file(name, text);
        let path = path.to_str().expect("it is text");
        let ended = run(&mut muster(["transfer", "plan", "--from", path]));
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        let start = format!("muster: --from {path}: ");
        assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
        ended.err.strip_prefix(&start).unwrap_or_else(|| panic!("{}", ended.err)).to_owned()
    };
    assert!(wrong("cut", &good[..good.len() / 2]).starts_with("the plan is not what is expected: EOF"));
    assert!(wrong("empty", "").starts_with("the plan is not what is expected: EOF"));
    let newer = good.replacen("\"version\":2", "\"version\":7", 1);
    assert!(wrong("newer", &newer).starts_with("the plan is of version 7"));
    let moved = good.replacen("\"offset\":0", "\"offset\":64", 1);
    assert!(
        wrong("moved", &moved).contains("step 0 is not what its own source"),
        "{}",
        wrong("moved", &moved)
    );
    let named = good.replacen("\"host\":\"", "\"h\u{202e}ost\":\"\u{1b}[31m", 1);
    let said = wrong("named", &named);
    assert!(!said.trim_end().contains(char::is_control) && !said.contains('\u{202e}'), "{said:?}");
    let missing = run(&mut muster(["transfer", "plan", "--from", "/nowhere/at/all"]));
    assert!(
        missing.err.starts_with("muster: --from: cannot read /nowhere/at/all: No such file"),
        "{missing:?}"
    );
    let both = plan(&["--from", "plan.json"]);
    assert!(both.code == Some(2) && both.err.contains("cannot be used with"), "{both:?}");
}

#[test]
fn errors_name_the_argument() {
    let wrong = |arguments: &[&str]| {
        let ended = run(&mut muster([&["transfer", "plan"], arguments].concat()));
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        ended.err
    };
    let good = array_description_json(&[0, 1], &json!(["x"]));
    let twice = array_description_json(&[0, 0], &json!(["x"]));
    assert_eq!(
        wrong(&["--source", &good, "--destination", &twice]),
        "muster: --destination: the mesh lists device 0 twice\n"
    );
    let forged = array_description_json(&[0, 1], &json!(["x\u{1b}[31m\u{202e}"]));
    let said = wrong(&["--source", &forged, "--destination", &good]);
    assert!(!said.trim_end().contains(char::is_control) && !said.contains('\u{202e}'), "{said:?}");
    let path = write_json_file("damaged", "{\"shape\": [1,");
    let path = path.to_str().expect("it is text");
    let said = wrong(&["--source", path, "--destination", &good]);
    assert!(
        said.starts_with(&format!("muster: --source: {path}: the description of an array is not what")),
        "{said}"
    );
    let said = wrong(&["--source", "/nowhere/at/all", "--destination", &good]);
    assert!(said.starts_with("muster: --source: cannot read /nowhere/at/all: No such file"), "{said}");
    for (flags, flag) in [
        (&["--source", "", "--destination", &good][..], "--source"),
        (&["--source", &good, "--destination", " "], "--destination"),
        (&["--source", &good, "--destination", &good, "--placement", ""], "--placement"),
        (&["--from", ""], "--from"),
    ] {
        let said = wrong(flags);
        assert!(said.starts_with(&format!("muster: {flag} is empty: give the name of a file")), "{said}");
    }
    let none = plan(&["--timeout", "0s"]);
    assert!(none.code == Some(2) && none.err.contains("nothing can be done in no time"), "{none:?}");
    let placed = json!({"devices": [{"device": 0, "task": 0, "host": "a"}]}).to_string();
    assert_eq!(
        wrong(&["--source", &good, "--destination", &good, "--placement", &placed]),
        "muster: the placement does not say which task owns device 1\n"
    );
}

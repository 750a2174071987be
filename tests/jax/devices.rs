//! Tests how pages and REST show the devices that real processes publish.

use serde_json::Value;

use muster::coordination::RunState;

use super::fixture::JaxFixture;
use super::http;
use super::process::Process;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[(RunSet::One, "devices_of_two_runs_are_matched_by_where_they_are", map)];

fn map(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "2"]);
    let get = |path: &str| http::get::<Value>(server.about.http, &format!("/api/v1/jobs/default/{path}"));
    let run = |number| {
        let tasks = scene.start_all(2, &["worker.py", "register", "--backend", "--seconds", "0"]);
        tasks.iter().for_each(Process::succeed);
        server.until_run(number, RunState::Completed);
    };
    run(1);
    let devices = get("devices");
    let tasks: Vec<&Value> =
        devices["devices"].as_array().expect("a list").iter().map(|d| &d["task"]).collect();
    assert_eq!(tasks, [0, 1], "{devices}");
    let map = get("devices/map");
    assert_eq!((&map["previous"], &map["places"][0]["fate"]), (&Value::Null, &"came".into()), "{map}");
    run(2);
    let map = get("devices/map");
    assert_eq!((&map["run"], &map["previous"]), (&2.into(), &1.into()), "{map}");
    let fates: Vec<&Value> = map["places"].as_array().expect("a list").iter().map(|p| &p["fate"]).collect();
    assert_eq!(fates, ["same", "same"], "{map}");
}

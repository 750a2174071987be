//! Tests of what workers say that they are doing.

use serde_json::{Value, json};

use crate::harness::{MusterServer, Process, Signal, wait_until};
use crate::worker::{start_stepping_worker, worker};

const STACKS: &str = "/api/v1/jobs/default/stacks";

fn ask(server: &MusterServer) -> Value {
    let asked = server.send("POST", STACKS, r#"{"reason": "a test"}"#);
    assert_eq!(asked.status, 202, "{asked:?}");
    asked.json()
}

/// Returns the lines of the main groups: the tasks, and the frames.
fn main_groups(view: &Value) -> Vec<(Value, Vec<String>)> {
    let groups = view["groups"].as_array().expect("a list").iter().filter(|group| group["main"] == true);
    let frames = |group: &Value| {
        let frames = group["frames"].as_array().expect("a list").iter();
        frames.map(|frame| frame["function"].as_str().unwrap_or_default().to_owned()).collect()
    };
    groups.map(|group| (group["tasks"].clone(), frames(group))).collect()
}

#[test]
fn idle_workers_say_so() {
    let server = MusterServer::patient(&["--tasks", "2"]);
    let _workers: Vec<Process> = (0..2).map(|task| worker(&server, task, &[])).collect();
    wait_until("both report", || server.get(STACKS).json()["helpers"] == 2);
    let asked = ask(&server);
    assert_eq!(asked["awaited"], json!([{"first": 0, "last": 1}]), "{asked}");
    wait_until("both have answered", || server.get(STACKS).json()["awaited"] == json!([]));
    let view = server.get(STACKS).json();
    let both = json!([{"first": 0, "last": 1}]);
    let idle = ["idle: follows who lives", "waits for no call to the service"];
    assert_eq!(main_groups(&view), [(both, idle.map(str::to_owned).to_vec())], "{view}");
    let threads = view["groups"].to_string();
    assert!(threads.contains("thread of the process") && threads.contains("\"worker\""), "{view}");
}

#[test]
fn workers_name_the_call_in_which_they_wait_for_a_stopped_one() {
    let server = MusterServer::patient(&["--tasks", "3", "--recoverable"]);
    let mut workers: Vec<Process> = (0..3).map(|task| start_stepping_worker(&server, task)).collect();
    workers.iter_mut().for_each(|worker| _ = worker.out_line("step 3:"));
    wait_until("all report", || server.get(STACKS).json()["helpers"] == 3);
    workers[2].signal(Signal::STOP);
    wait_until("the others wait", || {
        let job = server.get("/api/v1/jobs/default").json();
        let lists = [&job["run"]["barriers"], &job["run"]["live_sets"]];
        lists.iter().any(|list| list.to_string().contains("\"missing\":[2]"))
    });
    ask(&server);
    wait_until("two have answered", || {
        server.get(STACKS).json()["awaited"] == json!([{"first": 2, "last": 2}])
    });
    let view = server.get(STACKS).json();
    let groups = main_groups(&view);
    assert!(!groups.is_empty(), "{view}");
    for (_, frames) in &groups {
        assert!(frames[0].starts_with("exercise, step "), "{frames:?}");
        let waits = ["waits at barrier muster/exercise/", "waits for the live set"];
        assert!(waits.iter().any(|start| frames[1].starts_with(start)), "{frames:?}");
    }
    let since = view["groups"][0]["since"].as_u64();
    assert!(
        since.is_some_and(|since| Some(since) <= view["request"]["at"].as_u64().map(|at| at + 5_000_000))
    );
    workers[2].signal(Signal::CONT);
    wait_until("the stopped one answers late", || server.get(STACKS).json()["awaited"] == json!([]));
}

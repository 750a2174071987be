//! Ended runs keep their pages, their REST resources, and their place in `muster runs`: with real workers.

use std::fs;

use serde_json::Value;

use super::journal::serve;
use crate::harness::temp_folder::TempFolder;
use crate::harness::{MusterServer, Process, Signal, muster, run, wait_until};

const JOB: &str = "/api/v1/jobs/default";

/// Starts two workers.
fn start_workers(server: &MusterServer, more: &[&str]) -> [Process; 2] {
    let service = server.grpc.to_string();
    ["0", "1"].map(|task| {
        let worker = ["worker", "--service", &service, "--task", task, "--program", "exercise"];
        Process::start(muster(worker).args(more))
    })
}

/// Runs two workers through one run, from their registration to their shutdown.
#[track_caller]
fn complete_run(server: &MusterServer) {
    let workers = start_workers(server, &["--steps", "2"]);
    for worker in workers {
        let ended = worker.end();
        assert!(ended.status.success(), "{ended:?}");
    }
}

fn json(server: &MusterServer, path: &str) -> Value {
    server.get(&format!("{JOB}{path}")).json()
}

#[test]
fn an_ended_run_keeps_its_pages_and_is_compared_with_the_next_one() {
    let server = MusterServer::start(&["--tasks", "2"]);
    complete_run(&server);
    let present = json(&server, "/tasks?run=1");
    complete_run(&server);
    wait_until("the second run ends", || json(&server, "/runs/2")["state"] == "completed");

    let runs = json(&server, "/runs");
    assert_eq!((&runs["runs"][0]["number"], &runs["runs"][1]["number"]), (&2.into(), &1.into()), "{runs}");
    let first = json(&server, "/runs/1");
    assert_eq!(
        (&first["state"], &first["tasks"], &first["counts"]["disconnected"]),
        (&"completed".into(), &2.into(), &2.into())
    );
    // The tasks are as they were, whatever has happened since.
    let ended = json(&server, "/tasks?run=1");
    for task in 0..2 {
        let field = |view: &Value, name: &str| view["tasks"][task][name].clone();
        for name in ["task", "host", "standing", "lives", "last_heartbeat"] {
            assert_eq!(field(&ended, name), field(&present, name), "{name} of task {task}");
        }
        let incarnation = |view: &Value| view["tasks"][task]["lives"][0]["incarnation"].clone();
        assert_ne!(
            incarnation(&ended),
            incarnation(&json(&server, "/tasks")),
            "the next run has other processes"
        );
    }
    let states = json(&server, "/states?run=1");
    let names: Vec<&str> = states["tasks"][0]["periods"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|period| period["state"].as_str())
        .collect();
    assert_eq!(names, ["missing", "registering", "connected", "disconnected"], "{states}");
    let csv = server.get(&format!("{JOB}/states?run=1&format=csv")).body;
    assert_eq!(csv.lines().next(), Some("run,task,host,state,from_us,until_us"));
    assert_eq!(csv.lines().filter(|line| line.contains(",connected,")).count(), 2, "{csv}");
    assert_eq!(json(&server, "/hosts?run=1")["hosts"][0]["tasks"], serde_json::json!([0, 1]));
    let transfers = json(&server, "/transfers?run=1");
    assert!(transfers["taken"].as_u64() > Some(0), "its transfers stay");
    assert_eq!(transfers["seen_at"], first["ended_at"], "it is the state at the end of the run");

    for page in ["", "/hosts", "/barriers", "/timeline", "/transfers", "/tasks/1", "/comparison"] {
        let answer = server.get(&format!("/jobs/default/runs/1{page}"));
        assert_eq!(answer.status, 200, "{page}");
        let html = answer.body;
        assert!(
            html.contains("run 1") && !html.contains("data-live"),
            "{page} shows the run, without updates"
        );
        if page != "/comparison" {
            // Durations on the page end there.
            assert!(html.contains(&format!("data-ended=\"{}\"", first["ended_at"])), "{page}: {html}");
        }
    }
    // The comparison is one click from the overview, also by way of the earlier run.
    for (page, link) in [
        ("/", "/jobs/default/runs/2/comparison\""),
        ("/jobs/default", "/jobs/default/runs/2/comparison\""),
        ("/jobs/default/runs/1/comparison", "/jobs/default/runs/2/comparison?before=1\""),
    ] {
        let html = server.get(page).body;
        assert!(html.contains(link), "{page}: {html}");
    }
    for (path, status) in [
        ("/runs/9", 404),
        ("/runs/x", 400),
        ("/tasks?run=9", 404),
        ("/barriers/arrivals?run=9", 404),
        ("/barriers/arrivals?run=0", 404),
        ("/barriers/arrivals?run=1", 200),
        ("/events?run=9", 404),
        ("/events?run=1", 200),
        ("/runs/2/comparison?before=9", 400),
        ("/runs/2/comparison?before=0", 404),
        ("/runs/9/comparison?before=1", 404),
    ] {
        assert_eq!(server.get(&format!("{JOB}{path}")).status, status, "{path}");
    }
    assert_eq!(server.get("/jobs/default/runs/9/hosts").status, 404);

    let url = server.url();
    let told = |arguments: &[&str]| {
        let output = run(muster(["runs", "--server", &url]).args(arguments));
        assert!(output.status.success(), "{output:?}");
        output.out
    };
    assert_eq!(told(&[]).lines().count(), 3, "a heading and two runs");
    assert!(told(&["1"]).contains("0 connected, 2 disconnected"), "{}", told(&["1"]));
    let both: Value = serde_json::from_str(&told(&["2", "--before", "1", "--json"])).expect("JSON");
    assert_eq!((&both["late_in_both"], &both["moved_tasks"]), (&0.into(), &0.into()), "{both}");
    let summary = both["summary"].as_str().expect("a text");
    assert!(summary.starts_with("From run 1 to run 2"), "{summary}");
    assert!(told(&["2", "--before", "1"]).contains(summary));
    assert!(server.get("/jobs/default/runs/2/comparison").body.contains(summary));

    // A worker is killed in the third run.
    let workers = start_workers(&server, &[]);
    wait_until("the third run goes on", || json(&server, "/runs/3")["state"] == "running");
    workers[1].signal(Signal::KILL);
    wait_until("the third run fails", || json(&server, "/runs/3")["state"] == "failed");
    let both: Value = serde_json::from_str(&told(&["3", "--before", "2", "--json"])).expect("JSON");
    let summary = both["summary"].as_str().expect("a text");
    assert!(summary.contains("run 3 failed, and run 2 has not"), "{summary}");
    assert!(summary.contains("has failed tasks in the later run only"), "{summary}");
    assert_eq!(
        (&both["hosts"][0]["failed"], &both["hosts"][0]["failed_before"]),
        (&1.into(), &0.into()),
        "{both}"
    );
    assert_eq!((&both["tasks"][0]["task"], &both["tasks"][0]["failed"]), (&1.into(), &true.into()), "{both}");
    let page = server.get("/jobs/default/runs/3/comparison").body;
    assert!(page.contains("run 3 failed, and run 2 has not"), "{page}");
    assert!(told(&["3", "--before", "2"]).contains("failed now"), "{}", told(&["3", "--before", "2"]));
}

#[test]
fn an_ended_run_keeps_its_transfers_when_the_server_is_killed() {
    let folder = TempFolder::new("runs-kill");
    let path = folder.path("journal");
    let mut server = serve(&path, "127.0.0.1:0", &[]);
    complete_run(&server);
    wait_until("the run ends", || json(&server, "/runs/1")["state"] == "completed");
    // Its note is JSON.
    let has_note = || {
        let segments = fs::read_dir(&path).expect("a folder").flatten();
        let bytes = segments.filter_map(|file| fs::read(file.path()).ok()).flatten().collect::<Vec<u8>>();
        bytes.windows(9).any(|text| text == b"\"reports\"")
    };
    wait_until("the transfers are in the journal", has_note);
    let seen = |server: &MusterServer| {
        ["/transfers?run=1", "/transfers/tasks?run=1"].map(|path| {
            let mut seen = json(server, path);
            // The run is the present one, so it is seen now.
            seen["seen_at"].take();
            seen
        })
    };
    let before = seen(&server);
    assert!(before[0]["totals"]["bytes"][0]["sent"].as_u64() > Some(0), "{}", before[0]);
    for _ in 0..2 {
        server.signal(Signal::KILL);
        server.end();
        server = serve(&path, "127.0.0.1:0", &[]);
        assert_eq!(seen(&server), before);
    }
    // The snapshot of a server that is stopped has them, too.
    server.signal(Signal::TERM);
    server.end();
    assert_eq!(seen(&serve(&path, "127.0.0.1:0", &[])), before);
}

//! `muster demo`, as a new user runs it.

use crate::harness::{MusterServer, Process, Signal, is_alive, muster, run, server, wait_until};

/// Starts a demo with these arguments. Returns it as the server that it contains.
fn started_demo(arguments: &[&str]) -> MusterServer {
    let mut process = Process::start(&mut muster(["demo", "--pause", "200ms"].iter().chain(arguments)));
    let line = process.out_line("look at  http://");
    let http = line.split_once("look at  ").and_then(|(_, url)| server::address(url)).expect("an address");
    // It does not print where its gRPC port is.
    MusterServer { process, grpc: ([0, 0, 0, 0], 0).into(), http }
}

#[test]
fn the_demo_loses_a_worker_takes_it_back_and_finds_every_content_right() {
    let ended = run(&mut muster(["demo", "--for", "20", "--pause", "200ms"]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in [
        "look at  http://",
        "array from P(d) to P(None, d)",
        "array from P() to P(d)",
        "kill -9",
        "step on without worker 2",
        "worker 2 takes part again",
        "every content",
    ] {
        assert!(ended.out.contains(part), "{part:?} is not in {ended:?}");
    }
}

#[test]
fn a_drain_at_any_moment_around_a_loss_ends_the_run_and_the_demo_goes_on() {
    let mut started_demo = started_demo(&["--for", "40"]);
    // At once; when the service declares the worker lost; and when the others step without it.
    for (moment, pause_ms) in [("kill -9", 0), ("kill -9", 250), ("step on without", 0)] {
        started_demo.out_line(moment);
        std::thread::sleep(std::time::Duration::from_millis(pause_ms));
        let asked = started_demo.send("POST", "/api/v1/jobs/default/drain", r#"{"reason": "kernel update"}"#);
        assert_eq!(asked.status, 202, "{moment}, {pause_ms} ms later: {asked:?}");
        started_demo.out_line("Its next run begins");
        started_demo.out_line("all 4 workers step together");
    }
    let ended = started_demo.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("every content was right"), "{ended:?}");
}

#[test]
fn ending_the_demo_ends_all_of_its_processes() {
    for signal in [Signal::INT, Signal::KILL] {
        let mut demo = Process::start(&mut muster(["demo", "--json"]));
        let addresses: serde_json::Value = serde_json::from_str(&demo.out_line("grpc")).expect("JSON");
        assert!(addresses["http"].is_string(), "{addresses}");
        let said: serde_json::Value = serde_json::from_str(&demo.out_line("step together")).expect("JSON");
        assert!(said["text"].is_string(), "{said}");
        let children = format!("/proc/{0}/task/{0}/children", demo.pid());
        let children = std::fs::read_to_string(children).expect("the system tells of children");
        let children: Vec<i32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        // Four workers, and the guard.
        assert_eq!(children.len(), 5, "{children:?}");
        demo.signal(signal);
        let ended = demo.end();
        assert_eq!(ended.code, (signal == Signal::INT).then_some(130), "{ended:?}");
        if signal == Signal::INT {
            let outcome = ended.out.lines().last().unwrap_or_default();
            let outcome: serde_json::Value = serde_json::from_str(outcome).expect("JSON");
            assert!(outcome["steps"].as_u64() > Some(0) && outcome["verdict"].is_null(), "{outcome}");
        }
        wait_until("all of them are gone", || !children.iter().any(|pid| is_alive(*pid)));
    }
}

#[test]
fn a_demo_whose_workers_are_all_excluded_ends_in_time_and_says_so() {
    let mut started_demo = started_demo(&["--for", "10"]);
    started_demo.out_line("step together");
    for task in 0..4 {
        let body = format!(r#"{{"task": {task}, "reason": "nobody shall step", "end_run": true}}"#);
        let made = started_demo.send("POST", "/api/v1/jobs/default/exclusions", &body);
        assert_eq!(made.status, 201, "{made:?}");
    }
    let ended = started_demo.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("all 4 workers are excluded"), "{ended:?}");
}

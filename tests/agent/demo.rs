//! `muster demo`, as a new user runs it.

use crate::process::{CommandProcess, lives, muster, run, wait_until};
use crate::web::Server;

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
    let mut running = CommandProcess::start(&mut muster(["demo", "--for", "40", "--pause", "200ms"]));
    let http = running.out_line("look at  http://");
    let http = http.split_once("http://").expect("it names it").1.trim_end_matches('/').to_owned();
    let mut demo = Server { running, grpc: String::new(), http };
    // At once; when the service declares the worker lost; and when the others step without it.
    for (moment, pause_ms) in [("kill -9", 0), ("kill -9", 250), ("step on without", 0)] {
        demo.running.out_line(moment);
        std::thread::sleep(std::time::Duration::from_millis(pause_ms));
        let asked = demo.send("POST", "/api/v1/jobs/default/drain", r#"{"reason": "kernel update"}"#);
        assert_eq!(asked.status, 202, "{moment}, {pause_ms} ms later: {asked:?}");
        demo.running.out_line("Its next run begins");
        demo.running.out_line("all 4 workers step together");
    }
    let ended = demo.running.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("every content was right"), "{ended:?}");
}

#[test]
fn ending_the_demo_ends_all_of_its_processes() {
    for signal in ["INT", "KILL"] {
        let mut demo = CommandProcess::start(&mut muster(["demo"]));
        demo.out_line("step together");
        let children = format!("/proc/{0}/task/{0}/children", demo.pid());
        let children = std::fs::read_to_string(children).expect("the system tells of children");
        let children: Vec<i32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        // Four workers, and the guard.
        assert_eq!(children.len(), 5, "{children:?}");
        demo.signal(signal);
        let ended = demo.end();
        assert_eq!(ended.code, (signal == "INT").then_some(130), "{ended:?}");
        wait_until("all of them are gone", || !children.iter().any(|pid| lives(*pid)));
    }
}

#[test]
fn a_demo_whose_workers_are_all_excluded_ends_in_time_and_says_so() {
    let mut running = CommandProcess::start(&mut muster(["demo", "--for", "10", "--pause", "200ms"]));
    let http = running.out_line("look at  http://");
    let http = http.split_once("http://").expect("it names it").1.trim_end_matches('/').to_owned();
    running.out_line("step together");
    let demo = Server { running, grpc: String::new(), http };
    for task in 0..4 {
        let body = format!(r#"{{"task": {task}, "reason": "nobody shall step", "end_run": true}}"#);
        let made = demo.send("POST", "/api/v1/jobs/default/exclusions", &body);
        assert_eq!(made.status, 201, "{made:?}");
    }
    let ended = demo.running.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("all 4 workers are excluded"), "{ended:?}");
}

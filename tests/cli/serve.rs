//! Tests of how a server starts, runs and stops.

use std::process::Command;

use serde_json::Value;

use crate::harness::{MusterServer, Process, Signal, http, muster, run, wait_until};

#[test]
fn a_server_at_free_ports_says_where_it_is_and_how_to_use_it() {
    let mut server = MusterServer::start(&["--tasks", "2", "--job", "big=3@127.0.0.1:0"]);
    assert_ne!(server.http.port(), 0);
    let line = server.out_line("JAX_COORDINATOR_ADDRESS=");
    assert!(line.contains(&format!("JAX_COORDINATOR_ADDRESS={} ", server.grpc)), "{line}");
    assert!(line.contains("JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0"), "{line}");

    let about = server.get("/api/v1/server").json();
    assert_eq!(about["name"], "muster");
    assert_eq!(about["http"], server.http.to_string());
    assert_eq!(about["grpc"][0]["address"], server.grpc.to_string());
    assert_eq!(about["grpc"][1]["jobs"], serde_json::json!(["big"]));
    let own = about["grpc"][1]["address"].as_str().expect("it has an address");
    assert!(server.out_line("JAX_COORDINATOR_ADDRESS=").contains(own));
}

#[test]
fn health_and_version_answer() {
    let server = MusterServer::start(&["--tasks", "1"]);
    assert_eq!((server.get("/healthz/live").status, server.get("/healthz/ready").status), (200, 200));
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn jobs_and_events_are_shown_as_json() {
    let server = MusterServer::start(&["--job", "a=2", "--job", "b=5", "--recoverable"]);
    let jobs = server.get("/api/v1/jobs").json();
    let names: Vec<&Value> =
        jobs["jobs"].as_array().expect("a list").iter().map(|job| &job["name"]).collect();
    assert_eq!(names, ["a", "b"]);
    let job = server.get("/api/v1/jobs/b").json();
    assert_eq!((&job["settings"]["tasks"], &job["settings"]["recoverable"]), (&5.into(), &true.into()));
    assert_eq!(job["run"]["state"], "forming");

    let page = server.get("/api/v1/jobs/b/events?limit=1").json();
    assert_eq!(
        (page["events"].as_array().map(Vec::len), &page["events"][0]["kind"]),
        (Some(1), &"job-declared".into())
    );
    let page = server.get(&format!("/api/v1/jobs/b/events?after={}", page["next"])).json();
    assert_eq!((&page["events"][0]["kind"], &page["gap"]), (&"run-opened".into(), &false.into()));
}

#[test]
fn errors_are_problem_documents() {
    let server = MusterServer::start(&["--job", "a=2"]);
    let answer = server.get("/api/v1/jobs/x");
    assert_eq!(answer.status, 404);
    assert!(answer.head.contains("content-type: application/problem+json"), "{}", answer.head);
    let problem = answer.json();
    assert_eq!((&problem["status"], &problem["instance"]), (&404.into(), &"/api/v1/jobs/x".into()));
    assert!(problem["type"].is_string() && problem["title"].is_string() && problem["detail"].is_string());
    assert_eq!(problem["jobs"], serde_json::json!(["a"]));
    assert_eq!(server.get("/nothing").json()["status"], 404);
    assert_eq!(server.get("/api/v1/jobs/a/events?after=x").json()["status"], 400);
    let answer = http::send(server.http, "PUT", "/api/v1/jobs/a", &[], "").expect("it answers");
    assert_eq!((answer.status, &answer.json()["status"]), (405, &405.into()));
}

#[test]
fn a_terminated_server_exits_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let server = MusterServer::start(&["--tasks", "1"]);
        server.signal(signal);
        let ended = server.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.err.contains("stopped"), "{ended:?}");
    }
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    // An incomplete request delays the stop until the timeout is over.
    let mut server = MusterServer::start(&["--tasks", "1", "--stop-timeout", "1h"]);
    let mut held = std::net::TcpStream::connect(server.grpc).expect("it listens");
    std::io::Write::write_all(&mut held, b"PRI * HTTP/2.0\r\n").expect("it reads");
    let mut slow = std::net::TcpStream::connect(server.http).expect("it listens");
    std::io::Write::write_all(&mut slow, b"GET /version HTTP/1.1\r\n").expect("it reads");
    server.signal(Signal::TERM);
    server.err_line("stopping");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(143));
}

#[test]
fn a_taken_address_is_an_error_that_names_the_flag() {
    let first = MusterServer::start(&["--tasks", "1"]);
    let taken = first.grpc.to_string();
    let ended = run(&mut muster(["serve", "--tasks", "1", "--http", "127.0.0.1:0", "--grpc", &taken]));
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains(&taken) && ended.err.contains("--grpc"), "{}", ended.err);
}

#[test]
fn logs_are_json_on_request_one_event_a_line() {
    let mut command = muster(["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "2"]);
    let mut running = Process::start(command.args(["--log-format", "json"]));
    running.err_line("job-declared");
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.out, "", "nothing but logs");
    let lines: Vec<Value> =
        ended.err.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
    let event = lines.iter().find(|line| line["kind"] == "job-declared").expect("it is logged");
    assert_eq!((&event["job"], &event["run"]), (&"default".into(), &1.into()));
    assert!(event["message"].is_string() && event["level"] == "INFO");
    let serving = lines.iter().find(|line| line["message"] == "serving").expect("it is logged");
    assert!(serving["http"].is_string() && serving["grpc"].is_string());
}

#[test]
fn an_open_address_is_warned_of() {
    let mut running = Process::start(muster(["serve", "--tasks", "1", "--http", "127.0.0.1:0"]).args([
        "--grpc",
        "0.0.0.0:0",
        "--insecure-grpc",
    ]));
    assert!(running.err_line("--insecure-grpc").contains("WARN"));
}

#[test]
fn the_limit_on_open_files_is_raised() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_muster")]);
    let mut running = Process::start(command.args([
        "serve",
        "--tasks",
        "1",
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ]));
    running.out_line("HTTP");
    let limits = || std::fs::read_to_string(format!("/proc/{}/limits", running.pid())).unwrap_or_default();
    wait_until("the soft limit is the hard one", || {
        limits().lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            matches!(words[..], ["Max", "open", "files", soft, hard, ..] if soft == hard)
        })
    });
}

//! `muster status`: the output for operators.

use muster::proto::xla::coordination as wire;
use wire::coordination_service_client::CoordinationServiceClient;

use crate::harness::{MusterServer, muster, run, wait_until};

fn successful_status_output(server: &MusterServer, arguments: &[&str]) -> String {
    let ended = run(muster(["status", "--server", &server.url()]).args(arguments));
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{ended:?}");
    ended.out
}

/// Registers a task and keeps its connection for as long as the runtime lives.
pub fn register_task(server: &MusterServer, runtime: &tokio::runtime::Runtime, task: i32) {
    register_task_as(server, runtime, task, 100 + task as u64);
}

/// Registers a task with this incarnation.
pub fn register_task_as(
    server: &MusterServer,
    runtime: &tokio::runtime::Runtime,
    task: i32,
    incarnation: u64,
) {
    drop(register_task_from([127, 0, 0, 1].into(), server, runtime, task, incarnation));
}

/// Registers a task from this address. Its connection lives as long as the returned task.
fn register_task_from(
    own: std::net::IpAddr,
    server: &MusterServer,
    runtime: &tokio::runtime::Runtime,
    task: i32,
    incarnation: u64,
) -> tokio::task::JoinHandle<()> {
    let address = format!("http://{}", server.grpc);
    runtime.spawn(async move {
        let endpoint = tonic::transport::Endpoint::from_shared(address).expect("an address");
        let channel = endpoint.local_address(Some(own)).connect().await;
        let mut client = CoordinationServiceClient::new(channel.expect("it connects"));
        let request = wire::RegisterTaskRequest { incarnation, source_task_id: task };
        let _ = client.register_task(request).await;
        std::future::pending::<()>().await;
    })
}

#[test]
fn a_host_that_died_is_one_line_and_the_first_host() {
    let server = MusterServer::start(&["--tasks", "9", "--recoverable", "--disconnect-grace", "100ms"]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let connections: Vec<_> = (0..9)
        .map(|task| {
            let host = u8::try_from(task / 3 + 1).expect("a small number");
            register_task_from([127, 0, 9, host].into(), &server, &runtime, task, 100 + task as u64)
        })
        .collect();
    wait_until("the run is running", || server.get("/api/v1/jobs").body.contains("\"running\""));
    // All tasks of the last host, and one of the first.
    connections[6..].iter().chain(&connections[1..2]).for_each(|connection| connection.abort());
    wait_until("they have failed", || {
        server.get("/api/v1/jobs/default").json()["run"]["counts"]["failed"] == 4
    });
    let text = successful_status_output(&server, &[]);
    let failed: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("FAILED")).collect();
    assert_eq!(failed.len(), 2, "{text}");
    assert!(failed[0].contains("task 1 at 127.0.9.1"), "{text}");
    assert!(failed[1].contains("all 3 tasks of host 127.0.9.3 (6-8)"), "{text}");
    let hosts = run(muster(["hosts"]).args(["--server", &server.url()]));
    let states: Vec<&str> =
        hosts.out.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(states, ["down", "degraded", "healthy"], "{}", hosts.out);
}

#[test]
fn status_shows_a_job_without_tasks() {
    let server = MusterServer::start(&["--job", "a=2", "--job", "b=5"]);
    let text = successful_status_output(&server, &[]);
    assert!(text.contains("JOB a") && text.contains("JOB b") && text.contains("FORMING"), "{text}");
    assert!(text.contains("no task has registered yet, 5 expected"), "{text}");
    assert!(!successful_status_output(&server, &["--job", "b"]).contains("JOB a"));
}

#[test]
fn status_names_missing_tasks_with_start_and_deadline() {
    let server = MusterServer::start(&["--tasks", "3", "--register-timeout", "10m"]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    register_task(&server, &runtime, 0);
    register_task(&server, &runtime, 2);
    wait_until("both have come", || successful_status_output(&server, &[]).contains("2 of 3 arrived"));
    let text = successful_status_output(&server, &[]);
    assert!(text.contains("BARRIER  registration: 2 of 3 arrived, waiting for "), "{text}");
    assert!(text.contains("; first arrival: task ") && text.contains("; latest: task "), "{text}");
    assert!(text.contains("; times out in 9 min "), "{text}");
    assert!(text.contains("MISSING  task 1: has not registered"), "{text}");
    assert!(!text.contains("MISSING  task 0") && !text.contains('\u{1b}'), "{text}");

    let seen: serde_json::Value =
        serde_json::from_str(&successful_status_output(&server, &["--json"])).expect("it is JSON");
    assert_eq!(seen["server"]["name"], "muster");
    assert_eq!(seen["jobs"][0]["run"]["barriers"][0]["missing"], serde_json::json!([1]));

    register_task(&server, &runtime, 1);
    wait_until("the run is running", || successful_status_output(&server, &[]).contains("RUNNING"));
    assert!(successful_status_output(&server, &[]).contains("3 of 3 task(s) connected"));
}

#[test]
fn the_first_cause_comes_first() {
    let server = MusterServer::start(&["--tasks", "2", "--disconnect-grace", "0s"]);
    let stays = tokio::runtime::Runtime::new().expect("a runtime");
    let leaves = tokio::runtime::Runtime::new().expect("a runtime");
    register_task(&server, &stays, 0);
    register_task(&server, &leaves, 1);
    wait_until("the run is running", || successful_status_output(&server, &[]).contains("RUNNING"));
    leaves.shutdown_background();
    wait_until("its end is noticed", || successful_status_output(&server, &[]).contains("FIRST CAUSE"));
    let text = successful_status_output(&server, &[]);
    let line = text.lines().position(|line| line.contains("FIRST CAUSE  task 1 at 127.0.0.1:"));
    assert_eq!(line, Some(3), "{text}");
    assert!(text.contains("FAILED  task 1"), "{text}");
    // Texts for people differ from the errors that clients match; REST has those.
    assert!(text.contains("connection closed"), "{text}");
    assert!(!text.contains("UNAVAILABLE") && !text.contains("to debug further"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&successful_status_output(&server, &["--json"])).expect("it is JSON");
    let told = json["jobs"][0]["run"]["first_cause"]["error"].as_str().unwrap_or_default();
    assert!(told.contains("The following tasks are unhealthy (connection lost)"), "{told}");
    assert!(text.contains("following the first cause: the run has failed"), "{text}");
}

#[test]
fn a_large_job_is_summarised() {
    let server = MusterServer::start(&["--tasks", "10000"]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    register_task(&server, &runtime, 17);
    wait_until("it has come", || successful_status_output(&server, &[]).contains("1 of 10000 arrived"));
    let text = successful_status_output(&server, &[]);
    assert!(text.lines().count() < 30, "{text}");
    assert!(text.contains("… 9999 in all: 0-16, 18-9999"), "{text}");
    assert!(text.contains("TASKS  9999 missing, 1 registering"), "{text}");
}

#[test]
fn status_explains_errors() {
    let server = MusterServer::start(&["--job", "a=2"]);
    let asked = |arguments: &[&str]| run(muster(["status"]).args(arguments));
    let ended = asked(&["--server", &server.url(), "--job", "x"]);
    assert!(
        ended.code == Some(1) && ended.err.contains("no job \"x\"") && ended.err.contains(" a"),
        "{ended:?}"
    );
    // The gRPC port is the usual mistake.
    let ended = asked(&["--server", &server.grpc.to_string()]);
    assert!(ended.code == Some(1) && ended.err.contains("muster serve"), "{ended:?}");
    let ended = asked(&["--server", "http://127.0.0.1:1"]);
    assert!(ended.code == Some(1) && ended.err.contains("cannot reach"), "{ended:?}");
    let ended = asked(&["--server", "ftp://a"]);
    assert!(ended.code == Some(1) && ended.err.contains("is no server"), "{ended:?}");
    let ended = run(muster(["status"]).env("MUSTER_SERVER", server.url()));
    assert!(ended.code == Some(0) && ended.out.contains("JOB a"), "{ended:?}");
}

#[test]
fn status_shows_findings_with_advice() {
    let jobs = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metrics/jobs.toml");
    let server = MusterServer::start(&["--config", jobs]);
    assert!(!successful_status_output(&server, &["--job", "full"]).contains("  ISSUE  "));
    for key in 0..10 {
        let path = format!("/api/v1/jobs/full/keys/k{key}");
        let put = server.send("PUT", &path, r#"{"text": "v", "reason": "to fill it"}"#);
        assert!((200..300).contains(&put.status), "{put:?}");
    }
    wait_until("the full store is found", || {
        successful_status_output(&server, &["--job", "full"]).contains("  ISSUE  ")
    });
    let text = successful_status_output(&server, &["--job", "full"]);
    assert!(text.contains("A limit is nearly reached") && text.contains("bounds.keys"), "{text}");
    assert!(text.contains("to do  Raise the setting"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&successful_status_output(&server, &["--job", "full", "--json"])).unwrap();
    assert_eq!(json["findings"][0]["id"], "nearly-full-bounds", "{json}");
    assert!(
        !successful_status_output(&server, &["--job", "train"]).contains("  ISSUE  "),
        "it is another job's"
    );
}

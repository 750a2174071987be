//! Tests of a worker that loses a GPU, over the simulated driver.

use std::time::Duration;

use muster::agent::{Agent, AgentConfig};
use muster::transfer::{Arena, Gpu};
use serde_json::{Value, json};
use simulated_gpu::{Setting, SimulatedGpu};

use crate::harness::{MusterServer, wait_until};
use crate::isolated_test::run_isolated;
use crate::worker::worker;

/// Returns what a task has reported of its transfers; null before it has.
fn transfers_of_task(server: &MusterServer, task: i32) -> Value {
    let tasks = server.get("/api/v1/jobs/default/transfers/tasks").json()["tasks"].clone();
    let tasks = tasks.as_array().expect("a list");
    tasks.iter().find(|row| row["task"] == task).cloned().unwrap_or_default()
}

/// Lets this process lose a GPU: a copy meets an uncorrectable error of its memory.
fn lose_gpu(number: u32) {
    let driver = SimulatedGpu::load_if_wanted().expect("the simulated driver");
    let gpu = Gpu::open(number).expect("a GPU");
    let memory = Arena::on_gpu(&gpu, 4096).and_then(|arena| arena.allocate(4096)).expect("there is memory");
    driver.set(Setting::EccAfter, 1);
    assert!(memory.write_contents(0, &[7; 4096]).is_err(), "the copy meets an error");
}

#[test]
fn a_worker_that_loses_a_gpu_is_found_and_excluded_by_the_rule_of_the_job() {
    run_isolated(&[("SIMULATED_GPU", "devices=2")], || {
        let rule = ["--auto-exclude", "fatal-gpu-error", "--auto-exclude-for", "10m"];
        let server = MusterServer::start(&[&["--tasks", "4", "--recoverable"], &rule[..]].concat());
        let others: Vec<_> = (0..3).map(|task| worker(&server, task, &[])).collect();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let agent = runtime.block_on(Agent::join(AgentConfig::new(server.grpc.to_string(), 3)));
        let agent = agent.expect("it joins");
        let get = |path: &str| server.get(&format!("/api/v1/jobs/default{path}")).json();
        wait_until("it reports", || transfers_of_task(&server, 3)["reported_at"].is_number());
        assert_eq!(get("/findings")["open"], json!([]));

        lose_gpu(1);

        wait_until("the task is excluded", || get("/exclusions")["exclusions"] != json!([]));
        let exclusion = &get("/exclusions")["exclusions"][0];
        assert_eq!((&exclusion["task"], &exclusion["actor"]["who"]), (&3.into(), &"fatal-gpu-error".into()));
        let text = "GPU 1 of task 3 has a fatal error: ";
        let reason = exclusion["reason"].as_str().unwrap_or_default();
        assert!(reason.starts_with(text) && reason.contains("ECC"), "{exclusion}");
        let events = server.get("/api/v1/jobs/default/events?newest=true&limit=100").body;
        assert!(events.contains(text), "{events}");
        drop(runtime.block_on(async { tokio::time::timeout(Duration::from_secs(10), agent.leave()).await }));
        drop(others);
    });
}

#[test]
fn a_lost_gpu_is_on_the_page_of_its_task_until_the_task_starts_again() {
    run_isolated(&[("SIMULATED_GPU", "devices=1")], || {
        let server = MusterServer::start(&["--tasks", "1", "--recoverable"]);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let join = || Agent::join(AgentConfig::new(server.grpc.to_string(), 0));
        let agent = runtime.block_on(join()).expect("it joins");
        lose_gpu(0);
        let lost = || transfers_of_task(&server, 0)["lost_gpus"].clone();
        wait_until("REST tells of it", || lost()[0]["gpu"] == 0);
        assert!(lost()[0]["error"].as_str().is_some_and(|error| error.contains("ECC")), "{}", lost());
        let page = server.get("/jobs/default/tasks/0").body;
        assert!(page.contains("<dt>GPU 0</dt><dd>lost to this process"), "{page}");
        let metric =
            "muster_findings{muster_job=\"default\",finding=\"fatal-gpu-error\",severity=\"critical\"} 1";
        wait_until("the metric tells of it", || server.get("/metrics").body.contains(metric));
        drop(runtime.block_on(async { tokio::time::timeout(Duration::from_secs(10), agent.leave()).await }));
        // Another process has the GPU again.
        let _again = worker(&server, 0, &[]);
        wait_until("the finding closes", || {
            server.get("/api/v1/jobs/default/findings").json()["open"] == json!([])
        });
        wait_until("REST tells of no lost GPU", || lost().is_null());
    });
}

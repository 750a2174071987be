//! A process of the job is killed while the others wait for it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::{Signal, TestInstant, wait_until};

/// The silence after which a process counts as not heard. Until then, a process that was killed may as well go on.
const SILENT_AFTER: Duration = Duration::from_secs(10);
/// The time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

#[test]
fn a_killed_process_counts_as_silent_and_is_named() {
    // As on one host, the real NCCL notices nothing.
    let setup = JobSetup { nccl: "nccl_silent_death=1", ..JobSetup::default() };
    let job = GpuJob::start_joined("killed", &setup);
    job.wait_for_count(3);
    let killed = TestInstant::now();
    job.ranks[1].signal(Signal::KILL);
    job.ranks[1].end();
    for line in ["call 0 AllReduce 1000 1", "sync 0"] {
        job.tell(&[0, 2, 3], line);
    }
    let finding = job.wait_for_stuck_after(killed, SILENT_AFTER - REPORT_INTERVAL);
    assert_eq!(finding["tasks"], json!([1]), "{finding}");
    assert_eq!(finding["title"], "A task in a collective is silent", "{finding}");
    let view = job.collectives();
    let clique = &view["cliques"][0];
    assert_eq!(clique["wait"]["kind"], "not-heard", "{view}");
    assert_eq!(
        (&clique["wait"]["waited_for"], &clique["wait"]["number"]),
        (&json!([1]), &json!(3)),
        "{view}"
    );
    assert_eq!(view["processes"], 3, "{view}");
    let members = job.clique(&clique["clique"])["members"].take();
    let told: Vec<_> = members.as_array().expect("ranks").iter().map(|it| &it["silent"]).collect();
    assert_eq!(told, [false, true, false, false], "{members}");
    assert_eq!(job.metric("muster_collective_cliques_waiting", "kind=\"not-heard\""), 1.0);
}

#[test]
fn a_process_that_is_killed_in_a_collective_is_named() {
    let setup = JobSetup { nccl: "nccl_silent_death=1", timing: Some("always"), ..JobSetup::default() };
    let mut job = GpuJob::start_joined("killed-inside", &setup);
    job.wait_for_count(3);
    // Both have called it, and one of them does not begin it.
    job.run(&[3], "hold 0");
    job.run(&[0, 1, 2, 3], "call 0 AllReduce 1000 1");
    job.wait_for_count(4);
    job.ranks[3].signal(Signal::KILL);
    let is_silent = |view: &Value| view["cliques"][0]["wait"]["kind"] == "not-heard";
    let view = job.wait_for_collectives("the process counts as silent", is_silent);
    let wait = &view["cliques"][0]["wait"];
    assert_eq!((&wait["waited_for"], &wait["number"]), (&json!([3]), &json!(3)), "{view}");
    let is_told = || job.stuck().iter().any(|finding| finding["title"] == "A task in a collective is silent");
    wait_until("the finding says so", is_told);
    assert!(
        job.stuck_events().iter().all(|event| event["tasks"] == json!([3])),
        "no other task was ever named"
    );
}

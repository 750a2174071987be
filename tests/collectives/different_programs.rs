//! A rank calls another collective than the others.

use serde_json::{Value, json};

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::TestInstant;

/// Lets task 2 call `other` where the others call `usual`, and returns the finding and the wait.
#[track_caller]
fn differ(name: &str, usual: &str, other: &str) -> (GpuJob, Value, Value) {
    let setup = JobSetup { nccl: "nccl_lenient=1", ..JobSetup::default() };
    let job = GpuJob::start_joined(name, &setup);
    job.wait_for_count(3);
    let began = TestInstant::now();
    job.tell(&[2], &format!("call 0 {other}"));
    job.tell(&[0, 1, 3], &format!("call 0 {usual}"));
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([2]), "{finding}");
    assert_eq!(finding["title"], "Tasks call different collectives", "{finding}");
    let view = job.collectives();
    let wait = view["cliques"][0]["wait"].clone();
    assert_eq!((&wait["kind"], &wait["number"]), (&json!("different-program"), &json!(3)), "{view}");
    assert_eq!(wait["waited_for"], json!([2]), "{view}");
    assert!(job.metric("muster_collective_cliques_waiting", "kind=\"different-program\"") >= 1.0);
    (job, finding, wait)
}

#[track_caller]
fn assert_says(finding: &Value, texts: &[&str]) {
    let summary = finding["summary"].as_str().expect("a text");
    for text in texts {
        assert!(summary.contains(text), "{text:?} is not in {summary:?}");
    }
}

#[test]
fn another_function_is_named_with_its_task() {
    let (_job, finding, wait) = differ("function", "AllReduce 1000 1", "AllGather 250 1");
    assert_eq!(wait["collective"]["function"], "AllReduce", "{wait}");
    assert_eq!(wait["instead"]["function"], "AllGather", "{wait}");
    assert_says(&finding, &["task 2", "AllReduce", "AllGather"]);
}

#[test]
fn another_count_is_named_with_its_task() {
    let (_job, finding, wait) = differ("count", "AllReduce 1024 1", "AllReduce 2048 1");
    assert_eq!((&wait["collective"]["count"], &wait["instead"]["count"]), (&json!(1024), &json!(2048)));
    assert_says(&finding, &["task 2", "4.0 KiB", "8.0 KiB"]);
}

#[test]
fn programs_that_go_on_differ_where_they_differed_first() {
    // The calls behind the first one agree again, in function and in count.
    let setup = JobSetup { nccl: "nccl_lenient=1", ..JobSetup::default() };
    let mut job = GpuJob::start_joined("order", &setup);
    job.wait_for_count(3);
    let began = TestInstant::now();
    for (ranks, lines) in [
        (&[0, 1, 3][..], ["AllReduce 1000 1", "ReduceScatter 10 1"]),
        (&[2][..], ["ReduceScatter 10 1", "AllReduce 1000 1"]),
    ] {
        lines.iter().for_each(|line| job.tell(ranks, &format!("call 0 {line}")));
        job.run(ranks, "call 0 Broadcast 5 100");
    }
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([2]), "{finding}");
    // Ranks report earlier collectives bit by bit.
    let first = |view: &Value| {
        let wait = &view["cliques"][0]["wait"];
        assert_eq!(wait["waited_for"], json!([2]), "{view}");
        wait["number"] == 3
    };
    let view = job.wait_for_collectives("the first difference is found", first);
    let wait = &view["cliques"][0]["wait"];
    assert_eq!(wait["kind"], "different-program", "{view}");
    assert_eq!(wait["collective"]["function"], "AllReduce", "{view}");
    assert_eq!(wait["instead"]["function"], "ReduceScatter", "{view}");
    assert!(
        job.stuck_events().iter().all(|event| event["tasks"] == json!([2])),
        "no other task was ever named"
    );
}

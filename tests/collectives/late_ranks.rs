//! A rank calls a collective late, or never.

use serde_json::json;

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::TestInstant;

const CALL: &str = "call 0 AllReduce 1000 1";

#[test]
fn a_late_rank_is_named_until_it_goes_on() {
    let mut job = GpuJob::start_joined("late", &JobSetup::default());
    job.wait_for_count(3);
    let began = TestInstant::now();
    job.tell(&[2], "pause 10000");
    for line in [CALL, "sync 0"] {
        job.tell(&[0, 1, 2, 3], line);
    }
    job.wait_done(&[0, 1, 3], CALL);
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([2]), "{finding}");
    assert_eq!(finding["title"], "A task has not called a collective", "{finding}");
    let view = job.collectives();
    let clique = &view["cliques"][0];
    let wait = &clique["wait"];
    assert_eq!((&wait["kind"], &wait["role"]), (&json!("not-called"), &json!("cause")), "{view}");
    assert_eq!(wait["tasks"], json!([{"first": 2, "last": 2}]), "{view}");
    assert_eq!((&wait["number"], &wait["waited_for"]), (&json!(3), &json!([2])), "{view}");
    assert_eq!(wait["collective"]["function"], "AllReduce", "{view}");
    assert_eq!((&wait["collective"]["count"], &wait["collective"]["bytes"]), (&json!(1000), &json!(4000)));
    assert_eq!((&clique["front"], &clique["back"], &clique["ranks"]), (&json!(4), &json!(3), &json!(4)));
    let members = job.clique(&clique["clique"])["members"].take();
    let told: Vec<_> = members.as_array().expect("ranks").iter().map(|it| &it["waited_for"]).collect();
    assert_eq!(told, [false, false, true, false], "{members}");
    for (rank, member) in members.as_array().expect("ranks").iter().enumerate() {
        assert_eq!((&member["task"], &member["device"]), (&json!(rank), &json!(rank)), "{members}");
        assert_eq!(member["pid"], job.ranks[rank].pid(), "{members}");
    }
    assert!(job.metric("muster_collective_cliques_waiting", "kind=\"not-called\"") >= 1.0);
    assert!(job.metric("muster_collective_wait_seconds", "") >= 2.0);
    let opened = job.stuck_events();
    assert_eq!((opened.len(), &opened[0]["kind"]), (1, &json!("finding-opened")), "{opened:?}");
    assert_eq!(opened[0]["tasks"], json!([2]), "{opened:?}");

    job.wait_done(&[0, 1, 2, 3], "sync 0");
    job.wait_for_end_of_stuck();
    let view = job.wait_for_count(4);
    assert_eq!(view["waiting_count"], 0, "{view}");
    assert_eq!(job.metric("muster_collective_cliques_waiting", "kind=\"not-called\""), 0.0);
    // Each of four ranks called 3 of 100 elements, and 1 of 1000.
    assert_eq!(job.metric("muster_collective_operations_total", "function=\"AllReduce\""), 16.0);
    assert_eq!(job.metric("muster_collective_bytes_total", "function=\"AllReduce\""), 4.0 * 5200.0);
    assert_eq!(job.metric("muster_collective_processes", ""), 4.0);
    assert_eq!(job.stuck_events().len(), 2);
}

#[test]
fn a_rank_that_never_calls_is_named_for_as_long() {
    let mut job = GpuJob::start_joined("never", &JobSetup::default());
    job.wait_for_count(3);
    let began = TestInstant::now();
    job.run(&[0, 1, 2], "call 0 AllGather 64 2");
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([3]), "{finding}");
    // It stays open while reports go on, and its wait grows.
    let holds = |view: &serde_json::Value| {
        view["cliques"][0]["wait"]["waited_s"].as_f64().is_some_and(|waited| waited > 15.0)
    };
    let view = job.wait_for_collectives("the wait is 15 s long", holds);
    let wait = &view["cliques"][0]["wait"];
    assert_eq!((&wait["kind"], &wait["number"]), (&json!("not-called"), &json!(3)), "{view}");
    assert_eq!((&wait["waited_for"], &wait["collective"]["function"]), (&json!([3]), &json!("AllGather")));
    assert_eq!((job.stuck().len(), job.stuck_events().len()), (1, 1), "it was opened once");
}

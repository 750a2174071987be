//! Waits in several cliques at the same time.

use serde_json::{Value, json};

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::TestInstant;

/// Returns the wait of the clique with these tasks.
fn wait_among(view: &Value, first: u32, last: u32) -> Option<Value> {
    let cliques = view["cliques"].as_array()?;
    let tasks = json!([{"first": first, "last": last}]);
    let clique = cliques.iter().find(|clique| clique["tasks"] == tasks)?;
    Some(clique["wait"].clone()).filter(Value::is_object)
}

/// Lets processes call a collective of a clique and wait for its end.
fn step(job: &GpuJob, clique: &str, ranks: &[usize]) {
    job.tell(ranks, &format!("call {clique} AllReduce 100 1"));
    job.tell(ranks, &format!("sync {clique}"));
}

#[test]
fn tasks_that_wait_for_each_other_are_a_cycle() {
    let mut job = GpuJob::start("cycle", &JobSetup::default());
    // Two cliques of the same two tasks, which call them in different orders.
    job.join("1", &[0, 1]);
    job.join("2", &[0, 1]);
    let began = TestInstant::now();
    step(&job, "1", &[0]);
    step(&job, "2", &[1]);
    step(&job, "2", &[0]);
    step(&job, "1", &[1]);
    let finding = job.wait_for_stuck(began);
    assert!(finding["summary"].as_str().expect("a text").contains("wait for one another"), "{finding}");
    let both_wait = |view: &Value| view["waiting_count"] == 2;
    let view = job.wait_for_collectives("both cliques wait", both_wait);
    let waits: Vec<&Value> = (0..2).map(|at| &view["cliques"][at]["wait"]).collect();
    assert!(waits.iter().all(|wait| wait["role"] == "cycle"), "{view}");
    let mut tasks: Vec<String> = waits.iter().map(|wait| wait["waited_for"].to_string()).collect();
    tasks.sort();
    assert_eq!(tasks, ["[0]", "[1]"], "{view}");
    assert_eq!(job.metric("muster_collective_cliques_waiting", "kind=\"not-called\""), 2.0);
}

#[test]
fn a_chain_of_waits_names_its_beginning() {
    let mut job = GpuJob::start("chain", &JobSetup::default());
    job.join("1", &[0, 1]);
    job.join("2", &[1, 2]);
    job.join("3", &[2, 3]);
    let began = TestInstant::now();
    // Task 3 waits for 2, which waits for 1, which waits for 0. The last wait begins first.
    step(&job, "3", &[3]);
    step(&job, "2", &[2]);
    step(&job, "3", &[2]);
    step(&job, "1", &[1]);
    step(&job, "2", &[1]);
    let all_wait = |view: &Value| view["waiting_count"] == 3;
    job.wait_for_collectives("the cliques wait", all_wait);
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([0]), "{finding}");
    assert!(finding["summary"].as_str().expect("a text").contains("2 other cliques wait"), "{finding}");
    let view = job.collectives();
    let roles: Vec<_> = [(0, 1), (1, 2), (2, 3)]
        .map(|(a, b)| wait_among(&view, a, b).expect("it waits")["role"].clone())
        .into();
    assert_eq!(roles, ["cause", "consequence", "consequence"], "{view}");
    assert_eq!(view["cliques"][0]["tasks"], json!([{"first": 0, "last": 1}]), "the cause is first: {view}");
    // Every finding so far names task 0 alone.
    for event in job.stuck_events() {
        assert_eq!(event["tasks"], json!([0]), "{event}");
    }

    step(&job, "1", &[0]);
    job.wait_done(&[3], "sync 3");
    job.wait_for_end_of_stuck();
}

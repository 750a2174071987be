//! A GPU does not reach a collective that its program has called: an earlier kernel holds the stream.

use std::time::Duration;

use serde_json::{Value, json};

use crate::gpu_job::{GpuJob, JobSetup, PROMPT, STUCK_AFTER};
use crate::harness::{TestInstant, wait_until};

const CALL: &str = "call 0 AllReduce 1000 1";
const EVERYONE: [usize; 4] = [0, 1, 2, 3];
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

#[test]
fn a_held_gpu_is_named_if_times_are_known() {
    let setup = JobSetup { timing: Some("always"), ..JobSetup::default() };
    let mut job = GpuJob::start_joined("held", &setup);
    let view = job.wait_for_count(3);
    assert_eq!(view["timed_processes"], 4, "{view}");
    job.run(&[1], "hold 0");
    let began = TestInstant::now();
    job.run(&EVERYONE, CALL);
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([1]), "{finding}");
    assert_eq!(finding["title"], "A GPU has not begun a collective", "{finding}");
    let view = job.collectives();
    let wait = &view["cliques"][0]["wait"];
    assert_eq!((&wait["kind"], &wait["certain"]), (&json!("not-begun"), &json!(true)), "{view}");
    assert_eq!((&wait["waited_for"], &wait["number"]), (&json!([1]), &json!(3)), "{view}");
    assert!(job.metric("muster_collective_cliques_waiting", "kind=\"not-begun\"") >= 1.0);
    assert_eq!(job.metric("muster_collective_processes_timed", ""), 4.0);
    // The GPUs of the others are in the kernel, and programs go on calling: the first one stays the one that is told.
    job.run(&EVERYONE, "call 0 AllGather 10 40");
    let view = job.wait_for_count(44);
    assert_eq!(view["cliques"][0]["wait"]["number"], 3, "{view}");
    assert_eq!(view["cliques"][0]["wait"]["kind"], "not-begun", "{view}");

    job.tell(&EVERYONE, "release");
    job.run(&EVERYONE, "sync 0");
    job.wait_for_end_of_stuck();
    assert!(job.metric("muster_collective_gpu_seconds_total", "function=\"AllReduce\"") > 0.0);
}

#[test]
fn without_times_nothing_is_said_of_a_held_gpu() {
    let setup = JobSetup { timing: Some("never"), ..JobSetup::default() };
    let mut job = GpuJob::start_joined("held-untimed", &setup);
    job.wait_for_count(3);
    job.run(&[1], "hold 0");
    let began = TestInstant::now();
    job.run(&EVERYONE, CALL);
    // All programs have called, and that is all that is known.
    job.wait_for_count(4);
    wait_until("a finding would be there", || began.elapsed() > STUCK_AFTER + PROMPT);
    let view = job.collectives();
    assert_eq!((&view["waiting_count"], &view["timed_processes"]), (&json!(0), &json!(0)), "{view}");
    assert_eq!(job.stuck_events(), Vec::<Value>::new());

    // A program that goes on is ahead of those that wait for their GPUs. Most are behind, so no rank is blamed.
    let began = TestInstant::now();
    job.tell(&[0, 1, 3], "sync 0");
    job.run(&[2], "call 0 AllReduce 1000 2");
    let finding = job.wait_for_stuck(began);
    let view = job.collectives();
    let wait = &view["cliques"][0]["wait"];
    assert_eq!((&wait["kind"], &wait["certain"]), (&json!("not-called"), &json!(false)), "{view}");
    assert_eq!((&wait["waited_for"], &finding["tasks"]), (&json!([]), &json!([])), "{view}");
    let summary = finding["summary"].as_str().expect("a text");
    assert!(summary.contains("is not known without times on the GPU"), "{summary}");
}

#[test]
fn by_default_a_held_gpu_is_named_or_nothing_is_said() {
    let mut job = GpuJob::start_joined("held-auto", &JobSetup::default());
    job.wait_for_count(3);
    job.run(&[1], "hold 0");
    let began = TestInstant::now();
    job.run(&EVERYONE, CALL);
    job.wait_for_count(4);
    // Whether there are times depends on whether a rank was late before, as on a machine that is loaded.
    while began.elapsed() < STUCK_AFTER + PROMPT {
        let view = job.collectives();
        let wait = &view["cliques"][0]["wait"];
        assert!(
            wait.is_null() || (wait["waited_for"] == json!([1]) && wait["kind"] == "not-begun"),
            "another task is named: {view}"
        );
        std::thread::sleep(LOOK_INTERVAL);
    }
    // A rank that does not call a later collective turns the times on. Then the next wait is known exactly.
    job.tell(&[1], "release");
    job.run(&EVERYONE, "sync 0");
    let began = TestInstant::now();
    job.run(&[0, 1, 2], CALL);
    job.wait_for_stuck(began);
    let all_timed = |view: &Value| view["timed_processes"] == 4;
    job.wait_for_collectives("every process asks for times", all_timed);
    job.run(&[3], CALL);
    job.run(&EVERYONE, "sync 0");
    job.wait_for_end_of_stuck();
    job.run(&[2], "hold 0");
    let began = TestInstant::now();
    job.run(&EVERYONE, CALL);
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([2]), "{finding}");
    assert_eq!(finding["title"], "A GPU has not begun a collective", "{finding}");
}

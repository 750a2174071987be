//! RAS, NCCL's own monitoring, as the second source: what it says of ranks that do not report. Here it is the simulated NCCL's.

use serde_json::{Value, json};

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::{Signal, muster, run, wait_for, wait_until};

/// Waits until RAS has said something of the first clique, and returns the clique.
#[track_caller]
fn wait_for_ras(job: &GpuJob) -> Value {
    let view = job.wait_for_collectives("RAS has answered", |view| view["cliques"][0]["ras"].is_object());
    assert_eq!(
        (&view["ras"]["nccl_version"], &view["ras"]["error"]),
        (&json!("2.29.1"), &json!("")),
        "{view}"
    );
    view["cliques"][0].clone()
}

/// Asks RAS by the command line. Returns the status and the output.
fn ask_ras(job: &GpuJob, more: &[&str]) -> (Option<i32>, String) {
    let address = job.ras.to_string();
    let done = run(&mut muster(["collectives", "--ras", &address].iter().chain(more)));
    assert_eq!(done.err, "", "{done:?}");
    (done.code, done.out)
}

#[test]
fn a_process_that_is_stopped_does_not_answer_its_peers() {
    let mut job = GpuJob::start_joined("ras-stopped", &JobSetup::default());
    job.wait_for_count(3);
    let (code, text) = ask_ras(&job, &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("NCCL 2.29.1") && text.contains("all ranks are level"), "{text}");
    job.ranks[1].signal(Signal::STOP);
    for line in ["call 0 AllReduce 1000 1", "sync 0"] {
        job.tell(&[0, 2, 3], line);
    }
    let clique = wait_for_ras(&job);
    let notable = &clique["ras"]["notable"][0];
    assert_eq!(
        (&notable["rank"], &notable["task"], &notable["state"]),
        (&json!(1), &json!(1), &json!("unresponsive"))
    );
    assert_eq!(clique["ras"]["answered"], 3, "{clique}");
    assert_eq!(notable["pid"], job.ranks[1].pid(), "{notable}");
    assert_eq!(job.metric("muster_collective_ras_ranks", "state=\"unresponsive\""), 1.0);
    assert!(job.metric("muster_collective_ras_questions_total", "result=\"answered\"") >= 1.0);
    let finding = wait_for("a finding about the collective", || job.stuck().pop());
    let says = "NCCL's RAS says of rank 1 that its process";
    assert!(finding["summary"].as_str().expect("a text").contains(says), "{finding}");
    let page = job.server.get("/jobs/default/collectives").body;
    assert!(
        page.contains("<h3 id=\"ras-title\">NCCL RAS</h3>") && page.contains("does not answer its peers"),
        "{page}"
    );

    let (code, text) = ask_ras(&job, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("rank 1 does not answer its peers"), "{text}");
    let (_, json) = ask_ras(&job, &["--json"]);
    let told: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(told["cliques"][0]["state"], "trouble", "{told}");

    job.ranks[1].signal(Signal::CONT);
    job.run(&[1], "call 0 AllReduce 1000 1");
    job.wait_done(&[0, 2, 3], "sync 0");
    job.wait_for_end_of_stuck();
    let is_well = || ask_ras(&job, &[]).0 == Some(0);
    wait_until("RAS is well", is_well);
}

#[test]
fn a_killed_process_is_dead() {
    let setup = JobSetup { nccl: "nccl_silent_death=1;nccl_ras_dead_after=500", ..JobSetup::default() };
    let job = GpuJob::start_joined("ras-killed", &setup);
    job.wait_for_count(3);
    job.ranks[2].signal(Signal::KILL);
    job.ranks[2].end();
    let dead = wait_for("a peer says that it is dead", || {
        let (code, text) = ask_ras(&job, &[]);
        (code == Some(1) && text.contains("rank 2 is dead: ")).then_some(text)
    });
    assert!(dead.contains("3/4"), "{dead}");
}

#[test]
fn ras_reports_a_rank_without_the_plug_in() {
    let setup = JobSetup { timing: Some("always"), without_plugin: Some(3), ..JobSetup::default() };
    let mut job = GpuJob::start_joined("ras-without-plugin", &setup);
    job.tell(&[0, 1, 2], "call 0 AllReduce 1000 1");
    let is_told = |finding: &Value| {
        let summary = finding["summary"].as_str().expect("a text");
        summary.contains("NCCL's RAS says of rank 3 that its process")
            && summary.contains("has called 3 of 4 collectives")
    };
    let finding = wait_for("RAS tells what the rank has called", || job.stuck().into_iter().find(is_told));
    assert_eq!(finding["tasks"], json!([3]), "{finding}");
    let (code, text) = ask_ras(&job, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("has called nothing for 2 s, and its ranks differ\n  rank 3 "), "{text}");
    job.run(&[3], "call 0 AllReduce 1000 1");
    job.wait_for_end_of_stuck();
}

#[test]
fn without_nccl_the_command_says_what_to_do() {
    let done = run(&mut muster(["collectives", "--ras", "127.0.0.1:1"]));
    assert_eq!(done.code, Some(3), "{done:?}");
    assert!(
        done.err.contains("no process of NCCL answers at 127.0.0.1:1")
            && done.err.contains("NCCL_RAS_ENABLE"),
        "{done:?}"
    );
}

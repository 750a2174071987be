//! A job that is healthy and irregular has no finding.

use std::time::Duration;

use serde_json::Value;

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::{TestInstant, wait_for};

/// The seconds for which the job runs; two minutes without it.
const VARIABLE: &str = "MUSTER_HEALTHY_SECONDS";

#[test]
fn an_irregular_job_has_no_finding() {
    let seconds = std::env::var(VARIABLE).map_or(Ok(120), |text| text.parse()).expect("a number of seconds");
    let everyone = [0, 1, 2, 3];
    let mut job = GpuJob::start("healthy", &JobSetup::default());
    // Several cliques of the same tasks, as those of several meshes.
    let names: Vec<String> = (0..4).map(|name: u32| name.to_string()).collect();
    names.iter().for_each(|name| job.join(name, &everyone));
    let seed = fastrand::u64(..);
    eprintln!("the seed is {seed}");
    let line = format!("irregular {seed} {} {}", seconds * 1000, names.join(","));
    let began = TestInstant::now();
    job.tell(&everyone, &line);
    let limit = Duration::from_secs(seconds * 10 + 60);
    let is_done = |job: &GpuJob| {
        let says = |rank: &crate::harness::Process| rank.said().contains(&format!("done {line}"));
        job.ranks.iter().all(says)
    };
    let (mut looks, mut longest) = (0, 0.0_f64);
    while !is_done(&job) {
        assert!(began.elapsed() < limit, "the programs do not end");
        assert!(job.ranks.iter().all(crate::harness::Process::is_running), "a program has ended");
        let stuck = job.stuck();
        assert!(stuck.is_empty(), "seed {seed}: {stuck:?}\n{}", job.collectives());
        let view = job.collectives();
        let waits = view["cliques"].as_array().expect("cliques").iter();
        longest = waits.filter_map(|clique| clique["wait"]["waited_s"].as_f64()).fold(longest, f64::max);
        looks += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{looks} looks in {:?}; the longest wait was {longest:.2} s", began.elapsed());
    assert_eq!(job.stuck_events(), Vec::<Value>::new(), "seed {seed}");
    let counts = |view: &Value| {
        let cliques = view["cliques"].as_array().expect("cliques");
        let level = |clique: &Value| clique["front"] == clique["back"] && clique["reported"] == 4;
        cliques.len() == 4 && cliques.iter().all(level) && view["waiting_count"] == 0
    };
    wait_for("all have reported the end", || Some(job.collectives()).filter(counts));
}

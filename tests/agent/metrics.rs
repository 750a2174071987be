//! The metrics of a worker.

use std::collections::BTreeSet;
use std::process::Command;

use muster::telemetry::metrics::catalogue::WORKER;

use crate::harness::{HttpResponse, MusterServer, Signal, http, muster, run, run_with_input, wait_until};
use crate::worker::worker;

#[test]
fn a_worker_serves_the_metrics_of_its_engine() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let of_exercise = ["--program", "exercise", "--pause", "50ms", "--bytes-max", "200000"];
    let arguments = [&of_exercise[..], &["--metrics", "127.0.0.1:0"]].concat();
    let mut shown = worker(&server, 0, &arguments);
    let other = worker(&server, 1, &of_exercise);
    let line = shown.out_line("metrics  http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    let get = |path: &str| -> HttpResponse { http::get(address, path).expect("it answers") };
    let scrape = || get("/metrics").body;
    let has = |line: &str| scrape().lines().any(|found| found.starts_with(line));
    for line in [
        "muster_transfer_engine_info{version=",
        "muster_transfer_engine_bytes_total{peer=\"1\",transport=\"shm\",direction=\"sent\"} ",
        "muster_transfer_engine_stage_seconds_bucket{stage=\"move\",le=\"0.0001\"}",
        "muster_transfer_engine_clock_offset_seconds ",
        "muster_transfer_engine_duration_seconds_bucket{transport=\"shm\",size_class=\"",
        "muster_transfer_engine_in_flight_bytes{class=\"bulk\"} ",
        "muster_transfer_engine_clique_aborts_total{reason=\"peer_dead\"} 0",
        "muster_transfer_engine_connections{transport=\"unix\"} 1",
        "process_resident_memory_bytes ",
    ] {
        wait_until(line, || has(line));
    }
    let value = |name: &str| {
        let scrape = scrape();
        let line = scrape.lines().find_map(|line| line.strip_prefix(name)).expect("it is there").to_owned();
        line.trim().parse::<f64>().expect("a number")
    };
    let completed = "muster_transfer_engine_launches_total{outcome=\"completed\"}";
    let before = value(completed);
    wait_until("launches go on", || value(completed) > before);
    assert!(value("muster_transfer_engine_stage_seconds_count{stage=\"move\"}") > 0.0);

    // Exactly the metrics of the catalogue are present, and Prometheus's own linter accepts them.
    let page = scrape();
    let names: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let ours: BTreeSet<&str> = names.iter().copied().filter(|name| name.starts_with("muster_")).collect();
    assert_eq!(ours, WORKER.iter().map(|metric| metric.name).collect());
    let checked = run_with_input(Command::new("promtool").args(["check", "metrics"]), &page)
        .expect("promtool runs: `apt-get install prometheus`, as tests/run does");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    assert_eq!(get("/").status, 404);

    // The service has the sum over the workers.
    for summed in [
        "muster_transfer_stage_seconds_count{muster_job=\"default\",stage=\"move\"} ",
        "muster_transfer_stage_seconds_count{muster_job=\"default\",stage=\"connect\"} ",
        "muster_transfer_duration_seconds_count{muster_job=\"default\",transport=\"shm\",size_class=\"",
        "muster_transfer_in_flight_bytes{muster_job=\"default\",class=\"normal\"} ",
    ] {
        wait_until(summed, || server.get("/metrics").body.contains(summed));
    }
    for worker in [shown, other] {
        worker.signal(Signal::TERM);
        assert_eq!(worker.end().code, Some(0));
    }
}

#[test]
fn metrics_of_a_worker_that_others_could_read_have_to_be_meant() {
    let mut refused = muster(["worker", "--service", "127.0.0.1:1", "--task", "0", "--metrics", "0.0.0.0:0"]);
    let refused = run(&mut refused);
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains("--insecure-metrics"), "{refused:?}");
}

//! Workers on hosts with a wrong clock.

use crate::harness::{MusterServer, Signal, wait_until};
use crate::worker::{start_worker_with_wrong_clock, worker};

#[test]
fn a_worker_whose_clock_is_off_is_found_and_shown_everywhere_and_works_all_the_same() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let wrong = start_worker_with_wrong_clock(&server, 1, "-90s");
    let right = [worker(&server, 0, &[]), worker(&server, 2, &[])];
    let open = || {
        let findings = server.get("/api/v1/jobs/default/findings").json();
        findings["open"].as_array().expect("a list").clone()
    };
    wait_until("the clock is found", || open().iter().any(|finding| finding["id"] == "worker-clock-off"));
    let found = open().into_iter().find(|finding| finding["id"] == "worker-clock-off").expect("it is open");
    assert_eq!(
        (&found["tasks"], &found["severity"]),
        (&serde_json::json!([1]), &"warning".into()),
        "{found}"
    );
    let ahead = found["evidence"][0]["is"].as_f64().expect("a number");
    assert!((-91.0..-89.0).contains(&ahead), "{found}");
    let summary = found["summary"].as_str().expect("a text").to_owned();
    assert!(summary.contains("task 1 at 127.0.0.1") && summary.contains("behind the server's"), "{summary}");

    let of = |task: usize| server.get("/api/v1/jobs/default/transfers/tasks").json()["tasks"][task].clone();
    let apart = |task: usize| of(task)["clock"]["ahead_us"].as_i64().map(i64::unsigned_abs);
    for task in [0, 2] {
        wait_until("others tell of theirs", || apart(task).is_some());
        assert!(apart(task) < Some(500_000), "{}", of(task));
    }
    let page = server.get("/jobs/default/tasks/1").body;
    assert!(page.contains("behind the server’s") && page.contains("A clock is off"), "{page}");
    assert!(server.get("/").body.contains("A clock is off"), "the overview says so");
    let metrics = server.get("/metrics").body;
    let line = "muster_findings{muster_job=\"default\",finding=\"worker-clock-off\",severity=\"warning\"} 1";
    assert!(metrics.contains(line), "{metrics}");
    assert!(metrics.contains("muster_worker_clock_offset_seconds{muster_job=\"default\",task=\"1\"} -"));
    let events = server.get("/api/v1/jobs/default/events?limit=1000").body;
    assert!(events.contains("worker-clock-off"), "{events}");

    // The finding closes when the worker has gone.
    for worker in [wrong].into_iter().chain(right) {
        worker.signal(Signal::TERM);
        assert_eq!(worker.end().code, Some(0));
    }
    wait_until("it is found no more", || open().is_empty());
}
